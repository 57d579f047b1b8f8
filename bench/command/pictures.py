"""What `linkweave view` draws of machines: positions, links and plans in motion, as JSON has it.

A picture shows up to GPUS GPUs. A larger cluster has two: its nodes around the network, or around
its leaves and the spine; and the GPUs of one node, with what passes through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linkweave import collectives, topology
from linkweave.bench.command import plans
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import mscclpp
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.simulate import Timeline
from linkweave.topology import Link, Topology, TopologyError, Vertex
from linkweave.topology.clusters import nodes_of
from linkweave.topology.graph import KINDS, neighbours, reach
from linkweave.topology.layout import RADIUS, Positions, Star, lay_out, lay_out_node, star
from linkweave.topology.text import inside_node

SENDS = 6000
"""That move in a picture of one plan; with more, the same plan is cut into fewer chunks."""
GPUS = 72  # in one picture: those of a GB200 NVL72; of a larger cluster, nodes, and the GPUs of one
PIXELS = 100  # of a picture's unit
OTHERS = 4  # algorithms beside the one that `auto` takes
MANY = 32  # GPUs beyond which there is one other, and lines have fewer points: pages below 2 MB
THICK = 30  # links that begin at one place and have lines of the usual width
NETWORK, SPINE = "network", "spine"  # what joins nodes, and what joins leaves

View = dict[str, Any]
"""A picture with its plans, as the page's JSON has it; lengths in pixels, times in us."""


@dataclass(frozen=True)
class Made:
    nbytes: int
    plans: list[tuple[Plan, float | None]]


@dataclass(frozen=True)
class Picture:
    """What of a machine is drawn: its vertices and links by their numbers on the page."""

    name: str
    data: View
    number: dict[Vertex, int]
    line: dict[tuple[Vertex, Vertex], int]

    @staticmethod
    def of(
        name: str, where: Positions, links: Iterable[Link], called: Callable[[Vertex], str],
        changed: Callable[[Link], str] = lambda link: "", radius: float = RADIUS,
    ) -> Picture:  # fmt: skip
        """`called` names a vertex; `changed` says in a word how a link differs; `radius` is that of
        circles. Lines are thinner where many meet."""
        vertices: list[Vertex] = [*where.seats, *where.boxes]
        number = {v: i for i, v in enumerate(vertices)}
        nodes, lines, line = [], [], {}
        for v in vertices:
            at = where.anchor(v)
            one: dict[str, Any] = {"x": _px(at.real), "y": _px(-at.imag), "name": called(v)}
            one["label"] = inside_node(str(v))
            if isinstance(v, str):
                low, high = where.boxes[v]
                one["box"] = [_px(low.real), _px(-high.imag), _px((high - low).real),
                              _px((high - low).imag)]  # fmt: skip
            nodes.append(one)
        links, many = list(links), len(where.seats) > MANY
        both = {(link.dst, link.src) for link in links}
        for link in links:
            aside = 0.6 if str(link.src) < str(link.dst) else -0.6  # each direction on its side
            aside *= (link.src, link.dst) in both
            points = where.curve(link.src, link.dst, aside)[:: 40 if many else 6]
            line[link.src, link.dst] = len(lines)
            times = f"{link.count} x " if link.count > 1 else ""
            lines.append({
                "a": number[link.src], "b": number[link.dst], "kind": KINDS[link.kind][0],
                "rate": f"{times}{link.bandwidth / 1e9:g} GB/s",
                "points": [[_px(p.real, many), _px(-p.imag, many)] for p in points],
            })  # fmt: skip
            if word := changed(link):
                lines[-1]["change"] = word
        every = [p for one in lines for p in one["points"]] + [[n["x"], n["y"]] for n in nodes]
        corners = [c for box in where.boxes.values() for c in box]
        every += [[_px(c.real), _px(-c.imag)] for c in corners]
        pad = PIXELS * (radius + 0.15)
        xs, ys = zip(*every, strict=True)
        low, high = (min(xs) - pad, min(ys) - pad), (max(xs) + pad, max(ys) + pad)
        width = high[0] - low[0]
        frame = [*map(round, low), round(width), round(high[1] - low[1])]
        most = max(Counter(one["a"] for one in lines).values(), default=1)
        data = {"name": name, "nodes": nodes, "links": lines, "radius": PIXELS * radius,
                "thin": min(1.0, round(THICK / most, 2)),
                "pen": max(1.0, width / 900), "frame": frame}  # fmt: skip
        return Picture(name, data, number, line)

    def by_line(self, values: Mapping[tuple[Vertex, Vertex], float]) -> list[float]:
        """A number for each line, 0 where none is given."""
        return [values.get(ends, 0) for ends in self.line]

    def showing(self, machine: Topology, made: Sequence[Made], runs: list[list[View]]) -> View:
        best = bound_of(machine, made[0].plans[0][0].collective)
        sizes = [
            {"name": size_text(each.nbytes), "bound": best.algbw if best else 0.0, "runs": some}
            for each, some in zip(made, runs, strict=True)
        ]
        first = made[0].plans[0][0].collective
        words = str(best) if best else f"no bound of {first} is known"
        return {**self.data, "bound": words, "sizes": sizes}


