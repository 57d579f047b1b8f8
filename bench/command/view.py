"""`linkweave view`: one page that shows a machine, and plans that move along the simulator's clock.

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

from linkweave import collectives, topology
from linkweave.bench.command import options, plans
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import mscclpp
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology, Vertex
from linkweave.topology.layout import RADIUS, lay_out
from linkweave.topology.link import KINDS

SENDS = 6000
"""That move on a page for one plan; with more, the same plan is cut into fewer chunks."""
GPUS = 64
PIXELS = 100
"""Of a picture's unit."""
OTHERS = 4
"""Algorithms beside the one that `auto` takes."""


def view(
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    out: Annotated[Path, typer.Option("-o", "--out", help="The page, a .html file.")] = Path(
        "view.html"
    ),
    size: Annotated[
        list[str] | None,
        typer.Option("-s", "--size", help="A message to choose on the page; may be repeated."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", help="An algorithm, or a file of plan --json, NCCL or RCCL; may be "
                     "repeated. By default auto's choice and the next best."),
    ] = None,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
) -> None:  # fmt: skip
    """Write a page that shows a machine with plans in motion."""
    options.writable(out=out)
    found = options.machine_of(plans.one_of(machine, topo), gpus, measured, gpu)
    sizes = [options.parse_size(text) for text in size or ("64K", "1M", "64M")]
    with options.console.status("simulating"):
        text = page(found, sizes, plan or [])
    out.write_text(text)
    options.console.print(f"written: {out} ({len(text) / 1e6:.1f} MB)", highlight=False)


def page(machine: Topology, sizes: Sequence[int], asked: Sequence[str]) -> str:
    """The page as text. Raises CollectiveError for more than GPUS GPUs, and as planning does."""
    if len(machine.gpus) > GPUS:
        raise CollectiveError(
            f"{machine.name} has {len(machine.gpus)} GPUs: a page shows at most {GPUS}; a cluster "
            "of fewer nodes shows the same"
        )
    data = json.dumps(data_of(machine, sizes, asked), separators=(",", ":"))
    template = files("linkweave.bench.command").joinpath("view.html").read_text()
    return template.replace("DATA", data.replace("</", "<\\/"), 1)


def data_of(machine: Topology, sizes: Sequence[int], asked: Sequence[str]) -> dict[str, Any]:
    """What the page shows, as JSON has it; lengths in pixels, times in us."""
    where = lay_out(machine, machine.fabric, arcs=True)
    vertices: list[Vertex] = [*where.seats, *where.boxes]
    number = {v: i for i, v in enumerate(vertices)}
    nodes = []
    for v in vertices:
        at = where.anchor(v)
        node: dict[str, Any] = {"x": _px(at.real), "y": _px(-at.imag)}
        node["name"] = f"{machine.noun} {v}" if isinstance(v, int) else v
        node["label"] = str(v).rpartition(".")[2] if isinstance(v, str) else str(v)
        if isinstance(v, str):
            low, high = where.boxes[v]
            node["box"] = [_px(low.real), _px(-high.imag), _px((high - low).real),
                           _px((high - low).imag)]  # fmt: skip
        nodes.append(node)
    links, line = [], {}
    for link in machine.fabric:
        aside = 0.6 if str(link.src) < str(link.dst) else -0.6  # each direction on its own side
        points = where.curve(link.src, link.dst, aside)[::6]
        line[link.src, link.dst] = len(links)
        times = f"{link.count} x " if link.count > 1 else ""
        links.append({
            "a": number[link.src], "b": number[link.dst], "kind": KINDS[link.kind][0],
            "rate": f"{times}{link.bandwidth / 1e9:g} GB/s",
            "points": [[_px(p.real), _px(-p.imag)] for p in points],
        })  # fmt: skip
    every = [p for one in links for p in one["points"]] + [[n["x"], n["y"]] for n in nodes]
    pad = PIXELS * (RADIUS + 0.15)
    xs, ys = zip(*every, strict=True)
    low, high = (min(xs) - pad, min(ys) - pad), (max(xs) + pad, max(ys) + pad)
    width = high[0] - low[0]
    best = topology.bound(machine)
    made = [
        {"name": size_text(nbytes), "bound": best.algbw if best.seconds_per_byte else 0.0,
         "runs": [_run(one, machine, nbytes, number, line) for one in
                  plans_for(machine, nbytes, asked)]}
        for nbytes in sizes
    ]  # fmt: skip
    return {
        "title": machine.name, "what": repr(machine)[10:-1].partition(": ")[2],
        "bound": str(best), "nodes": nodes, "links": links, "radius": PIXELS * RADIUS,
        "pen": max(1.0, width / 900), "sizes": made,
        "frame": [*map(round, low), round(width), round(high[1] - low[1])],
    }  # fmt: skip


