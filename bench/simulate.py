"""`linkweave simulate`: messages by each algorithm, training steps, and papers' tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from linkweave import collectives
from linkweave.bench.options import (
    AlgorithmOption,
    ChunksOption,
    CollectiveOption,
    GpusOption,
    JsonOption,
    MeasuredOption,
    ModelOption,
    OptionalMachine,
    OptionalSize,
    PlanFileOption,
    RootOption,
    TopologyOption,
    console,
    machine_of,
    parse_size,
    table,
    writable,
)
from linkweave.bench.plans import check_chunks, one_of, read_plan
from linkweave.collectives import CollectiveError, Plan
from linkweave.collectives.overlap import POLICIES, models
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose
from linkweave.collectives.planning.simulate import Timeline

LEGEND = (
    "busiest link: share of the time in which it carries bytes; detours: connections over another "
    "GPU;\nshared: connections take turns on some link"
)
_PAPER = "its own clusters and sizes"
_TRAINING = {
    "machine", "topo", "gpus", "gpu", "measured", "as_json", "train", "batch", "tflops", "policy",
    "ranks", "algorithm", "png", "trace",
}  # fmt: skip


def simulate(
    context: typer.Context,
    size: OptionalSize = None,
    machine: OptionalMachine = None,
    topo: TopologyOption = "",
    collective: CollectiveOption = "allreduce",
    root: RootOption = 0,
    algorithm: AlgorithmOption = "all",
    chunks: ChunksOption = None,
    gpus: GpusOption = None,
    gpu: ModelOption = None,
    measured: MeasuredOption = None,
    plan: PlanFileOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome trace, of one algorithm; with --train of one policy."),
    ] = None,
    gtopk: Annotated[
        bool,
        typer.Option("--gtopk", help="Print the gTop-k paper's tables beside ours (15 s)."),
    ] = False,
    embrace: Annotated[
        bool,
        typer.Option("--embrace", help="Print the EmbRace paper's tables beside ours (5 s)."),
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --embrace: a text whose words are tokens as well."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Predict training steps instead, of a profile from a file or one of "
            f"{', '.join(models())}.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="With --train: samples on each GPU; by default 64.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            help="With --train: TFLOP/s that training reaches on one GPU; by default 40 % "
            "of its peak."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"With --train: all, auto, or one of {', '.join(POLICIES)}.")
    ] = "all",
    ranks: Annotated[
        int | None, typer.Option(help="With --train: use only the first GPUs.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="With --gtopk or --embrace: draw its figures; with --train: a Gantt chart."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a message by each algorithm, or training steps."""
    if train is not None:
        _alone(context, "--train", "sizes of its own", _TRAINING)
        from linkweave.bench.training_step import ranks_of, simulate_training

        simulate_training(
            ranks_of(machine_of(one_of(machine, topo), gpus, measured, gpu), ranks), train,
            batch=batch, tflops=tflops, algorithm="auto" if algorithm == "all" else algorithm,
            policy=policy, png=png, trace=trace, as_json=as_json,
        )  # fmt: skip
        return
    for flag, given in (("--batch", batch), ("--tflops", tflops), ("--ranks", ranks)):
        if given is not None:
            raise CollectiveError(f"{flag} belongs to --train MODEL: give that as well")
    if policy != "all":
        raise CollectiveError("--policy belongs to --train MODEL: give that as well")
    if gtopk:
        _alone(context, "--gtopk", _PAPER, {"gtopk", "png", "as_json"})
        _gtopk(png, as_json)
        return
    if embrace:
        _alone(context, "--embrace", _PAPER, {"embrace", "corpus", "png", "as_json"})
        _embrace(corpus, png, as_json)
        return
    if png is not None:
        raise CollectiveError(
            "--png draws the figures of --gtopk or --embrace, or --train: give one of them"
        )
    if corpus is not None:
        raise CollectiveError("--corpus is the text of --embrace: give that as well")
    if size is None:
        raise CollectiveError("give the message's --size, such as 64M, or --train MODEL")
    found, nbytes = machine_of(one_of(machine, topo), gpus, measured, gpu), parse_size(size)
    check_chunks(chunks)
    writable(trace=trace)
    given, chosen = None, None
    if plan is not None:
        if (collective, root, algorithm, chunks) != ("allreduce", 0, "all", None):
            raise CollectiveError(
                "--plan has its own collective, root, algorithm and chunks: leave those out"
            )
        given = read_plan(plan, found)
        collective, root, names = given.collective, given.root, (given.algorithm,)
    else:
        with console.status("planning"):
            collectives.plan_collective(collective, found, nbytes, root)  # refuses what is wrong
            chosen = choose(found, nbytes, collective, root)
            every = algorithm == "all"
            names = candidates(found, collective, root) if every else (algorithm,)
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one algorithm: name it with --algorithm")
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in progress.track(names, description="simulating"):
            made = given or collectives.plan_collective(
                collective, found, nbytes, root, name, chunks
            )  # fmt: skip
            line = collectives.simulate(made, found, nbytes)
            rows.append(_row(made, line))
            if trace:
                line.save_trace(trace)
    rows.sort(key=lambda row: row["time_us"])
    if as_json:
        what = {"topology": found.name, "collective": collective, "size": nbytes}
        print(json.dumps({**what, "auto": chosen, "rows": rows}))
        return
    taken = f"; auto takes {chosen}" if chosen else f" by {plan}"
    print(f"{collective} of {size_text(nbytes)} on {found.name}{taken}")
    print(table(
        ("algorithm", "chunks", "us", "GB/s", "first chunk us", "busiest link", "detours", ""),
        [(r["algorithm"], r["chunks"], f"{r['time_us']:.1f}", f"{r['algbw_gbs']:.2f}",
          f"{r['first_chunk_us']:.1f}", f"{r['busiest_link']:.0%}", r["detours"],
          "" if r["exclusive"] else "shared") for r in rows],
    ))  # fmt: skip
    print(LEGEND)


