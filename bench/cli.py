"""The `linkweave` command."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

import collectives
import topology
from bench.machine import comparison, explanation_json, parse_gpus, report
from collectives import CollectiveError
from collectives.planning.explain import size_text
from collectives.planning.planner import candidates, choose, predict

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Collectives planned over the wires: see a machine, plan, simulate, measure.",
)  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measure on this machine; results are checked.")
app.add_typer(bench, name="bench")
console = Console(stderr=True)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "64M": binary units K, M, G, an optional B. Raises CollectiveError."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise CollectiveError(f"a size is like 1024, 64K, 16M or 1G, not {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def at_least(*options: tuple[str, int, int]) -> None:
    """Raise CollectiveError for the first (flag, value, least) that is too small."""
    for flag, value, least in options:
        if value < least:
            raise CollectiveError(f"{flag} must be at least {least}, not {value}")


def sweep(begin: str, end: str, factor: int) -> tuple[int, ...]:
    """The sizes in bytes that -b, -e and -f ask for. Raises CollectiveError."""
    from bench.allreduce import sizes

    low, high = parse_size(begin), parse_size(end)
    at_least(("-f", factor, 2))
    if not 4 <= low <= high:
        raise CollectiveError(f"-b {begin} and -e {end}: sizes from 4 bytes up, -b not above -e")
    return sizes(low, high, factor)


TopologyOption = Annotated[
    str, typer.Option("--topology", "--topo", "-t", help="Machine's name, a file, or auto.")
]
SizeOption = Annotated[str, typer.Option("--size", "-s", help="Message in bytes: 64K, 16M, 1G.")]
AlgorithmOption = Annotated[
    str, typer.Option("--algorithm", "--force", "-a", help="auto, or a name.")
]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", "-k", help="Chunks over all trees; default: the model's.")
]
MeasuredOption = Annotated[
    str | None,
    typer.Option(help="Lay these figures over: bench links' JSON, p2pBandwidthLatencyTest's text."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
BeginOption = Annotated[str, typer.Option("-b", help="Smallest message.")]
EndOption = Annotated[str, typer.Option("-e", help="Largest message.")]
FactorOption = Annotated[int, typer.Option("-f", help="Factor between sizes.")]
BatchOption = Annotated[
    bool, typer.Option("--batch/--no-batch", help="Everyone under SCHED_BATCH.")
]


@app.command()
def topo(
    name: Annotated[
        str, typer.Argument(help="Machine's name, a file (any kind), '4 x NAME', or auto.")
    ],
    svg: Annotated[Path | None, typer.Option(help="Draw the machine to this SVG file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the machine to this PNG file.")] = None,
    plan: Annotated[
        str | None, typer.Option(help="Draw the trees of this algorithm over the links.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Only these GPUs, like 0,1,4-7; the bound is theirs.")
    ] = None,
    measured: MeasuredOption = None,
    compare: Annotated[
        str | None, typer.Option(help="Say whether that machine is wired alike, or what differs.")
    ] = None,
    xml: Annotated[
        Path | None, typer.Option(help="Write the machine in NCCL's form (NCCL_TOPO_FILE).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print how a machine is wired, and the best possible collectives on it; draw it."""
    machine = topology.load(name, measured)
    if gpus is not None:
        machine = machine.subset(parse_gpus(gpus))
    if plan and not (svg or png):
        raise CollectiveError("--plan draws: give --svg FILE or --png FILE as well")
    if compare is not None:
        other = topology.load(compare)
        if as_json:
            mapping, differences = topology.compare(machine, other)
            print(json.dumps({"mapping": mapping, "differences": differences}))
        else:
            print(comparison(machine, other))
    elif as_json:
        print(machine.to_json())
    else:
        with console.status("bounding"):
            text = report(machine)
        print(text)
    if xml:
        xml.write_text(topology.to_nccl_xml(machine))
        console.print(f"written: {xml}", highlight=False)
    if paths := [p for p in (svg, png) if p]:
        drawn = collectives.plan_allreduce(machine, 1 << 26, plan) if plan else None
        with console.status("drawing"):
            topology.draw(machine, paths, drawn)
        for path in paths:
            console.print(f"drawn: {path}", highlight=False)


