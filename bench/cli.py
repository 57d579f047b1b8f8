"""The `linkweave` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from linkweave import collectives, topology
from linkweave.bench.machine import comparison, explanation_json, parse_gpus, report
from linkweave.bench.measure import bench
from linkweave.bench.options import (
    AlgorithmOption,
    ChunksOption,
    CollectiveOption,
    JsonOption,
    MeasuredOption,
    RootOption,
    SizeOption,
    TopologyOption,
    console,
    parse_size,
)
from linkweave.collectives import CollectiveError
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose, predict

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Collectives planned over the wires: see a machine, plan, simulate, measure.",
)  # fmt: skip
app.add_typer(bench, name="bench")


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
    collective: CollectiveOption = "allreduce",
    root: RootOption = 0,
    algorithm: AlgorithmOption = "auto",
    chunks: ChunksOption = None,
    measured: MeasuredOption = None,
    explain: Annotated[
        bool, typer.Option(help="Print what was compared and why, instead of the plan.")
    ] = False,
    sparse: Annotated[
        int | None, typer.Option(help="With --explain: entries a rank of sparse all-reduces.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the verified plan for a message, step by step; or, with --explain, why it is chosen."""
    machine, nbytes = topology.load(topo, measured), parse_size(size)
    if explain:
        if collective != "allreduce":
            raise CollectiveError("--explain is for all-reduce; simulate compares the others")
        if algorithm != "auto" or chunks is not None:
            raise CollectiveError("--explain compares all: leave out --algorithm and --chunks")
        with console.status("comparing"):
            told = collectives.explain(machine, nbytes, sparse)
        print(explanation_json(told) if as_json else told)
        return
    if sparse is not None:
        raise CollectiveError("--sparse goes with --explain")
    made = collectives.plan_collective(collective, machine, nbytes, root, algorithm, chunks)
    if algorithm != "auto":
        auto = choose(machine, nbytes, collective, root)
        (seconds, _), (best, _) = (
            predict(machine, nbytes, name, collective, root) for name in (algorithm, auto)
        )
        if chunks is not None:
            seconds = collectives.simulate(made, machine, nbytes).seconds
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
    collective: CollectiveOption = "allreduce",
    root: RootOption = 0,
    algorithm: AlgorithmOption = "all",
    chunks: ChunksOption = None,
    measured: MeasuredOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace (one algorithm only).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a message; of all algorithms, unless one is named."""
    machine, nbytes = topology.load(topo, measured), parse_size(size)
    collectives.plan_collective(collective, machine, nbytes, root)  # which refuses what is wrong
    chosen = choose(machine, nbytes, collective, root)
    names = candidates(machine, collective, root) if algorithm == "all" else (algorithm,)
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one algorithm: name it with --algorithm")
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(names, description="simulating"):
            made = collectives.plan_collective(collective, machine, nbytes, root, name, chunks)
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
        what = {"topology": machine.name, "collective": collective, "size": nbytes}
        print(json.dumps({**what, "auto": chosen, "rows": rows}))
        return
    print(f"{collective} of {size_text(nbytes)} on {machine.name}; auto takes {chosen}")
    print(f"{'algorithm':24}{'chunks':>7}{'time us':>12}{'algbw GB/s':>12}"
          f"{'first chunk us':>16}{'busiest link':>14}{'detours':>9}")  # fmt: skip
    for r in rows:
        print(f"{r['algorithm']:24}{r['chunks']:7}{r['time_us']:12.1f}{r['algbw_gbs']:12.2f}"
              f"{r['first_chunk_us']:16.1f}{r['busiest_link']:14.0%}{r['detours']:9}"
              + ("" if r["exclusive"] else "  shared links"))  # fmt: skip


@app.command()
def schedule(
    model: Annotated[str, typer.Option(help="A model's name, or a profile: JSON or CSV.")],
    network: Annotated[str, typer.Option(help="A network's name.")] = "10GbE",
    workers: Annotated[int | None, typer.Option(help="Default: as it was measured.")] = None,
    policy: Annotated[str, typer.Option(help="all, auto, or a name.")] = "all",
    limit: Annotated[float, typer.Option(help="Seconds for optimal and auto.")] = 3.0,
    explain: Annotated[bool, typer.Option(help="Print why, and each all-reduce.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a Gantt chart.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (one policy).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict an iteration under each policy of sending gradients; compare, draw, explain."""
    from linkweave.bench import schedule as shown
    from linkweave.collectives import overlap

    profile, net = overlap.load(model), overlap.network(network, workers)
    names = [*overlap.POLICIES, "auto"] if policy == "all" else [policy]
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one policy: name it with --policy")
    if as_json and explain:
        raise CollectiveError("--explain goes without --json")
    found: list[overlap.Schedule] = []
    with Progress(console=console, transient=True) as progress:
        for name in progress.track(names, description="planning"):
            if name == "auto" and found:  # which is the optimal one under another name
                found.append(replace(found[-1], policy=name))
                continue
            limited = name in ("optimal", "carlier", "auto")
            options = {"limit_s": limit} if limited else {}
            found.append(overlap.plan(profile, net, name, **options))
    if as_json:
        print(shown.as_json(found))
    else:
        base = overlap.plan(profile, net, "wfbp").predicted_seconds
        print(f"{profile}\n{net}\n\n{shown.table(found, base)}")
        if explain:
            for made in found:
                print(f"\n{made.explain()}\n{made if len(found) == 1 else ''}".rstrip())
    if png:
        shown.draw(found, png)
        console.print(f"drawn: {png}", highlight=False)
    if trace:
        trace.write_text(shown.trace(found[0]))
        console.print(f"written: {trace}", highlight=False)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check what this machine can do: driver, peer access, IPC, shared memory, containers."""
    from linkweave.collectives.runtime.gpu.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print("\n".join(map(str, checks)))
    if any(check.state == "problem" for check in checks):
        raise SystemExit(1)


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(help="c-cube-14: trees against rings up to 1,024 ranks. choice: what auto "
                            "takes, against the best of all. schedulers: papers on when to send "
                            "what. schedules: auto for all models and networks."),
    ],
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Simulate a table: a paper's, with its figures beside ours, or of our own choices."""
    from linkweave.bench.reproduce import choice, scale, schedulers, schedules

    tables = {
        "c-cube-14": (scale, len(scale.RANKS) * len(scale.SIZES)),
        "choice": (choice, len(choice.MACHINES)),
        "schedulers": (schedulers, schedulers.TOTAL),
        "schedules": (schedules, schedules.TOTAL),
    }
    if what not in tables:
        raise CollectiveError(f"unknown table {what!r}; choose from {', '.join(tables)}")
    module, total = tables[what]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        rows = module.rows(lambda: progress.update(task, advance=1))
    print(json.dumps([asdict(row) for row in rows]) if as_json else module.table(rows))


@app.command()
def demo(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Data-parallel CPU ranks.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 12,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Train a CNN on handwritten digits, gradients over the DGX-1's double tree."""
    from linkweave.bench.demo import run, summary

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
