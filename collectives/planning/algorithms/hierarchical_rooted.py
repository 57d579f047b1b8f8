"""Other collectives on clusters: between nodes over all NICs at once, and inside nodes."""

from __future__ import annotations

from linkweave.collectives.planning.algorithms.nodes import (
    DOWN,
    MIDDLE,
    Node,
    equal_nodes,
    gates,
    hops_around,
    inside,
)
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.lower import (
    MOST_BLOCKS,
    Algorithm,
    Copy,
    Move,
    Reduce,
    Round,
    few_enough,
)
from linkweave.topology import Topology

_PARTS = 4
"""The chunks of a slice of a broadcast or a reduce, each with a channel of its own, so that a GPU
sends to its node and to the next one at the same time."""


def hierarchical_blocks(topology: Topology, collective: str, root: int) -> Algorithm:
    """All-gather: each block goes around a ring of the nodes, and in each node to all its GPUs.
    Reduce-scatter: the same backwards.

    GPU g communicates with GPU g of other nodes only. For each GPU that uses it, a NIC sends and
    receives n - 1 blocks for n nodes, the least possible. Raises PlanError for more than 256 ranks,
    and unless the machine is a cluster of equal nodes.
    """
    nodes = equal_nodes("hierarchical", topology)
    size, gathers = len(topology.gpus), collective == "allgather"
    few_enough("hierarchical", size, MOST_BLOCKS)
    between: list[Round] = []
    for step in range(len(nodes) - 1):
        moves: list[Move] = []
        for at, a, b in hops_around([nodes], len(nodes), step, 0 if gathers else 1):
            for src, dst, block in zip(a, b, nodes[at], strict=True):
                moves.append(
                    Copy(src, (dst,), block, block) if gathers
                    else Reduce((src,), dst, block, MIDDLE + block)
                )  # fmt: skip
        between.append(tuple(moves))
    up, down = inside(topology, nodes, nodes, lambda g: [node[g] for node in nodes])
    rounds = (*between, *down) if gathers else (*up, *between)
    return Algorithm("hierarchical", size, size, (rounds,), collective=collective)


def hierarchical_rooted(topology: Topology, collective: str, root: int) -> Algorithm:
    """Broadcast: the root deals slices out to the GPUs of its node that are near a NIC, each slice
    goes along a path of the nodes between such GPUs, and in each node to all its GPUs. Reduce: the
    same backwards.

    So all NICs of a node carry the message together, and each sends its slice once, the least
    possible. Raises PlanError unless the machine is a cluster of equal nodes.
    """
    nodes = equal_nodes("hierarchical", topology)
    home = next(i for i, node in enumerate(nodes) if root in node)
    nodes = nodes[home:] + nodes[:home]
    path = gates(topology, nodes)
    per, size = len(path[0]), len(topology.gpus)
    slices = [(g, chunk) for g in range(per) for chunk in range(g * _PARTS, (g + 1) * _PARTS)]
    steps = list(zip(path, path[1:], strict=False))
    dealt = [
        [(chunk, a, b) for g, a, b in hops for of, chunk in slices if of == g]
        for hops in _dealt(topology, nodes[0], path[0], root)
    ]
    up, down = inside(topology, nodes, path, lambda g: range(g * _PARTS, (g + 1) * _PARTS))
    rounds: list[Round]
    if collective == "broadcast":
        held = {(root, c) for _, c in slices} | {(b, c) for hops in dealt for c, _, b in hops}
        rounds = [
            *(tuple(Copy(a, (b,), c, MIDDLE + c) for c, a, b in hops) for hops in dealt),
            *(tuple(Copy(a[g], (b[g],), c, MIDDLE + c) for g, c in slices) for a, b in steps),
            *_useful(down, held),
        ]
    else:
        rounds = [
            *up,
            *(tuple(Reduce((b[g],), a[g], c, c) for g, c in slices) for a, b in reversed(steps)),
            *(tuple(Copy(b, (a,), c, DOWN + c) for c, a, b in hops) for hops in reversed(dealt)),
        ]
    made = (tuple(r for r in rounds if r),)
    return Algorithm("hierarchical", size, per * _PARTS, made, collective=collective, root=root)


def _dealt(
    topology: Topology, node: Node, near: Node, root: int
) -> list[list[tuple[int, int, int]]]:
    """Return by depth the hops (slice, from, to) on the way from the root to GPU g of those that
    are near the network, with slice g."""
    levels = shortest_trees(topology, node, [root])[0]
    above = {child: up for level in levels for up, children in level.items() for child in children}
    rounds: list[list[tuple[int, int, int]]] = [[] for _ in levels]
    for g, rank in enumerate(near):
        way = [rank]
        while way[-1] != root:
            way.append(above[way[-1]])
        for depth, (a, b) in enumerate(zip(way[::-1], way[-2::-1], strict=False)):
            rounds[depth].append((g, a, b))
    return rounds


def _useful(rounds: list[Round], held: set[tuple[int, int]]) -> list[Round]:
    """Return the copies without those to ranks that have the slice already."""
    return [
        tuple(
            Copy(m.src, dsts, m.chunk, m.channel)
            for m in moves
            if isinstance(m, Copy)
            and (dsts := tuple(d for d in m.dsts if (d, m.chunk) not in held))
        )
        for moves in rounds
    ]
