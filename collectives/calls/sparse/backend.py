"""The interface of sparse vectors on one device: the CPU (`host`) or a GPU (`gpu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.collective import Pairs, Root
from linkweave.collectives.planning.sparse_tree import INDEX
from linkweave.collectives.runtime.buffer import DTYPES
from linkweave.collectives.runtime.reference import from_bfloat16, to_bfloat16
from linkweave.kernels.merge.cpu import PAD

Vector = tuple[Any, Any]
"""(values, indices): ascending int32 indices; float32 values that the wire dtype can hold."""

Message = tuple[str, int, str, Root]
"""A collective that a mode uses: kind, bytes of its buffer, dtype, root."""


class Backend(Protocol):
    """One rank's vector and residual, with operations on vectors and messages between ranks."""

    mine: Vector
    wire: Wire

    def size(self, vector: Vector) -> int:
        """The vector's number of entries, or as many as there may be."""

    def arrived(self, context: Any, vector: Vector) -> Vector:
        """The vector, without room behind its entries, when all messages have arrived.

        Raises the error of a collective that has failed.
        """

    def merge(self, a: Vector, b: Vector | None, k: int) -> tuple[Vector, Vector]:
        """The k largest entries of a + b, unrounded, and the others."""

    def rounded(self, vector: Vector) -> tuple[Vector, Vector | None]:
        """The vector with values of the wire dtype, and what that takes from them, if it may."""

    def keep(self, vector: Vector, among: Vector | None = None) -> None:
        """Add a vector to the residual; if `among` is given, only its entries at indices there."""

    def put_back(self, found: Vector) -> None:
        """Add this rank's entries that are not in `found` to the residual, if there is one."""

    def refusal(self, context: Any, messages: Sequence[Message]) -> str:
        """Why these messages cannot be sent, the same on all ranks; empty if they can."""

    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        """Send vectors of at most k entries from sources to targets. Returns the one received,
        which may still be under way."""

    def share(self, context: Any, vector: Vector, root: int, k: int) -> Vector:
        """Broadcast the root's vector, which has at most k entries. It may still be under way."""

    def gather(self, context: Any, counts: list[int]) -> list[Vector]:
        """Gather all ranks' vectors, which have `counts` entries. They may be under way."""

    def dense(self, context: Any, numel: int) -> Vector:
        """Sum all ranks' vectors by a dense all-reduce; zeros are left out."""

    def result(self, vector: Vector, divisor: int) -> Vector:
        """The vector divided by `divisor` in float32, then in the caller's library and dtype."""


@dataclass(frozen=True, slots=True)
class SparseCall:
    """A call that all ranks have agreed on. `counts` are the ranks' numbers of entries."""

    backend: Backend
    numel: int
    k: int
    op: str
    mode: str
    conserve: bool
    counts: list[int]


HostVector = tuple[NDArray[np.float32], NDArray[np.int32]]

_ALIGN = 16  # bytes


@dataclass(frozen=True, slots=True)
class Wire:
    """The format of vectors whose values have one dtype.

    A message of up to k entries holds k indices, then k values; the indices of what is no entry are
    `PAD`.
    """

    dtype: str

    @property
    def item(self) -> int:
        """Bytes of a value."""
        return DTYPES[self.dtype].size

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return self.item + INDEX

    def message(self, k: int) -> int:
        """Bytes of a message of up to k entries."""
        return self.entry * k

    def part(self, counts: Sequence[int]) -> int:
        """Bytes of each rank's part of an all-gather, if the ranks have `counts` entries."""
        return -(-self.message(max(counts)) // _ALIGN) * _ALIGN

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Values rounded to the wire dtype, to nearest even. Finite values saturate."""
        if self.dtype == "float32":
            return values
        most = np.float32(DTYPES[self.dtype].largest)
        finite = np.isfinite(values)
        values = np.where(finite, np.clip(values, -most, most), values)
        if self.dtype == "float16":
            return values.astype(np.float16).astype(np.float32)
        return from_bfloat16(to_bfloat16(values))

    def pack(self, vector: HostVector, room: NDArray[np.uint8]) -> None:
        """Write a vector into `room`, which has exactly its size."""
        values, indices = vector
        room[: indices.nbytes].view(np.int32)[:] = indices
        room[indices.nbytes :].view(self._stored)[:] = self._narrow(values)

    def message_of(self, vector: HostVector, k: int) -> NDArray[np.uint8]:
        """A message of up to k entries with a vector."""
        values, indices = np.zeros(k, np.float32), np.full(k, PAD, np.int32)
        values[: vector[0].size], indices[: vector[1].size] = vector
        whole = np.empty(self.message(k), np.uint8)
        self.pack((values, indices), whole)
        return whole

    def read(self, message: NDArray[np.uint8]) -> HostVector:
        """A copy of the vector in a message."""
        values, indices = self.unpack(message)
        size = int(np.searchsorted(indices, PAD))
        return values[:size], indices[:size]

    def unpack(self, room: NDArray[np.uint8]) -> HostVector:
        """A copy of the vector that fills `room`."""
        first = room.size // self.entry * INDEX
        stored = room[first:].view(self._stored)
        values = from_bfloat16(stored) if self.dtype == "bfloat16" else stored.astype(np.float32)
        return values, room[:first].view(np.int32).copy()

    @property
    def _stored(self) -> str:
        return DTYPES[self.dtype].stored

    def _narrow(self, values: NDArray[np.float32]) -> NDArray[np.generic]:
        if self.dtype == "bfloat16":
            return to_bfloat16(values)
        return values.astype(self.dtype)
