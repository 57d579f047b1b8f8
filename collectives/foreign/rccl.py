"""RCCL's trees and rings, as its environment variables `RCCL_TREES` and `NCCL_RINGS` have them.

Of RCCL's `parseGraphLight`, `parseGraph` (`src/graph/rome_models.cc`) and `ncclTreeBasePostset`
(`connect.cc`): a tree is its root's number and, each in brackets, the trees below it, all of it in
brackets; a ring is its GPUs in order. Bars divide several. Numbers are those of a node's GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign.nccl_graph import MOST_CHANNELS, refuse_other_machines, rings_of
from linkweave.collectives.planning.algorithms.embed import Embedding
from linkweave.collectives.planning.algorithms.over_trees import over_trees
from linkweave.collectives.planning.algorithms.rings import ring_of
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.planning.plan import Plan
from linkweave.topology import Topology
from linkweave.topology.checks import shown

MOST_CHILDREN = 3
TREES, RINGS = "RCCL_TREES", "NCCL_RINGS"
_LINE = re.compile(rf"""\b({TREES}|{RINGS})=(?:"([^"\n]*)"|'([^'\n]*)'|(\S*))""")


def is_text(text: str) -> bool:
    return bool(_LINE.search(text))


def read(text: str) -> dict[str, Callable[[Topology], Algorithm]]:
    """The all-reduces that the variables ask for, by variable. Raises PlanError for what RCCL would
    not take."""
    found: dict[str, Callable[[Topology], Algorithm]] = {}
    for name, *quoted in _LINE.findall(text):
        value = "".join(quoted)
        if not re.fullmatch(r"[0-9()| ]*\d[0-9()| ]*", value) or re.search(r"\d{5}", value):
            raise PlanError(
                f"{name} has numbers, bars and brackets, of GPUs alone, not {shown(value)}"
            )
        found[name] = _trees(value) if name == TREES else _rings(value)
    return found


def _rings(value: str) -> Callable[[Topology], Algorithm]:
    if "(" in value or ")" in value:
        raise PlanError(f"{RINGS} has no brackets: {shown(value)}")
    rings = [tuple(int(word) for word in part.split()) for part in value.split("|") if part.strip()]

    def make(topology: Topology) -> Algorithm:
        for ring in rings:
            _check(ring, topology, "ring")
        return ring_of("rccl_ring", len(topology.gpus), rings)

    return make


def _trees(value: str) -> Callable[[Topology], Algorithm]:
    parents = [parsed(part) for part in value.split("|") if part.strip()]

    def make(topology: Topology) -> Algorithm:
        for parent in parents:
            _check(list(parent), topology, "tree")
        trees = [Tree(tuple(parent[r] for r in range(len(parent)))) for parent in parents]
        _check_children(trees)
        identity = Embedding(tuple(range(len(topology.gpus))))
        return over_trees("rccl_trees", topology, trees, True, identity)

    return make


def _check(ranks: Sequence[int], topology: Topology, what: str) -> None:
    if sorted(ranks) != list(range(len(topology.gpus))):
        raise PlanError(
            f"a {what} of RCCL's is of GPUs {', '.join(map(str, sorted(ranks)))}; {topology.name} "
            f"has {len(topology.gpus)}"
        )


def parsed(text: str) -> dict[int, int]:
    """The parent of each GPU in a tree such as "(0(1(2))(3))"; the root's is itself."""
    parent: dict[int, int] = {}
    above: list[int] = []
    words = re.findall(r"\d+|[()]", text)
    long = max(map(len, words), default=0) > 4
    if long or "".join(words) != text.replace(" ", "") or words[:1] != ["("]:
        raise PlanError(f"a tree of RCCL's is like (0(1(2))(3)), not {shown(text)}")
    for before, word in zip(["", *words], words, strict=False):
        if word == ")":
            if not above or before == "(":
                raise PlanError(f"brackets do not pair in the tree {shown(text)}")
            above.pop()
        elif word != "(":
            number = int(word)
            if before != "(" or number in parent or (parent and not above):
                raise PlanError(f"GPU {number} cannot stand there in the tree {shown(text)}")
            parent[number] = above[-1] if above else number
            above.append(number)
    if above:
        raise PlanError(f"brackets do not pair in the tree {shown(text)}")
    return parent


def write(plan: Plan, topology: Topology) -> str:
    """A line of shell that sets a variable to a plan's trees or rings.

    Raises PlanError for more than three children, which RCCL has no room for, and for plans that
    are neither.
    """
    if plan.collective != "allreduce":
        raise PlanError(f"RCCL takes the trees of an allreduce, not of a {plan.collective}")
    refuse_other_machines("RCCL", topology, "xgmi")
    if topology.gpus != tuple(range(plan.size)):
        raise PlanError(
            f"RCCL numbers the GPUs of a node from 0 on, not as {topology.name}: take the first "
            f"{plan.size}"
        )
    if not plan.trees:
        rings = rings_of(plan, topology)
        return f'{RINGS}="{_joined(" ".join(map(str, ring)) for ring in rings)}"\n'
    _check_children(plan.trees)
    return f'{TREES}="{_joined(_text(tree, tree.root) for tree in plan.trees)}"\n'


def _check_children(trees: Sequence[Tree]) -> None:
    for tree in trees:
        for rank in range(len(tree.parent)):
            if (count := len(tree.children(rank))) > MOST_CHILDREN:
                raise PlanError(
                    f"RCCL takes at most {MOST_CHILDREN} children in a tree; GPU {rank} has {count}"
                )


def _joined(parts: Iterable[str]) -> str:
    every = list(parts)
    if len(every) > MOST_CHANNELS:
        raise PlanError(f"RCCL takes at most {MOST_CHANNELS} channels, not {len(every)}")
    return "|".join(every)


def _text(tree: Tree, rank: int) -> str:
    return f"({rank}{''.join(_text(tree, child) for child in tree.children(rank))})"
