"""Which plan for which message: `plan_allreduce`, `plan_collective`."""

from __future__ import annotations

import os
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, Named, algorithm_for
from linkweave.collectives.planning.algorithms.rooted_and_exchange import OTHERS, other_algorithm
from linkweave.collectives.planning.cost import (
    LARGE,
    Pipeline,
    largest_chunk,
    most_chunks,
    pipeline_of,
    simulated_seconds,
)
from linkweave.collectives.planning.fields import MOST_BYTES, MOST_CELLS, whole
from linkweave.collectives.planning.floor import Floor, floor_of
from linkweave.collectives.planning.goals import Root, blocks, check, parts
from linkweave.collectives.planning.lower import MOST_SQUARED, Algorithm, Tuning, lower
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.planning.simulate import simulate
from linkweave.collectives.planning.verify import shortened, verify
from linkweave.collectives.planning.wellformed import check_form
from linkweave.topology import Topology
from linkweave.topology.timings import measured_seconds

ALLREDUCE = "allreduce"
_FOR_CLUSTERS = ("overlapped_double_tree", "recursive_doubling", "hierarchical",
                 "hierarchical_ring")  # fmt: skip
_LATER = 1.03
_STEEP = 1.05  # of the least time: still more chunks are not tried
_WORTH = 0.995  # of the time: a smaller gain ends the search for a number of chunks


