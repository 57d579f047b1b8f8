"""What each collective starts from and must end with.

In a plan over P ranks, contributions are sets of ranks, as bits: bit r for what rank r gives, bit
P + r for other data in its buffer, which no result may contain. Chunk c of an all-gather or a
reduce-scatter belongs to block (= rank) c mod P; of an all-to-all, to the block that rank s sends
to rank d, where c mod P^2 = s P + d. In a sendrecv the target of each pair gets its source's data;
a rank is in one pair at most, and those in none keep what they have.
"""

from __future__ import annotations

from linkweave.collectives.errors import PlanError

COLLECTIVES = ("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall")
SENDRECV = "sendrecv"

Pairs = tuple[tuple[int, int], ...]
"""(source, target) ranks."""

Root = int | Pairs
"""Where data comes from: a rank; of a sendrecv its pairs."""


def blocks(collective: str, size: int) -> int:
    """How many parts of the data the collective tells apart; every group has chunks of all."""
    return {"allgather": size, "reduce_scatter": size, "alltoall": size * size}.get(collective, 1)


def parts(collective: str, size: int) -> int:
    """How many equal parts a rank's buffer has; its size is a multiple of that."""
    return 1 if blocks(collective, size) == 1 else size


def check(collective: str, size: int, root: Root) -> None:
    """Raise PlanError unless there is such a collective, and its root is a rank, or pairs."""
    if collective == SENDRECV:
        _check_pairs(size, root)
        return
    if collective not in COLLECTIVES:
        raise PlanError(f"unknown collective {collective!r}; choose from {', '.join(COLLECTIVES)}")
    if not _is_rank(root, size):
        raise PlanError(f"root {root!r} is not a rank; ranks are 0 to {size - 1}")


def _is_rank(value: object, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _check_pairs(size: int, pairs: object) -> None:
    shaped = isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
    ranks = [rank for pair in pairs for rank in pair] if isinstance(pairs, tuple) and shaped else []
    if not shaped or not all(_is_rank(r, size) for r in ranks) or len(set(ranks)) < len(ranks):
        raise PlanError(
            f"a sendrecv needs pairs (source, target) of different ranks from 0 to {size - 1}, "
            f"each in one pair at most, not {pairs!r}"
        )


def targets(root: Root) -> dict[int, int]:
    """Of a sendrecv: the source of each target."""
    return {} if isinstance(root, int) else {target: source for source, target in root}


def start(collective: str, size: int, root: Root, rank: int, index: int) -> int:
    """What a rank's own chunk holds at first; `index` is the chunk's place in its group."""
    match collective:
        case "broadcast":
            holds = rank == root
        case "allgather":
            holds = rank == index % size
        case "alltoall":
            holds = rank == index % (size * size) // size
        case "sendrecv":
            holds = rank not in targets(root)
        case _:
            holds = True
    return 1 << rank if holds else 1 << size + rank


def goal(collective: str, size: int, root: Root, rank: int, index: int) -> int | None:
    """What a rank's own chunk must hold in the end; None where it does not matter."""
    everyone = (1 << size) - 1
    match collective:
        case "sendrecv":
            return 1 << targets(root).get(rank, rank)
        case "broadcast":
            assert isinstance(root, int)
            return 1 << root
        case "reduce":
            return everyone if rank == root else None
        case "allgather":
            return 1 << index % size
        case "reduce_scatter":
            return everyone if rank == index % size else None
        case "alltoall":
            source, target = divmod(index % (size * size), size)
            return 1 << source if rank == target else None
    return everyone
