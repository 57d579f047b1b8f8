"""Launches of `entries.cu`: sparse vectors checked, added to a residual, and moved to and from
messages.

A vector is (values, indices), float32 and int32 arrays on the GPU. A message is its number of
entries (8 bytes), indices of 4 bytes and values of 4 or 2.
"""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct

ENTRIES = fields(("u8", "values indices far_values far_indices head residual n limit"))
HEAD, INDEX = 8, 4  # bytes
Pair = tuple[Any, Any]


def admit(gpu: Gpu, values: Any, indices: Any, dtype: str, limit: int) -> Pair | None:
    """A caller's vector, widened, in memory of its own; None where its indices do not ascend or are
    not from 0 to `limit` - 1. Waits for the GPU."""
    n = int(indices.shape[0])
    wide, where, wrong = gpu.empty(n, "float32"), gpu.empty(n, "int32"), gpu.full(1, "int64", 0)
    _launch(
        gpu, "admit", dtype, n, values=gpu.address(wide), indices=gpu.address(where),
        far_values=gpu.address(values), far_indices=gpu.address(indices), head=gpu.address(wrong),
        limit=limit,
    )  # fmt: skip
    return None if gpu.read(wrong)[0] else (wide, where)


def settle(gpu: Gpu, vector: Pair, dtype: str, residual: Any) -> None:
    """Round a vector's values to those of a dtype, in place; the rest goes to the `residual`, if
    there is one."""
    values, indices = vector
    _launch(
        gpu, "settle", dtype, int(indices.shape[0]), values=gpu.address(values),
        indices=gpu.address(indices), residual=0 if residual is None else gpu.address(residual),
    )  # fmt: skip


def keep(gpu: Gpu, vector: Pair, residual: Any) -> None:
    """residual[indices[i]] += values[i]."""
    values, indices = vector
    _launch(
        gpu, "keep", "float32", int(indices.shape[0]), values=gpu.address(values),
        indices=gpu.address(indices), residual=gpu.address(residual),
    )  # fmt: skip


def pack(gpu: Gpu, vector: Pair, dtype: str, message: int) -> None:
    """Write a vector to the `message` at an address, with room enough for it."""
    values, indices = vector
    n = int(indices.shape[0])
    _launch(
        gpu, "pack", dtype, n, values=gpu.address(values), indices=gpu.address(indices),
        head=message, far_indices=message + HEAD, far_values=message + HEAD + INDEX * n,
    )  # fmt: skip


def unpack(gpu: Gpu, n: int, dtype: str, message: int) -> Pair:
    """The vector of a message of n entries."""
    values, indices = gpu.empty(n, "float32"), gpu.empty(n, "int32")
    _launch(
        gpu, "unpack", dtype, n, values=gpu.address(values), indices=gpu.address(indices),
        far_indices=message + HEAD, far_values=message + HEAD + INDEX * n,
    )  # fmt: skip
    return values, indices


def narrowed(gpu: Gpu, vector: Pair, dtype: str) -> Pair:
    """With values of a dtype."""
    if dtype == "float32":
        return vector
    values, indices = vector
    n = int(indices.shape[0])
    found, same, head = gpu.empty(n, dtype), gpu.empty(n, "int32"), gpu.empty(1, "int64")
    _launch(
        gpu, "pack", dtype, n, values=gpu.address(values), indices=gpu.address(indices),
        head=gpu.address(head), far_indices=gpu.address(same), far_values=gpu.address(found),
    )  # fmt: skip
    return found, same


def _launch(gpu: Gpu, name: str, dtype: str, n: int, **named: int) -> None:
    blocks, _ = grid(gpu, n, gpu.threads, gpu.threads)
    gpu.launch("merge/entries.cu", name, element(dtype), struct(ENTRIES, n=n, **named), blocks)
