"""The commands of `linkweave bench` that train."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from linkweave.bench.convergence_command import convergence
from linkweave.bench.options import (
    BatchOption,
    JsonOption,
    NetworkOption,
    OutOption,
    ProfileOption,
    RanksOption,
    RoundsOption,
    WorkersOption,
    at_least,
    parse_size,
    sane,
    tell,
)
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import POLICIES, load, network_from


def ddp(
    ranks: RanksOption = 8,
    size: Annotated[str, typer.Option("-s", "--size", help="Gradients in bytes.")] = "25M",
    rounds: RoundsOption = 10,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard the layers by FSDP2.")] = False,
    out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Training by PyTorch's DDP or FSDP2, beside gloo (30 s)."""
    from linkweave.bench import ddp as measured

    at_least(("-n", ranks, 1), ("-r", rounds, 1))
    nbytes = parse_size(size)
    at_least(("-s", nbytes, 1024))
    tell(measured, lambda: measured.ddp(ranks, nbytes, rounds, fsdp), out, as_json)


def steps(
    ranks: RanksOption = 2,
    profile: ProfileOption = "resnet50",
    network: NetworkOption = "10GbE",
    workers: WorkersOption = None,
    policy: Annotated[
        str, typer.Option(help=f"all, or one of {', '.join(POLICIES)}.")
    ] = "all",
    seconds: Annotated[float, typer.Option(help="Forward and backward pass together.")] = 2.5,
    density: Annotated[
        float | None, typer.Option(help="Exchange by GTopK; --network is what its exchanges take.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Put a sharded embedding before the layers, whose batches have so many "
                     "words; run each policy without prefetch and with it."),
    ] = None,
    unchained: Annotated[
        bool, typer.Option("--unchained", help="Run each chained schedule unchained, too.")
    ] = False,
    rounds: RoundsOption = 5, out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Steps of sleeping layers under each policy (4 min)."""
    from linkweave.bench import sleeping, sleeping_embedding

    at_least(("-n", ranks, 2), ("-r", rounds, 1))
    sane(1, 1 if density is None else density)
    layers, net = sleeping.scaled(
        load(profile), network_from(network, workers), sleeping.NBYTES, seconds
    )
    if density is None:
        chosen = list(POLICIES) if policy == "all" else [policy]
        schedules = sleeping.plans(layers, net, chosen)
    elif policy == "all":
        schedules = sleeping.sparse_plans(layers, net)
    else:
        raise CollectiveError(f"--policy {policy} does not go with --density, which tries its own")
    if unchained:
        schedules = sleeping.with_unchained(schedules)
    if tokens is None:
        tell(sleeping, lambda: sleeping.rows(schedules, ranks, rounds, "", density), out, as_json)
        return
    at_least(("--tokens", tokens, 1))
    if density is not None:
        raise CollectiveError("--tokens does not go with --density")
    tell(
        sleeping_embedding, lambda: sleeping_embedding.rows(schedules, ranks, rounds, tokens), out,
        as_json,
    )  # fmt: skip


def train(
    model: Annotated[str, typer.Option(help="One of resnet18, vgg11, transformer.")] = "resnet18",
    batch: Annotated[int, typer.Option(help="Samples of each rank.")] = 8,
    schedule: Annotated[
        str, typer.Option(help=f"auto, or one of {', '.join(POLICIES)}.")
    ] = "auto",
    rounds: RoundsOption = 7, scheduling: BatchOption = True, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Training steps, beside DDP, on all ranks (1 min)."""
    from linkweave.bench import train as measured

    at_least(("--batch", batch, 1), ("-r", rounds, 1))
    rows = measured.measure(model, batch, rounds, schedule, scheduling)
    if rows:  # rank 0 tells
        tell(measured, lambda: rows, out, as_json)


def gtopk(
    model: Annotated[
        str, typer.Option(help="One of vgg16, resnet18, vgg11, transformer.")
    ] = "resnet18",
    density: Annotated[float, typer.Option(help="The share of values that are sent.")] = 0.001,
    hook: Annotated[
        list[str] | None, typer.Option(help="Only this one, beside dense; may be repeated.")
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(help="Instead of rounds, train a CNN on digits, padded to the model's number "
                     "of values, by dense and by gTop-k, until it has this accuracy, such as 0.95. "
                     "It learns quickly at --density 0.01."),
    ] = None,
    rounds: RoundsOption = 7, scheduling: BatchOption = True, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Gradients by gTop-k and other hooks of DDP, on all ranks (1 min)."""
    sane(1, density, ("-r", rounds, 1))
    measured: Any
    if accuracy is None:
        from linkweave.bench import gtopk as measured

        rows = measured.measure(model, density, rounds, scheduling, hook or ())
    elif hook:
        raise CollectiveError("--hook does not go with --accuracy, which tries dense and gTop-k")
    elif not 0 < accuracy <= 1:
        raise CollectiveError(f"--accuracy must be above 0 and at most 1, not {accuracy:g}")
    else:
        from linkweave.bench import gtopk_accuracy as measured

        rows = measured.measure(model, density, accuracy, scheduling)
    if rows:  # rank 0 tells
        tell(measured, lambda: rows, out, as_json)


def embedding(
    rows: Annotated[
        int | None,
        typer.Option(help="Rows of the table; more than there are words (the default): for hashed "
                     "pairs of words."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of each rank.")] = 8,
    length: Annotated[int, typer.Option(help="Words of each sample.")] = 20,
    way: Annotated[
        list[str] | None,
        typer.Option("--embedding", help="Only this way, beside DDP; may be repeated."),
    ] = None,
    rounds: RoundsOption = 5, scheduling: BatchOption = True, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """An LSTM with a large table of words, on all ranks (1 min)."""
    from linkweave.bench import embedding as measured

    at_least(("--rows", 1 if rows is None else rows, 1), ("--batch", batch, 1),
             ("--length", length, 1), ("-r", rounds, 1))  # fmt: skip
    found = measured.measure(rows, batch, length, rounds, scheduling, way or ())
    if found:  # rank 0 tells
        tell(measured, lambda: found, out, as_json)


COMMANDS = (ddp, steps, train, gtopk, convergence, embedding)
