"""The `linkweave` command."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from linkweave import collectives, topology
from linkweave.bench import commands
from linkweave.bench.command import compare, plans, predict, simulate, what_if
from linkweave.bench.command.machine import comparison, report
from linkweave.bench.command.options import (
    GpusOption,
    JsonOption,
    MachineArgument,
    MeasuredOption,
    ModelOption,
    NetworkOption,
    ProfileOption,
    RanksOption,
    WorkersOption,
    console,
    machine_of,
    writable,
)
from linkweave.bench.commands import bench
from linkweave.bench.reproduce import command as reproduce
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import POLICIES
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"max_content_width": 100},
    help="Plan collectives for the links a machine has: look at it, plan, simulate, measure.",
)  # fmt: skip
for command in (*commands.COMMANDS, compare.compare):
    bench.command()(command)
app.add_typer(bench, name="bench")
app.command()(plans.plan)
app.command()(simulate.simulate)
app.command()(predict.predict)
app.command()(what_if.what_if)


def _version(asked: bool) -> None:
    if asked:
        print(f"linkweave {version_of('linkweave')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def topo(
    machine: MachineArgument,
    svg: Annotated[Path | None, typer.Option(help="Draw the machine to this SVG file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the machine to this PNG file.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Draw a plan over the links: a file that plan --json wrote, or one of "
                          f"{', '.join(ALGORITHMS['allreduce'])}."),
    ] = None,
    part: Annotated[
        int | None,
        typer.Option("--tree", "--ring", "--phase", metavar="N",
                     help="Draw only tree, ring or phase N of the plan, counted from 1."),
    ] = None,
    all_links: Annotated[
        bool, typer.Option("--all-links", help="Draw PCIe, CPUs and NICs beside NVLinks as well.")
    ] = False,
    gpus: GpusOption = None,
    gpu: ModelOption = None,
    measured: MeasuredOption = None,
    compare: Annotated[
        str | None, typer.Option(help="Say whether that machine is wired alike, or what differs.")
    ] = None,
    xml: Annotated[
        Path | None, typer.Option(help="Write the machine in NCCL's form (NCCL_TOPO_FILE).")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Print a machine's links and bounds; draw it and plans."""
    found = machine_of(machine, gpus, measured, gpu)
    paths = [p for p in (svg, png) if p]
    writable(svg=svg, png=png, xml=xml)
    drawn = None
    for flag, given in (("--plan", plan), ("--tree", part), ("--all-links", all_links)):
        if given is not None and given is not False and not paths:
            raise CollectiveError(f"{flag} draws: give --svg FILE or --png FILE as well")
    if plan and plan not in ("auto", *ALGORITHMS["allreduce"]):
        if not os.path.isfile(plan):
            raise CollectiveError(
                f"--plan: {plan!r} is neither a file nor an algorithm; algorithms are "
                f"{', '.join(ALGORITHMS['allreduce'])}"
            )
        drawn = plans.read_plan(Path(plan), found)
    if compare is not None:
        other = topology.load(compare)
        if as_json:
            mapping, differences = topology.compare(found, other)
            print(json.dumps({"mapping": mapping, "differences": differences}))
        else:
            print(comparison(found, other))
    elif as_json:
        print(found.to_json())
    else:
        with console.status("bounding"):
            text = report(found)
        print(text)
    if xml:
        xml.write_text(topology.to_nccl_xml(found))
        console.print(f"written: {xml}", highlight=False)
    if paths:
        with console.status("drawing"):
            if plan and drawn is None:
                drawn = collectives.plan_allreduce(found, 1 << 26, plan)
            topology.draw(found, paths, drawn, part, all_links)
        for path in paths:
            console.print(f"drawn: {path}", highlight=False)


@app.command()
def schedule(
    profile: ProfileOption,
    network: NetworkOption = "10GbE",
    workers: WorkersOption = None,
    policy: Annotated[
        str, typer.Option(help=f"all, auto, or one of {', '.join(POLICIES)}.")
    ] = "all",
    limit: Annotated[float, typer.Option(help="Seconds that optimal and auto may search.")] = 3.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print why, and each all-reduce.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a Gantt chart to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (one policy).")] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Predict what DDP and other schedules of gradients take."""
    from linkweave.bench.command import schedule as shown
    from linkweave.collectives import overlap

    shown.check(policy, png, trace, explain, as_json)
    loaded, net = overlap.load(profile), overlap.network_from(network, workers)
    found = shown.planned(loaded, net, policy, limit)
    shown.tell(found, explain=explain, png=png, trace=trace, as_json=as_json)


@app.command()
def train_trace(
    step: Annotated[Path, typer.Argument(help="A file that DataParallel.save_step wrote.")],
    png: Annotated[Path | None, typer.Option(help="Draw Gantt charts to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a measured training step with its prediction."""
    from linkweave.bench.command import gantt
    from linkweave.collectives.overlap import MeasuredStep

    writable(png=png, trace=trace)
    found = MeasuredStep.from_json(step.read_text())
    charts = [
        gantt.predicted(found.schedule, "predicted"),
        gantt.measured(found.schedule, found.timeline),
    ]
    if as_json:
        print(json.dumps({
            "policy": found.schedule.policy, "seconds": found.timeline.seconds,
            "predicted_seconds": found.schedule.predicted_seconds,
        }))  # fmt: skip
    else:
        print(found)
    if png:
        gantt.draw(charts, png)
        console.print(f"drawn: {png}", highlight=False)
    if trace:
        trace.write_text(gantt.trace(charts))
        console.print(f"written: {trace}", highlight=False)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check the driver, peer access, IPC, shared memory and limits."""
    from linkweave.collectives.runtime.gpu.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print("\n".join(map(str, checks)))
    if any(check.state == "problem" for check in checks):
        raise SystemExit(1)


@app.command()
def selftest(
    gpus: Annotated[str, typer.Option(help="all, none, or indices such as 0,2.")] = "all",
    report: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
) -> None:
    """Test collectives on this machine's ranks and GPUs.

    The exit status is 0 for PASS, 1 for FAIL, and 3 for PASS but for what was left out.
    """
    from linkweave.bench.command import selftest as shown

    writable(report=report)
    raise SystemExit(shown.run(gpus, sys.stdout, report))


app.command()(reproduce.reproduce)


@app.command()
def demo(
    ranks: RanksOption = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 12,
    out: Annotated[Path, typer.Option(help="The folder of the picture.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Train a small CNN, and compare schedules."""
    try:
        from linkweave.bench.command.demo import run, summary
    except ImportError as error:
        raise CollectiveError(
            f"the demo needs torch: pip install torch==2.13.0 ({error})"
        ) from None

    result = run(ranks, epochs, out)
    print(json.dumps(result) if as_json else summary(result))


def end_at_once(*_: object) -> None:
    """Leave the process: Numba swallows a KeyboardInterrupt raised while it compiles."""
    os.write(2, b"\nlinkweave: interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point: errors in what was asked for are one line and exit status 2."""
    if sys.argv[1:2] not in (["bench"], ["demo"], ["selftest"]):  # those have processes to stop
        signal.signal(signal.SIGINT, end_at_once)
    try:
        app(standalone_mode=True)
    except (CollectiveError, OSError) as error:
        print(f"linkweave: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
