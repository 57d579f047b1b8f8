"""Pictures of a machine, and of a plan's trees on it. Needs matplotlib, but only to draw."""

from __future__ import annotations

import cmath
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from topology.errors import TopologyError
from topology.graph import Link, Topology, Vertex
from topology.machines import dgx1_p100, dgx1_v100

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Points are complex numbers, so that turning and scaling is arithmetic.
_RADIUS = 0.22  # of a GPU's circle; a unit of length is 1.5 inches at most
_GAP = 0.1  # between parallel lines
_BOX = 0.17  # half the height of a switch
_MANY = 3  # more links than this side by side become one line and a number
_ROAD = "#d4d7dd"  # physical links beneath the arrows of a plan
_KINDS = {
    "nvlink": ("NVLink", "#3f7d20"), "pcie": ("PCIe link", "#a0671b"),
    "memory": ("memory path", "#4a5a75"), "network": ("network link", "#2a5db0"),
}  # fmt: skip
_TREES = ("#1f6fb4", "#d1481f", "#2a8f4f", "#8a4fb5", "#b8860b", "#c2408f", "#4d4d4d", "#0f9aa8")
# Two quads face to face, the outer GPUs further from the axis than the inner ones: the four lines
# between twins are then parallel, and none runs through another GPU.
_CUBE = (-2.2 + 1.35j, -0.8 + 0.6j, -0.8 - 0.6j, -2.2 - 1.35j,
         2.2 + 1.35j, 0.8 + 0.6j, 0.8 - 0.6j, 2.2 - 1.35j)  # fmt: skip
_Arrow = tuple[int, tuple[int, ...]]  # tree; GPUs from child to parent, with a forwarder three


