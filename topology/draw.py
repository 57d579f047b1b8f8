"""Pictures of machines and plans. matplotlib is imported only to draw."""

from __future__ import annotations

import cmath
import io
import math
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linkweave.topology.checks import TopologyError
from linkweave.topology.clusters import nodes_of
from linkweave.topology.graph import KINDS, Link, Vertex
from linkweave.topology.layout import RADIUS, Positions, bend_through, lay_out, lay_out_node
from linkweave.topology.loading import load
from linkweave.topology.parts import Arrow, Part, PlanLike, parts_of
from linkweave.topology.text import assumed, cables, inside_node, ranks
from linkweave.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DETOURS = 4  # that the legend names one by one
_NAMED = 4  # so does it rings and phases
_MANY = 3  # more links than this side by side become one line and a number
_FAINT = "#d4d7dd"  # physical links beneath the arrows of a plan
_BOX = "#f6f0e0"
_GONE = "#d55e00"
_COLORS = {
    "nvlink": "#3f7d20", "xgmi": "#3f7d20", "pcie": "#a0671b", "host": "#c79a5b",
    "socket": "#7a4a9e", "network": "#2a5db0", "memory": "#4a5a75",
}  # fmt: skip
_PARTS = ("#1f6fb4", "#d1481f", "#2a8f4f", "#8a4fb5", "#b8860b", "#c2408f", "#4d4d4d", "#0f9aa8")
_CROWD = 64  # GPUs that can be drawn
_NODES = 4  # of a larger cluster one node is drawn
_Drawn = tuple[Arrow, int]  # with its part, or how many parts use it


