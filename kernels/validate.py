"""Checks of arguments, for arrays of any library. Each raises TypeError or ValueError."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from typing import Any

from linkweave.kernels.dtypes import DTYPES

FLOATS = tuple(name for name, d in DTYPES.items() if d.kind == "float" and d.size in (2, 4))


def is_torch(x: Any) -> bool:
    """Whether it is a torch tensor; torch may not be imported, or not yet in full."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(x, kind)


def dtype_of(x: Any, *others: str) -> str:
    """The dtype of `x`: float32, float16, bfloat16, or one of the others."""
    found = _name(x)
    if found not in (*FLOATS, *others):
        known = ", ".join((*FLOATS, *others))
        raise TypeError(f"dtype {found} is not supported; choose from {known}")
    return found


def index_dtype(x: Any, name: str = "indices") -> str:
    """The dtype of a one-dimensional array of indices: int32 or int64."""
    found = _name(x)
    if found not in ("int32", "int64") or len(x.shape) != 1:
        raise TypeError(
            f"{name} must be int32 or int64 in one dimension, not {found} of shape "
            f"{tuple(getattr(x, 'shape', ()))}"
        )
    return found


def index_type(n: int) -> str:
    """The dtype of positions in a row of n elements."""
    return "int32" if n <= 1 << 31 else "int64"


def integer(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def at_least_0(value: Any, name: str) -> int:
    if (found := integer(value, name)) < 0:
        raise ValueError(f"{name} must be at least 0, not {found}")
    return found


def count(k: Any, n: int) -> int:
    """`k` as an integer from 0 to n."""
    if not 0 <= (found := integer(k, "k")) <= n:
        raise ValueError(f"k must be from 0 to {n}, not {found}")
    return found


def same_shape(grad: Any, residual: Any) -> None:
    if tuple(grad.shape) != tuple(residual.shape):
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, residual {tuple(residual.shape)}: they must agree"
        )


def one_for_each(indices: Any, values: Any) -> None:
    """`values` must have one row for each index."""
    if tuple(values.shape)[:1] != tuple(indices.shape):
        raise ValueError(f"{indices.shape[0]} indices, but values of shape {tuple(values.shape)}")


def vectors(a: tuple[Any, Any], b: tuple[Any, Any]) -> str:
    """The dtype of the indices of two sparse vectors, which must agree; values are float32."""
    for (values, indices), name in ((a, "a"), (b, "b")):
        index_dtype(indices, f"{name}'s indices")
        if _name(values) != "float32" or tuple(values.shape) != tuple(indices.shape):
            raise TypeError(
                f"{name}'s values must be float32, one for each of {indices.shape[0]} indices, not "
                f"{_name(values)} of shape {tuple(values.shape)}"
            )
    found = _name(a[1]), _name(b[1])
    if found[0] != found[1]:
        raise TypeError(f"a's indices are {found[0]}, b's {found[1]}: they must agree")
    return found[0]


LARGEST = DTYPES["float32"].largest
WIDE, HALF = ("float32", "float64"), ("float16", "bfloat16")


def cast(x: Any, out: Any, x_at: int, out_at: int) -> str:
    """The 16-bit dtype of a cast from `x` to `out`, which begin at the addresses given.

    Both must be contiguous, with equal numbers of elements, and must not overlap.
    """
    found, sizes = (_name(x), _name(out)), [math.prod(array.shape) for array in (x, out)]
    if not any(found[i] in WIDE and found[1 - i] in HALF for i in (0, 1)):
        raise TypeError(
            f"cannot cast {found[0]} to {found[1]}; one must be {' or '.join(WIDE)}, the other "
            f"{' or '.join(HALF)}"
        )
    if sizes[0] != sizes[1]:
        raise ValueError(f"x has {sizes[0]} elements, out {sizes[1]}: they must agree")
    for array, name in ((x, "x"), (out, "out")):
        is_torch = hasattr(array, "is_contiguous")
        if not (array.is_contiguous() if is_torch else array.flags.c_contiguous):
            raise TypeError(f"{name} must be contiguous")
    ends = [at + n * DTYPES[d].size for at, n, d in zip((x_at, out_at), sizes, found, strict=True)]
    if x_at < ends[1] and out_at < ends[0] and sizes[0]:
        raise ValueError("x and out overlap in memory")
    return found[0] if found[0] in HALF else found[1]


def on_device_of(x: Any, out: Any) -> None:
    """Two torch tensors must be on one device."""
    if getattr(out, "device", None) != x.device:
        raise TypeError(
            f"x is on {x.device}, out on {getattr(out, 'device', 'no device')}: all must be on the "
            "CPU or on one GPU"
        )


def float32_value(value: Any, name: str) -> float:
    """A finite real number in the range of float32."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name} must be finite in float32, not {value!r}")
    return float(value)


def floats_at_least_0(**named: Any) -> list[float]:
    """Finite real numbers in the range of float32, none negative."""
    found = [float32_value(value, name) for name, value in named.items()]
    if min(found) < 0:
        raise ValueError(f"{', '.join(named)} must be at least 0, not {found}")
    return found


def outside(at: int, index: int, limit: int) -> str:
    """The message for an index that is out of range."""
    return f"indices[{at}] is {index}; the table has {limit} rows, from 0"


def _name(x: Any) -> str:
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
