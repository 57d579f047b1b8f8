"""All-reduce on clusters: inside each node, then between nodes, then inside each node again."""

from __future__ import annotations

from itertools import pairwise, zip_longest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.nodes import (
    BACK,
    MIDDLE,
    Hop,
    Node,
    equal_nodes,
    gates,
    hops_around,
    inside,
)
from linkweave.collectives.planning.algorithms.trees import Tree, two_trees
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Round
from linkweave.topology import Topology

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
