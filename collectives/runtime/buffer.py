"""The runtimes' view of a tensor, and the dtypes and ops that collectives support."""

from __future__ import annotations

from dataclasses import dataclass, field

from linkweave.collectives.errors import CollectiveError
from linkweave.kernels.dtypes import DTYPES, OPS, ops_of, step_of


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory of one dtype; `owner` keeps it alive."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int
    owner: object = field(default=None, compare=False, repr=False)


__all__ = ["DTYPES", "OPS", "check_op", "step_of", "unsupported"]


def unsupported(dtype: str) -> CollectiveError:
    return CollectiveError(f"unsupported dtype {dtype}; choose from {', '.join(DTYPES)}")


def check_op(op: object, dtype: str) -> None:
    """Raise CollectiveError unless `op` is defined for `dtype`."""
    if not isinstance(op, str) or op not in OPS:
        raise CollectiveError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise unsupported(dtype)
    if DTYPES[dtype].kind not in OPS[op]:
        able = ", ".join(ops_of(dtype))
        raise CollectiveError(f"{op} is not defined for {dtype}; choose from {able}")
