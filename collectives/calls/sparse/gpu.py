"""Sparse vectors on GPUs, merged there and sent from GPU to GPU by planned collectives.

On the way vectors have a fixed room, whose end may hold no entries (`kernels.merge.entries`). So
the host waits for the GPU twice only: for the check of the caller's indices, and for the size of
the result, when all messages have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linkweave.collectives.calls.gpu import GpuContext
from linkweave.collectives.calls.sparse.backend import Message, Vector, Wire
from linkweave.collectives.calls.sparse.modes import check_vector, flat_residual, wrong_indices
from linkweave.collectives.planning.collective import SENDRECV, Pairs, Root, targets
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.tensors import dtype_name
from linkweave.kernels.gpu.arrays import Gpu, LibraryGpu
from linkweave.kernels.merge import entries as gpu_entries
from linkweave.kernels.merge.gpu import merge_padded


class GpuBackend:
    """`Backend` of CuPy arrays and torch CUDA tensors, on the library's current stream."""

    def __init__(self, values: Any, indices: Any, numel: Any, residual: Any) -> None:
        self._limit = limit = check_vector(values, indices, numel)
        self.wire = Wire(dtype_name(values))
        self._gpu: Gpu = LibraryGpu(values)
        gpu = self._gpu
        self._residual = None
        if residual is not None:
            self._residual = gpu.contiguous(flat_residual(residual, limit, values))
        values, indices = gpu.contiguous(values), gpu.contiguous(indices)
        mine = gpu_entries.admit(gpu, values, indices, self.wire.dtype, limit)
        if mine is None:
            raise wrong_indices(limit)
        self.mine: Vector = mine
        self._room: Buffer | None = None
        self._whole: Vector | None = None  # of `dense`, which has arrived

    def size(self, vector: Vector) -> int:
        return int(vector[1].shape[0])

    def arrived(self, context: GpuContext, vector: Vector) -> Vector:
        if vector is self._whole:
            return vector
        found: Vector = gpu_entries.measured(self._gpu, vector)
        context.gpu.check()
        return found

    def merge(self, a: Vector, b: Vector | None, k: int) -> tuple[Vector, Vector]:
        b = b or (self._gpu.empty(0, "float32"), self._gpu.empty(0, "int32"))
        parts: tuple[Vector, Vector] = merge_padded(self._gpu, a, b, k, self._limit)
        return parts

    def rounded(self, vector: Vector) -> tuple[Vector, Vector | None]:
        if self.wire.dtype == "float32":
            return vector, None
        values, indices = vector
        lost = self._gpu.full(self.size(vector), "float32", 0)
        gpu_entries.settle(self._gpu, vector, self.wire.dtype, lost)
        return (values, indices), (lost, indices)

    def keep(self, vector: Vector, among: Vector | None = None) -> None:
        common = None if among is None else among[1]
        gpu_entries.keep(self._gpu, vector, self._residual, common=common)

    def put_back(self, found: Vector) -> None:
        if self._residual is not None:
            gpu_entries.keep(self._gpu, self.mine, self._residual, foreign=found[1])

    def result(self, vector: Vector, divisor: int) -> Vector:
        if divisor != 1:
            vector = vector[0] / divisor, vector[1]
        found: Vector = gpu_entries.narrowed(self._gpu, vector, self.wire.dtype)
        return found

    def refusal(self, context: GpuContext, messages: Sequence[Message]) -> str:
        for kind, nbytes, dtype, root in messages:
            if not nbytes:
                continue
            buffer = Buffer(0, nbytes, dtype, 4 if dtype == "float32" else 1)
            if why := context.gpu.refusal(context.request(kind, buffer, "sum", root)):
                return why
        return ""

    def send(self, context: GpuContext, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        room = self._message(k)
        if context.rank in dict(pairs):
            gpu_entries.pack(self._gpu, vector, self.wire.dtype, room.address, k)
        self._make(context, SENDRECV, room, pairs)
        return self._taken(room, k) if context.rank in targets(pairs) else None

    def share(self, context: GpuContext, vector: Vector, root: int, k: int) -> Vector:
        room = self._message(k)
        if context.rank == root:
            gpu_entries.pack(self._gpu, vector, self.wire.dtype, room.address, k)
        self._make(context, "broadcast", room, root)
        return vector if context.rank == root else self._taken(room, k)

    def gather(self, context: GpuContext, counts: list[int]) -> list[Vector]:
        each = self.wire.part(counts)
        whole = self._bytes(each * context.size)
        parts = [whole.address + each * rank for rank in range(context.size)]
        mine = parts[context.rank]
        gpu_entries.pack(self._gpu, self.mine, self.wire.dtype, mine, counts[context.rank])
        self._make(context, "allgather", whole, 0)
        return [
            gpu_entries.unpack(self._gpu, n, self.wire.dtype, part)
            for n, part in zip(counts, parts, strict=True)
        ]

    def dense(self, context: GpuContext, numel: int) -> Vector:
        whole = self._gpu.full(numel, "float32", 0)
        gpu_entries.keep(self._gpu, self.mine, whole)
        buffer = Buffer(self._gpu.address(whole), 4 * numel, "float32", 4, whole)
        self._make(context, "allreduce", buffer, 0)
        found: Vector = self._gpu.nonzero(whole)  # waits for its size
        context.gpu.check()
        self._whole = found
        return found

    def _message(self, k: int) -> Buffer:
        """The buffer of all messages of a call.

        It can be reused because this rank's own kernels read it, on the stream that overwrites it.
        """
        if self._room is None:
            self._room = self._bytes(self.wire.message(k))
        return self._room

    def _bytes(self, nbytes: int) -> Buffer:
        array = self._gpu.empty(nbytes, "uint8")
        return Buffer(self._gpu.address(array), nbytes, "uint8", 1, array)

    def _make(self, context: GpuContext, kind: str, buffer: Buffer, root: Root) -> None:
        context.kept.append(buffer.owner)
        context.make(context.request(kind, buffer, "sum", root))

    def _taken(self, room: Buffer, k: int) -> Vector:
        """The vector of the message in `room`."""
        found: Vector = gpu_entries.unpack(self._gpu, k, self.wire.dtype, room.address)
        return found
