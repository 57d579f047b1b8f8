"""`linkweave view`: one page that shows a machine, and plans that move along the simulator's clock;
a training step, predicted or measured; a machine before and after a change; what nccl-tests found.

The page needs nothing else: positions are those of `topology.draw`, times those of `simulate`, and
what moves is SVG and canvas in plain JavaScript. A plotting library of several megabytes would draw
neither chunks on links nor a machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from linkweave.bench.command import gantt, options, pictures, plans
from linkweave.bench.command.pictures import GPUS, View
from linkweave.bench.command.predict import POLICIES, network_of, work_of
from linkweave.collectives import CollectiveError, overlap
from linkweave.topology import Topology
from linkweave.topology.loading import read
from linkweave.topology.text import assumed

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
                     "repeated. By default auto's choice and, up to "
                     f"{GPUS} GPUs, the next best."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Show steps of a profile from a file, or of one of "
                     f"{', '.join(overlap.models())}."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples on each GPU; by default 64.")] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that training reaches on one GPU.")
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(help=f"The node that can be opened where there are more than {GPUS} GPUs, "
                     "counted from 0 among those shown."),
    ] = None,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
) -> None:  # fmt: skip
    """Write a page that shows a machine with plans in motion, and training steps."""
    if out.suffix != ".html":
        raise CollectiveError(f"--out writes a file that ends in .html, not {out}")
    options.writable(out=out)
    given = plans.one_of(machine, topo)
    if (step := _step(given)) is not None:
        others = (size, plan, train, batch, tflops, node, gpus, gpu, measured)
        if any(one is not None for one in others):
            raise CollectiveError(f"{given} is a measured step: it is shown without other options")
        write(out, given, "a training step, predicted and measured", charts=step)
        return
    if train is None and (batch is not None or tflops is not None):
        raise CollectiveError("--batch and --tflops belong to --train MODEL: give that as well")
    found = options.machine_of(given, gpus, measured, gpu)
    pictures.check(found, node)
    work = None if train is None else work_of(train, found, batch, tflops)
    sizes = [
        options.parse_size(text) for text in size or SIZES[-1 if len(found.gpus) > GPUS else 0 :]
    ]
    with options.console.status("simulating"):
        views = pictures.views_of(found, sizes, plan or [], node or 0)
    charts: list[gantt.Chart] = []
    if work is not None:
        network = network_of(found)
        charts = [
            replace(gantt.predicted(overlap.plan(work.profile, network, name)), about=work.words)
            for name in POLICIES
        ]
    write(out, found.name, about(found), views, charts, opened=0 if node is None else 1)


def _step(given: str) -> list[gantt.Chart] | None:
    """The charts of a file that is a measured step; None for anything else."""
    if not (path := Path(given)).is_file() or not overlap.MeasuredStep.is_one(text := read(given)):
        return None
    with options.naming(path):
        found = overlap.MeasuredStep.from_json(text)
    return gantt.of_step(found)


def about(machine: Topology) -> str:
    words = repr(machine)[10:-1].partition(": ")[2]
    hidden = {k.kind for k in machine.links} - {k.kind for k in machine.fabric}
    words += " (only the fabric is drawn)" * bool(hidden)
    return "; ".join([words, *assumed(machine)])


def write(
    out: Path, title: str, what: str, views: Sequence[View] = (),
    charts: Sequence[gantt.Chart] = (), judged: Any = None, opened: int = 0,
) -> None:  # fmt: skip
    text = page(title, what, views, charts, judged, opened)
    out.write_text(text)
    options.console.print(f"written: {out} ({len(text) / 1e3:,.0f} kB)", highlight=False)


def page(
    title: str, what: str, views: Sequence[View] = (), charts: Sequence[gantt.Chart] = (),
    judged: Any = None, opened: int = 0,
) -> str:  # fmt: skip
    """`opened`: the number of the view that is shown first."""
    steps = gantt.as_data(charts) if charts else None
    data = {"title": title, "what": what, "views": views, "open": opened, "steps": steps,
            "judged": judged}  # fmt: skip
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = files("linkweave.bench.command").joinpath("view.html").read_text()
    return template.replace("DATA", text, 1)
