"""The reference executor: NumPy, one step at a time. It defines the result of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.dataflow import Visit, walk
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.buffer import DTYPES, check_op, step_of

Array = NDArray[Any]


def run(
    plan: Plan, inputs: Sequence[Array], op: str = "sum", seed: int | None = None, dtype: str = ""
) -> list[Array]:
    """Run a plan; returns the contents of each rank's buffer.

    `inputs` has one array per rank, all of one shape and dtype, and is not changed. Its layout is
    that of `Plan.chunk_bounds`; for an all-to-all, the data to send is followed by as much room for
    the data received. Arrays of a `dtype` that NumPy lacks are its bit patterns.

    A REDUCE combines values in the order of its connections; the rank's own value comes first, or
    behind the first `ahead` ones. Small floats are combined in float32 and rounded once per
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
            own[...] = combine(values[0], values[1:], op, divisor, dtype)

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
    own: Array, others: Sequence[Array], op: str, divisor: int = 1, dtype: str = ""
) -> Array:
    """One REDUCE: combine `own` with `others` in order, divide, and round once."""
    name = dtype or str(own.dtype)
    check_op(op, name)
    step = _STEPS[step_of(op, name)]
    total = widened(own, name)
    for other in others:
        total = step(total, widened(other, name))
    if divisor != 1:
        total = total / total.dtype.type(divisor)
    return rounded(total, name) if name in _ROUNDED else total.astype(own.dtype)


def widened(x: Array, dtype: str) -> Array:
    """The values in the type in which they are combined."""
    if dtype == "bfloat16":
        return from_bfloat16(x)
    if DTYPES[dtype].kind == "float" and x.dtype.kind != "f":
        return _float8(dtype)[0][x]
    if x.dtype == np.bool_:
        return np.not_equal(x.view(np.uint8), 0)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def rounded(x: Array, dtype: str) -> Array:
    """float32 values rounded to nearest even, as patterns of a dtype that NumPy lacks."""
    if dtype == "bfloat16":
        return to_bfloat16(x)
    middles = _float8(dtype)[1]
    size = np.abs(x.astype(np.float32))
    code = np.searchsorted(middles, size)  # of the largest value that is not above, if it is near
    tie = size == middles[np.minimum(code, len(middles) - 1)]
    code = np.where(np.isnan(size), 0x7F, code + (tie & (code & 1 == 1)))
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


_FLOAT8 = {"float8_e4m3fn": (4, 7), "float8_e5m2": (5, 15)}
"""Bits of the exponent, and its bias."""
_ROUNDED = ("bfloat16", *_FLOAT8)


@cache
def _float8(dtype: str) -> tuple[Array, Array]:
    """The value of each pattern, what lies midway between those of neighbours up to the first that
    is not finite: of float8_e4m3fn a NaN, as it has no infinity."""
    bits, bias = _FLOAT8[dtype]
    fraction = 7 - bits
    codes = np.arange(128)
    exponent, rest = codes >> fraction, (codes & ((1 << fraction) - 1)) / (1 << fraction)
    low = exponent == 0
    values = np.where(low, rest, 1 + rest) * 2.0 ** (np.where(low, 1, exponent) - bias)
    most = 0x7E if dtype == "float8_e4m3fn" else 0x7B  # the largest finite one
    middles = (values[: most + 1] + values[1 : most + 2]) / 2
    if dtype == "float8_e5m2":
        values[most + 1] = np.inf
    values[most + 1 + (dtype == "float8_e5m2") :] = np.nan
    both = np.concatenate([values, -values]).astype(np.float32)
    return both, middles.astype(np.float32)


def from_bfloat16(bits: Array) -> Array:
    """float32 values of uint16 bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """float32 values rounded to nearest even, as uint16 patterns; NaN becomes a quiet NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)
