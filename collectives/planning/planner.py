"""The choice of plans: `plan_allreduce`, `plan_collective` and what they compare."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, Named, algorithm_for
from linkweave.collectives.planning.collective import ALLREDUCE, COLLECTIVES, SENDRECV, Root, check
from linkweave.collectives.planning.lower import (
    MOST_BLOCKS,
    MOST_SQUARED,
    LowerBound,
    Tuning,
    lower,
    lower_bound,
)
from linkweave.collectives.planning.plan import MOST_BYTES, MOST_CELLS, Plan
from linkweave.collectives.planning.simulate import (
    LARGE,
    Pipeline,
    largest_chunk,
    most_chunks,
    pipeline_of,
    simulate,
    simulated_seconds,
)
from linkweave.collectives.planning.verify import check_form, shortened, verify
from linkweave.topology import Topology, load
from linkweave.topology.checks import integer
from linkweave.topology.timings import measured_seconds

_SENT = 8
"""Slots of a send in shared memory: 1 MiB takes a quarter less time than with 2, as nothing else is
under way. All-reduces would gain a twentieth, at four times the memory."""
_QUEUE_SLACK = 1.03  # how much slower a plan for a gradient queue may be
_STEEP = 1.05  # the search for a number of chunks ends at times so far above the best,
_WORTH = 0.995  # and once a step improves the time by less


def size_class(nbytes: int, unit: int = 1) -> int:
    """Return the size, of eight in each octave, that stands for messages of `nbytes`.

    It is the smallest that is not below `nbytes`, in `unit` equal blocks. Plans are made for
    classes of sizes, and take the size itself at run time.
    """
    block = -(-nbytes // unit)
    step = 1 << max(0, (block - 1).bit_length() - 4)
    return -(-block // step) * step * unit


@lru_cache(maxsize=512)
def _template(
    topology: Topology, algorithm: Named, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[Plan, Pipeline]:
    """Return a plan of one group of chunks, and its pipeline."""
    program = algorithm_for(algorithm, topology, collective, root)
    slots = _SENT if collective == SENDRECV and topology.on_memory else 2
    plan = lower(program, topology, Tuning(program.stride, slots))
    return plan, pipeline_of(plan, topology)


@lru_cache(maxsize=512)
def _bound(topology: Topology, name: str, collective: str, root: Root) -> LowerBound:
    program = algorithm_for(name, topology, collective, root)
    if COLLECTIVES[collective].cells(program.size, program.stride) > MOST_CELLS:
        raise PlanError(f"a group of {program.stride} chunks of {name} is too large")
    return lower_bound(program, topology)


@lru_cache(maxsize=4096)
def _prove(topology: Topology, short: Plan) -> None:
    verify(short, topology)


def proved(plan: Plan, topology: Topology) -> Plan:
    """Return the plan once it is verified; raises PlanError if it is wrong.

    One proof, which is cached, serves all numbers of chunks that `shortened` maps to the same one.
    """
    _prove(topology, shortened(plan))
    return plan


def _able(topology: Topology, name: str, collective: str, root: Root) -> bool:
    try:
        _bound(topology, name, collective, root)
    except PlanError:
        return False
    return True


def on_large_cluster(topology: Topology, collective: str = ALLREDUCE, root: Root = 0) -> bool:
    """Return whether only algorithms that suit clusters are compared, as comparing takes long."""
    return len(topology.gpus) > MOST_SQUARED and any(
        entry.clusters == "only" and _able(topology, name, collective, root)
        for name, entry in ALGORITHMS[collective].items()
    )


@lru_cache(maxsize=256)
def candidates(topology: Topology, collective: str = ALLREDUCE, root: Root = 0) -> tuple[str, ...]:
    """Return the names of the algorithms that this machine can run, in the order of preference.

    On a cluster of more than 64 GPUs these are only the ones that suit clusters. Raises PlanError
    if there are none.
    """
    check(collective, len(topology.gpus), root)
    few, known = on_large_cluster(topology, collective, root), ALGORITHMS[collective]
    names = [name for name, entry in known.items() if not few or entry.clusters != "no"]
    able = tuple(name for name in names if _able(topology, name, collective, root))
    if not able:
        large = len(topology.gpus) > MOST_BLOCKS and any(
            k.kind == "network" for k in topology.links
        )
        suits = [name for name in names if large and known[name].clusters == "only"]
        try:
            _template(topology, (suits or names)[0], collective, root)
        except PlanError as error:
            raise PlanError(f"no {collective} runs on {topology.name}: {error}") from None
    return able


def predict(
    topology: Topology, nbytes: int, algorithm: Named, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[float, int]:
    """Return (seconds, chunks) of an algorithm with the number of chunks best for `size_class`.

    Measured times (`Topology.timings`) come first, interpolated between their sizes; then the
    closed forms, if they are exact or the ranks share one memory; else the simulator, with the
    number of chunks that simulates fastest in a search from where the closed forms point. Ties go
    to the fewest chunks. Raises PlanError.
    """
    of_class = _class_of(topology, nbytes, collective)
    seconds, chunks = _predicted(topology, of_class, algorithm, collective, root)
    if nbytes == of_class:
        return seconds, chunks
    if measured := _measured(topology, nbytes, algorithm, collective):
        return measured[0], chunks
    template, shape = _template(topology, algorithm, collective, root)
    if shape.exact or largest_chunk(topology) or not nbytes:
        return shape.seconds(template.volume(nbytes), chunks), chunks
    return simulated_seconds(template, topology, nbytes, chunks), chunks


def _class_of(topology: Topology, nbytes: int, collective: str) -> int:
    return size_class(nbytes, COLLECTIVES[collective].layout.parts(len(topology.gpus)))


def _measured(
    topology: Topology, nbytes: int, algorithm: Named, collective: str
) -> tuple[float, int] | None:
    if not COLLECTIVES[collective].tunable or not isinstance(algorithm, str):
        return None
    return measured_seconds(topology.timings, algorithm, nbytes)


@lru_cache(maxsize=65536)
def _predicted(
    topology: Topology, nbytes: int, algorithm: Named, collective: str, root: Root
) -> tuple[float, int]:
    template, shape = _template(topology, algorithm, collective, root)
    if measured := _measured(topology, nbytes, algorithm, collective):
        return measured[0], min(measured[1], most_chunks(nbytes, template.stride))
    moved = template.volume(nbytes)
    chunks = shape.best_chunks(moved, largest_chunk(topology))
    if shape.exact or largest_chunk(topology) or not nbytes:
        return shape.seconds(moved, chunks), chunks
    stride, most = template.stride, most_chunks(moved, template.stride)

    def at(chunks: float, limit: float) -> tuple[float, int]:
        count = min(max(1, round(chunks / stride)) * stride, most)
        return simulated_seconds(template, topology, nbytes, count, limit), count

    small = len(template.connections) < LARGE
    best = then = at(chunks, math.inf)
    for factor in (0, 0.25, 0.5) if small else (0, 0.5):  # 0: one group, which waits for no other
        best = min(best, at(chunks * factor, best[0]))
    for factor in (2, 4) if small else (2,):
        if then[0] > _STEEP * best[0]:
            break
        best = min(best, then := at(chunks * factor, _STEEP * best[0]))
    for factor in (2, 0.5):
        while (then := at(best[1] * factor, best[0])) < best:
            ends = then[0] > _WORTH * best[0]
            best = then
            if ends:
                break
    return best


def choose(
    topology: Topology, nbytes: int, collective: str = ALLREDUCE, root: Root = 0,
    queued: bool = False,
) -> str:  # fmt: skip
    """Return the algorithm with the least predicted time; of several, the registry's first.

    `queued` is for gradient queues, which use layers while later ones are in flight: of the
    algorithms at most 3 % slower, it returns the one whose first chunk is final earliest.
    `LINKWEAVE_ALGORITHM` overrides the choice of an all-reduce. Raises PlanError.
    """
    forced, known = os.environ.get("LINKWEAVE_ALGORITHM"), COLLECTIVES[collective]
    if known.tunable and forced:
        if forced not in ALGORITHMS[collective]:
            raise PlanError(
                f"LINKWEAVE_ALGORITHM={forced!r} is no algorithm; choose from "
                + ", ".join(ALGORITHMS[collective])
            )
        return forced
    of_class = _class_of(topology, nbytes, collective)
    if queued and nbytes and known.symmetric:
        return _earliest(topology, of_class, collective)
    return _fastest(topology, of_class, collective, root)


@lru_cache(maxsize=4096)
def _earliest(topology: Topology, nbytes: int, collective: str) -> str:
    def seconds(name: str) -> float:
        return predict(topology, nbytes, name, collective)[0]

    def first(name: str) -> float:
        chunks = predict(topology, nbytes, name, collective)[1]
        plan = _template(topology, name, collective)[0].with_chunks(chunks)
        return simulate(plan, topology, nbytes).first_chunk_seconds

    most = seconds(_fastest(topology, nbytes, collective, 0)) * _QUEUE_SLACK
    return min((n for n in candidates(topology, collective) if seconds(n) <= most), key=first)


@lru_cache(maxsize=4096)
def _fastest(topology: Topology, nbytes: int, collective: str, root: Root) -> str:
    """Return the fastest candidate, or if some have been measured at this size, the fastest of
    those.

    The most promising one is predicted first; the others are lowered, and simulated, only while
    their lower bounds leave them a chance.
    """
    names = candidates(topology, collective, root)

    def seconds(name: str) -> float:
        return predict(topology, nbytes, name, collective, root)[0]

    if timed := [name for name in names if _measured(topology, nbytes, name, collective)]:
        return min(timed, key=seconds)
    moved = COLLECTIVES[collective].volume(len(topology.gpus), nbytes)
    bounds = {name: _bound(topology, name, collective, root) for name in names}
    first = min(names, key=lambda name: bounds[name].guess(moved))
    best = seconds(first), names.index(first)
    left = [name for name in names if bounds[name].seconds(moved) <= best[0]]
    shapes = {name: _template(topology, name, collective, root)[1] for name in left}
    estimate = {n: shape.seconds(moved, shape.best_chunks(moved)) for n, shape in shapes.items()}
    for name in sorted(left, key=lambda n: estimate[n]):
        if max(bounds[name].seconds(moved), shapes[name].load * moved) <= best[0]:
            best = min(best, (seconds(name), names.index(name)))
    return names[best[1]]


def ranked(
    topology: Topology, nbytes: int, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[str, ...]:
    """Return all candidates in the order of their predicted times."""
    names = candidates(topology, collective, root)
    return tuple(sorted(names, key=lambda n: predict(topology, nbytes, n, collective, root)[0]))


def plan_allreduce(
    topology: Topology | str, nbytes: int, algorithm: Named = "auto", num_chunks: int | None = None
) -> Plan:
    """Return a verified all-reduce plan for a message of `nbytes` on this topology.

    `topology` is a `Topology`, or what `topology.load` takes, such as a machine's name.
    `algorithm` is a name, or a function of a topology that returns an `Algorithm`
    (`planning.algorithms` has examples). `num_chunks` is the total over all trees; by default the
    cost model chooses it. The result is cached and depends only on the arguments and on
    `LINKWEAVE_ALGORITHM`. Raises PlanError for an unknown algorithm, one that the machine cannot
    run, and numbers out of range.
    """
    return plan_collective(ALLREDUCE, topology, nbytes, 0, algorithm, num_chunks)


def plan_collective(
    collective: str, topology: Topology | str, nbytes: int, root: Root = 0,
    algorithm: Named = "auto", num_chunks: int | None = None, queued: bool = False,
) -> Plan:  # fmt: skip
    """Return a verified plan of any collective in `planning.collective`, as `plan_allreduce` does.

    `nbytes` is the rank's whole buffer, as in nccl-tests: the message of a broadcast, a reduce or
    a sendrecv; all P blocks of an all-gather's result, of a reduce-scatter's input, or of what a
    rank sends in an all-to-all (a multiple of P). `root` is the rank of a broadcast's or a reduce's
    root, or the pairs of a sendrecv. `queued`: see `choose`. The number of chunks is chosen for a
    class of sizes (`size_class`). Raises PlanError.
    """
    topology = load(topology)
    nbytes = integer(nbytes, "nbytes", 0, MOST_BYTES, PlanError)
    size = len(topology.gpus)
    root = check(collective, size, root)
    if nbytes % COLLECTIVES[collective].layout.parts(size):
        raise PlanError(
            f"{collective} over {size} ranks needs {size} equal blocks; {nbytes} bytes cannot be "
            f"split into {size}"
        )
    with _uncollected():
        if algorithm == "auto":
            algorithm = choose(topology, nbytes, collective, root, queued)
        template, _ = _template(topology, algorithm, collective, root)
        if num_chunks is None:
            num_chunks = predict(topology, nbytes, algorithm, collective, root)[1]
        return proved(template.with_chunks(num_chunks), topology)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from looking at millions of steps, none of which is garbage:
    it would take a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def adopt(plan: Plan, topology: Topology) -> Plan:
    """Return a plan made elsewhere, by hand or from JSON, once verified. Raises PlanError."""
    check_form(plan)
    return proved(plan, topology)