def _alone(context: typer.Context, flag: str, why: str, allowed: Collection[str]) -> None:
    """Raise CollectiveError, with their names, if parameters were given that are not `allowed`."""
    wrong = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and parameter.name not in allowed
        and (source := context.get_parameter_source(parameter.name))
        and source.name == "COMMANDLINE"
    ]  # fmt: skip
    if wrong:
        raise CollectiveError(f"{flag} has {why}: leave out {', '.join(wrong)}")


def _gtopk(png: Path | None, as_json: bool) -> None:
    from linkweave.bench.reproduce import gtopk, gtopk_figures, gtopk_tables

    _tables(gtopk.rows, gtopk.TOTAL, gtopk_tables.tables, gtopk_figures.draw, png, as_json)


def _embrace(corpus: Path | None, png: Path | None, as_json: bool) -> None:
    from linkweave.bench.reproduce import embrace, embrace_figures, embrace_tables
    from linkweave.bench.reproduce.embrace_tokens import read_words

    words = None if corpus is None else read_words(corpus)
    _tables(lambda done: embrace.rows(done, words), embrace.TOTAL, embrace_tables.tables,
            embrace_figures.draw, png, as_json)  # fmt: skip


def _tables(
    rows: Callable[[Callable[[], None]], Any], total: int, tables: Callable[[Any], str],
    draw: Callable[[Any, Path], None], png: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compute a paper's rows, which call what they are given `total` times; print and draw them."""
    writable(png=png)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=total)
        found = rows(lambda: progress.update(task, advance=1))
    print(json.dumps(asdict(found)) if as_json else tables(found))
    if png:
        draw(found, png)
        console.print(f"drawn: {png}", highlight=False)


def _row(made: Plan, line: Timeline) -> dict[str, Any]:
    return {
        "algorithm": made.algorithm,
        "chunks": made.num_chunks,
        "time_us": line.seconds * 1e6,
        "algbw_gbs": line.algbw / 1e9,
        "first_chunk_us": line.first_chunk_seconds * 1e6,
        "busiest_link": max(line.utilisation.values(), default=0.0),
        "exclusive": made.exclusive,
        "detours": len(made.detours),
    }
