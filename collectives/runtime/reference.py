"""The reference executor: NumPy, one step at a time. It defines the result of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.walk import Visit, walk
from linkweave.collectives.runtime.buffer import check_op, step_of

Array = NDArray[Any]


def run(
    plan: Plan, inputs: Sequence[Array], op: str = "sum", seed: int | None = None,
    bfloat16: bool = False,
) -> list[Array]:  # fmt: skip
    """Run a plan; returns the contents of each rank's buffer.

    `inputs` has one array per rank, all of one shape and dtype, and is not changed. Its layout is
    that of `Plan.chunk_bounds`; for an all-to-all, the data to send is followed by as much room for
    the data received. With `bfloat16`, arrays are uint16 bit patterns.

    A REDUCE combines values in the order of its connections; the rank's own value comes first, or
    behind the first `ahead` ones. 16-bit floats are combined in float32 and rounded once per
    REDUCE; integers wrap; min and max propagate NaN; avg divides in the REDUCE that completes a
    chunk. Any nonzero byte of a bool is True; results are 0 or 1. `seed` selects another valid
    order of steps, which must not change the result. Raises CollectiveError.
    """
    if len(inputs) != plan.size:
        raise CollectiveError(f"the plan is for {plan.size} ranks, not {len(inputs)} inputs")
    buffers = [np.ascontiguousarray(x).reshape(-1).copy() for x in inputs]
    first = buffers[0]
    if any(b.shape != first.shape or b.dtype != first.dtype for b in buffers):
        raise CollectiveError("all inputs must have one shape and dtype")
    size = first.dtype.itemsize
    nbytes = first.nbytes // plan.definition.sides
    bounds = [
        [(a // size, b // size) for a, b in plan.chunk_bounds(nbytes, rank)]
        for rank in range(plan.size)
    ]
    slots: dict[tuple[int, int], Array] = {}

    def visit(v: Visit) -> None:
        if v.step.op is Op.SIGNAL or v.step.op is Op.WAIT:
            return
        rank = v.track.rank
        own = buffers[rank][slice(*bounds[rank][v.chunk])]
        if v.step.op is Op.SEND:
            data = own
            if v.step.source is not None:
                data = slots[v.step.source, v.source_slot]
            for key in zip(v.step.connections, v.slots, strict=True):
                slots[key] = data.copy()
            return
        arrived = [slots[key] for key in zip(v.step.connections, v.slots, strict=True)]
        if v.step.op is Op.COPY:
            own[...] = arrived[0]
        else:
            divisor = plan.size if op == "avg" and v.step.last else 1
            values = [*arrived[: v.step.ahead], own, *arrived[v.step.ahead :]]
            own[...] = combine(values[0], values[1:], op, divisor, bfloat16)

    with np.errstate(all="ignore"):  # overflow and NaN are valid results
        walk(plan, visit, seed)
    return [b.reshape(x.shape) for b, x in zip(buffers, inputs, strict=True)]


def _min(a: Array, b: Array) -> Array:
    return np.where((b < a) | np.not_equal(b, b), b, a)  # b != b: a NaN wins


def _max(a: Array, b: Array) -> Array:
    return np.where((b > a) | np.not_equal(b, b), b, a)


_STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add, "prod": np.multiply, "min": _min, "max": _max,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "any": np.logical_or, "all": np.logical_and, "odd": np.logical_xor,
}  # fmt: skip


def combine(
    own: Array, others: Sequence[Array], op: str, divisor: int = 1, bfloat16: bool = False
) -> Array:
    """One REDUCE: combine `own` with `others` in order, divide, and round once."""
    dtype = own.dtype
    name = "bfloat16" if bfloat16 else str(dtype)
    check_op(op, name)
    step = _STEPS[step_of(op, name)]
    total = _widen(own, bfloat16)
    for other in others:
        total = step(total, _widen(other, bfloat16))
    if divisor != 1:
        total = total / total.dtype.type(divisor)
    return to_bfloat16(total) if bfloat16 else total.astype(dtype)


def _widen(x: Array, bfloat16: bool) -> Array:
    if bfloat16:
        return from_bfloat16(x)
    if x.dtype == np.bool_:
        return np.not_equal(x.view(np.uint8), 0)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def from_bfloat16(bits: Array) -> Array:
    """float32 values of uint16 bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """float32 values rounded to nearest even, as uint16 patterns; NaN becomes a quiet NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)
