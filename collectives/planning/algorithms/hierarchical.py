"""All-reduce on clusters: inside each node, then between nodes, then inside each node again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.algorithms.trees import Tree, two_trees
from linkweave.collectives.planning.lower import (
    MOST_BLOCKS,
    Algorithm,
    Copy,
    Move,
    Reduce,
    Round,
    few_enough,
)
from linkweave.topology import Topology, Vertex
from linkweave.topology.clusters import nodes_of

Node = list[int]
"""The ranks of a node."""
Hop = tuple[int, Node, Node]
"""A chunk of every slice goes from one node to another."""

MIDDLE, BACK, DOWN = 100_000, 150_000, 200_000
"""The first channels between nodes, of the way back there, and of the way back inside nodes."""


def equal_nodes(name: str, topology: Topology) -> list[Node]:
    """Return the ranks of each node. Raises PlanError unless there are several equal nodes."""
    nodes = nodes_of(topology)
    sizes = {len(node) for node in nodes}
    if not any(link.kind == "network" for link in topology.links):
        nodes = nodes[:1]
    if len(nodes) < 2 or len(sizes) > 1:
        raise PlanError(
            f"{name} is for clusters of equal nodes; {topology.name} has "
            + ("one node" if len(nodes) < 2 else f"nodes of {sorted(sizes)} GPUs")
        )
    rank = {g: r for r, g in enumerate(topology.gpus)}
    return [[rank[g] for g in node] for node in nodes]


def gates(topology: Topology, nodes: Sequence[Node]) -> list[Node]:
    """Return the ranks of each node that communicate with other nodes: the same positions of all.

    Raises PlanError as `near_nics` does.
    """
    positions = sorted(g for near in near_nics(topology, nodes) for g in near)
    return [[node[position] for position in positions] for node in nodes]


def near_nics(topology: Topology, nodes: Sequence[Node]) -> list[list[int]]:
    """Return for each NIC of a node the positions of the GPUs that communicate by it.

    Of GPUs that share a NIC, the nearest to it do: those beyond the link between a node's CPUs
    leave its only NIC to the others. GPUs with no path to the next node do not. Raises PlanError if
    no position has a path in every node.
    """
    gpus = [[topology.gpus[rank] for rank in node] for node in nodes]
    paths = [
        [list(pairwise(topology.hops.get(ends, ()))) for ends in zip(node, following, strict=True)]
        for node, following in zip(gpus, [*gpus[1:], gpus[0]], strict=True)
    ]
    positions = {position for position in range(len(gpus[0])) if all(at[position] for at in paths)}
    if not positions:
        raise PlanError(f"no position has a path to the next node in every node of {topology.name}")
    for node_paths in paths:
        nics: dict[Vertex, dict[int, int]] = {}  # by NIC: the hops to it from each position
        for position in positions:
            path = node_paths[position]
            hops = [topology.by_ends[link].kind for link in path].index("network")
            nics.setdefault(path[hops][0], {})[position] = hops
        nearest = {nic: min(known.values()) for nic, known in nics.items()}
        positions = {g for nic in nics for g, hops in nics[nic].items() if hops == nearest[nic]}
    return [sorted(positions & known.keys()) for known in nics.values() if positions & known.keys()]


def inside(
    topology: Topology, nodes: Sequence[Node], roots: Sequence[Node],
    chunks: Callable[[int], Iterable[int]],
) -> tuple[list[Round], list[Round]]:  # fmt: skip
    """Return the rounds that reduce `chunks(g)` to root g of each node, and those that copy them
    back to all its GPUs, over trees of shortest paths that share the links evenly."""
    up: list[list[Move]] = []  # by depth
    down: list[list[Move]] = []
    for node, ends in zip(nodes, roots, strict=True):
        for g, tree in enumerate(shortest_trees(topology, node, ends)):
            for depth, level in enumerate(tree):
                if depth == len(up):
                    up.append([])
                    down.append([])
                for chunk in chunks(g):
                    for r, children in level.items():
                        up[depth].append(Reduce(children, r, chunk, chunk))
                        down[depth].append(Copy(r, children, chunk, DOWN + chunk))
    return [tuple(moves) for moves in reversed(up)], [tuple(moves) for moves in down]


def hops_around(rings: Sequence[Sequence[Node]], parts: int, step: int, first: int) -> list[Hop]:
    """Return the hops of a step around all rings; at first each chunk is `first` places after its
    owner. The chunks beyond a ring's length have the same owners as its first ones."""
    found = []
    for ring in rings:
        for chunk in range(parts if step < len(ring) - 1 else 0):
            at = chunk + first + step
            found.append((chunk, ring[at % len(ring)], ring[(at + 1) % len(ring)]))
    return found


