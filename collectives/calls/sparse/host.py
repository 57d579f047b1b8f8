"""Sparse vectors on the CPU. Ranks read each other's vectors in shared memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.operations import allgather, into
from linkweave.collectives.calls.sparse.backend import Message, Vector, Wire
from linkweave.collectives.calls.sparse.modes import check_vector, flat_residual, wrong_indices
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.runtime.tensors import dtype_name, gpu_of
from linkweave.kernels import merge_topk
from linkweave.kernels.merge.cpu import add_at
from linkweave.kernels.validate import is_torch

_NOTHING: Vector = np.empty(0, np.float32), np.empty(0, np.int32)


class HostBackend:
    """`Backend` of NumPy arrays and torch CPU tensors."""

    def __init__(self, values: Any, indices: Any, numel: Any, residual: Any) -> None:
        if not is_torch(values) and not is_torch(indices) and gpu_of(indices) is None:
            values, indices = np.asarray(values), np.asarray(indices)
        limit = check_vector(values, indices, numel)
        self.wire = Wire(dtype_name(values))
        wide = _numpy(values.float() if is_torch(values) else values)
        where = _numpy(indices)
        if where.size and (where[0] < 0 or where[-1] >= limit or (where[1:] <= where[:-1]).any()):
            raise wrong_indices(limit)
        self.mine: Vector = wide.astype(np.float32, copy=False), where
        self._like = values
        flat = None if residual is None else flat_residual(residual, limit, values)
        self._residual = None if flat is None else _numpy(flat)
        self._sent: NDArray[np.uint8] | None = None

    def size(self, vector: Vector) -> int:
        return int(vector[1].size)

    def arrived(self, context: HostCalls, vector: Vector) -> Vector:
        return vector

    def merge(self, a: Vector, b: Vector | None, k: int) -> tuple[Vector, Vector]:
        parts: tuple[Vector, Vector] = merge_topk(a, _NOTHING if b is None else b, k)
        return parts

    def rounded(self, vector: Vector) -> tuple[Vector, Vector | None]:
        values, indices = vector
        settled = self.wire.rounded(values)
        if settled is values:
            return vector, None
        fine = np.isfinite(values)
        return (settled, indices), (values[fine] - settled[fine], indices[fine])

    def keep(self, vector: Vector, among: Vector | None = None) -> None:
        values, indices = vector
        if among is not None:
            there = np.isin(indices, among[1])
            values, indices = values[there], indices[there]
        add_at(self._residual, indices, values)

    def put_back(self, found: Vector) -> None:
        if self._residual is not None:
            lost = ~np.isin(self.mine[1], found[1])
            self.keep((self.mine[0][lost], self.mine[1][lost]))

    def result(self, vector: Vector, divisor: int) -> tuple[Any, Any]:
        values, indices = vector
        if divisor != 1:
            values = values / np.float32(divisor)
        if not is_torch(self._like):
            return values.astype(self.wire.dtype, copy=False), indices
        torch = sys.modules["torch"]
        return torch.from_numpy(values).to(self._like.dtype), torch.from_numpy(indices)

    def refusal(self, context: HostCalls, messages: Sequence[Message]) -> str:
        return ""

    def send(self, context: HostCalls, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        message = (-1, 0)
        if context.rank in dict(pairs):
            # kept until the call ends: the result depends on it, so then it has been read
            self._sent = context.block(self.wire.entry * self.size(vector))
            self.wire.pack(vector, self._sent)
            message = context.offset_of(self._sent), self.size(vector)
        rows = context.gather("merges", json.dumps(message).encode())
        if (source := targets(pairs).get(context.rank)) is None:
            return None
        offset, size = json.loads(rows[source])
        return self.wire.unpack(context.bytes_at(offset, self.wire.entry * size))

    def share(self, context: HostCalls, vector: Vector, root: int, k: int) -> Vector:
        message = self.wire.message_of(vector if context.rank == root else _NOTHING, k)
        self.broadcast(context, message, root)
        return self.wire.read(message)

    def gather(self, context: HostCalls, counts: list[int]) -> list[Vector]:
        entry = self.wire.entry
        packed = np.zeros(entry * max(counts), np.uint8)
        self.wire.pack(self.mine, packed[: entry * self.size(self.mine)])
        rows = allgather(context, packed, None, None)
        return [self.wire.unpack(r[: entry * n]) for r, n in zip(rows, counts, strict=True)]

    def dense(self, context: HostCalls, numel: int) -> Vector:
        whole = np.zeros(numel, np.float32)
        whole[self.mine[1]] = self.mine[0]
        self.add(context, whole)
        where = np.flatnonzero(whole).astype(np.int32)
        return whole[where], where

    def broadcast(self, context: HostCalls, message: NDArray[np.uint8], root: int) -> None:
        """Copy rank `root`'s message to all ranks."""
        into(context, "broadcast", message, "sum", root)

    def add(self, context: HostCalls, whole: NDArray[np.float32]) -> None:
        """Sum a dense vector over all ranks, in place."""
        into(context, "allreduce", whole, "sum")


def _numpy(x: Any) -> NDArray[Any]:
    return np.asarray(x.detach().resolve_neg().numpy() if is_torch(x) else x)
