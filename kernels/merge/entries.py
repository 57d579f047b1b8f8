"""Launches of `entries.cu`: check sparse vectors, add them to a residual, pack and unpack them.

A vector is (float32 values [n], ascending int32 indices [n]) on the GPU, of which the last may be
`PAD`: these are no entries. So the host need not know how many entries there are. A message of
room n is n indices of 4 bytes, and n values of 4 or 2 bytes.
"""

from __future__ import annotations

from typing import Any

from linkweave.kernels.gpu.arrays import Gpu, element, fields, grid, struct

ENTRIES = fields(("u8", "values indices far_values far_indices number residual n room limit which"))
INDEX = 4  # bytes
Pair = tuple[Any, Any]
ALL, COMMON, FOREIGN = range(3)


def admit(gpu: Gpu, values: Any, indices: Any, dtype: str, limit: int) -> Pair | None:
    """A copy of a caller's vector, widened to float32. Waits for the GPU.

    None if the indices do not ascend or are not from 0 to `limit` - 1.
    """
    n = int(indices.shape[0])
    made, wrong = (gpu.empty(n, "float32"), gpu.empty(n, "int32")), gpu.full(1, "int64", 0)
    _launch(gpu, "admit", dtype, made, n, far=(values, indices), number=wrong, limit=limit)
    return None if gpu.read(wrong)[0] else made


def settle(gpu: Gpu, vector: Pair, dtype: str, lost: Any) -> None:
    """Round a vector's values to a dtype, in place, and write what each finite one loses to `lost`
    [n]."""
    _launch(gpu, "settle", dtype, vector, int(vector[1].shape[0]), residual=lost)


def keep(gpu: Gpu, vector: Pair, residual: Any, *, common: Any = None, foreign: Any = None) -> None:
    """residual[indices[i]] += values[i], for all entries; or those whose indices are in the
    ascending `common`; or those whose indices are not in the ascending `foreign`.

    Indices that the residual does not have, such as `PAD`, are passed over."""
    other = common if common is not None else foreign
    which = ALL if other is None else FOREIGN if common is None else COMMON
    far = (0, 0 if other is None else other)
    _launch(
        gpu, "keep", "float32", vector, 0 if other is None else int(other.shape[0]), far=far,
        residual=residual, limit=int(residual.shape[0]), which=which,
    )  # fmt: skip


def pack(gpu: Gpu, vector: Pair, dtype: str, message: int, room: int) -> None:
    """Write a vector to the message at the address `message`, with values of a dtype."""
    far = message + INDEX * room, message
    _launch(gpu, "pack", dtype, vector, room, far=far)


def unpack(gpu: Gpu, room: int, dtype: str, message: int) -> Pair:
    """The vector of a message."""
    vector = gpu.empty(room, "float32"), gpu.empty(room, "int32")
    _launch(gpu, "unpack", dtype, vector, room, far=(message + INDEX * room, message))
    return vector


def measured(gpu: Gpu, vector: Pair) -> Pair:
    """The vector without what is no entry. Waits for the GPU."""
    number = gpu.full(1, "int64", 0)
    _launch(gpu, "measure", "float32", vector, 0, number=number)
    size = int(gpu.read(number)[0])
    return vector[0][:size], vector[1][:size]


def narrowed(gpu: Gpu, vector: Pair, dtype: str) -> Pair:
    """A copy of the vector with values of a dtype."""
    n = int(vector[1].shape[0])
    made = gpu.empty(n, dtype), gpu.empty(n, "int32")
    _launch(gpu, "pack", dtype, vector, n, far=made)
    return made


def _launch(
    gpu: Gpu, name: str, dtype: str, vector: Pair, room: int, far: Pair = (0, 0), **others: Any
) -> None:
    """`far` are the values and indices of a message or a caller; fields are arrays or numbers."""
    n = int(vector[1].shape[0])
    names = ("values", "indices", "far_values", "far_indices")
    given = dict(zip(names, (*vector, *far), strict=True)) | others
    words = {field: x if isinstance(x, int) else gpu.address(x) for field, x in given.items()}
    blocks, _ = grid(gpu.blocks, max(n, room), gpu.threads, gpu.threads)
    argument = struct(ENTRIES, n=n, room=room, **words)
    gpu.launch("merge/entries.cu", (name,), element(dtype), argument, blocks)