_LONGEST, _PRODUCT, _MOST = 16, 2048, 256
"""The most nodes of a ring, and the most nodes times nodes of a ring: so large is a plan. Both are
exceeded by half at most where that makes rings equal. With more nodes rings would be so short that
trees are as fast."""


def hierarchical(topology: Topology) -> Algorithm:
    """Reduce a slice on each GPU of a node, all-reduce slices between nodes, broadcast in nodes.

    Inside a node a slice moves over a tree of shortest paths (a star behind a switch), over NVLinks
    alone if they connect the node; the trees share the links evenly. Between nodes each slice is
    two chunks, one for each tree of an overlapped double tree over the nodes, so every NIC sends
    and receives about twice its slice. GPU g communicates with GPU g of other nodes only, over its
    own rail if there are rails; GPUs that share a NIC with nearer ones, or have no path to the next
    node, have no slice. Raises PlanError unless the machine is a cluster of equal nodes.
    """
    nodes = equal_nodes("hierarchical", topology)
    near, trees = gates(topology, nodes), two_trees(len(nodes))
    over = [_over_tree(near, tree, t, 2) for t, tree in enumerate(trees)]
    middle = [
        tuple(m for part in parts for m in part) for parts in zip_longest(*over, fillvalue=())
    ]
    return _wrapped("hierarchical", topology, nodes, near, 2, [middle])


def hierarchical_ring(topology: Topology) -> Algorithm:
    """All-reduce as `hierarchical` does, with rings of nodes in place of trees, for long messages.

    Up to 16 nodes (also 17, 19, 21 and 23) form one ring, in which a NIC sends 2(n - 1)/n slices
    for n nodes, the least possible. More nodes form several rings. Each reduce-scatters slices;
    then the owners of a chunk in all rings form a path, which reduces it towards the ring in the
    middle and copies it back; at last each ring all-gathers. Of rings of equal length a NIC sends
    at most 2 slices, and the start-ups grow with the length of a ring and the number of rings, not
    with n.

    These three parts are phases: beside each other, what a NIC sends to another ring would make its
    neighbours in both rings wait, and NICs would be used 80 to 90 % of the time.

    Each chunk has channels of its own, one on the way to its sum and one on the way back. So a NIC
    has other chunks to send while one waits, and groups of chunks overlap: a single channel for all
    would leave a quarter of a NIC's time unused. Raises PlanError also for more than 256 nodes.
    """
    nodes = equal_nodes("hierarchical_ring", topology)
    if len(nodes) > _MOST:
        raise PlanError(f"hierarchical_ring is for at most {_MOST} nodes, not {len(nodes)}")
    near = gates(topology, nodes)
    rings = _rings(near)
    parts = max(map(len, rings))
    scatter = [hops_around(rings, parts, step, 1) for step in range(parts - 1)]
    gather = [hops_around(rings, parts, step, 0) for step in range(parts - 1)]
    inward = _inward(rings, parts)
    outward = [[(chunk, b, a) for chunk, a, b in hops] for hops in reversed(inward)]
    if len(rings) == 1:
        phases = [[*_reduced(scatter, parts), *_copied(gather, parts)]]
    else:
        across = [*_reduced(inward, parts), *_copied(outward, parts)]
        phases = [_reduced(scatter, parts), across, _copied(gather, parts)]
    return _wrapped("hierarchical_ring", topology, nodes, near, parts, phases)


