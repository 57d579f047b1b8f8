"""One collective of a schedule, and the pieces of gradients that it sends."""

from __future__ import annotations

from dataclasses import dataclass

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.profile import MAX_BYTES, Profile
from linkweave.topology.checks import integer, shown

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = KINDS = "all-reduce", "reduce-scatter", "all-gather"
"""A reduce-scatter leaves each rank an equal share of the averages; an all-gather of the same
pieces copies these to all ranks. Both together are an all-reduce."""

ALIGN = 16
"""Bytes: where gradients may be cut, so that no element is, of whatever dtype."""
MAX_LANES = 64
"""All-reduces at once that a policy may be asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [first, first + nbytes) of a layer's gradient."""

    layer: int
    first: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective of the pieces, on a lane. It starts once its gradients are there, and the
    communication before it on its lane and those numbered in `after` are over.

    `streamed`: pieces of an all-reduce become final one after another, in their order, as a
    gradient queue delivers them; otherwise all become final at the end. `kind`: one of KINDS.
    """

    pieces: tuple[Piece, ...]
    lane: int = 0
    after: tuple[int, ...] = ()
    streamed: bool = False
    kind: str = ALL_REDUCE

    @property
    def final(self) -> bool:
        """Whether it leaves averages on all ranks."""
        return self.kind != REDUCE_SCATTER

    @property
    def share(self) -> float:
        """Its share of an all-reduce: a ring takes as many messages of as many bytes to scatter as
        to gather (DeAR, Zhang et al. 2023)."""
        return 1.0 if self.kind == ALL_REDUCE else 0.5

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def check(self, where: str, layers: int) -> None:
        """Raise CollectiveError for what no runtime could carry out on so many layers. `where`
        names the communication."""
        if not self.pieces:
            raise CollectiveError(f"{where} has no pieces")
        if self.kind not in KINDS or (self.streamed and self.kind != ALL_REDUCE):
            raise CollectiveError(
                f"{where} must be one of {', '.join(KINDS)}, of which only an all-reduce is "
                f"streamed, not {shown(self.kind)}"
            )
        numbers = [("lane", self.lane)]
        for piece in self.pieces:
            numbers += [("layer", piece.layer), ("first", piece.first), ("nbytes", piece.nbytes)]
        for name, value in numbers:
            integer(value, f"{where}: {name}", 0, MAX_BYTES)
        for piece in self.pieces:
            if piece.layer >= layers:
                raise CollectiveError(f"{where}: there are {layers} layers, and no {piece.layer}")
            if piece.first % ALIGN:
                raise CollectiveError(
                    f"{where}: a piece begins at byte {piece.first}, not at a multiple of {ALIGN}"
                )


def partition_of(value: object) -> int:
    """A size of blocks, in bytes."""
    found = integer(value, "partition", 1, MAX_BYTES)
    if found % ALIGN:
        raise CollectiveError(f"partition must be a multiple of {ALIGN} bytes, not {shown(value)}")
    return found


def whole(profile: Profile, layers: tuple[int, ...], **extra: object) -> Communication:
    """One communication of all of these layers' gradients."""
    pieces = tuple(Piece(i, 0, profile.layers[i].nbytes) for i in layers)
    return Communication(pieces, **extra)  # type: ignore[arg-type]