def draw(
    topology: Topology | str, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    plan: PlanLike | None = None, part: int | None = None, everything: bool = False,
    like: Topology | None = None,
) -> None:  # fmt: skip
    """Draw a machine, and a plan over its links, into a .svg or .png file, or several.

    `topology` is a `Topology`, or what `topology.load` takes, such as a machine's name.
    `part` selects one tree, ring or phase of the plan, counted from 1. Without it all are drawn; if
    there are more than eight, lines show how many of them use each connection. Only the fabric is
    drawn (no PCIe if NVLinks connect all GPUs) unless `everything` is set. Without a plan, a
    cluster of more than four nodes is drawn as its first node and what joins it to the others.
    `like` is a machine of the same GPUs and at least these links: GPUs stand where its stand, and
    lines that it has more are dashed.
    Equal arguments give equal files.

    Raises TopologyError for another suffix, a part that the plan does not have, a plan for another
    number of GPUs, or more than 64 GPUs.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else paths
    for path in files:
        if Path(path).suffix not in (".svg", ".png"):
            raise TopologyError(f"{os.fspath(path)}: can only draw to .svg and .png files")
    figure = _figure(load(topology), plan, part, everything, like)
    for path in files:
        _save(figure, path, Path(path).suffix[1:])


def svg(topology: Topology) -> str | None:
    """The picture of a machine, as `draw` makes it; None if it makes none."""
    text = io.StringIO()
    try:
        _save(_figure(topology, None, None, False), text, "svg")
    except TopologyError:
        return None
    found = text.getvalue()
    return found[found.index("<svg") :]


def _save(figure: Any, where: Any, kind: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "linkweave"}):  # the same ids in every run
        figure.savefig(where, format=kind, dpi=120, bbox_inches="tight", pad_inches=0.15,
                       metadata={"Date": None} if kind == "svg" else None)  # fmt: skip


def _figure(
    topology: Topology, plan: PlanLike | None, part: int | None, everything: bool,
    like: Topology | None = None,
) -> Any:  # fmt: skip
    parts = [] if plan is None else parts_of(plan, topology)
    if part is not None and not 1 <= part <= len(parts):
        what = f"parts 1 to {len(parts)}" if plan is not None else "no plan"
        raise TopologyError(f"there is no part {part} to draw: the picture has {what}")
    links: Sequence[Link] = topology.links if everything else topology.fabric
    title = _title(topology, links)
    if plan is not None:
        title += f"\n{plan.algorithm}: {_what(parts, part)}"
    nodes = nodes_of(topology)
    part_of = len(nodes) > _NODES and plan is None and any(k.kind == "network" for k in links)
    shown = nodes[0] if part_of else topology.gpus
    if len(shown) > _CROWD:
        raise TopologyError(
            f"{topology.name} has {len(topology.gpus)} {topology.noun}s: at most {_CROWD} can be "
            f"drawn{' with a plan' * (plan is not None)}; linkweave view makes a page of more"
        )
    wanted: Sequence[Link] = ()
    if part_of:
        title += f"\nnode 0 of {len(nodes)}, and the switches that its NICs reach"
        layout, links = lay_out_node(shown, links)
        if beyond := _beyond(topology, layout):
            title += f"; their links to {beyond} are not drawn"
    else:
        among = like or topology
        fabric = among.links if everything else among.fabric
        if not {(k.src, k.dst) for k in links} <= {(k.src, k.dst) for k in fabric}:
            fabric = among.links
        layout = lay_out(among, fabric, arcs=plan is not None)
        wanted = fabric if like else ()
    from matplotlib.figure import Figure  # not pyplot, which keeps its figures in global state

    figure = Figure()
    picture = _Picture(figure.add_axes((0, 0, 1, 1)), topology, links, layout)
    picture.links(faint=plan is not None)
    picture.missing(wanted)
    drawn = parts if part is None else parts[part - 1 : part]
    if not _apart(drawn):
        picture.shares(drawn)
    elif plan is not None:
        picture.parts(drawn)
    picture.arcs(drawn)
    picture.vertices()
    figure.set_size_inches(picture.finish(title))
    return figure


def _beyond(topology: Topology, layout: Positions) -> str:
    """The switches of other switches that are not in the picture of one node."""
    net = {v for v in layout.boxes if v in layout.passed}
    found = {k.dst for k in topology.links if k.src in net and isinstance(k.dst, str)}
    return ", ".join(sorted(f"the {v}" for v in found if v not in layout.boxes and "." not in v))


def _title(topology: Topology, links: Sequence[Link]) -> str:
    counts: Counter[str] = Counter()
    for link, _ in cables(links):
        counts[link.kind] += link.count
    parts = [ranks(topology)]
    parts += [f"{count} {KINDS[kind][count != 1]}" for kind, count in counts.items()]
    text = f"{topology.name}: {', '.join(parts)}"
    hidden = {k.kind for k in topology.links} - set(counts) - {"network"}
    return f"{text} (PCIe not drawn)" if hidden else text


def _what(parts: Sequence[Part], part: int | None) -> str:
    if part is not None:
        text = parts[part - 1].name
    else:
        kind = parts[0].name.split()[0] if parts else "part"
        text = f"all {len(parts)} {kind}s" if len(parts) != 1 else parts[0].name
    arrows = any(p.root is not None for p in parts) and (part is not None or _apart(parts))
    return text + ", arrows from child to parent" * arrows


def _apart(parts: Sequence[Part]) -> bool:
    """Whether each part has a colour of its own; of more, links are shown by their use."""
    return len(parts) <= len(_PARTS)


class _Picture:
    def __init__(
        self, ax: Axes, topology: Topology, links: Sequence[Link], layout: Positions
    ) -> None:
        self.ax, self.topology, self.drawn, self.layout = ax, topology, links, layout
        switches = [p for box in self.layout.boxes.values() for p in box]
        size = max(max(xs) - min(xs) for xs in _xy([*self.layout.seats.values(), *switches]))
        width = 16 if len(self.layout.seats) <= _CROWD // 2 else 40
        self.scale = min(1.5, width / max(size, 1.0))  # inches for a unit of length

    def arrow(self, points: Sequence[complex], both: bool = False, **style: Any) -> None:
        """Draw a line with a head at its end, or at both ends."""
        for way in (points, points[::-1])[: 1 + both]:
            body = [p for p in way if abs(p - way[-1]) >= 0.14]
            head = 0.14 * (way[-1] - body[-1]) / abs(way[-1] - body[-1])
            base = way[-1] - head
            self.ax.fill(*_xy([way[-1], base + 0.4j * head, base - 0.4j * head]),
                         color=style["color"], zorder=style["zorder"], linewidth=0)  # fmt: skip
        heads = [points[-1], points[0]][: 1 + both]
        body = [p for p in points if all(abs(p - head) >= 0.13 for head in heads)]
        self.line(body, **style)

    def circle(self, gpu: int, size: float, **style: Any) -> None:
        turn = [cmath.exp(1j * math.tau * i / 90) for i in range(90)]
        self.ax.fill(*_xy([self.layout.seats[gpu] + size * RADIUS * p for p in turn]), **style)

    def text(self, at: complex, text: str, size: float, **style: Any) -> None:
        self.ax.text(at.real, at.imag, text, fontsize=size * self.scale,
                     ha="center", va="center_baseline", **style)  # fmt: skip

    def links(self, faint: bool) -> None:
        thick = 1.6 if not faint or len(self.drawn) > 80 else 4.5
        marked = any(link.count > _MANY for link in self.drawn)
        for there, back in cables(self.drawn):
            n, (one, several) = there.count, KINDS[there.kind]
            lines = n if n <= _MANY else 1
            what = f"a line marked x{n}: {n} {several} of" if n > lines else f"one line: one {one},"
            label = f"{what} {there.bandwidth / 1e9:g} GB/s {'each way' if back else 'one way'}"
            label += " (speed assumed)" * there.assumed
            if faint and n <= lines:  # all are of one colour
                label = "grey: the machine's other links" if marked else "grey: the machine's links"
            style: dict[str, Any] = {"color": _FAINT if faint else _COLORS[there.kind]}
            style["linewidth"] = thick + (n > lines)
            for i in range(lines):
                points = self.layout.curve(there.src, there.dst, i - (lines - 1) / 2)
                self.ax.plot(*_xy(points), label=label, zorder=1, **style)
                if not back:  # a head half-way: this way only
                    self.arrow(points[:68], zorder=1, **style)
            if n > (_MANY if faint else 1):
                points = self.layout.curve(there.src, there.dst)
                at = points[60] if abs(points[60]) > 0.4 else points[40]  # lines cross at 0
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                self.text(at, f"x{n}", 7, color="#333333", bbox=box, zorder=4)
            for end in {there.src, there.dst} & self.layout.passed:  # where it ends, not passes
                points = self.layout.curve(there.src, there.dst)
                y = self.layout.anchor(end).imag
                near = min((points[0], points[-1]), key=lambda p: abs(p.imag - y))
                self.ax.plot(*_xy([near]), "o", color=style["color"], markersize=5 * self.scale,
                             zorder=6)  # fmt: skip

    def missing(self, links: Sequence[Link]) -> None:
        """Draw dashed which of these links are not there, beside those that are."""
        counts = {(k.src, k.dst): k.count for k in self.drawn}
        for link, back in cables(links):
            count = counts.get((link.src, link.dst), 0)
            count = min(count, counts.get((link.dst, link.src), 0)) if back else count
            if link.count > count:
                beside = count / 2 + 0.5 if 0 < count <= _MANY else 0
                points = self.layout.curve(link.src, link.dst, beside)
                self.ax.plot(*_xy(points), color=_GONE, linestyle=(0, (4, 3)), linewidth=1.8,
                             zorder=2, label="dashed: links that this machine lacks")  # fmt: skip

    def parts(self, parts: Sequence[Part]) -> None:
        """Draw each part in its own colour; opposite arrows of a part become one with two heads."""
        roots = [part.root for part in parts if part.root is not None]
        every = [(arrow, i) for i, part in enumerate(parts) for arrow in _merged(part.arrows)]
        for i, part in enumerate(parts):
            color = _PARTS[i]
            if part.root is not None:
                size = 1.35 + 0.3 * roots[:i].count(part.root)
                label = (f"{part.name}: root {self.topology.noun} {part.root} (ringed), "
                         f"depth {part.depth}")  # fmt: skip
                self.circle(part.root, size, facecolor="none", edgecolor=color, linewidth=2.5,
                            zorder=4, label=label)  # fmt: skip
            elif len(parts) <= _NAMED:
                self.ax.plot([], [], color=color, label=part.name)
            else:
                kind = part.name.split()[0]
                label = f"each colour: one of the {len(parts)} {kind}s"
                self.ax.plot([], [], color=color, label=label)
        for one in every:
            arrow, i = one
            style: dict[str, Any] = {"color": _PARTS[i], "linewidth": 1.8, "zorder": 3}
            self.hop(one, arrow[::-1] in parts[i].arrows, every, roots, style)

    def shares(self, parts: Sequence[Part]) -> None:
        """Draw lines that are the wider the more parts use a connection."""
        uses = Counter(
            frozenset(leg)
            for part in parts
            for leg in {frozenset(leg) for arrow in part.arrows for leg in pairwise(arrow)}
        )
        most, kind = max(uses.values()), parts[0].name.split()[0]
        every = [(tuple(sorted(leg)), n) for leg, n in uses.items()]
        for one in every:
            leg, n = one
            style = {"color": _PARTS[0], "linewidth": 0.5 + 2 * n / most}
            beside = self.beside(leg[0], leg[1])
            if beside == 1:
                self.line(self.leg(every, one, *leg), **style)
            for i in range(beside if beside > 1 else 0):  # they share what passes between the two
                self.line(self.layout.curve(leg[0], leg[1], i - (beside - 1) / 2), **style)
        for n in sorted({min(uses.values()), most}):
            self.ax.plot([], [], color=_PARTS[0], linewidth=0.5 + 2 * n / most,
                         label=f"used by {n} of the {len(parts)} {kind}s")  # fmt: skip

    def arcs(self, parts: Sequence[Part]) -> None:
        """Say what arcs stand for, if what they show passes through switches."""
        ways = [self.topology.hops.get(leg, ())
                for part in parts for arrow in part.arrows for leg in pairwise(arrow)]  # fmt: skip
        if any(len(way) > 2 and not self.layout.passed.intersection(way) for way in ways):
            label = "arcs: who sends to whom; it goes over switches"
            self.ax.plot([], [], color=_PARTS[0], linewidth=1.8, label=label)

    def beside(self, a: int, b: int) -> int:
        """The number of lines that join two GPUs side by side; 1 if there is no link."""
        link = self.topology.by_ends.get((a, b))
        return link.count if link and link.count <= _MANY else 1

    def leg(self, every: Sequence[_Drawn], one: _Drawn, a: int, b: int) -> list[complex]:
        """Points from a to b, beside other arrows; those that turn left later are on the left."""
        path = self.topology.hops.get((a, b), (a, b))
        if any(v in self.layout.passed for v in path):
            return self.route(every, one, path)
        seats = self.layout.seats
        p, q = (seats[g] for g in sorted((a, b)))
        here = [other for other in every if {a, b} in map(set, pairwise(other[0]))]
        order = sorted(here, key=lambda o: sum(((seats[g] - p) / (q - p)).imag for g in o[0]))
        width = max(len(order), self.beside(a, b))
        return self.layout.curve(a, b, order.index(one) - (width - 1) / 2)

    def route(self, every: Sequence[_Drawn], one: _Drawn, path: Sequence[Vertex]) -> list[complex]:
        """Points between nodes, along the links and beside other arrows."""
        aside: dict[Vertex, float] = {}
        for vertex in path:
            here = [o for o in every if vertex in self.crossed(o[0])]
            room = min(0.07, (0.26 if vertex in self.layout.passed else 0.5) / len(here))
            aside[vertex] = room * (here.index(one) - (len(here) - 1) / 2)
        corners = []
        for u, v in pairwise(path):
            x = self.layout.meeting(u, v) + aside[v if u in self.layout.passed else u]
            for end in (u, v):
                lift = aside[end] if end in self.layout.passed else 0.0
                corners.append(complex(x, self.layout.anchor(end).imag + lift))
        return [p + (q - p) * i / 20 for p, q in pairwise(corners) for i in range(21)]

    def crossed(self, arrow: Arrow) -> set[Vertex]:
        """The vertices on the arrow's path if it leads through the network, else none."""
        paths = [self.topology.hops.get((a, b), ()) for a, b in pairwise(arrow)]
        return {v for path in paths if self.layout.passed.intersection(path) for v in path}

    def line(self, points: Sequence[complex], **style: Any) -> None:
        """Draw a line beneath boxes, but above a network switch in which it is horizontal."""
        self.ax.plot(*_xy(points), **{"zorder": 3, **style})
        for name in self.layout.passed:
            low, high = self.layout.boxes[str(name)]
            for p, q in pairwise(points):
                if low.imag < p.imag < high.imag and abs(p.imag - q.imag) < 1e-9 < abs(p - q):
                    self.ax.plot(*_xy([p, q]), **{**style, "zorder": 6, "label": None})

    def hop(
        self, one: _Drawn, both: bool, every: Sequence[_Drawn], roots: Sequence[int],
        style: dict[str, Any],
    ) -> None:  # fmt: skip
        """Draw an arrow; it is dashed if GPUs forward."""
        arrow = one[0]
        legs = [self.leg(every, one, a, b) for a, b in pairwise(arrow)]
        points = legs[0]
        for via, leg in zip(arrow[1:], legs[1:], strict=False):
            points = _round(self.layout.seats[via], points, leg)
        if len(legs) > 1:
            noun, label = self.topology.noun, f"dashed: detours over other {self.topology.noun}s"
            if sum(len(other) > 2 for other, _ in every) <= _DETOURS:
                over = ", ".join(map(str, arrow[1:-1]))
                label = f"dashed: detour {arrow[0]} to {arrow[-1]} over {noun} {over}"
            style |= {"linestyle": (0, (3, 1.5)), "label": label}
        for gpu in (arrow[0], arrow[-1]):
            clear = RADIUS * (1.5 if gpu in roots else 1.15)
            if gpu == arrow[0] and gpu in self.layout.rows and not both:
                clear += RADIUS  # no head of another arc touches the tail
            points = [p for p in points if abs(p - self.layout.seats[gpu]) > clear]
        self.arrow(points, both, **style)

    def vertices(self) -> None:
        style: dict[str, Any] = {"edgecolor": "#222222", "linewidth": 1.4, "zorder": 4}
        for gpu, at in self.layout.seats.items():
            passing = gpu in self.topology.forwarders
            self.circle(gpu, 1.0, facecolor="#ffffff" if passing else "#eef2f7", **style)
            self.text(at, str(gpu), 8.5, zorder=5, weight="normal" if passing else "bold")
        for name, (a, b) in self.layout.boxes.items():
            self.ax.fill(*_xy([a, complex(b.real, a.imag), b, complex(a.real, b.imag)]),
                         facecolor=_BOX, **style)  # fmt: skip
            at = (a + b) / 2
            if name in self.layout.passed:
                at = complex(self.free(), at.imag)
            back = {"facecolor": _BOX, "edgecolor": "none", "pad": 1}
            self.text(at, inside_node(name), 8 if (b - a).real > 0.8 else 6.5, zorder=7, bbox=back)
        for at, caption in self.layout.captions:
            self.text(at, caption, 9, zorder=5, color="#555555")
            self.ax.plot(*_xy([at]), color="none")  # makes room for the text

    def free(self) -> float:
        """The x, near the middle, at which no line passes through network switches."""
        xs = sorted(p.real for p in self.layout.seats.values())
        middle = (xs[0] + xs[-1]) / 2
        taken = [self.layout.meeting(k.src, k.dst) for k in self.drawn
                 if {k.src, k.dst} & self.layout.passed]  # fmt: skip

        def room(x: float) -> tuple[float, float]:
            return min(0.5, *(abs(x - other) for other in taken)), -abs(x - middle)

        return max([middle, *(sum(pair) / 2 for pair in pairwise(xs))], key=room)

    def finish(self, title: str) -> tuple[float, float]:
        self.ax.set(aspect="equal", frame_on=False, xticks=[], yticks=[])
        self.ax.set_title(title, fontsize=12, pad=12)
        for told in assumed(self.topology):
            self.ax.plot([], [], color="none", label=textwrap.fill(told, 90))
        handles, labels = self.ax.get_legend_handles_labels()
        keys = dict(zip(labels, handles, strict=True))  # each label once
        self.ax.legend(keys.values(), keys.keys(), loc="upper center", bbox_to_anchor=(0.5, 0),
                       frameon=False, fontsize=9, ncols=1 + len(keys) // 9)  # fmt: skip
        return self.scale * self.ax.dataLim.width, self.scale * self.ax.dataLim.height


def _merged(arrows: Sequence[Arrow]) -> list[Arrow]:
    found: dict[Arrow, None] = {}
    for arrow in arrows:
        if arrow[::-1] not in found:
            found[arrow] = None
    return list(found)


def _round(via: complex, first: list[complex], second: list[complex]) -> list[complex]:
    """Join two legs by a curve that passes the forwarder on the inside of the bend."""
    first, second = ([p for p in leg if abs(p - via) > 3 * RADIUS] for leg in (first, second))
    a, b = first[-1], second[0]
    inside = (a + b) / 2 - via if abs(a + b - 2 * via) > 0.5 * RADIUS else 1j * (b - a)
    top, along = via + 1.55 * RADIUS * inside / abs(inside), (b - a) / 5
    into, out = (0.2 * (q - p) / abs(q - p) for p, q in (first[-2:], second[:2]))
    return [*first, *bend_through(a, a + into, top - along, top),
            *bend_through(top, top + along, b - out, b), *second]  # fmt: skip


def _xy(points: Sequence[complex]) -> tuple[list[float], list[float]]:
    return [p.real for p in points], [p.imag for p in points]