def _px(length: float, whole: bool = False) -> float:
    return round(PIXELS * length) if whole else round(PIXELS * length, 1)


def _called(noun: str) -> Callable[[Vertex], str]:
    return lambda v: f"{noun} {v}" if isinstance(v, int) else v


def views_of(
    machine: Topology, sizes: Sequence[int], asked: Sequence[str], node: int = 0
) -> list[View]:
    """Views of a machine with the plans asked for, by algorithm or file; or `auto`'s and, up to
    GPUS GPUs, the next best. Raises CollectiveError as planning does."""
    size = len(machine.gpus)
    most = 1 if size > GPUS else 2 if size > MANY else 1 + OTHERS
    made = [Made(nbytes, plans_for(machine, nbytes, asked, most)) for nbytes in sizes]
    return views_of_plans(machine, made, node)


def views_of_plans(machine: Topology, made: Sequence[Made], node: int = 0) -> list[View]:
    """Views of all GPUs, or of a large cluster's nodes and of one node."""
    if len(machine.gpus) > GPUS:
        nodes = nodes_of(machine)
        return [of_nodes(machine, nodes, made), of_node(machine, nodes, node, made)]
    return [whole(machine, made)]


def check(machine: Topology, node: int | None = None) -> None:
    """Raise CollectiveError for a machine that has no picture, and a node that cannot be opened."""
    nodes, size = nodes_of(machine), len(machine.gpus)
    largest = max(map(len, nodes))
    if size > GPUS and largest > GPUS:
        raise CollectiveError(
            f"{machine.name} has a node of {largest} GPUs; a picture shows at most {GPUS}: choose "
            "some with --gpus"
        )
    if node is not None and size <= GPUS:
        raise CollectiveError(f"--node is for more than {GPUS} GPUs: {machine.name} has {size}")
    if node is not None and not 0 <= node < len(nodes):
        raise CollectiveError(f"--node {node}: {machine.name} has nodes 0 to {len(nodes) - 1}")


def whole(
    machine: Topology, made: Sequence[Made], name: str = "", beside: Topology | None = None,
    among: Topology | None = None,
) -> View:  # fmt: skip
    """The view of all GPUs, with what differs from the machine `beside` it; laid out as `among`,
    which has the vertices and links of both."""
    among, beside = among or machine, beside or machine
    used = {ends for each in made for plan, _ in each.plans for ends in plan.link_use}
    fabric = among.fabric
    if not used <= {(link.src, link.dst) for link in fabric}:  # of a plan read from a file
        fabric = among.links
    own, other = (
        {(link.src, link.dst): link.count * link.bandwidth for link in one.links}
        for one in (machine, beside)
    )

    def changed(link: Link) -> str:
        ends = link.src, link.dst
        if ends not in own:
            return "not here"
        if ends not in other:
            return "only here"
        if own[ends] == other[ends]:
            return ""
        return "more here" if own[ends] > other[ends] else "less here"

    where = lay_out(among, fabric, arcs=True)
    links = [machine.by_ends.get((link.src, link.dst), link) for link in fabric]
    large = isinstance(where, Star) and len(where.seats) > THICK
    picture = Picture.of(
        name, where, links, _called(machine.noun), changed, 0.42 if large else RADIUS
    )
    runs = [[_run(plan, machine, each.nbytes, seconds, picture) for plan, seconds in each.plans]
            for each in made]  # fmt: skip
    return picture.showing(machine, made, runs)


def before_and_after(
    before: Topology, after: Topology, among: Topology | None, nbytes: int
) -> list[View]:
    """Views of both machines with `auto`'s plan and the next best; laid out alike, with what
    differs, if `among` has the links of both."""
    pairs = (("before", before, after), ("after", after, before))
    return [
        whole(one, [Made(nbytes, plans_for(one, nbytes, ()))], name, among and other, among)
        for name, one, other in pairs
    ]