class PlanLike(Protocol):
    """What a picture needs of a plan, whose own type lies in a layer above this one."""

    @property
    def algorithm(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def trees(self) -> Sequence[Any]: ...  # each with root, depth and edges
    @property
    def connections(self) -> Sequence[Any]: ...  # each with src, src_channel, dst, dst_channel


def draw(
    topology: Topology, paths: Sequence[str | os.PathLike[str]], plan: PlanLike | None = None
) -> None:
    """Draw the machine, and a plan's trees and detours over it, into .svg and .png files.

    Equal arguments give equal files. Raises TopologyError for another suffix, or a plan for
    another number of GPUs.
    """
    for path in paths:
        if Path(path).suffix not in (".svg", ".png"):
            raise TopologyError(f"{os.fspath(path)}: can only draw to .svg and .png files")
    if plan is not None and plan.size != len(topology.gpus):
        raise TopologyError(f"{topology.name} has not the {plan.size} GPUs that the plan is for")
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps its figures in global state

    figure = Figure()
    picture = _Picture(figure.add_axes((0, 0, 1, 1)), topology, arcs=plan is not None)
    picture.links(faint=plan is not None)
    if plan is not None:
        picture.trees(plan)
    picture.vertices()
    figure.set_size_inches(picture.finish(_title(topology, plan)))
    for path in paths:
        kind = Path(path).suffix[1:]
        with matplotlib.rc_context({"svg.hashsalt": "linkweave"}):  # the same ids in every run
            figure.savefig(path, format=kind, dpi=120, bbox_inches="tight", pad_inches=0.15,
                           metadata={"Date": None} if kind == "svg" else None)  # fmt: skip


def _title(topology: Topology, plan: PlanLike | None) -> str:
    count = sum(there.count for there, _ in _cables(topology))
    ranks = "CPU ranks" if any(k.kind == "memory" for k in topology.links) else "GPUs"
    text = f"{topology.name}: {len(topology.gpus)} {ranks}, {count} link{'s'[: count != 1]}"
    arrows = ": arrows from child to parent" if plan and plan.trees else ""
    return f"{text}\n{plan.algorithm}{arrows}" if plan else text


def _cables(topology: Topology) -> Iterator[tuple[Link, Link | None]]:
    """Each link with the one that leads back, once; None where nothing does."""
    for link in topology.links:
        back = topology.by_ends.get((link.dst, link.src))
        if back is None or str(link.src) < str(link.dst):
            yield link, back


@dataclass
class _Layout:
    seats: dict[int, complex]
    boxes: dict[str, tuple[complex, complex]] = field(default_factory=dict)
    """Lower left and upper right corner of each switch; the GPUs are then in a row."""

    def anchor(self, vertex: Vertex) -> complex:
        return self.seats[vertex] if isinstance(vertex, int) else sum(self.boxes[vertex]) / 2

    def curve(self, src: Vertex, dst: Vertex, place: float = 0) -> list[complex]:
        """From one to the other, `place` parallel lines aside: the same side in both directions."""
        a, b = self.anchor(src), self.anchor(dst)
        aside = _GAP * place * 1j * (b - a) / abs(b - a) * (1 if str(src) < str(dst) else -1)
        pull, spread = (a + b) / 2, 0j  # control points are pull + spread and pull - spread
        if not isinstance(src, int) or not isinstance(dst, int):
            bars = [self.boxes.get(str(v), (p, p)) for v, p in ((src, a), (dst, b))]
            left, right = min(bars, key=lambda bar: (bar[1] - bar[0]).real)
            # between a bar above the GPUs and one below, the line stands beyond the last GPU
            x = right.real - 0.4 if a.imag * b.imag < 0 else (left + right).real / 2
            a, pull, b = (complex(x, p.imag) for p in (a, pull, b))
        elif self.boxes:
            pull, spread = pull - 4j / 3 * _depth(abs(a - b)), (a - b) / 3
        elif len(self.seats) > 8 and abs(a - b) > 1.3:
            pull *= 0.8  # on a large circle a straight line would graze the GPU that it skips
        return _bend(a + aside, pull + spread + aside, pull - spread + aside, b + aside)


def _bend(a: complex, b: complex, c: complex, d: complex) -> list[complex]:
    """A cubic Bezier curve."""
    ways = [(1 - i / 120, i / 120) for i in range(121)]
    return [s * s * (s * a + 3 * t * b) + t * t * (3 * s * c + t * d) for s, t in ways]


def _depth(distance: float) -> float:
    """How far an arc between two GPUs hangs below their row."""
    return 0.42 * math.pow(distance, 0.7)


def _layout(topology: Topology, arcs: bool) -> _Layout:
    gpus = topology.gpus
    if topology.switches:
        return _rows(topology, arcs)
    for whole in (dgx1_v100(), dgx1_p100()):
        if len(gpus) == 8 and (seat := topology.isomorphic_to(whole)):
            same = topology.links == whole.links  # then not one of its symmetries
            return _Layout({g: _CUBE[g if same else seat[g]] for g in gpus})
    radius, turn = max(1.25, 0.19 * len(gpus)), cmath.exp(-1j * math.tau / len(gpus))
    return _Layout({g: radius * 1j * turn**i for i, g in enumerate(gpus)})


def _rows(topology: Topology, arcs: bool) -> _Layout:
    """Each switch is a bar over what it joins, or below it if it only hands down to GPUs."""
    layout = _Layout({g: complex(i) for i, g in enumerate(topology.gpus)})
    fed = {k.dst for k in topology.links if isinstance(k.src, int)}
    feeding = {k.src for k in topology.links if isinstance(k.dst, int)} - fed
    beyond = 0.8 if feeding.intersection(topology.switches) else 0.0
    for switch in sorted(topology.switches, key=lambda s: s not in fed | feeding):
        near = [v for k in topology.links if switch in (k.src, k.dst) for v in (k.src, k.dst)]
        joined = [layout.seats[v] for v in near if isinstance(v, int)]
        joined = joined or [p for v in near for p in layout.boxes.get(str(v), ())]
        xs = [p.real for p in joined or layout.seats.values()]
        low, high = min(xs) - 0.3, max(xs) + 0.3 + beyond
        step = -1.1 if switch in feeding else 1.1
        y = step - (_depth(len(layout.seats) - 1) if arcs and step < 0 else 0)  # the arcs' room
        while any(abs(y - a.imag) < 1 and low < b.real and a.real < high
                  for a, b in layout.boxes.values()):  # fmt: skip
            y += step
        layout.boxes[switch] = complex(low, y - _BOX), complex(high, y + _BOX)
    return layout


def _arrows(plan: PlanLike, gpus: Sequence[int]) -> list[_Arrow]:
    # a tree has two channels, a ring one; a detour has a further one, at its forwarder alone
    own = max(1, 2 * len(plan.trees))
    into = {(c.dst, c.dst_channel): (c.src,) for c in plan.connections if c.dst_channel >= own}
    ways = {  # (from, to, channel it arrives on): forwarder, if any
        ((*into.get((c.src, c.src_channel), ()), c.src)[0], c.dst, c.dst_channel):
            (c.src,) if c.src_channel >= own else ()
        for c in plan.connections if c.dst_channel < own and c.src != c.dst
    }  # fmt: skip
    hops: list[_Arrow] = []
    for t, tree in enumerate(plan.trees):
        stars = plan.algorithm == "two_shot"  # its tree t has channels t and size + t
        up, down = (t, plan.size + t) if stars else (2 * t, 2 * t + 1)
        for child, parent in tree.edges:  # a broadcast only goes down
            via = ways.get((child, parent, up)) or ways.get((parent, child, down)) or ()
            hops.append((t, (child, *via, parent)))
    if not plan.trees:
        hops = [(0, (a, *via, b)) for (a, b, _), via in ways.items()]
    return [(t, tuple(gpus[rank] for rank in stops)) for t, stops in hops]


class _Picture:
    def __init__(self, ax: Axes, topology: Topology, arcs: bool) -> None:
        self.ax, self.topology, self.layout = ax, topology, _layout(topology, arcs)
        switches = [p for box in self.layout.boxes.values() for p in box]
        size = max(max(xs) - min(xs) for xs in _xy([*self.layout.seats.values(), *switches]))
        self.scale = min(1.5, 14 / max(size, 1.0))  # inches for a unit of length

    def arrow(self, points: Sequence[complex], **style: Any) -> None:
        body = [p for p in points if abs(p - points[-1]) >= 0.14]
        side = 0.4j * (points[-1] - body[-1])
        self.ax.plot(*_xy(body), **style)
        self.ax.fill(*_xy([points[-1], body[-1] + side, body[-1] - side]),
                     color=style["color"], zorder=style["zorder"], linewidth=0)  # fmt: skip

    def circle(self, gpu: int, size: float, **style: Any) -> None:
        turn = [cmath.exp(1j * math.tau * i / 90) for i in range(90)]
        self.ax.fill(*_xy([self.layout.seats[gpu] + size * _RADIUS * p for p in turn]), **style)

    def text(self, at: complex, text: str, size: float, **style: Any) -> None:
        self.ax.text(at.real, at.imag, text, fontsize=size * self.scale,
                     ha="center", va="center_baseline", **style)  # fmt: skip

    def links(self, faint: bool) -> None:
        thick = 1.6 if not faint or len(self.topology.links) > 80 else 4.5
        for there, back in _cables(self.topology):
            n, (noun, color) = there.count, _KINDS[there.kind]
            lines = n if n <= _MANY else 1
            what = f"a line marked x{n}: {n} {noun}s of" if n > lines else f"one line: one {noun},"
            label = f"{what} {there.bandwidth / 1e9:g} GB/s {'each way' if back else 'one way'}"
            style: dict[str, Any] = {"color": _ROAD if faint else color}
            style["linewidth"] = thick + (n > lines)
            for i in range(lines):
                points = self.layout.curve(there.src, there.dst, i - (lines - 1) / 2)
                self.ax.plot(*_xy(points), label=label, zorder=1, **style)
                if back is None:  # a head half-way: this way only
                    self.arrow(points[:68], zorder=1, **style)
            if n > (_MANY if faint else 1):
                points = self.layout.curve(there.src, there.dst)
                at = points[60] if abs(points[60]) > 0.4 else points[40]  # lines cross at 0
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                self.text(at, f"x{n}", 7, color="#333333", bbox=box, zorder=2)

    def trees(self, plan: PlanLike) -> None:
        arrows = _arrows(plan, self.topology.gpus)
        roots = [self.topology.gpus[tree.root] for tree in plan.trees]
        for t, tree in enumerate(plan.trees):
            size = 1.35 + 0.3 * roots[:t].count(roots[t])
            label = f"tree {t}: root GPU {roots[t]} (ringed), depth {tree.depth}"
            self.circle(roots[t], size, facecolor="none", edgecolor=_TREES[t % len(_TREES)],
                        linewidth=2.5, zorder=4, label=label)  # fmt: skip
        for arrow in arrows:
            legs = [self.leg(arrows, arrow, a, b) for a, b in pairwise(arrow[1])]
            self.hop(arrow, legs, roots)

    def leg(self, arrows: list[_Arrow], arrow: _Arrow, a: int, b: int) -> list[complex]:
        """From a to b, beside other arrows there; one that turns off left is furthest left."""
        seats = self.layout.seats
        p, q = (seats[g] for g in sorted((a, b), key=str))
        here = [other for other in arrows if {a, b} in map(set, pairwise(other[1]))]
        places = sorted(here, key=lambda o: sum(((seats[g] - p) / (q - p)).imag for g in o[1]))
        link = self.topology.by_ends.get((a, b))
        lanes = max(len(places), link.count if link and link.count <= _MANY else 1)
        return self.layout.curve(a, b, places.index(arrow) - (lanes - 1) / 2)

    def hop(self, arrow: _Arrow, legs: list[list[complex]], roots: list[int]) -> None:
        tree, stops = arrow
        style: dict[str, Any] = {"color": _TREES[tree % len(_TREES)], "linewidth": 1.8, "zorder": 3}
        points = legs[0] if len(legs) == 1 else _round(self.layout.seats[stops[1]], *legs)
        if len(legs) == 2:
            style["linestyle"] = (0, (3, 1.5))
            style["label"] = f"dashed: detour {stops[0]} to {stops[2]} over GPU {stops[1]}"
        for gpu in (stops[0], stops[-1]):
            clear = _RADIUS * (1.5 if gpu in roots else 1.15)
            points = [p for p in points if abs(p - self.layout.seats[gpu]) > clear]
        self.arrow(points, **style)

    def vertices(self) -> None:
        style: dict[str, Any] = {"edgecolor": "#222222", "linewidth": 1.4, "zorder": 4}
        for gpu, at in self.layout.seats.items():
            self.circle(gpu, 1.0, facecolor="#eef2f7", **style)
            self.text(at, str(gpu), 8.5, zorder=5, weight="bold")
        for name, (a, b) in self.layout.boxes.items():
            self.ax.fill(*_xy([a, complex(b.real, a.imag), b, complex(a.real, b.imag)]),
                         facecolor="#f6f0e0", **style)  # fmt: skip
            self.text((a + b) / 2, name, 8, zorder=5)

    def finish(self, title: str) -> tuple[float, float]:
        """The size in inches."""
        self.ax.set(aspect="equal", frame_on=False, xticks=[], yticks=[])
        self.ax.set_title(title, fontsize=12, pad=12)
        handles, labels = self.ax.get_legend_handles_labels()
        keys = dict(zip(labels, handles, strict=True))  # each label once
        self.ax.legend(keys.values(), keys.keys(), loc="upper center", bbox_to_anchor=(0.5, 0),
                       frameon=False, fontsize=9, ncols=1 + len(keys) // 9)  # fmt: skip
        return self.scale * self.ax.dataLim.width, self.scale * self.ax.dataLim.height


def _round(via: complex, first: list[complex], second: list[complex]) -> list[complex]:
    """Two legs made one curve, which passes the forwarder on the inside of the bend."""
    first, second = ([p for p in leg if abs(p - via) > 3 * _RADIUS] for leg in (first, second))
    a, b = first[-1], second[0]
    inside = (a + b) / 2 - via if abs(a + b - 2 * via) > 0.5 * _RADIUS else 1j * (b - a)
    top, along = via + 1.55 * _RADIUS * inside / abs(inside), (b - a) / 5
    into, out = (0.2 * (q - p) / abs(q - p) for p, q in (first[-2:], second[:2]))
    return [*first, *_bend(a, a + into, top - along, top),
            *_bend(top, top + along, b - out, b), *second]  # fmt: skip


def _xy(points: Sequence[complex]) -> tuple[list[float], list[float]]:
    return [p.real for p in points], [p.imag for p in points]
