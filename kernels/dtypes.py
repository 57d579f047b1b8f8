"""The table of dtypes and ops that the reference, the kernels and the runtimes share.

It imports nothing heavy, so that planning may read it too.
"""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    size: int  # bytes of an element
    kind: str  # float, int or bool
    stored: str  # NumPy's dtype that holds the same bits
    element: str  # the type's name in the CUDA sources
    fraction: int = 0  # bits of a float's fraction

    @property
    def infinity(self) -> int:
        """The bit pattern of a float's positive infinity (float8_e4m3fn has none); those of NaN are
        larger."""
        return (1 << (8 * self.size - 1)) - (1 << self.fraction)

    @property
    def largest(self) -> float:
        """A float's largest finite value, of those that have infinities."""
        exponent_bits = 8 * self.size - 1 - self.fraction
        return float((2 - 2.0**-self.fraction) * 2.0 ** (2 ** (exponent_bits - 1) - 1))


DTYPES = {
    "float32": Dtype(4, "float", "float32", "float", 23),
    "float64": Dtype(8, "float", "float64", "double", 52),
    "float16": Dtype(2, "float", "float16", "float16", 10),
    "bfloat16": Dtype(2, "float", "uint16", "bfloat16", 7),
    "float8_e4m3fn": Dtype(1, "float", "uint8", "float8_e4m3fn", 3),
    "float8_e5m2": Dtype(1, "float", "uint8", "float8_e5m2", 2),
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
"""The step that combines two values, for each op and each kind of dtype that it supports."""

REDUCTIONS = {
    "sum": "sum", "min": "min_", "max": "max_", "prod": "prod", "any": "max_", "all": "min_",
    "and": "and_", "or": "or_", "xor": "xor_", "odd": "xor_",
}  # fmt: skip
"""The functor in the CUDA sources of each step; a bool is a byte, 0 or 1."""


def step_of(op: str, dtype: str) -> str:
    """The step with which an op combines values of a dtype."""
    return OPS[op][DTYPES[dtype].kind]


def ops_of(dtype: str) -> list[str]:
    """The ops that a dtype supports."""
    return [op for op, steps in OPS.items() if DTYPES[dtype].kind in steps]
