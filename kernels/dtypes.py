"""The table of dtypes and ops: what reference, kernels, runtimes and error messages know of them.

Light, so that planning may read it too.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    size: int  # bytes of an element
    kind: str  # float, int or bool
    stored: str  # NumPy's dtype that holds the same bits
    element: str  # the type's name in the CUDA sources


DTYPES = {
    "float32": Dtype(4, "float", "float32", "float"),
    "float64": Dtype(8, "float", "float64", "double"),
    "float16": Dtype(2, "float", "float16", "float16"),
    "bfloat16": Dtype(2, "float", "uint16", "bfloat16"),
    "int8": Dtype(1, "int", "int8", "signed char"),
    "uint8": Dtype(1, "int", "uint8", "u8"),
    "int32": Dtype(4, "int", "int32", "int"),
    "int64": Dtype(8, "int", "int64", "i64"),
    "bool": Dtype(1, "bool", "bool", "u8"),
}

OPS = {
    "sum": {"float": "sum", "int": "sum", "bool": "any"},
    "avg": {"float": "sum"},
    "min": {"float": "min", "int": "min", "bool": "all"},
    "max": {"float": "max", "int": "max", "bool": "any"},
    "prod": {"float": "prod", "int": "prod", "bool": "all"},
    "and": {"int": "and", "bool": "all"},
    "or": {"int": "or", "bool": "any"},
    "xor": {"int": "xor", "bool": "odd"},
}
"""For each kind of dtype that an op takes, the step that combines two values."""

REDUCTIONS = {
    "sum": "sum", "min": "min_", "max": "max_", "prod": "prod", "any": "max_", "all": "min_",
}  # fmt: skip
"""Of the steps that GPUs can do, the reduction in the CUDA sources; bytes of a bool are 0 or 1."""


def step_of(op: str, dtype: str) -> str:
    """The step of an op that this dtype takes."""
    return OPS[op][DTYPES[dtype].kind]


def ops_of(dtype: str, gpu: bool = False) -> list[str]:
    """The ops that a dtype takes, on CPUs or on GPUs."""
    kind = DTYPES[dtype].kind
    return [
        op for op, steps in OPS.items() if kind in steps and (not gpu or steps[kind] in REDUCTIONS)
    ]
