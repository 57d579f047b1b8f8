"""What one rank's sparse vectors can do where they lie: on the CPU (`host`) or on a GPU (`gpu`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from linkweave.collectives.planning.goals import Pairs, Root
from linkweave.collectives.sparse.wire import Wire

Vector = tuple[Any, Any]
"""(values, indices): int32 indices that ascend; float32 values that the wire can hold."""

Message = tuple[str, int, str, Root]
"""A collective that a mode makes: its name, the bytes and the dtype of its buffer, its root."""


class Backend(Protocol):
    """One rank's vector and residual: how vectors are added, and how they travel."""

    mine: Vector
    wire: Wire

    def size(self, vector: Vector) -> int: ...

    def merge(self, a: Vector, b: Vector | None, k: int, keeps: bool) -> Vector:
        """The k largest of a + b, not rounded. With `keeps` the residual gets what is dropped."""

    def settle(self, vector: Vector, keeps: bool) -> Vector:
        """Round values to the wire's. With `keeps` the residual gets the rest."""

    def put_back(self, found: Vector) -> None:
        """Add to the residual, if there is one, those of our own entries that `found` lacks."""

    def refusal(self, context: Any, messages: Sequence[Message]) -> str:
        """Why there is no room for these messages, the same on all ranks; empty if there is."""

    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        """Send each source's vector, of at most k entries, to its target. Returns what came."""

    def share(self, context: Any, vector: Vector, root: int, k: int) -> Vector:
        """The root's vector, of at most k entries, on all ranks."""

    def gather(self, context: Any, counts: list[int]) -> list[Vector]:
        """All ranks' own vectors; `counts` are their numbers of entries."""

    def dense(self, context: Any, numel: int) -> Vector:
        """The sum of all ranks' own vectors, without zeros."""

    def result(self, vector: Vector, divisor: int) -> Vector:
        """The vector in the caller's library and dtype, divided in float32 before."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One rank's side of a call that all ranks have agreed on. `counts`: entries by rank."""

    backend: Backend
    numel: int
    k: int
    op: str
    mode: str
    conserve: bool
    counts: list[int]
