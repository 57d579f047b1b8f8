"""The trees, rings or phases of a plan, as arrows between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import groups
from linkweave.topology.text import ranks
from linkweave.topology.topology import Topology

Arrow = tuple[int, ...]  # a sender, the GPUs that forward, and a receiver


PlanLike = Any  # a `Plan`, whose type lies in a higher layer


@dataclass(frozen=True, slots=True)
class Part:
    """A tree, a ring or a phase. A tree's arrows lead from child to parent."""

    name: str
    arrows: tuple[Arrow, ...]
    root: int | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Move:
    stops: Arrow
    channel: int
    reduced: bool
    copied: bool


def parts_of(plan: PlanLike, topology: Topology) -> list[Part]:
    """Split a plan into its trees or, if it has none, into rings or phases.

    A plan has rings if the connections of every channel form one cycle through all ranks. Otherwise
    a phase consists of the connections whose receivers reduce, copy, or do both, and on clusters
    connections inside and between nodes are different phases. Raises TopologyError if the plan and
    the topology have different numbers of ranks.
    """
    if plan.size != len(topology.gpus):
        raise TopologyError(f"{topology.name} has {ranks(topology)}; the plan is for {plan.size}")
    moves = _moves(plan, topology.gpus)
    channels: dict[int, list[_Move]] = {}
    for move in moves:
        channels.setdefault(move.channel, []).append(move)
    if plan.trees:
        return _trees(plan, topology.gpus, channels)
    if all(_is_cycle(ring, plan.size) for ring in channels.values()):
        return [
            Part(f"ring {i} of {len(channels)}", tuple(move.stops for move in ring))
            for i, ring in enumerate(channels.values(), 1)
        ]
    return _phases(topology, moves)


def _moves(plan: PlanLike, gpus: Sequence[int]) -> list[_Move]:
    """Trace what each rank reduces or copies back to its sender, over ranks that forward."""
    reduced: set[int] = set()
    copied: set[int] = set()
    forwarded: dict[int, int] = {}  # by connection: the one whose slot is sent over it
    for step in (s for track in plan.tracks for body in track.phases for s in body):
        if step.op.name == "REDUCE":
            reduced.update(step.connections)
        elif step.op.name == "COPY":
            copied.update(step.connections)
        elif step.op.name == "SEND" and step.source is not None:
            forwarded.update(dict.fromkeys(step.connections, step.source))
    kept = reduced | copied
    moves = []
    for i in sorted(kept):
        at, last = i, plan.connections[i]
        stops = [gpus[last.dst], gpus[last.src]]
        while (at := forwarded.get(at, i)) not in kept:
            stops.append(gpus[plan.connections[at].src])
        moves.append(_Move(tuple(stops[::-1]), last.dst_channel, i in reduced, i in copied))
    return moves


def _trees(plan: PlanLike, gpus: Sequence[int], channels: dict[int, list[_Move]]) -> list[Part]:
    found = []
    for t, tree in enumerate(plan.trees, 1):
        edges = [(gpus[a], gpus[b]) for a, b in tree.edges]
        arrows = _arrows(channels, edges)
        found.append(Part(f"tree {t} of {len(plan.trees)}", arrows, gpus[tree.root], tree.depth))
    return found


def _arrows(
    channels: dict[int, list[_Move]], edges: Sequence[tuple[int, int]]
) -> tuple[Arrow, ...]:
    """Return the edges of a tree with their detours, and take away the channel that has them.

    The channel is the first on which the tree's ranks reduce or, as in a broadcast, which only goes
    down, on which they copy.
    """
    for up in (True, False):
        for channel, moves in channels.items():
            ways = {m.stops if up else m.stops[::-1] for m in moves if m.reduced == up}
            between = {(way[0], way[-1]): way for way in ways}
            if all(edge in between for edge in edges):
                del channels[channel]
                return tuple(between[edge] for edge in edges)
    return tuple(edges)


def _is_cycle(moves: Sequence[_Move], size: int) -> bool:
    after = {move.stops[0]: move.stops[-1] for move in moves}
    seen, at = 0, moves[0].stops[0]
    while at in after:
        seen, at = seen + 1, after.pop(at)
    return seen == size == len(moves) and at == moves[0].stops[0]


def _phases(topology: Topology, moves: Sequence[_Move]) -> list[Part]:
    local = [(k.src, k.dst) for k in topology.links if k.kind != "network"]
    nodes = groups(topology.gpus, local)
    node = {gpu: i for i, members in enumerate(nodes) for gpu in members}
    found: dict[tuple[int, int], dict[Arrow, None]] = {}
    for move in moves:
        way = 1 if not move.copied else 3 if not move.reduced else 2
        across = node[move.stops[0]] != node[move.stops[-1]]
        # reduce inside, then between nodes; copy between, then inside nodes
        order = (way, int(across) if way < 3 else int(not across))
        found.setdefault(order, {})[move.stops] = None
    phases = []
    for i, ((way, second), arrows) in enumerate(sorted(found.items()), 1):
        name = f"phase {i} of {len(found)}: {('reduce', 'reduce and copy', 'copy')[way - 1]}"
        if len(nodes) > 1:
            name += " between nodes" if second == (way < 3) else " inside nodes"
        phases.append(Part(name, tuple(arrows)))
    return phases
