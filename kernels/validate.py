"""What is refused before anything is done, by name and value; of arrays of any library."""

from __future__ import annotations

import operator
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")
INDICES = ("int32", "int64")


def dtype_of(x: Any, name: str = "") -> str:
    """float32, float16 or bfloat16."""
    found = _name(x)
    if found not in DTYPES:
        of = f" of {name}" if name else ""
        raise TypeError(f"dtype {found}{of} is not supported; choose from {', '.join(DTYPES)}")
    return found


def index_dtype(x: Any, name: str = "indices") -> str:
    """int32 or int64, of an array with one dimension."""
    found = _name(x)
    if found not in INDICES or len(x.shape) != 1:
        raise TypeError(
            f"{name} must be int32 or int64 in one dimension, not {found} of shape "
            f"{tuple(getattr(x, 'shape', ()))}"
        )
    return found


def index_type(n: int) -> str:
    """The dtype of places in a row of that length."""
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
    """`k` of n."""
    if not 0 <= (found := integer(k, "k")) <= n:
        raise ValueError(f"k must be from 0 to {n}, not {found}")
    return found


def same_shape(grad: Any, residual: Any) -> None:
    if tuple(grad.shape) != tuple(residual.shape):
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, residual {tuple(residual.shape)}: they must agree"
        )


def one_for_each(indices: Any, values: Any) -> None:
    """A row of `values` for each index."""
    if tuple(values.shape)[:1] != tuple(indices.shape):
        raise ValueError(f"{indices.shape[0]} indices, but values of shape {tuple(values.shape)}")


def rows_of(table: Any, values: Any) -> None:
    """Rows that can be added to the table's."""
    shape = tuple(table.shape)
    if not shape or tuple(values.shape)[1:] != shape[1:]:
        raise ValueError(f"values of shape {tuple(values.shape)} for a table of {shape}")


def vectors(a: tuple[Any, Any], b: tuple[Any, Any]) -> str:
    """The dtype of the indices of two sparse vectors, float32 values."""
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


def outside(at: int, index: int, limit: int) -> str:
    """What is said of an index that is out of range."""
    return f"indices[{at}] is {index}; the table has {limit} rows, from 0"


def _name(x: Any) -> str:
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
