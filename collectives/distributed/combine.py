"""How values of several machines are combined: by gloo, or where they lie side by side."""

from __future__ import annotations

from functools import reduce
from operator import add, and_, mul, or_, xor
from typing import Any

import torch
import torch.distributed as dist

from linkweave.collectives.tensors import dtype_name
from linkweave.kernels.dtypes import step_of

OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR, "xor": dist.ReduceOp.BXOR,
}  # fmt: skip
"""torch.distributed's name of each op."""

_OF_STEPS = OPS | {"any": OPS["max"], "all": OPS["min"], "odd": OPS["xor"]}
_PAIRWISE = {
    "sum": add, "prod": mul, "min": torch.minimum, "max": torch.maximum, "and": and_, "or": or_,
    "xor": xor, "any": or_, "all": and_, "odd": xor,
}  # fmt: skip


def gloo_op(op: str, x: Any) -> Any:
    """What gloo is asked for, to combine tensors like `x`: for an average, the sum."""
    return _OF_STEPS[step_of(op, dtype_name(x))]


def undivided(op: str) -> str:
    """The op with which values are combined before an average is divided."""
    return "sum" if op == "avg" else op


def combined(rows: Any, op: str) -> Any:
    """The rows of a tensor, or tensors, combined in their order; 16-bit floats are added in float32
    and rounded once. An average is not divided. min and max keep NaN."""
    step, kind = step_of(op, dtype_name(rows[0])), rows[0].dtype
    if step == "sum" and kind in (torch.float16, torch.bfloat16):
        rows = [row.float() for row in rows]
    return reduce(_PAIRWISE[step], rows).to(kind)
