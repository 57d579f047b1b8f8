"""The collectives: what each rank starts from, what it must end with, how its buffer is laid out.

A plan over P ranks describes what a chunk contains as a set of contributions, kept in the bits of
an integer: bit r is what rank r contributes; bit P + r is other data in rank r's buffer, which no
result may contain.

A new collective needs an entry in `COLLECTIVES`, its algorithms in `algorithms.registry`, and a
method of `methods.Methods`, which `collectives/__init__.py` names for type checkers. Unless its
message is whole and in place, as a broadcast's is, it also needs a function in `calls.operations`.
For several machines it needs an entry in `cluster.kinds`, and for torch its verb in
`distributed.group`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from linkweave.collectives.errors import PlanError
from linkweave.topology.checks import integer

ALLREDUCE = "allreduce"
SENDRECV = "sendrecv"

Pairs = tuple[tuple[int, int], ...]
"""(source, target) ranks."""

Root = int | Pairs
"""The root's rank, or the pairs of a sendrecv; 0 where a collective has neither."""


class Layout(Enum):
    """The blocks that make up a message. Every group of chunks has chunks of all blocks."""

    WHOLE = 0
    """One block."""
    PER_RANK = 1
    """P equal blocks in the order of the ranks; chunk c belongs to block c mod P."""
    PER_PAIR = 2
    """P x P equal blocks; chunk c belongs to the block that rank s sends to rank d, where
    c mod P^2 = s P + d. A rank's buffer has the P blocks that it sends and, behind them, the P
    that it receives."""

    def blocks(self, size: int) -> int:
        """The number of blocks over all ranks."""
        return int(size**self.value)

    def parts(self, size: int) -> int:
        """The number of equal parts of one rank's message."""
        return 1 if self is Layout.WHOLE else size


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective promises. `gives` and `goal` take (size, root, rank, index of the chunk in
    its group)."""

    name: str
    layout: Layout
    gives: Callable[[int, Any, int, int], bool]
    """Whether the rank's own chunk holds its contribution at the start."""
    goal: Callable[[int, Any, int, int], int | None]
    """The contributions that the rank's own chunk must hold at the end; None if any will do."""
    root: Literal["none", "rank", "pairs"] = "none"
    combines: bool = False
    """Whether an operator combines the contributions."""
    symmetric: bool = False
    """Whether every rank contributes a whole message and receives the whole result in place,
    so that gradient queues and results written into peers' buffers are possible."""
    tunable: bool = False
    """Whether the caller may choose the algorithm, which is then made from the topology alone: by
    name, as a function, by `LINKWEAVE_ALGORITHM`, or by measured times."""

    pulled_by: Literal["none", "one", "all"] = "none"
    """Whether one other rank needs each byte of an input, or all, in collectives in which CPU ranks
    read long inputs straight from each other's memory, by no plan (`pulls`)."""

    @property
    def sides(self) -> int:
        """Messages in a rank's buffer: 2 where one is sent and another one received."""
        return 2 if self.layout is Layout.PER_PAIR else 1

    @property
    def same_offsets(self) -> bool:
        """Whether a chunk lies at the same offset in the buffers of all ranks."""
        return self.layout is not Layout.PER_PAIR

    @property
    def gathers(self) -> bool:
        """Whether ranks' inputs are the rows of the result, and not rows those of an input."""
        return self.layout is Layout.PER_RANK and not self.combines and self.gives(2, 0, 1, 1)

    def has_chunk(self, size: int, rank: int, index: int) -> bool:
        """Whether the rank's buffer has the chunk, rather than only passing it on."""
        ends = divmod(index % (size * size), size)
        return self.layout is not Layout.PER_PAIR or rank in ends

    def cells(self, size: int, stride: int) -> int:
        """The chunks of one group, counted on all ranks that have them."""
        return stride * min(size, 2 if self.layout is Layout.PER_PAIR else size)

    def volume(self, size: int, nbytes: int) -> int:
        """Bytes of all chunks together, for a message of `nbytes` on each rank."""
        return nbytes * self.layout.blocks(size) // self.layout.parts(size)

    def pulls(self, size: int) -> bool:
        """Whether ranks read inputs from each other's memory: where each byte has one reader. A
        slot that is written once serves several readers faster."""
        return self.pulled_by == "one" or (self.pulled_by == "all" and size == 2)

    def start(self, size: int, root: Root, rank: int, index: int) -> int:
        """What the rank's own chunk holds at the start, as a set of contributions."""
        return 1 << rank if self.gives(size, root, rank, index) else 1 << size + rank


