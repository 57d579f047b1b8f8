"""Which plan for which message: `plan_allreduce`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from collectives.errors import PlanError
from collectives.planning.algorithms import ALGORITHMS, algorithm_for, broadcast
from collectives.planning.cost import (
    Shape,
    largest_chunk,
    most_chunks,
    shape_of,
    simulated_seconds,
)
from collectives.planning.lower import MOST_SQUARED, Tuning, lower
from collectives.planning.plan import Plan
from collectives.planning.verify import shortened, verify
from topology import Topology

_FOR_CLUSTERS = ("overlapped_double_tree", "recursive_doubling", "hierarchical",
                 "hierarchical_ring")  # fmt: skip
_WORTH = 0.995  # of the time: a smaller gain ends the search for a number of chunks


@lru_cache(maxsize=512)
def _template(topology: Topology, algorithm: str) -> tuple[Plan, Shape]:
    """A plan of one group of chunks, to be given its number of chunks, and its shape."""
    program = algorithm_for(algorithm, topology)
    plan = lower(program, topology, Tuning(num_chunks=program.stride))
    return plan, shape_of(plan, topology)


@lru_cache(maxsize=4096)
def _prove(topology: Topology, short: Plan) -> None:
    verify(short, topology)


def _verified(topology: Topology, plan: Plan) -> Plan:
    """The plan, proved right: one proof serves all numbers of chunks that shorten to the same."""
    _prove(topology, shortened(plan))
    return plan


def _able(topology: Topology, name: str) -> bool:
    try:
        _template(topology, name)
    except PlanError:
        return False
    return True


@lru_cache(maxsize=64)
def candidates(topology: Topology) -> tuple[str, ...]:
    """Names of the algorithms that this machine can run, in the order of preference.

    On a cluster of more than 64 GPUs only those that suit one, as to compare takes its time.
    """
    names = tuple(ALGORITHMS)
    if len(topology.gpus) > MOST_SQUARED and _able(topology, "hierarchical"):
        names = _FOR_CLUSTERS
    able = [name for name in names if _able(topology, name)]
    if not able:
        raise PlanError(f"no algorithm runs on {topology.name}: its GPUs are not connected")
    return tuple(able)


@lru_cache(maxsize=65536)
def predict(topology: Topology, nbytes: int, algorithm: str) -> tuple[float, int]:
    """(seconds, chunks) of an algorithm at its best number of chunks.

    The closed forms where each connection has links of its own, or on CPU ranks; else, from where
    they point, the number of chunks that simulates fastest.
    """
    template, shape = _template(topology, algorithm)
    chunks = shape.best_chunks(nbytes, largest_chunk(topology))
    if shape.unshared or largest_chunk(topology) or not nbytes:
        return shape.seconds(nbytes, chunks), chunks
    stride = template.stride
    best = (simulated_seconds(template, topology, nbytes, chunks), chunks)
    for factor in (2.0, 0.5):  # away from there, in the direction that helps
        while True:
            groups = max(1, round(best[1] / stride * factor))
            tried = min(groups * stride, most_chunks(nbytes, stride))
            if tried == best[1]:
                break
            seconds = simulated_seconds(template, topology, nbytes, tried)
            if seconds >= best[0]:
                break
            small = seconds > _WORTH * best[0]
            best = (seconds, tried)
            if small:
                break
    return best


def choose(topology: Topology, nbytes: int) -> str:
    """The algorithm with the least predicted time; the first named of equals.

    `LINKWEAVE_ALGORITHM` overrides the choice.
    """
    if forced := os.environ.get("LINKWEAVE_ALGORITHM"):
        if forced not in ALGORITHMS:
            raise PlanError(
                f"LINKWEAVE_ALGORITHM={forced!r} is no algorithm; choose from "
                + ", ".join(ALGORITHMS)
            )
        return forced
    return _fastest(topology, nbytes)


@lru_cache(maxsize=4096)
def _fastest(topology: Topology, nbytes: int) -> str:
    """The most promising first; what its busiest link alone makes slower is not simulated."""
    names = candidates(topology)
    shapes = {name: _template(topology, name)[1] for name in names}
    estimate = {n: s.seconds(nbytes, s.best_chunks(nbytes)) for n, s in shapes.items()}
    best: tuple[float, int] | None = None
    for name in sorted(names, key=lambda n: estimate[n]):
        if best is None or shapes[name].load * nbytes <= best[0]:
            tried = (predict(topology, nbytes, name)[0], names.index(name))
            best = tried if best is None else min(best, tried)
    assert best is not None
    return names[best[1]]


def plan_allreduce(
    topology: Topology, nbytes: int, algorithm: str = "auto", num_chunks: int | None = None
) -> Plan:
    """A verified all-reduce plan for a message of `nbytes` on this topology.

    `num_chunks` (the total over all trees) is chosen by the cost model where it is None. Pure and
    cached. Raises PlanError for an unknown algorithm, one that the machine cannot run, or sizes
    that make no sense.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise PlanError(f"nbytes must be an integer of at least 0, not {nbytes!r}")
    with _uncollected():
        if algorithm == "auto":
            algorithm = choose(topology, nbytes)
        return _planned(topology, nbytes, algorithm, num_chunks)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A plan is a million small objects and no cycle: to collect meanwhile takes a fifth longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@lru_cache(maxsize=1024, typed=True)  # True is no number of chunks
def _planned(topology: Topology, nbytes: int, algorithm: str, num_chunks: int | None) -> Plan:
    template, _ = _template(topology, algorithm)
    if num_chunks is None:
        num_chunks = predict(topology, nbytes, algorithm)[1]
    return _verified(topology, template.with_chunks(num_chunks))


def plan_broadcast(
    topology: Topology, nbytes: int, root: int, num_chunks: int | None = None
) -> Plan:
    """A verified broadcast plan: one binary tree from `root`, chunks pipelined."""
    template, shape = _broadcast_template(topology, root)
    if num_chunks is None:
        num_chunks = shape.best_chunks(nbytes, largest_chunk(topology))
    return _verified(topology, template.with_chunks(num_chunks))


@lru_cache(maxsize=512)
def _broadcast_template(topology: Topology, root: int) -> tuple[Plan, Shape]:
    plan = lower(broadcast(topology, root), topology, Tuning(num_chunks=1))
    return plan, shape_of(plan, topology)