def of_nodes(machine: Topology, nodes: Sequence[Sequence[int]], made: Sequence[Made]) -> View:
    """The view of a cluster's nodes and its network's switches: what they send each other, by time
    and bytes. Switches of the same nodes are drawn as one."""
    home = {g: i for i, gpus in enumerate(nodes) for g in gpus}
    network = [link for link in machine.links if link.kind == "network"]
    near = neighbours((k.src, k.dst) for k in machine.links if k.kind != "network")
    drawn: dict[Vertex, Vertex] = {}
    for i, gpus in enumerate(nodes):
        drawn |= dict.fromkeys(reach(near, gpus[0]), i)
    served = _served(network, drawn)
    leaves = {below: f"leaf {i}" for i, below in enumerate(sorted({*served.values()}))}
    drawn |= {v: leaves[below] for v, below in served.items()}
    middle = SPINE if leaves else NETWORK
    for link in network:
        for v in (link.src, link.dst):
            drawn.setdefault(v, middle)
    speed: dict[tuple[Vertex, Vertex], int] = {}
    ways: dict[tuple[Vertex, Vertex], tuple[tuple[Vertex, Vertex], int]] = {}
    for link in network:
        ends = drawn[link.src], drawn[link.dst]
        if ends[0] != ends[1]:
            rate = int(link.count * link.bandwidth)
            ways[link.src, link.dst] = ends, rate
            speed[ends] = speed.get(ends, 0) + rate
    links = [Link(*ends, rate, kind="network") for ends, rate in sorted(speed.items(), key=str)]
    where = star(range(len(nodes)), middle, {name: of for of, name in leaves.items()})
    picture = Picture.of("nodes", where, links, _called("node"),
                         radius=0.42 if len(nodes) > THICK else RADIUS)  # fmt: skip

    def run(plan: Plan, nbytes: int, seconds: float | None) -> View:
        line = collectives.simulate(plan, machine, nbytes)
        gpus = machine.gpus
        routes = [
            (
                (home[gpus[c.src]], home[gpus[c.dst]]),
                tuple(picture.line[ways[hop][0]] for hop in c.links if hop in ways),
            )
            for c in plan.connections
        ]
        apart = sorted({((a, b), way) for (a, b), way in routes if way and a != b})
        order = {route: i for i, route in enumerate(apart)}
        which = np.array([order.get(route, -1) for route in routes])[line.rows[0]]
        busy, carried = dict.fromkeys(speed, 0.0), [0.0] * len(picture.line)
        for between, share in line.utilisation.items():
            if between in ways:
                ends, rate = ways[between]
                busy[ends] += share * rate / speed[ends]
        sizes = plan.chunk_sizes(nbytes)
        moved = np.bincount(which + 1, sizes[line.rows[1]], minlength=len(apart) + 1)[1:]
        for (_, way), n in zip(apart, moved.tolist(), strict=True):
            for i in way:
                carried[i] += n
        spans = _merged(which, line.rows[2], line.rows[4], line.seconds)
        return {
            **_facts(plan, line, machine, seconds),
            "note": "Each bar is a time in which a node sends to another; the line is now.",
            "busy": picture.by_line({ends: round(share, 3) for ends, share in busy.items()}),
            "bytes": [*map(round, carried)],
            "ends": [[picture.number[a], picture.number[b]] for (a, b), _ in apart],
            "ways": [way for _, way in apart],
            "sends": [[i, -1, round(1e6 * s, 2), round(1e6 * e, 2)] for i, s, e in spans],
        }  # fmt: skip

    runs = [[run(plan, each.nbytes, seconds) for plan, seconds in each.plans] for each in made]
    return picture.showing(machine, made, runs)


def _served(
    network: Sequence[Link], drawn: Mapping[Vertex, Vertex]
) -> dict[Vertex, tuple[int, ...]]:
    """The nodes of each switch that is a leaf; empty if switches have other nodes in common, as
    rails that take all."""
    below: dict[Vertex, set[int]] = {}
    for link in network:
        for v, w in ((link.src, link.dst), (link.dst, link.src)):
            if v not in drawn and isinstance(node := drawn.get(w), int):
                below.setdefault(v, set()).add(node)
    served = {v: tuple(sorted(nodes)) for v, nodes in below.items()}
    groups = {*served.values()}
    apart = sum(map(len, groups)) == len({node for nodes in groups for node in nodes})
    return served if apart and len(groups) > 1 else {}


def of_node(
    machine: Topology, nodes: Sequence[Sequence[int]], node: int, made: Sequence[Made]
) -> View:
    where, links = lay_out_node(nodes[node], machine.fabric)
    picture = Picture.of(f"node {node}", where, links, _called(machine.noun))
    runs = [[_run(plan, machine, each.nbytes, seconds, picture) for plan, seconds in each.plans]
            for each in made]  # fmt: skip
    return picture.showing(machine, made, runs)