def targets(pairs: Pairs) -> dict[int, int]:
    """The source of each target."""
    return {target: source for source, target in pairs}


def _everyone(size: int) -> int:
    return (1 << size) - 1


def _to_pair(size: int, root: Root, rank: int, index: int) -> int | None:
    source, target = divmod(index % (size * size), size)
    return 1 << source if rank == target else None


_ALL = (
    Collective(
        ALLREDUCE, Layout.WHOLE, combines=True, symmetric=True, tunable=True,
        gives=lambda size, root, rank, index: True,
        goal=lambda size, root, rank, index: _everyone(size),
    ),
    Collective(
        "broadcast", Layout.WHOLE, root="rank", pulled_by="all",
        gives=lambda size, root, rank, index: bool(rank == root),
        goal=lambda size, root, rank, index: 1 << root,
    ),
    Collective(
        "reduce", Layout.WHOLE, root="rank", combines=True,
        gives=lambda size, root, rank, index: True,
        goal=lambda size, root, rank, index: _everyone(size) if rank == root else None,
    ),
    Collective(
        "allgather", Layout.PER_RANK, pulled_by="all",
        gives=lambda size, root, rank, index: rank == index % size,
        goal=lambda size, root, rank, index: 1 << index % size,
    ),
    Collective(
        "reduce_scatter", Layout.PER_RANK, combines=True,
        gives=lambda size, root, rank, index: True,
        goal=lambda size, root, rank, index: _everyone(size) if rank == index % size else None,
    ),
    Collective(
        "gather", Layout.PER_RANK, root="rank",
        gives=lambda size, root, rank, index: rank == index % size,
        goal=lambda size, root, rank, index: 1 << index % size if rank == root else None,
    ),
    Collective(
        "scatter", Layout.PER_RANK, root="rank", pulled_by="one",
        gives=lambda size, root, rank, index: bool(rank == root),
        goal=lambda size, root, rank, index: 1 << root if rank == index % size else None,
    ),
    Collective(
        "alltoall", Layout.PER_PAIR, pulled_by="one",
        gives=lambda size, root, rank, index: rank == index % (size * size) // size,
        goal=_to_pair,
    ),
    Collective(  # each target gets its source's data; ranks in no pair keep what they have
        SENDRECV, Layout.WHOLE, root="pairs",
        gives=lambda size, pairs, rank, index: rank not in targets(pairs),
        goal=lambda size, pairs, rank, index: 1 << targets(pairs).get(rank, rank),
    ),
)  # fmt: skip

COLLECTIVES = {collective.name: collective for collective in _ALL}
PUBLIC = tuple(name for name, collective in COLLECTIVES.items() if collective.root != "pairs")
"""The collectives that users may name. A sendrecv serves those of messages."""


def check(collective: object, size: int, root: object) -> Root:
    """Return the root. Raises PlanError for an unknown collective, or a root it cannot have."""
    found = COLLECTIVES.get(collective) if isinstance(collective, str) else None
    if found is None:
        raise PlanError(f"unknown collective {collective!r}; choose from {', '.join(PUBLIC)}")
    if found.root != "pairs":
        return integer(root, "root", 0, size - 1, PlanError)
    if not isinstance(root, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in root):
        raise PlanError(f"the root of a sendrecv must be pairs (source, target), not {root!r}")
    name = "a rank of a sendrecv"
    ranks = [integer(rank, name, 0, size - 1, PlanError) for pair in root for rank in pair]
    if len(set(ranks)) < len(ranks):
        raise PlanError(f"each rank may be in at most one pair of a sendrecv, not {root!r}")
    return tuple(zip(ranks[::2], ranks[1::2], strict=True))
