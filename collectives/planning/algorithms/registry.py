"""All algorithms by collective and name. Help texts, requests and `auto` take their names here.

An algorithm is a function of a topology that returns an `Algorithm`: which chunk is combined or
copied from where to where. It knows neither bytes nor signals nor devices. A new algorithm needs
its function and an entry in `ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from linkweave.collectives.errors import CollectiveError, PlanError
from linkweave.collectives.planning.algorithms import over_trees, rings, rooted
from linkweave.collectives.planning.algorithms.direct import direct, one_shot, pairwise, two_shot
from linkweave.collectives.planning.algorithms.doubling import halving_doubling, recursive_doubling
from linkweave.collectives.planning.algorithms.hierarchical import (
    hierarchical,
    hierarchical_blocks,
    hierarchical_ring,
    hierarchical_rooted,
)
from linkweave.collectives.planning.collective import ALLREDUCE, COLLECTIVES, SENDRECV, Root, check
from linkweave.collectives.planning.lower import Algorithm
from linkweave.topology import Topology


@dataclass(frozen=True, slots=True)
class Entry:
    """How to make an algorithm: of a topology, and unless the collective is tunable also of the
    collective and its root."""

    make: Callable[..., Algorithm]
    clusters: Literal["no", "also", "only"] = "no"
    """Whether it suits a cluster; on large clusters `auto` compares only those that do."""
    fixed_order: bool = False
    """Whether it serves `order="fixed"`: it combines every element in the same order, whatever the
    size of the message."""


_ROOTED = {
    "tree": Entry(rooted.tree, "also"),
    "shortest_tree": Entry(rooted.shortest_tree),
    "packed_trees": Entry(rooted.packed_trees),
    "ring": Entry(rooted.chains),
    "hierarchical": Entry(hierarchical_rooted, "only"),
}

ALGORITHMS: dict[str, dict[str, Entry]] = {
    ALLREDUCE: {
        "two_shot": Entry(two_shot),
        "packed_trees": Entry(over_trees.packed_trees),
        "overlapped_double_tree": Entry(over_trees.overlapped_double_tree, "also"),
        "double_tree": Entry(over_trees.double_tree),
        "overlapped_tree": Entry(over_trees.overlapped_tree, fixed_order=True),
        "tree": Entry(over_trees.tree),
        "chain": Entry(over_trees.chain),
        "ring": Entry(rings.ring),
        "one_shot": Entry(one_shot),
        "recursive_doubling": Entry(recursive_doubling, "also"),
        "halving_doubling": Entry(halving_doubling),
        "hierarchical": Entry(hierarchical, "only"),
        "hierarchical_ring": Entry(hierarchical_ring, "only"),
        "ccube_dgx1": Entry(over_trees.ccube_dgx1),
    },
    "broadcast": _ROOTED,
    "reduce": _ROOTED | {"shortest_tree": Entry(rooted.shortest_tree, fixed_order=True)},
    "allgather": {
        "shortest_trees": Entry(rooted.shortest),
        "ring": Entry(rings.half_ring),
        "hierarchical": Entry(hierarchical_blocks, "only"),
    },
    "reduce_scatter": {
        "shortest_trees": Entry(rooted.shortest, fixed_order=True),
        "ring": Entry(rings.half_ring),
        "hierarchical": Entry(hierarchical_blocks, "only"),
    },
    "gather": {"shortest_paths": Entry(rooted.shortest_paths)},
    "scatter": {"shortest_paths": Entry(rooted.shortest_paths)},
    "alltoall": {"direct": Entry(direct)},
    SENDRECV: {"pairwise": Entry(pairwise)},
}
"""If the cost model sees no difference, `auto` takes the first."""

NAMES = tuple(dict.fromkeys(["auto", *(name for table in ALGORITHMS.values() for name in table)]))
"""All that a caller may ask for by name."""

Named = str | Callable[[Topology], Algorithm]
"""An algorithm: by name, or a function that makes it for a topology."""


def fixed_order(collective: str) -> str:
    """The algorithm that `order="fixed"` uses: `auto` where nothing is combined."""
    table = ALGORITHMS[collective].items()
    return next((name for name, entry in table if entry.fixed_order), "auto")


@lru_cache(maxsize=512)
def algorithm_for(
    name: Named, topology: Topology, collective: str = ALLREDUCE, root: Root = 0
) -> Algorithm:
    """Return an algorithm of a collective on this topology; the result is cached.

    Raises PlanError for an unknown name, and where the algorithm does not suit the machine.
    """
    check(collective, len(topology.gpus), root)
    if not isinstance(name, str):
        return _own(name, topology, collective)
    known = ALGORITHMS[collective]
    if name not in known:
        raise PlanError(
            f"unknown algorithm {name!r} of {collective}; choose from auto, {', '.join(known)}"
        )
    if COLLECTIVES[collective].tunable:
        return known[name].make(topology)
    return known[name].make(topology, collective, root)


def _own(make: Callable[[Topology], Algorithm], topology: Topology, collective: str) -> Algorithm:
    """Return what a caller's function makes. Whatever it raises becomes a PlanError, which all
    ranks are told and may continue after."""
    if not COLLECTIVES[collective].tunable:
        raise PlanError(f"{collective} takes the name of an algorithm, not a function")
    try:
        made = make(topology)
    except CollectiveError:
        raise
    except Exception as error:
        text = f"{make.__name__} on {topology.name}: {type(error).__name__}: {error}"
        raise PlanError(text) from error
    if not isinstance(made, Algorithm):
        raise PlanError(f"{make!r} must return an Algorithm, not {type(made).__name__}")
    return made
