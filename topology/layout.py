"""Positions in a picture: GPUs as points, switches as boxes, links as curves.

Points are complex numbers, which makes turning and scaling arithmetic.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from linkweave.topology.clusters import nodes_of
from linkweave.topology.graph import DIRECT, Link, Vertex, neighbours, reach
from linkweave.topology.machines import dgx1_p100, dgx1_v100
from linkweave.topology.topology import Topology

RADIUS = 0.22  # of a GPU's circle; the unit is at most 1.5 inches
GAP = 0.1  # between parallel lines
BOX = 0.17  # half the height of a switch
_STEP = 1.1  # from one layer of switches to the next
_ROW = 16  # GPUs of one switch that stand in a row; more stand around it
_RAIL = 0.5  # from one network switch to the next
# Two quads face to face, the outer GPUs further from the axis than the inner ones: the four lines
# between twins are then parallel, and none runs through another GPU.
_CUBE = (-2.2 + 1.35j, -0.8 + 0.6j, -0.8 - 0.6j, -2.2 - 1.35j,
         2.2 + 1.35j, 0.8 + 0.6j, 0.8 - 0.6j, 2.2 - 1.35j)  # fmt: skip


@dataclass
class Positions:
    """Centres of GPUs, and lower left and upper right corners of switches.

    `rows` holds GPUs that stand in a row. Direct links between them are arcs on the side away from
    the switches: below the row for -1, above it for 1.
    """

    seats: dict[int, complex]
    boxes: dict[str, tuple[complex, complex]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    ports: dict[tuple[str, str], float] = field(default_factory=dict)  # x of a line between boxes
    passed: set[Vertex] = field(default_factory=set)  # lines to other boxes run beneath
    captions: list[tuple[complex, str]] = field(default_factory=list)

    def anchor(self, vertex: Vertex) -> complex:
        return self.seats[vertex] if isinstance(vertex, int) else sum(self.boxes[vertex]) / 2

    def curve(self, src: Vertex, dst: Vertex, offset: float = 0) -> list[complex]:
        """Points from one to the other, `offset` parallel lines aside.

        Both directions are moved to the same side.
        """
        a, b = self.anchor(src), self.anchor(dst)
        pull, spread = (a + b) / 2, 0j  # control points are pull + spread and pull - spread
        if isinstance(src, int) and isinstance(dst, int):
            if bend := self.rows.get(src):
                pull, spread = pull + bend * 4j / 3 * arc_depth(abs(a - b)), (a - b) / 3
            elif len(self.seats) > 8 and abs(a - b) > 1.3:
                pull *= 0.8  # on a large circle a straight line would graze the GPU that it skips
        elif isinstance(src, str) and isinstance(dst, str) and abs(a.imag - b.imag) < BOX:
            a, b = self._facing(src, dst)  # two CPUs side by side
            pull = (a + b) / 2
            if self._blocked(a, b):
                a, b = self.anchor(src) + BOX * 1j, self.anchor(dst) + BOX * 1j
                pull, spread = (a + b) / 2 + 0.25j * math.sqrt(abs(a - b)), (a - b) / 4
        else:
            x = self.meeting(src, dst)
            a, b = complex(x, a.imag), complex(x, b.imag)
            pull = (a + b) / 2
        aside = GAP * offset * 1j * (b - a) / abs(b - a) * (1 if str(src) < str(dst) else -1)
        return bend_through(a + aside, pull + spread + aside, pull - spread + aside, b + aside)

    def _facing(self, src: str, dst: str) -> tuple[complex, complex]:
        (a0, a1), (b0, b1) = self.boxes[src], self.boxes[dst]
        y = (a0 + a1).imag / 2
        if a0.real < b0.real:
            return complex(a1.real, y), complex(b0.real, y)
        return complex(a0.real, y), complex(b1.real, y)

    def _blocked(self, a: complex, b: complex) -> bool:
        low, high = sorted((a.real, b.real))
        return any(
            p.imag < a.imag < q.imag and low < (p + q).real / 2 < high
            for p, q in self.boxes.values()
        )

    def meeting(self, src: Vertex, dst: Vertex) -> float:
        """The x of the vertical line between two vertices, at least one of them a box."""
        for ends in ((src, dst), (dst, src)):
            if isinstance(ends[0], str) and isinstance(ends[1], str) and ends in self.ports:
                return self.ports[ends]
        a, b = self.anchor(src), self.anchor(dst)
        spans = [self.boxes.get(str(v), (p, p)) for v, p in ((src, a), (dst, b))]
        left, right = min(spans, key=lambda span: (span[1] - span[0]).real)
        # between a box above the GPUs and one below, the line stands beyond the last GPU
        return (
            right.real - 0.4
            if a.imag * b.imag < 0 and isinstance(src, str) and isinstance(dst, str)
            else ((left + right).real / 2)
        )


class Star(Positions):
    """Seats around a box, with straight lines between them and the middle of it."""

    def curve(self, src: Vertex, dst: Vertex, offset: float = 0) -> list[complex]:
        a, b = self.anchor(src), self.anchor(dst)
        aside = GAP * offset * 1j * (b - a) / abs(b - a) * (1 if str(src) < str(dst) else -1)
        ways = [i / 120 for i in range(121)]
        return [a + aside + t * (b - a) for t in ways]


def bend_through(a: complex, b: complex, c: complex, d: complex) -> list[complex]:
    """A cubic Bezier curve."""
    ways = [(1 - i / 120, i / 120) for i in range(121)]
    return [s * s * (s * a + 3 * t * b) + t * t * (3 * s * c + t * d) for s, t in ways]


def arc_depth(distance: float) -> float:
    """How far an arc between two GPUs reaches from their row."""
    return 0.42 * math.pow(distance, 0.7)


def lay_out(topology: Topology, links: Sequence[Link], arcs: bool) -> Positions:
    """A layout for these links; with `arcs` there is room for arcs between all GPUs of a row."""
    switches = [v for link in links for v in (link.src, link.dst) if isinstance(v, str)]
    gpus = topology.gpus
    if len({*switches}) == 1 and len(switches) == len(links) and len(gpus) > _ROW:
        return star(gpus, switches[0])
    if switches:
        return _in_rows(topology, links, arcs)
    for whole in (dgx1_v100(), dgx1_p100()):
        if len(gpus) == 8 and (seat := topology.isomorphic_to(whole)):
            same = tuple(links) == whole.fabric  # then not one of its symmetries
            return Positions({g: _CUBE[g if same else seat[g]] for g in gpus})
        more = {*_ends(links)} - {*_ends(whole.fabric)}
        if gpus == whole.gpus and len(links) == len(whole.fabric) + len(more) and _clear(more):
            return Positions(dict(enumerate(_CUBE)))
    everyone = (*gpus, *topology.forwarders)
    radius, turn = max(1.25, 0.19 * len(everyone)), cmath.exp(-1j * math.tau / len(everyone))
    return Positions({g: radius * 1j * turn**i for i, g in enumerate(everyone)})


def star(
    seats: Sequence[int], middle: str, between: Mapping[str, Sequence[int]] | None = None
) -> Positions:
    """Seats around a box; `between` names boxes that stand before some of them, which are seated
    side by side."""
    between = between or {}
    seats = [*dict.fromkeys([*(seat for each in between.values() for seat in each), *seats])]
    radius, turn = max(1.6, 0.17 * len(seats)), cmath.exp(-1j * math.tau / len(seats))
    around = {g: radius * 1j * turn**i for i, g in enumerate(seats)}
    corner = complex(0.35 * radius, 0.09 * radius)
    boxes = {middle: (-corner, corner)}
    half = radius * min(0.12, 1.5 / max(1, len(between)))
    for name, each in between.items():
        towards = sum(around[seat] for seat in each)
        centre = 0.62 * radius * (towards / abs(towards) if abs(towards) > 1e-6 else 1)
        corner = complex(half, min(half, 0.05 * radius))
        boxes[name] = (centre - corner, centre + corner)
    return Star(around, boxes)


def lay_out_node(gpus: Sequence[int], links: Sequence[Link]) -> tuple[Positions, list[Link]]:
    """A layout of one node of a cluster with what it is attached to above it; and its links, of
    those of the cluster."""
    near = neighbours((k.src, k.dst) for k in links if k.kind != "network")
    part = {*reach(near, gpus[0])}
    own = [k for k in links if k.src in part and k.dst in part]
    outer = [k for k in links if (k.src in part) != (k.dst in part)
             and (isinstance(k.src, str) or k.src in part)
             and (isinstance(k.dst, str) or k.dst in part)]  # fmt: skip
    layout = _row(gpus, own, arcs=False, cluster=True)
    top = max([RADIUS, *(b.imag for _, b in layout.boxes.values())])
    low, high = _span(layout)
    net = dict.fromkeys(v for k in outer for v in (k.src, k.dst) if v not in part)
    for i, name in enumerate(str(v) for v in net):
        y = top + 0.7 + _RAIL * i
        layout.boxes[name] = (complex(low, y - BOX), complex(high, y + BOX))
    layout.passed = set(net)
    return layout, [*own, *outer]


def _clear(links: Iterable[tuple[Vertex, Vertex]]) -> bool:
    """Whether lines between corners of the cube run through no other corner."""
    for src, dst in links:
        a, b = _CUBE[int(src)], _CUBE[int(dst)]
        for c in {*_CUBE} - {a, b}:
            along = max(0.0, min(1.0, ((c - a) / (b - a)).real))
            if abs(a + along * (b - a) - c) < RADIUS + GAP:
                return False
    return True


def _ends(links: Iterable[Link]) -> Iterator[tuple[Vertex, Vertex]]:
    return ((k.src, k.dst) for k in links)


def _in_rows(topology: Topology, links: Sequence[Link], arcs: bool) -> Positions:
    """One machine in one row; the nodes of a cluster in two rows around the network."""
    nodes = nodes_of(topology)
    if len(nodes) == 1:
        return _row(topology.gpus, links, arcs, cluster=False)
    local = [k for k in links if k.kind != "network"]
    near = neighbours((k.src, k.dst) for k in local)
    parts = [reach(near, gpus[0]) for gpus in nodes]
    own = [
        _row(gpus, [k for k in local if k.src in part], arcs, cluster=True)
        for gpus, part in zip(nodes, parts, strict=True)
    ]
    columns = math.ceil(len(nodes) / 2) if len(nodes) > 2 else len(nodes)
    width = 1.2 + max(_span(one)[1] - _span(one)[0] for one in own)
    net = dict.fromkeys(
        v for k in links if k.kind == "network" for v in (k.src, k.dst)
        if isinstance(v, str) and not any(v in one.boxes for one in own)
    )  # fmt: skip
    top = max(b.imag for one in own for _, b in one.boxes.values())
    middle = top + 0.5 + _RAIL * (len(net) - 1) / 2 + BOX
    whole = Positions({})
    for i, one in enumerate(own):
        row, column = divmod(i, columns)
        shift = column * width - _span(one)[0]
        low, high = _span(one)
        one.captions = [(complex((low + high) / 2, _bottom(one, local, arcs) - 0.3), f"node {i}")]
        _add(whole, one, shift, 2 * middle if row else None)
    low, high = _span(whole)
    for i, name in enumerate(net):
        y = middle + _RAIL * (i - (len(net) - 1) / 2)
        whole.boxes[name] = (complex(low, y - BOX), complex(high, y + BOX))
    whole.passed = set(net)
    crossing = [k for k in links if k.src in net and k.dst in net and str(k.src) < str(k.dst)]
    for i, k in enumerate(crossing):  # beside the nodes, so that no other line is near
        whole.ports[str(k.src), str(k.dst)] = high + 0.25 + 0.2 * i
    if crossing:
        for name in net:
            a, b = whole.boxes[name]
            whole.boxes[name] = (a, b + 0.3 + 0.2 * len(crossing))
    return whole


def _add(whole: Positions, one: Positions, shift: float, mirror: float | None) -> None:
    def moved(p: complex) -> complex:
        return complex(p.real + shift, p.imag if mirror is None else mirror - p.imag)

    whole.seats |= {g: moved(p) for g, p in one.seats.items()}
    for name, (a, b) in one.boxes.items():
        ys = sorted((moved(a).imag, moved(b).imag))
        whole.boxes[name] = (complex(moved(a).real, ys[0]), complex(moved(b).real, ys[1]))
    whole.rows |= {g: bend if mirror is None else -bend for g, bend in one.rows.items()}
    whole.ports |= {ends: x + shift for ends, x in one.ports.items()}
    whole.captions += [(moved(at), caption) for at, caption in one.captions]


def _bottom(layout: Positions, links: Iterable[Link], arcs: bool) -> float:
    reach = [
        -arc_depth(abs(layout.seats[k.src] - layout.seats[k.dst])) for k in links
        if isinstance(k.src, int) and isinstance(k.dst, int) and k.src in layout.seats
    ]  # fmt: skip
    reach += [-arc_depth(len(layout.seats) - 1)] if arcs else []
    return min([-RADIUS, *reach, *(a.imag for a, _ in layout.boxes.values())])


def _span(layout: Positions) -> tuple[float, float]:
    xs = [p.real + d for p in layout.seats.values() for d in (-RADIUS, RADIUS)]
    xs += [p.real for box in layout.boxes.values() for p in box]
    return min(xs), max(xs)


def _row(gpus: Sequence[int], links: Sequence[Link], arcs: bool, cluster: bool) -> Positions:
    """GPUs side by side; each switch is a bar above what it joins, CPUs above PCIe switches.

    A bus that only leads to GPUs, and an NVSwitch beside a PCIe tree, are bars below the GPUs.
    """
    layout = Positions({g: complex(i) for i, g in enumerate(_by_tree(gpus, links))})
    direct = [k for k in links if isinstance(k.src, int) and isinstance(k.dst, int)]
    arcs = arcs or bool(direct)
    reach = max((abs(layout.seats[k.src] - layout.seats[k.dst]) for k in direct), default=0.0)  # type: ignore[index]
    room = arc_depth(len(gpus) - 1 if arcs and not direct else reach) if arcs else 0.0
    switches = list(dict.fromkeys(v for k in links for v in (k.src, k.dst) if isinstance(v, str)))
    fed = {k.dst for k in links if isinstance(k.src, int)}
    below = {k.src for k in links if isinstance(k.dst, int)} - fed
    if any(k.kind not in DIRECT for k in links) and not direct:
        below |= {v for v in switches if all(k.kind in DIRECT for k in links if v == k.src)}
    layout.rows = dict.fromkeys(gpus, -1)
    beyond = 0.8 if any(k.src in fed and k.dst in below for k in links) else 0.0
    level = _levels(switches, links)
    nics = [v for v in switches if cluster and _is_nic(v, links)]
    for switch in sorted((v for v in switches if v not in nics), key=lambda v: level[v]):
        near = [v for k in links if switch in (k.src, k.dst) for v in (k.src, k.dst)]
        joined = [layout.seats[v] for v in near if isinstance(v, int)]
        joined += [
            sum(layout.boxes[v]) / 2 for v in near
            if isinstance(v, str) and v in layout.boxes and level[v] < level[switch]
        ]  # fmt: skip
        xs = [p.real for p in joined or layout.seats.values()]
        low, high = min(xs) - 0.3, max(xs) + 0.3 + beyond
        step = -_STEP if switch in below else _STEP
        y = step - room if step < 0 else step * level[switch]
        while _taken(layout, low, high, y):
            y += step
        layout.boxes[switch] = complex(low, y - BOX), complex(high, y + BOX)
    if nics:
        _add_nics(layout, nics, links)
    return layout


def _by_tree(gpus: Sequence[int], links: Sequence[Link]) -> list[int]:
    """Order GPUs so that those of one CPU, and of one PCIe switch, are neighbours."""
    up = {k.src: k.dst for k in links if k.kind in ("pcie", "host") and isinstance(k.dst, str)
          and (isinstance(k.src, int) or k.kind == "host")}  # fmt: skip
    first: dict[Vertex, int] = {}
    keys: dict[int, tuple[int, int, int]] = {}
    for i, g in enumerate(gpus):
        switch = up.get(g, g)
        cpu = up.get(switch, switch)
        keys[g] = (first.setdefault(cpu, i), first.setdefault(switch, i), i)
    return sorted(gpus, key=keys.__getitem__)


def _is_nic(v: str, links: Sequence[Link]) -> bool:
    """Whether a switch is a dead end without the network."""
    return len({k.dst for k in links if k.src == v}) == 1


def _levels(switches: Sequence[str], links: Sequence[Link]) -> dict[str, int]:
    """Level 1 for switches that join GPUs; CPUs are above the switches that lead to them."""
    level = dict.fromkeys(switches, 1)
    for _ in switches:
        for k in links:
            if isinstance(k.src, str) and isinstance(k.dst, str) and _above(k, links):
                level[k.dst] = max(level[k.dst], min(level[k.src] + 1, len(switches)))
    return level


def _above(link: Link, links: Sequence[Link]) -> bool:
    """Whether the link leads from a PCIe switch to a CPU or to a switch further from GPUs."""
    if link.kind == "host":
        return any(k.src == link.src and k.kind == "pcie" for k in links)
    if link.kind == "pcie":
        return any(k.src == link.src and isinstance(k.dst, int) for k in links) and not any(
            k.src == link.dst and isinstance(k.dst, int) for k in links
        )
    return False


def _taken(layout: Positions, low: float, high: float, y: float) -> bool:
    return any(
        abs(y - (a + b).imag / 2) < 2.5 * BOX and low < b.real and a.real < high
        for a, b in layout.boxes.values()
    )


def _add_nics(layout: Positions, nics: Sequence[str], links: Sequence[Link]) -> None:
    """Put NICs on top, each above a free part of the GPU, switch or CPU that it is attached to."""
    top = max([0.0, *(b.imag for _, b in layout.boxes.values())])
    for nic in nics:
        host = next(k.dst for k in links if k.src == nic)
        if isinstance(host, int):
            xs = [layout.seats[host].real]
        else:
            a, b = layout.boxes[host]
            xs = [(a + b).real / 2, a.real + 0.1, b.real - 0.1, a.real + 0.4, b.real - 0.4]
        floor = layout.anchor(host).imag
        free = [
            x for x in xs
            if not any(p.real - 0.05 < x < q.real + 0.05 and floor + BOX < (p + q).imag / 2
                       for v, (p, q) in layout.boxes.items() if v != host)
            and not _taken(layout, x - 0.3, x + 0.3, top + _STEP)
        ]  # fmt: skip
        x = (free or xs)[0]
        layout.boxes[nic] = (
            complex(x - 0.32, top + _STEP - BOX), complex(x + 0.32, top + _STEP + BOX)
        )  # fmt: skip
        if isinstance(host, str):
            layout.ports[host, nic] = x