def plans_for(machine: Topology, nbytes: int, asked: Sequence[str]) -> list[Plan]:
    """The plans asked for; or `auto`'s, and the next best by their predicted times."""
    if not asked:
        told = collectives.explain(machine, nbytes)
        names = [row.algorithm for row in told.rows][: 1 + OTHERS]
        return [collectives.plan_allreduce(machine, nbytes, name) for name in names]
    found = []
    for one in asked:
        if one in ("auto", *ALGORITHMS["allreduce"]):
            found.append(collectives.plan_allreduce(machine, nbytes, one))
        elif not Path(one).is_file():
            raise CollectiveError(
                f"--plan: {one!r} is neither a file nor an algorithm; algorithms are "
                f"{', '.join(ALGORITHMS['allreduce'])}"
            )
        else:
            read = plans.read_plans(Path(one), machine, nbytes)
            if isinstance(read, mscclpp.ExecutionPlan):
                raise CollectiveError(f"{one}: plans of MSCCL++ are drawn by topo --plan")
            found += read
    return found


def _run(
    plan: Plan, machine: Topology, nbytes: int, number: dict[Vertex, int],
    line: dict[tuple[Vertex, Vertex], int],
) -> dict[str, Any]:  # fmt: skip
    run = collectives.simulate(plan, machine, nbytes)
    best = topology.bound(machine, plan.collective)
    shown, note = plan, "Each bar is a chunk that is sent; the line is now."
    while len(collectives.simulate(shown, machine, nbytes).sends) > SENDS:
        groups = max(1, shown.groups // 2)
        if groups == shown.groups:
            break
        shown = plan.with_chunks(groups * plan.stride)
    motion = collectives.simulate(shown, machine, nbytes)
    if shown is not plan:
        note += (
            f" What moves is cut into {shown.num_chunks} chunks in place of {plan.num_chunks}, and "
            f"takes {motion.seconds * 1e6:.0f} us; figures are of the plan itself."
        )
    carried = dict.fromkeys(line, 0.0)
    for send in run.sends:
        for ends in plan.connections[send.connection].links:
            carried[ends] += nbytes / plan.num_chunks
    gpus = machine.gpus
    scale = run.seconds / motion.seconds if motion.seconds else 1.0
    return {
        "name": plan.algorithm, "us": run.seconds * 1e6, "speed": run.algbw,
        "rate": f"{run.algbw / 1e9:.2f} GB/s",
        "share": f"{run.algbw / best.algbw:.0%}" if best.seconds_per_byte else "-",
        "made": f"{len(plan.trees)} trees" if plan.trees else f"{len(plan.tracks)} tracks",
        "note": note,
        "busy": {line[ends]: round(share, 3) for ends, share in run.utilisation.items()},
        "bytes": {line[ends]: round(n) for ends, n in carried.items() if n},
        "ends": [[number[gpus[c.src]], number[gpus[c.dst]]] for c in shown.connections],
        "ways": [[line[ends] for ends in c.links] for c in shown.connections],
        "sends": [[s.connection, s.chunk, round(s.start * scale * 1e6, 2),
                   round(s.end * scale * 1e6, 2)] for s in motion.sends],
    }  # fmt: skip


def _px(length: float) -> float:
    return round(PIXELS * length, 1)