def size_class(nbytes: int, unit: int = 1) -> int:
    """The size that stands for messages of `nbytes`, in `unit` equal blocks: the least of eight to
    an octave that is no smaller. Plans are made for it, and take the size itself at run time."""
    block = -(-nbytes // unit)
    step = 1 << max(0, (block - 1).bit_length() - 4)
    return -(-block // step) * step * unit


@lru_cache(maxsize=128)
def _algorithm(
    topology: Topology, algorithm: Named, collective: str = ALLREDUCE, root: Root = 0
) -> Algorithm:
    if collective == ALLREDUCE:
        return algorithm_for(algorithm, topology)
    if isinstance(algorithm, str):
        return other_algorithm(topology, collective, algorithm, root)
    raise PlanError(f"a function makes an algorithm of an allreduce, not of {collective}")


@lru_cache(maxsize=512)
def _template(
    topology: Topology, algorithm: Named, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[Plan, Pipeline]:
    """A plan of one group of chunks, to be given its number of chunks, and its shape."""
    program = _algorithm(topology, algorithm, collective, root)
    plan = lower(program, topology, Tuning(num_chunks=program.stride))
    return plan, pipeline_of(plan, topology)


@lru_cache(maxsize=512)
def _floor(topology: Topology, name: str, collective: str, root: Root) -> Floor:
    program = _algorithm(topology, name, collective, root)
    if program.size * program.stride > MOST_CELLS:
        raise PlanError(f"a group of {program.stride} chunks of {name} is too large")
    return floor_of(program, topology)


@lru_cache(maxsize=4096)
def _prove(topology: Topology, short: Plan) -> None:
    verify(short, topology)


def proved(plan: Plan, topology: Topology) -> Plan:
    """The plan, proved right: one proof serves all numbers of chunks that shorten to the same.
    Raises PlanError."""
    _prove(topology, shortened(plan))
    return plan


def _able(topology: Topology, name: str, collective: str, root: Root) -> bool:
    try:
        _floor(topology, name, collective, root)
    except PlanError:
        return False
    return True


@lru_cache(maxsize=256)
def candidates(topology: Topology, collective: str = ALLREDUCE, root: Root = 0) -> tuple[str, ...]:
    """Names of the algorithms that this machine can run, in the order of preference.

    On a cluster of more than 64 GPUs only those that suit one, as to compare takes its time.
    """
    names = tuple(ALGORITHMS if collective == ALLREDUCE else OTHERS[collective])
    large = len(topology.gpus) > MOST_SQUARED and collective == ALLREDUCE
    if large and _able(topology, "hierarchical", collective, root):
        names = _FOR_CLUSTERS
    able = tuple(name for name in names if _able(topology, name, collective, root))
    if not able:
        try:
            _template(topology, names[0], collective, root)
        except PlanError as error:
            raise PlanError(f"no {collective} runs on {topology.name}: {error}") from None
    return able


def predict(
    topology: Topology, nbytes: int, algorithm: Named, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[float, int]:
    """(seconds, chunks) of an algorithm at the number of chunks that is best for `size_class`.

    Measured times (`Topology.timings`), between the sizes they are of; else the cost model's.
    The closed forms where they are exact, or on CPU ranks; else, from where they point, the number
    of chunks that simulates fastest; ties go to the fewest.
    """
    of_class = size_class(nbytes, parts(collective, len(topology.gpus)))
    seconds, chunks = _predicted(topology, of_class, algorithm, collective, root)
    if nbytes == of_class:
        return seconds, chunks
    if measured := _measured(topology, nbytes, algorithm, collective):
        return measured[0], chunks
    template, shape = _template(topology, algorithm, collective, root)
    moved = template.volume(nbytes)
    if shape.exact or largest_chunk(topology) or not nbytes:
        return shape.seconds(moved, chunks), chunks
    return simulated_seconds(template, topology, nbytes, chunks), chunks


def _measured(
    topology: Topology, nbytes: int, algorithm: Named, collective: str
) -> tuple[float, int] | None:
    if collective != ALLREDUCE or not isinstance(algorithm, str):
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

    def at(groups: float) -> tuple[float, int]:
        count = min(max(1, round(groups)) * stride, most)
        return simulated_seconds(template, topology, nbytes, count), count

    start = chunks / stride
    # a single group has no next one to wait for: its time lies on no curve
    best, quarter = at(1), len(template.connections) < LARGE
    for factor in (0.25, 0.5, 1, 2, 4) if quarter else (0.5, 1, 2):
        best = min(best, then := at(start * factor))
        if factor >= 1 and then[0] > _STEEP * best[0]:
            break
    for factor in (2.0, 0.5):  # and on, as long as it is worth it
        while (then := at(best[1] / stride * factor)) < best:
            small = then[0] > _WORTH * best[0]
            best = then
            if small:
                break
    return best


def choose(
    topology: Topology, nbytes: int, collective: str = ALLREDUCE, root: Root = 0,
    streamed: bool = False,
) -> str:  # fmt: skip
    """The algorithm with the least predicted time; the first named of equals.

    `streamed`: of those that take at most `_LATER` times as long, the one whose first chunk is
    final first, as its layers are used while later ones are under way.

    `LINKWEAVE_ALGORITHM` overrides the choice of an all-reduce's.
    """
    forced = os.environ.get("LINKWEAVE_ALGORITHM")
    if collective == ALLREDUCE and forced:
        if forced not in ALGORITHMS:
            raise PlanError(
                f"LINKWEAVE_ALGORITHM={forced!r} is no algorithm; choose from "
                + ", ".join(ALGORITHMS)
            )
        return forced
    of_class = size_class(nbytes, parts(collective, len(topology.gpus)))
    if streamed and nbytes and collective == ALLREDUCE:
        return _earliest(topology, of_class)
    return _fastest(topology, of_class, collective, root)


@lru_cache(maxsize=4096)
def _earliest(topology: Topology, nbytes: int) -> str:
    fastest = _fastest(topology, nbytes, ALLREDUCE, 0)
    most = predict(topology, nbytes, fastest)[0] * _LATER
    names = [n for n in candidates(topology) if predict(topology, nbytes, n)[0] <= most]

    def first(name: str) -> float:
        template, _ = _template(topology, name, ALLREDUCE, 0)
        chunks = predict(topology, nbytes, name)[1]
        return simulate(template.with_chunks(chunks), topology, nbytes).first_chunk_seconds

    return min(names, key=first)


@lru_cache(maxsize=4096)
def _fastest(topology: Topology, nbytes: int, collective: str, root: Root) -> str:
    """The most promising first; what cannot be as fast is not made a plan, or not simulated.

    Where some algorithms have been measured at this size, the fastest of those.
    """
    names = candidates(topology, collective, root)
    if collective == ALLREDUCE and topology.timings:
        timed = [n for n in names if measured_seconds(topology.timings, n, nbytes)]
        if timed:
            return min(timed, key=lambda name: predict(topology, nbytes, name)[0])
    size = len(topology.gpus)
    moved = nbytes * blocks(collective, size) // parts(collective, size)
    floors = {name: _floor(topology, name, collective, root) for name in names}

    def timed_at(name: str) -> tuple[float, int]:
        return predict(topology, nbytes, name, collective, root)[0], names.index(name)

    best = timed_at(min(names, key=lambda name: floors[name].guess(moved)))
    left = [name for name in names if floors[name].seconds(moved) <= best[0]]
    shapes = {name: _template(topology, name, collective, root)[1] for name in left}
    least = {
        name: max(floors[name].seconds(moved), shape.load * moved) for name, shape in shapes.items()
    }
    estimate = {n: shape.seconds(moved, shape.best_chunks(moved)) for n, shape in shapes.items()}
    for name in sorted(left, key=lambda n: estimate[n]):
        if least[name] <= best[0]:
            best = min(best, timed_at(name))
    return names[best[1]]


def ranked(
    topology: Topology, nbytes: int, collective: str = ALLREDUCE, root: Root = 0
) -> tuple[str, ...]:
    """All that this machine can run, the least predicted time first."""
    names = candidates(topology, collective, root)
    return tuple(sorted(names, key=lambda n: predict(topology, nbytes, n, collective, root)[0]))


def plan_allreduce(
    topology: Topology, nbytes: int, algorithm: Named = "auto", num_chunks: int | None = None
) -> Plan:
    """A verified all-reduce plan for a message of `nbytes` on this topology.

    `algorithm`: a name, or a function of a topology that returns an `Algorithm`
    (`planning.algorithms` has examples). `num_chunks` (the total over all trees) is chosen by the
    cost model where it is None. Pure (but for `LINKWEAVE_ALGORITHM`) and cached. Raises PlanError
    for an unknown algorithm, one that the machine cannot run, or sizes that make no sense.
    """
    return plan_collective(ALLREDUCE, topology, nbytes, 0, algorithm, num_chunks)


def plan_collective(
    collective: str, topology: Topology, nbytes: int, root: Root = 0, algorithm: Named = "auto",
    num_chunks: int | None = None, streamed: bool = False,
) -> Plan:  # fmt: skip
    """A verified plan of any collective (`planning.goals`), by `plan_allreduce`'s algorithms or
    those of `planning.others`.

    `nbytes` is the rank's whole buffer, as in nccl-tests: what is broadcast or reduced; all P
    blocks of an all-gather's result, of what a reduce-scatter takes, of what a rank sends in an
    all-to-all (then a multiple of P); what a sendrecv sends. `root` matters to broadcast and
    reduce; of a sendrecv it is its pairs. `streamed`: see `choose`. Plans are made for classes of
    sizes (`size_class`). Pure and cached. Raises PlanError as `plan_allreduce` does.
    """
    whole(nbytes, "nbytes", 0, MOST_BYTES)
    size = len(topology.gpus)
    check(collective, size, root)
    if nbytes % parts(collective, size):
        raise PlanError(
            f"{collective} over {size} ranks needs {size} equal blocks; {nbytes} bytes cannot be "
            f"split into {size}"
        )
    if algorithm == "auto":
        algorithm = choose(topology, nbytes, collective, root, streamed)
    template, _ = _template(topology, algorithm, collective, root)
    if num_chunks is None:
        num_chunks = predict(topology, nbytes, algorithm, collective, root)[1]
    return proved(template.with_chunks(num_chunks), topology)


def adopt(plan: Plan, topology: Topology) -> Plan:
    """A plan made elsewhere, by hand or from JSON, if it is right here. Raises PlanError."""
    if plan.size != len(topology.gpus):
        raise PlanError(
            f"the plan is for {plan.size} ranks; {topology.name} has {len(topology.gpus)} GPUs"
        )
    check_form(plan)
    return proved(plan, topology)