def _merged(which: Any, starts: Any, ends: Any, seconds: float) -> list[tuple[int, float, float]]:
    """(number, start, end) of the times in which sends of each number are under way; those of -1
    are left out. Short gaps are closed until there are at most SENDS, or no gaps."""
    order = np.lexsort((starts, which))
    order = order[which[order] >= 0]
    number, begin, end = which[order], starts[order], ends[order]
    gap = 0.0
    while True:
        found: list[tuple[int, float, float]] = []
        bounds = np.flatnonzero(np.diff(number)) + 1
        for part in np.split(np.arange(len(number)), bounds):
            if not len(part):
                continue
            upto = np.maximum.accumulate(end[part])
            cut = np.flatnonzero(begin[part][1:] > upto[:-1] + gap) + 1
            first, last = [0, *cut], [*(cut - 1), len(part) - 1]
            found += [(int(number[part[0]]), float(begin[part][i]), float(upto[j]))
                      for i, j in zip(first, last, strict=True)]  # fmt: skip
        if len(found) <= SENDS or gap > seconds:
            return found
        gap = 2 * gap or seconds / 1000


def bound_of(machine: Topology, collective: str) -> topology.Bound | None:
    """The bound of a collective, if there is one and something has to move."""
    try:
        found = topology.bound(machine, collective)
    except TopologyError:
        return None
    return found if found.seconds_per_byte else None


def plans_for(
    machine: Topology, nbytes: int, asked: Sequence[str], most: int = 1 + OTHERS
) -> list[tuple[Plan, float | None]]:
    """The plans asked for; or `auto`'s, and the next best, up to `most`; each with its measured
    seconds, if the machine has them."""
    if not asked and most == 1:
        plan = collectives.plan_allreduce(machine, nbytes)
        timed = plans.timed_of(machine, plan.collective, plan.algorithm, nbytes)
        return [(plan, timed[0] if timed else None)]
    if not asked:
        told = collectives.explain(machine, nbytes)
        rows = {row.algorithm: row for row in told.rows}
        names = [*dict.fromkeys([told.choice, *rows])][:most]
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


def _facts(plan: Plan, run: Timeline, machine: Topology, measured: float | None) -> View:
    """What is told of a plan, whatever is drawn."""
    best = bound_of(machine, plan.collective)
    return {
        "name": plan.algorithm,
        "us": run.seconds * 1e6,
        "speed": run.algbw,
        "rate": f"{run.algbw / 1e9:.2f} GB/s",
        "share": f"{run.algbw / best.algbw:.0%}" if best else "-",
        "measured": f"{measured * 1e6:.1f} us" if measured else "",
        "made": plans.made_of(plan, machine),
    }


def _run(
    plan: Plan, machine: Topology, nbytes: int, measured: float | None, picture: Picture
) -> View:
    """A plan's run, as far as it passes through a picture."""
    run = motion = collectives.simulate(plan, machine, nbytes)
    ways = [[picture.line[ends] for ends in c.links if ends in picture.line]
            for c in plan.connections]  # fmt: skip
    seen = np.array([bool(way) for way in ways], bool)
    shown, note = plan, "Each bar is a chunk that is sent; the line is now."
    groups = plan.groups
    while (count := int(seen[motion.rows[0]].sum())) > SENDS and groups > 1:
        groups = max(1, min(groups - 1, groups * SENDS // count))
        shown = plan.with_chunks(groups * plan.stride)
        motion = collectives.simulate(shown, machine, nbytes)
    if shown is not plan:
        note += (
            f" What moves are {shown.num_chunks} larger chunks in place of {plan.num_chunks}; "
            f"their {motion.seconds * 1e6:.0f} us are drawn as long as the plan's own. All figures "
            "but those of what is under way are of the plan itself."
        )
    carried, sizes = [0] * len(picture.line), plan.chunk_sizes(nbytes)
    each = np.bincount(run.rows[0], sizes[run.rows[1]], minlength=len(ways))
    for way, n in zip(ways, each.tolist(), strict=True):
        for i in way:
            carried[i] += round(n)
    scale = run.seconds / motion.seconds if motion.seconds else 1.0
    gpus = machine.gpus

    def end(rank: int) -> int | str:
        inside = picture.number.get(gpus[rank])
        return f"{machine.noun} {gpus[rank]}" if inside is None else inside

    number = (np.cumsum(seen) - 1).tolist()
    shares = run.utilisation
    return {
        **_facts(plan, run, machine, measured), "note": note,
        "busy": picture.by_line({ends: round(share, 3) for ends, share in shares.items()}),
        "bytes": carried,
        "ends": [[end(c.src), end(c.dst)] for c, way in zip(plan.connections, ways, strict=True)
                 if way],
        "ways": [way for way in ways if way],
        "sends": [[number[s.connection], s.chunk, round(s.start * scale * 1e6, 2),
                   round(s.end * scale * 1e6, 2)] for s in motion.sends if seen[s.connection]],
    }  # fmt: skip
