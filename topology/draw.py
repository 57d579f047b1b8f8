"""Pictures of a machine, and of a plan's trees on it. Needs matplotlib, but only to draw."""

from __future__ import annotations

import cmath
import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from linkweave.topology.clusters import nodes_of
from linkweave.topology.errors import TopologyError
from linkweave.topology.layout import RADIUS, bend_through, lay_out
from linkweave.topology.link import KINDS
from linkweave.topology.text import cables
from linkweave.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MANY = 3  # more links than this side by side become one line and a number
_ROAD = "#d4d7dd"  # physical links beneath the arrows of a plan
_COLORS = {
    "nvlink": "#3f7d20", "pcie": "#a0671b", "host": "#c79a5b", "socket": "#7a4a9e",
    "network": "#2a5db0", "memory": "#4a5a75",
}  # fmt: skip
_TREES = ("#1f6fb4", "#d1481f", "#2a8f4f", "#8a4fb5", "#b8860b", "#c2408f", "#4d4d4d", "#0f9aa8")
_CROWD = 64  # GPUs that can be drawn
_NODES = 4  # of a larger cluster one node is drawn
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

    Its fabric is drawn: without PCIe, where NVLinks connect the GPUs. Of a cluster of more than
    four nodes it is the first node. Equal arguments give equal files. Raises TopologyError for
    another suffix, a plan for another number of GPUs, or a plan on a machine too large to draw.
    """
    for path in paths:
        if Path(path).suffix not in (".svg", ".png"):
            raise TopologyError(f"{os.fspath(path)}: can only draw to .svg and .png files")
    if plan is not None and plan.size != len(topology.gpus):
        raise TopologyError(f"{topology.name} has not the {plan.size} GPUs that the plan is for")
    title = _title(topology, plan)
    nodes = nodes_of(topology)
    if len(nodes) > _NODES and plan is None and any(k.kind == "network" for k in topology.fabric):
        title += f"\nnode 0 of {len(nodes)}"
        topology = topology.subset(nodes[0])
    if len(topology.gpus) > _CROWD:
        raise TopologyError(
            f"{topology.name} has {len(topology.gpus)} GPUs: at most {_CROWD} can be drawn"
        )
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps its figures in global state

    figure = Figure()
    picture = _Picture(figure.add_axes((0, 0, 1, 1)), topology, arcs=plan is not None)
    picture.links(faint=plan is not None)
    if plan is not None:
        picture.trees(plan)
    picture.vertices()
    figure.set_size_inches(picture.finish(title))
    for path in paths:
        kind = Path(path).suffix[1:]
        with matplotlib.rc_context({"svg.hashsalt": "linkweave"}):  # the same ids in every run
            figure.savefig(path, format=kind, dpi=120, bbox_inches="tight", pad_inches=0.15,
                           metadata={"Date": None} if kind == "svg" else None)  # fmt: skip


def _title(topology: Topology, plan: PlanLike | None) -> str:
    counts: Counter[str] = Counter()
    for link, _ in cables(topology.fabric):
        counts[link.kind] += link.count
    ranks = "CPU rank" if topology.on_memory else "GPU"
    n = len(topology.gpus)
    parts = [f"{n} {ranks}{'s'[: n != 1]}"]
    parts += [f"{count} {KINDS[kind][count != 1]}" for kind, count in counts.items()]
    text = f"{topology.name}: {', '.join(parts)}"
    hidden = {k.kind for k in topology.links} - set(counts) - {"network"}
    if hidden:
        text += " (PCIe not drawn)"
    arrows = ": arrows from child to parent" if plan and plan.trees else ""
    return f"{text}\n{plan.algorithm}{arrows}" if plan else text


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
        self.ax, self.topology, self.layout = ax, topology, lay_out(topology, arcs)
        switches = [p for box in self.layout.boxes.values() for p in box]
        size = max(max(xs) - min(xs) for xs in _xy([*self.layout.seats.values(), *switches]))
        self.scale = min(1.5, 16 / max(size, 1.0))  # inches for a unit of length

    def arrow(self, points: Sequence[complex], **style: Any) -> None:
        body = [p for p in points if abs(p - points[-1]) >= 0.14]
        side = 0.4j * (points[-1] - body[-1])
        self.ax.plot(*_xy(body), **style)
        self.ax.fill(*_xy([points[-1], body[-1] + side, body[-1] - side]),
                     color=style["color"], zorder=style["zorder"], linewidth=0)  # fmt: skip

    def circle(self, gpu: int, size: float, **style: Any) -> None:
        turn = [cmath.exp(1j * math.tau * i / 90) for i in range(90)]
        self.ax.fill(*_xy([self.layout.seats[gpu] + size * RADIUS * p for p in turn]), **style)

    def text(self, at: complex, text: str, size: float, **style: Any) -> None:
        self.ax.text(at.real, at.imag, text, fontsize=size * self.scale,
                     ha="center", va="center_baseline", **style)  # fmt: skip

    def links(self, faint: bool) -> None:
        thick = 1.6 if not faint or len(self.topology.fabric) > 80 else 4.5
        for there, back in cables(self.topology.fabric):
            n, (one, several) = there.count, KINDS[there.kind]
            lines = n if n <= _MANY else 1
            what = f"a line marked x{n}: {n} {several} of" if n > lines else f"one line: one {one},"
            label = f"{what} {there.bandwidth / 1e9:g} GB/s {'each way' if back else 'one way'}"
            style: dict[str, Any] = {"color": _ROAD if faint else _COLORS[there.kind]}
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
                self.text(at, f"x{n}", 7, color="#333333", bbox=box, zorder=2)
            for end in {there.src, there.dst} & self.layout.passed:  # where it ends, not passes
                points = self.layout.curve(there.src, there.dst)
                y = self.layout.anchor(end).imag
                near = min((points[0], points[-1]), key=lambda p: abs(p.imag - y))
                self.ax.plot(*_xy([near]), "o", color=style["color"], markersize=5 * self.scale,
                             zorder=6)  # fmt: skip

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
            clear = RADIUS * (1.5 if gpu in roots else 1.15)
            points = [p for p in points if abs(p - self.layout.seats[gpu]) > clear]
        self.arrow(points, **style)

    def vertices(self) -> None:
        style: dict[str, Any] = {"edgecolor": "#222222", "linewidth": 1.4, "zorder": 4}
        for gpu, at in self.layout.seats.items():
            passing = gpu in self.topology.forwarders
            self.circle(gpu, 1.0, facecolor="#ffffff" if passing else "#eef2f7", **style)
            self.text(at, str(gpu), 8.5, zorder=5, weight="normal" if passing else "bold")
        for name, (a, b) in self.layout.boxes.items():
            self.ax.fill(*_xy([a, complex(b.real, a.imag), b, complex(a.real, b.imag)]),
                         facecolor="#f6f0e0", **style)  # fmt: skip
            node, _, inner = name.rpartition(".")
            short = inner if node.startswith("node") and "." not in node else name
            at = (a + b) / 2
            if name in self.layout.passed:  # where no line passes: between the columns of nodes
                xs = [p.real for p in self.layout.seats.values()]
                at = complex((min(xs) + max(xs)) / 2, at.imag)
            self.text(at, short, 8 if (b - a).real > 0.8 else 6.5, zorder=7)
        for at, caption in self.layout.captions:
            self.text(at, caption, 9, zorder=5, color="#555555")

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
    first, second = ([p for p in leg if abs(p - via) > 3 * RADIUS] for leg in (first, second))
    a, b = first[-1], second[0]
    inside = (a + b) / 2 - via if abs(a + b - 2 * via) > 0.5 * RADIUS else 1j * (b - a)
    top, along = via + 1.55 * RADIUS * inside / abs(inside), (b - a) / 5
    into, out = (0.2 * (q - p) / abs(q - p) for p, q in (first[-2:], second[:2]))
    return [*first, *bend_through(a, a + into, top - along, top),
            *bend_through(top, top + along, b - out, b), *second]  # fmt: skip


def _xy(points: Sequence[complex]) -> tuple[list[float], list[float]]:
    return [p.real for p in points], [p.imag for p in points]
