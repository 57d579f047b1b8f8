"""The interface of sparse vectors on one device: the CPU (`host`) or a GPU (`gpu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from linkweave.collectives.planning.collective import Pairs, Root
from linkweave.collectives.sparse.wire import Wire

Vector = tuple[Any, Any]
"""(values, indices): ascending int32 indices; float32 values that the wire dtype can hold."""

Message = tuple[str, int, str, Root]
"""A collective that a mode uses: kind, bytes of its buffer, dtype, root."""


class Backend(Protocol):
    """One rank's vector and residual, with operations on vectors and messages between ranks."""

    mine: Vector
    wire: Wire

    def size(self, vector: Vector) -> int: ...

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
        """Send vectors of at most k entries from sources to targets. Returns the one received."""

    def share(self, context: Any, vector: Vector, root: int, k: int) -> Vector:
        """Broadcast the root's vector, which has at most k entries."""

    def gather(self, context: Any, counts: list[int]) -> list[Vector]:
        """Gather all ranks' vectors, which have `counts` entries."""

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
