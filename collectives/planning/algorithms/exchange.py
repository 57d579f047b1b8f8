"""All-reduce by exchanges between pairs of ranks, 1, 2, 4, ... positions apart."""

from __future__ import annotations

from linkweave.collectives.planning.algorithms.embed import Edge, Embedding, embed
from linkweave.collectives.planning.lower import Algorithm, Copy, Move, Reduce, Round, few_enough
from linkweave.topology import Topology


def _distances(size: int) -> list[int]:
    """1, 2, 4, ... below the greatest power of two that is no larger than the size."""
    return [1 << i for i in range(size.bit_length() - 1)]


def _cube(topology: Topology) -> tuple[int, Embedding]:
    """The power of two that exchanges, and which rank holds each position.

    Positions beyond it hand their data to the one that far below first, and get it back at the end.
    """
    size = len(topology.gpus)
    cube = 1 << (size.bit_length() - 1)
    edges = [Edge(0, p, p ^ d) for d in _distances(size) for p in range(cube) if not p & d]
    edges += [Edge(0, p, p - cube) for p in range(cube, size)]
    return cube, embed(topology, edges, size)


def _detours(embedding: Embedding, channels: range) -> dict[tuple[int, int, int], tuple[int, ...]]:
    found: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for (_, p, q), middle in embedding.via.items():
        a, b = embedding.rank_of[p], embedding.rank_of[q]
        for channel in channels:
            found[channel, a, b] = found[channel, b, a] = (middle,)
    return found


def _finish(
    name: str, topology: Topology, stride: int, rounds: list[Round], embedding: Embedding,
    channels: range,
) -> Algorithm:  # fmt: skip
    return Algorithm(
        name, len(topology.gpus), stride, (tuple(rounds),), (), _detours(embedding, channels),
    )  # fmt: skip


def recursive_doubling(topology: Topology) -> Algorithm:
    """In round i ranks 2^i apart exchange all they have: log2 P start-ups, for small messages.

    Both partners combine the same two values in the same order, so the bits are the same on all
    ranks (Thakur, Rabenseifner, Gropp 2005, section 4.2).
    """
    size = len(topology.gpus)
    cube, embedding = _cube(topology)
    at = embedding.rank_of
    rounds: list[Round] = []
    if size > cube:
        rounds.append(tuple(Reduce((at[p],), at[p - cube], 0, 0) for p in range(cube, size)))
    for i, d in enumerate(_distances(size)):
        rounds.append(tuple(
            Reduce((at[p ^ d],), at[p], 0, i + 1, ahead=int(p & d > 0)) for p in range(cube)
        ))  # fmt: skip
    last = len(rounds)
    if size > cube:
        rounds.append(tuple(Copy(at[p - cube], (at[p],), 0, last) for p in range(cube, size)))
    return _finish("recursive_doubling", topology, 1, rounds, embedding, range(last + 1))


def halving_doubling(topology: Topology) -> Algorithm:
    """Reduce-scatter by halves between ranks ever nearer, all-gather back: 2 log2 P start-ups.

    Every byte is sent 2 (P - 1) / P times by each rank, as in a ring (Rabenseifner 2004). Chunk c
    ends on position c; each chunk has channels of its own, so that exchanges run side by side. The
    plan grows as P^2: PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("halving_doubling", len(topology.gpus))
    cube, embedding = _cube(topology)
    at = embedding.rank_of
    chunks = range(cube)
    rounds: list[Round] = []
    if size > cube:
        rounds.append(tuple(
            Reduce((at[p],), at[p - cube], c, c) for p in range(cube, size) for c in chunks
        ))  # fmt: skip
    open_: int = 0  # bits of a position that the chunks it still works on share with it
    for d in reversed(_distances(size)):
        open_ |= d
        rounds.append(tuple(
            Reduce((at[p ^ d],), at[p], c, c)
            for p in chunks for c in chunks if (p ^ c) & open_ == 0
        ))  # fmt: skip
    for d in _distances(size):
        moves: list[Move] = [
            Copy(at[p], (at[p ^ d],), c, cube + c)
            for p in chunks for c in chunks if (p ^ c) & open_ == 0
        ]  # fmt: skip
        rounds.append(tuple(moves))
        open_ &= ~d
    if size > cube:
        rounds.append(tuple(
            Copy(at[p - cube], (at[p],), c, cube + c) for p in range(cube, size) for c in chunks
        ))  # fmt: skip
    return _finish("halving_doubling", topology, cube, rounds, embedding, range(2 * cube))
