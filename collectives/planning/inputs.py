"""Which steps of a plan read what the caller has given: for calls that leave it as it is."""

from __future__ import annotations

from functools import lru_cache

from collectives.planning.plan import Op, Plan
from collectives.planning.walk import Visit, walk

Place = tuple[int, int, int]  # rank, channel, position in the stream's code


@lru_cache(maxsize=16)
def input_reads(plan: Plan) -> frozenset[Place]:
    """The SENDs and REDUCEs that take their own chunk before anything at their rank has written it.

    All other accesses to own chunks are to results. In a verified plan every two accesses to a
    chunk of which one writes are ordered, so any legal order of steps tells; and as each group of
    chunks repeats the steps, one group tells for all.
    """
    written: set[tuple[int, int]] = set()
    found: set[Place] = set()

    def visit(v: Visit) -> None:
        own = v.stream.rank, v.chunk
        reads = v.step.op is Op.REDUCE or (v.step.op is Op.SEND and v.step.source is None)
        if reads and own not in written:
            found.add((v.stream.rank, v.stream.channel, v.at))
        if v.step.op in (Op.REDUCE, Op.COPY):
            written.add(own)

    walk(plan.with_chunks(plan.stride), visit)
    return frozenset(found)
