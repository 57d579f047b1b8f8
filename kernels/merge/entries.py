"""Launches of `entries.cu`: check sparse vectors, add them to a residual, pack and unpack them.

A vector is (float32 values [n], int32 indices [n]) on the GPU. A message holds the number of
entries n (8 bytes), n indices of 4 bytes, and n values of 4 or 2 bytes.
"""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct

ENTRIES = fields(("u8", "values indices far_values far_indices head residual n limit"))
HEAD, INDEX = 8, 4  # bytes
Pair = tuple[Any, Any]


def admit(gpu: Gpu, values: Any, indices: Any, dtype: str, limit: int) -> Pair | None:
    """A copy of a caller's vector, widened to float32. Waits for the GPU.

    None if the indices do not ascend or are not from 0 to `limit` - 1.
    """
    n = int(indices.shape[0])
    made, wrong = (gpu.empty(n, "float32"), gpu.empty(n, "int32")), gpu.full(1, "int64", 0)
    _launch(gpu, "admit", dtype, made, far=(values, indices), head=wrong, limit=limit)
    return None if gpu.read(wrong)[0] else made


def settle(gpu: Gpu, vector: Pair, dtype: str, lost: Any) -> None:
    """Round a vector's values to a dtype, in place, and write what each finite one loses to `lost`
    [n]."""
    _launch(gpu, "settle", dtype, vector, residual=lost)


def keep(gpu: Gpu, vector: Pair, residual: Any) -> None:
    """residual[indices[i]] += values[i]."""
    _launch(gpu, "keep", "float32", vector, residual=residual)


def pack(gpu: Gpu, vector: Pair, dtype: str, message: int) -> None:
    """Write a vector to the message at the address `message`, with values of a dtype."""
    far = message + HEAD + INDEX * int(vector[1].shape[0]), message + HEAD
    _launch(gpu, "pack", dtype, vector, far=far, head=message)


def unpack(gpu: Gpu, n: int, dtype: str, message: int) -> Pair:
    """The vector of a message of n entries."""
    vector = gpu.empty(n, "float32"), gpu.empty(n, "int32")
    _launch(gpu, "unpack", dtype, vector, far=(message + HEAD + INDEX * n, message + HEAD))
    return vector


def narrowed(gpu: Gpu, vector: Pair, dtype: str) -> Pair:
    """The vector with values of a dtype."""
    if dtype == "float32":
        return vector
    n = int(vector[1].shape[0])
    made, head = (gpu.empty(n, dtype), gpu.empty(n, "int32")), gpu.empty(1, "int64")
    _launch(gpu, "pack", dtype, vector, far=made, head=head)
    return made


def _launch(
    gpu: Gpu, name: str, dtype: str, vector: Pair, far: Pair = (0, 0), **others: Any
) -> None:
    """`far` are the values and indices of a message or a caller; fields are arrays or numbers."""
    n = int(vector[1].shape[0])
    names = ("values", "indices", "far_values", "far_indices")
    given = dict(zip(names, (*vector, *far), strict=True)) | others
    words = {field: x if isinstance(x, int) else gpu.address(x) for field, x in given.items()}
    blocks, _ = grid(gpu.blocks, n, gpu.threads, gpu.threads)
    gpu.launch("merge/entries.cu", (name,), element(dtype), struct(ENTRIES, n=n, **words), blocks)
