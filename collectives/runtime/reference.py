"""The reference: a plan carried out one step at a time on NumPy arrays. It defines the result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.execute_order import Visit, walk
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.dtypes import DTYPES, check_op, step_of

Array = NDArray[Any]


class Reference:
    """The reference as an `Executor` of all ranks, over memory of this process."""

    def __init__(self, size: int) -> None:
        self.ranks = range(size)

    def execute(self, plan: Plan, buffers: Sequence[Buffer], op: str = "sum") -> None:
        arrays = []
        for b in buffers:
            raw = (ctypes.c_uint8 * b.nbytes).from_address(b.address)
            arrays.append(np.ctypeslib.as_array(raw).view(DTYPES[b.dtype].stored))
        results = run(plan, arrays, op, bfloat16=buffers[0].dtype == "bfloat16")
        for array, result in zip(arrays, results, strict=True):
            array[:] = result


def run(
    plan: Plan, inputs: Sequence[Array], op: str = "sum", seed: int | None = None,
    bfloat16: bool = False,
) -> list[Array]:  # fmt: skip
    """What each rank's buffer holds after the plan; `inputs` are one array a rank, untouched.

    A buffer is laid out as `Plan.chunk_bounds` says (of an all-to-all: what is sent, and as much
    room for what is received).

    The named connections in plan order, the own value before them (or behind the first `ahead`).
    16-bit floats are combined in float32 and rounded once for each REDUCE; integers wrap; min and
    max propagate NaN; avg divides in the REDUCE that completes a chunk. Any byte of a bool but 0
    is True; what is combined is 0 or 1. With `bfloat16` the arrays are uint16 bit patterns. `seed`
    picks another legal order of steps. Raises CollectiveError.
    """
    if len(inputs) != plan.size:
        raise CollectiveError(f"the plan is for {plan.size} ranks, not {len(inputs)} inputs")
    buffers = [np.ascontiguousarray(x).reshape(-1).copy() for x in inputs]
    first = buffers[0]
    if any(b.shape != first.shape or b.dtype != first.dtype for b in buffers):
        raise CollectiveError("all inputs must have one shape and dtype")
    size = first.dtype.itemsize
    nbytes = first.nbytes // (2 if plan.collective == "alltoall" else 1)
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

    with np.errstate(all="ignore"):  # overflow and NaN are results here, not accidents
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
    """One REDUCE: `own` combined with `others` in order, then divided, then rounded once."""
    dtype = own.dtype
    name = "bfloat16" if bfloat16 else str(dtype)
    check_op(op, name)
    step = _STEPS[step_of(op, name)]
    total = _widen(own, bfloat16)
    for other in others:
        total = step(total, _widen(other, bfloat16))
    if divisor != 1:
        total = total / total.dtype.type(divisor)
    if bfloat16:
        return to_bfloat16(total)
    return total.astype(dtype)


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
    """float32 values rounded to nearest even, as uint16 patterns; a NaN stays a quiet NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)