def _reduced(steps: list[list[Hop]], parts: int) -> list[Round]:
    return [
        tuple(
            Reduce((a[g],), b[g], g * parts + chunk, MIDDLE + g * parts + chunk)
            for chunk, a, b in hops for g in range(len(a))
        ) for hops in steps
    ]  # fmt: skip


def _copied(steps: list[list[Hop]], parts: int) -> list[Round]:
    return [
        tuple(
            Copy(a[g], (b[g],), g * parts + chunk, BACK + g * parts + chunk)
            for chunk, a, b in hops for g in range(len(a))
        ) for hops in steps
    ]  # fmt: skip


def _rings(nodes: list[Node]) -> list[list[Node]]:
    """Return the nodes as rings of equal length, half as long again at most, if there are any.

    In rings of nearly equal length some nodes of the shorter ones own two chunks, for which their
    NICs take twice as long: 17 nodes as 8 and 9 reach 88 % of the bound, as one ring 99.9 %.
    """
    longest = min(_LONGEST, _PRODUCT // len(nodes))
    usual = -(-len(nodes) // longest)
    equal = [
        count
        for count in range(-(-2 * len(nodes) // (3 * longest)), 2 * usual)
        if len(nodes) % count == 0
    ]
    count = min(equal, key=lambda count: abs(count - usual), default=usual)
    cuts = [i * len(nodes) // count for i in range(count + 1)]
    return [nodes[a:b] for a, b in pairwise(cuts)]


def _inward(rings: list[list[Node]], parts: int) -> list[list[Hop]]:
    """Return the hops of each step from the owners in outer rings to those in the middle one."""
    root, last = len(rings) // 2, len(rings) - 1
    rounds = []
    for step in range(root):  # the left side is not shorter than the right one
        pairs = [(step, step + 1), (last - step, last - step - 1)]
        rounds.append([
            (chunk, rings[a][chunk % len(rings[a])], rings[b][chunk % len(rings[b])])
            for a, b in pairs if a < b <= root or root <= b < a for chunk in range(parts)
        ])  # fmt: skip
    return rounds


def _wrapped(
    name: str, topology: Topology, nodes: list[Node], near: list[Node], parts: int,
    phases: list[list[Round]],
) -> Algorithm:  # fmt: skip
    """Return an algorithm with the rounds inside nodes before and after the phases between nodes,
    for slices of `parts` chunks."""
    up, down = inside(topology, nodes, near, lambda g: range(g * parts, (g + 1) * parts))
    made = [*phases]
    made[0] = [*up, *made[0]]
    made[-1] = [*made[-1], *down]
    whole = tuple(tuple(r for r in rounds if r) for rounds in made)
    return Algorithm(name, len(topology.gpus), parts * len(near[0]), whole)


def _over_tree(nodes: list[Node], tree: Tree, t: int, parts: int) -> list[Round]:
    """Return the rounds of tree t over the nodes, which all-reduces chunk t of every slice."""
    up: list[Round] = []
    down: list[Round] = []
    for level in tree.levels[:-1]:
        reduces, copies = [], []
        for n in filter(tree.children, level):
            for g, mine in enumerate(nodes[n]):
                chunk, children = parts * g + t, tuple(nodes[c][g] for c in tree.children(n))
                reduces.append(Reduce(children, mine, chunk, MIDDLE + 2 * chunk))
                copies.append(Copy(mine, children, chunk, MIDDLE + 2 * chunk + 1))
        up.insert(0, tuple(reduces))
        down.append(tuple(copies))
    return [*up, *down]


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
