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
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology, TopologyError, Vertex
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
            f"{machine.name} has {len(machine.gpus)} GPUs: a page shows at most {GPUS}; choose "
            "some with --gpus, or fewer nodes of a cluster"
        )
    data = json.dumps(data_of(machine, sizes, asked), separators=(",", ":"))
    template = files("linkweave.bench.command").joinpath("view.html").read_text()
    return template.replace("DATA", data.replace("<", "\\u003c"), 1)


def data_of(machine: Topology, sizes: Sequence[int], asked: Sequence[str]) -> dict[str, Any]:
    """What the page shows, as JSON has it; lengths in pixels, times in us."""
    plans_of = {nbytes: plans_for(machine, nbytes, asked) for nbytes in sizes}
    used = {ends for some in plans_of.values() for plan, _ in some for ends in plan.link_use}
    fabric = machine.fabric
    if not used <= {(link.src, link.dst) for link in fabric}:  # of a plan read from a file
        fabric = machine.links
    where = lay_out(machine, fabric, arcs=True)
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
    for link in fabric:
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
    first = plans_of[sizes[0]][0][0].collective
    best = bound_of(machine, first)
    made = [
        {"name": size_text(nbytes), "bound": best.algbw if best else 0.0,
         "runs": [_run(plan, machine, nbytes, seconds, number, line) for plan, seconds in some]}
        for nbytes, some in plans_of.items()
    ]  # fmt: skip
    return {
        "title": machine.name, "what": repr(machine)[10:-1].partition(": ")[2],
        "bound": str(best) if best else f"no bound of {first} is known",
        "nodes": nodes, "links": links, "radius": PIXELS * RADIUS,
        "pen": max(1.0, width / 900), "sizes": made,
        "frame": [*map(round, low), round(width), round(high[1] - low[1])],
    }  # fmt: skip


def bound_of(machine: Topology, collective: str) -> topology.Bound | None:
    """The bound of a collective, if there is one and something has to move."""
    try:
        found = topology.bound(machine, collective)
    except TopologyError:
        return None
    return found if found.seconds_per_byte else None


def plans_for(
    machine: Topology, nbytes: int, asked: Sequence[str]
) -> list[tuple[Plan, float | None]]:
    """The plans asked for; or `auto`'s, and the next best; each with its measured seconds, if the
    machine has them."""
    if not asked:
        told = collectives.explain(machine, nbytes)
        rows = {row.algorithm: row for row in told.rows}
        names = [*dict.fromkeys([told.choice, *rows])][: 1 + OTHERS]
        return [
            (collectives.plan_allreduce(machine, nbytes, name),
             rows[name].seconds if name in rows and rows[name].measured else None)
            for name in names
        ]  # fmt: skip
    found: list[Plan] = []
    for one in asked:
        if not (file := plans.plan_file(one)):
            found.append(collectives.plan_allreduce(machine, nbytes, one))
        else:
            read = plans.read_plans(file, machine, nbytes)
            if isinstance(read, mscclpp.ExecutionPlan):
                raise CollectiveError(f"{one}: plans of MSCCL++ are drawn by topo --plan")
            found += read
    return [(plan, None) for plan in found]


def _run(
    plan: Plan, machine: Topology, nbytes: int, measured: float | None,
    number: dict[Vertex, int], line: dict[tuple[Vertex, Vertex], int],
) -> dict[str, Any]:  # fmt: skip
    run = motion = collectives.simulate(plan, machine, nbytes)
    best = bound_of(machine, plan.collective)
    shown, note = plan, "Each bar is a chunk that is sent; the line is now."
    while len(motion.sends) > SENDS:
        groups = max(1, shown.groups // 2)
        if groups == shown.groups:
            break
        shown = plan.with_chunks(groups * plan.stride)
        motion = collectives.simulate(shown, machine, nbytes)
    if shown is not plan:
        note += (
            f" What moves is cut into {shown.num_chunks} chunks in place of {plan.num_chunks}, and "
            f"takes {motion.seconds * 1e6:.0f} us, drawn as long as the plan itself; so are chunks "
            "and times of what is under way. All other figures are of the plan itself."
        )
    carried, sizes = dict.fromkeys(line, 0), plan.chunk_sizes(nbytes).tolist()
    for send in run.sends:
        for ends in plan.connections[send.connection].links:
            carried[ends] += sizes[send.chunk]
    gpus = machine.gpus
    scale = run.seconds / motion.seconds if motion.seconds else 1.0
    return {
        "name": plan.algorithm, "us": run.seconds * 1e6, "speed": run.algbw,
        "rate": f"{run.algbw / 1e9:.2f} GB/s",
        "share": f"{run.algbw / best.algbw:.0%}" if best else "-",
        "measured": f"{measured * 1e6:.1f} us" if measured else "",
        "made": f"{len(plan.trees)} trees" if plan.trees else f"{len(plan.tracks)} tracks",
        "note": note,
        "busy": {line[ends]: round(share, 3) for ends, share in run.utilisation.items()},
        "bytes": {line[ends]: n for ends, n in carried.items() if n},
        "ends": [[number[gpus[c.src]], number[gpus[c.dst]]] for c in shown.connections],
        "ways": [[line[ends] for ends in c.links] for c in shown.connections],
        "sends": [[s.connection, s.chunk, round(s.start * scale * 1e6, 2),
                   round(s.end * scale * 1e6, 2)] for s in motion.sends],
    }  # fmt: skip


def _px(length: float) -> float:
    return round(PIXELS * length, 1)