@app.command()
def plan(
    size: SizeOption,
    topo: TopologyOption = "auto",
    algorithm: AlgorithmOption = "auto",
    chunks: ChunksOption = None,
    explain: Annotated[
        bool, typer.Option(help="Print what was compared and why, instead of the plan.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the verified plan for a message, step by step; or, with --explain, why it is chosen."""
    machine, nbytes = topology.load(topo), parse_size(size)
    if explain:
        with console.status("comparing"):
            told = collectives.explain(machine, nbytes)
        print(explanation_json(told) if as_json else told)
        return
    made = collectives.plan_allreduce(machine, nbytes, algorithm, chunks)
    if algorithm != "auto":
        auto = choose(machine, nbytes)
        (seconds, _), (best, _) = (predict(machine, nbytes, name) for name in (algorithm, auto))
        if seconds > 1.02 * best:
            console.print(
                f"warning: {algorithm} is predicted to take {seconds / best:.2f} times as long as "
                f"{auto}, which auto would take", highlight=False, soft_wrap=True,
            )  # fmt: skip
    print(made.to_json() if as_json else made)


@app.command()
def simulate(
    size: SizeOption,
    topo: TopologyOption = "auto",
    algorithm: AlgorithmOption = "all",
    chunks: ChunksOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace (one algorithm only).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a message; of all algorithms, unless one is named."""
    machine, nbytes = topology.load(topo), parse_size(size)
    chosen = choose(machine, nbytes)
    names = candidates(machine) if algorithm == "all" else (algorithm,)
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one algorithm: name it with --algorithm")
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(names, description="simulating"):
            made = collectives.plan_allreduce(machine, nbytes, name, chunks)
            line = collectives.simulate(made, machine, nbytes)
            rows.append(
                {
                    "algorithm": made.algorithm,
                    "chunks": made.num_chunks,
                    "time_us": line.seconds * 1e6,
                    "algbw_gbs": line.algbw / 1e9,
                    "first_chunk_us": line.first_chunk_seconds * 1e6,
                    "busiest_link": max(line.utilisation.values(), default=0.0),
                    "exclusive": made.exclusive,
                    "detours": len(made.detours),
                }
            )
            if trace:
                line.save_trace(trace)
    rows.sort(key=lambda row: row["time_us"])
    if as_json:
        print(json.dumps({"topology": machine.name, "size": nbytes, "auto": chosen, "rows": rows}))
        return
    print(f"{size_text(nbytes)} on {machine.name}; auto takes {chosen}")
    print(f"{'algorithm':24}{'chunks':>7}{'time us':>12}{'algbw GB/s':>12}"
          f"{'first chunk us':>16}{'busiest link':>14}{'detours':>9}")  # fmt: skip
    for r in rows:
        print(f"{r['algorithm']:24}{r['chunks']:7}{r['time_us']:12.1f}{r['algbw_gbs']:12.2f}"
              f"{r['first_chunk_us']:16.1f}{r['busiest_link']:14.0%}{r['detours']:9}"
              + ("" if r["exclusive"] else "  shared links"))  # fmt: skip


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check what this machine can do: driver, peer access, IPC, shared memory, containers."""
    from collectives.runtime.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print("\n".join(map(str, checks)))
    if any(check.state == "problem" for check in checks):
        raise SystemExit(1)


@bench.command()
def links(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="CPU ranks, instead of this machine's GPUs.")
    ] = None,
    rounds: Annotated[int, typer.Option("-r", help="Rounds; medians are given.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Bandwidth and latency between every two GPUs, or (without any) every two CPU ranks."""
    from bench.links import gpus, measure_cpu, measure_gpu, table

    at_least(("-r", rounds, 1), ("-n", 2 if ranks is None else ranks, 2))
    if out:
        out.touch()
    devices = gpus() if ranks is None else 0
    if devices > 1:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=devices * (devices - 1))
            figures = measure_gpu(rounds, lambda: progress.update(task, advance=1))
    else:
        figures = measure_cpu(ranks or max(2, os.cpu_count() or 2), rounds)
    print(figures.to_json() if as_json else f"{figures.machine}\n{table(figures)}")
    if out:
        out.write_text(figures.to_json() + "\n")


@bench.command()
def allreduce(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="CPU ranks.")] = 8,
    begin: BeginOption = "1K",
    end: EndOption = "64M",
    factor: FactorOption = 4,
    rounds: Annotated[
        int, typer.Option("-r", help="Rounds in which all libraries take turns.")
    ] = 5,
    topo: TopologyOption = "auto",
    batch: BatchOption = True,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="gloo and MPI beside.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """All-reduce of float32 over CPU ranks, beside gloo and MPI (where mpi4py is installed)."""
    from bench.allreduce import Settings, as_json_text, run
    from bench.report import header, line
    from collectives.communicator import topology_for

    at_least(("-n", ranks, 1), ("-r", rounds, 1))
    swept = sweep(begin, end, factor)
    if out:
        out.touch()  # an unwritable path is told before the measurement, not after
    settings = Settings(ranks, swept, topology_for(topo, ranks), rounds, batch, peers)
    if not as_json:
        print(header(settings))
    # no refreshing thread: `spawn` forks only where this process runs no other thread
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(settings.sizes))
        progress.refresh()

        def done(rows: list[Any]) -> None:
            if not as_json:
                for row in rows:
                    print(line(row), flush=True)
            progress.update(task, advance=1, refresh=True)

        rows = run(settings, done)
    text = as_json_text(settings, rows)
    if as_json:
        print(text)
    if out:
        out.write_text(text + "\n")
    if wrong := sum(row.wrong for row in rows):
        raise CollectiveError(f"{wrong} elements were wrong")


@bench.command()
def algorithms(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="CPU ranks.")] = 8,
    begin: BeginOption = "1K",
    end: EndOption = "256M",
    factor: FactorOption = 4,
    rounds: Annotated[
        int, typer.Option("-r", help="Rounds in which all algorithms take turns.")
    ] = 5,
    batch: BatchOption = True,
    out: Annotated[Path | None, typer.Option(help="Write the times as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """All-reduce of float32 over CPU ranks by every algorithm, beside what the model takes."""
    from bench.algorithms import Settings, as_json_text, header, line, run
    from collectives.communicator import topology_for

    at_least(("-n", ranks, 2), ("-r", rounds, 1))
    swept = sweep(begin, end, factor)
    if out:
        out.touch()
    settings = Settings(ranks, swept, topology_for("auto", ranks), rounds, batch)
    if not as_json:
        print(header(settings), flush=True)  # before the fork, or the ranks print it as well
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(swept))
        progress.refresh()

        def done(row: Any) -> None:
            if not as_json:
                print(line(row, candidates(settings.topology)), flush=True)
            progress.update(task, advance=1, refresh=True)

        text = as_json_text(settings, run(settings, done))
    if as_json:
        print(text)
    if out:
        out.write_text(text + "\n")


@app.command()
def demo(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Data-parallel CPU ranks.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 12,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Train a CNN on handwritten digits, gradients over the DGX-1's double tree."""
    from bench.demo import run, summary

    result = run(ranks, epochs, out)
    print(json.dumps(result) if as_json else summary(result))


def main() -> None:
    """Entry point: errors in what was asked for are one line and exit status 2."""
    try:
        app(standalone_mode=True)
    except (CollectiveError, OSError) as error:
        print(f"linkweave: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
