"""`linkweave view`: one page that shows a machine, and plans that move along the simulator's clock;
a training step, predicted or measured; a machine before and after a change; what nccl-tests found.

The page needs nothing else: positions are those of `topology.draw`, times those of `simulate`, and
what moves is SVG and canvas in plain JavaScript. A plotting library of several megabytes would draw
neither chunks on links nor a machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from linkweave.bench.command import gantt, options, plans
from linkweave.bench.command.pictures import GPUS, View, views_of
from linkweave.bench.command.predict import POLICIES, network_of, work_of
from linkweave.collectives import CollectiveError, overlap
from linkweave.topology import Topology
from linkweave.topology.loading import read

SIZES = "64K", "1M", "64M"


def view(
    machine: Annotated[
        str | None,
        typer.Argument(help="A machine, as for plan; or a file that DataParallel.save_step wrote."),
    ] = None,
    topo: options.TopologyOption = "",
    out: Annotated[Path, typer.Option("-o", "--out", help="The page, a .html file.")] = Path(
        "view.html"
    ),
    size: Annotated[
        list[str] | None,
        typer.Option("-s", "--size", help="A message to choose on the page; may be repeated. By "
                     f"default {', '.join(SIZES)}; above {GPUS} GPUs the last."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="An algorithm, or a file of plan --json, NCCL or RCCL; may be "
                     "repeated. By default auto's choice and the next best."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Show steps of a profile from a file, or of one of "
                     f"{', '.join(overlap.models())}."),
    ] = None,
    node: Annotated[
        int, typer.Option(help=f"The node to open, of a cluster of more than {GPUS} GPUs.")
    ] = 0,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
) -> None:  # fmt: skip
    """Write a page that shows a machine with plans in motion, and training steps."""
    options.writable(out=out)
    given = plans.one_of(machine, topo)
    if (step := _step(given)) is not None:
        if size or plan or train or gpus or gpu or measured:
            raise CollectiveError(f"{given} is a measured step: it is shown without other options")
        write(out, given, f"a step of {step[0].schedule.profile.name}", charts=step)
        return
    found = options.machine_of(given, gpus, measured, gpu)
    many = len(found.gpus) > GPUS
    sizes = [options.parse_size(text) for text in size or SIZES[2 * many :]]
    with options.console.status("simulating"):
        views = views_of(found, sizes, plan or [], node)
    charts: list[gantt.Chart] = []
    if train is not None:
        work, network = work_of(train, found), network_of(found)
        charts = [gantt.predicted(overlap.plan(work.profile, network, name)) for name in POLICIES]
    write(out, found.name, about(found), views, charts)


def _step(given: str) -> list[gantt.Chart] | None:
    """The charts of a file that is a measured step; None for anything else."""
    if not (path := Path(given)).is_file() or not overlap.MeasuredStep.is_one(text := read(given)):
        return None
    with options.naming(path):
        found = overlap.MeasuredStep.from_json(text)
    return [gantt.predicted(found.schedule, "predicted"),
            gantt.measured(found.schedule, found.timeline)]  # fmt: skip


def about(machine: Topology) -> str:
    return repr(machine)[10:-1].partition(": ")[2]


def write(
    out: Path, title: str, what: str, views: Sequence[View] = (),
    charts: Sequence[gantt.Chart] = (), judged: Any = None,
) -> None:  # fmt: skip
    """Write a page, and say so."""
    text = page(title, what, views, charts, judged)
    out.write_text(text)
    options.console.print(f"written: {out} ({len(text) / 1e6:.1f} MB)", highlight=False)


def page(
    title: str, what: str, views: Sequence[View] = (), charts: Sequence[gantt.Chart] = (),
    judged: Any = None,
) -> str:  # fmt: skip
    """A page as text. `judged` is what `judged_of` returns."""
    steps = gantt.as_data(charts) if charts else None
    data = {"title": title, "what": what, "views": views, "steps": steps, "judged": judged}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = files("linkweave.bench.command").joinpath("view.html").read_text()
    return template.replace("DATA", text, 1)
