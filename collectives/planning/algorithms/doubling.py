"""All-reduce by exchanges between pairs of ranks that are 1, 2, 4, ... positions apart."""

from __future__ import annotations

from linkweave.collectives.planning.algorithms.embed import Edge, Embedding, embed
from linkweave.collectives.planning.lower import Algorithm, Copy, Move, Reduce, Round, few_enough
from linkweave.topology import Topology


def _distances(size: int) -> list[int]:
    """Return 1, 2, 4, ... below the largest power of two that does not exceed the size."""
    return [1 << i for i in range(size.bit_length() - 1)]


def _cube(topology: Topology) -> tuple[int, Embedding]:
    """Return the largest power of two that does not exceed the size, and which rank holds each
    position. Positions from there on first send their data to the position that many below, and
    receive the result at the end."""
    size = len(topology.gpus)
    cube = 1 << (size.bit_length() - 1)
    edges = [Edge(0, p, p ^ d) for d in _distances(size) for p in range(cube) if not p & d]
    edges += [Edge(0, p, p - cube) for p in range(cube, size)]
    return cube, embed(topology, edges, size)


def recursive_doubling(topology: Topology) -> Algorithm:
    """All-reduce in log2 P rounds, for small messages: in round i ranks 2^i apart exchange data.

    Both partners combine the same two values in the same order, so all ranks get the same bits
    (Thakur, Rabenseifner, Gropp 2005, section 4.2).
    """
    size = len(topology.gpus)
    cube, embedding = _cube(topology)
    at = embedding.rank_of
    rounds: list[Round] = []
    if size > cube:
        rounds.append(tuple(Reduce((at[p],), at[p - cube], 0, 0) for p in range(cube, size)))
    for i, d in enumerate(_distances(size)):
        rounds.append(
            tuple(Reduce((at[p ^ d],), at[p], 0, i + 1, ahead=int(p & d > 0)) for p in range(cube))
        )
    last = len(rounds)
    if size > cube:
        rounds.append(tuple(Copy(at[p - cube], (at[p],), 0, last) for p in range(cube, size)))
    detours = embedding.detours(range(last + 1))
    return Algorithm("recursive_doubling", size, 1, (tuple(rounds),), (), detours)


def halving_doubling(topology: Topology) -> Algorithm:
    """Reduce-scatter by recursive halving, then all-gather by doubling: 2 log2 P start-ups.

    Each rank sends 2 (P - 1) / P times the message, as in a ring (Rabenseifner 2004). Chunk c is
    complete at position c; each chunk has its own channels, so that exchanges run side by side. The
    plan grows as P^2: PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("halving_doubling", size)
    cube, embedding = _cube(topology)
    at = embedding.rank_of
    chunks = range(cube)
    rounds: list[Round] = []
    if size > cube:
        rounds.append(
            tuple(Reduce((at[p],), at[p - cube], c, c) for p in range(cube, size) for c in chunks)
        )
    fixed = 0  # the bits that a position shares with the chunks that it still works on
    for d in reversed(_distances(size)):
        fixed |= d
        rounds.append(tuple(
            Reduce((at[p ^ d],), at[p], c, c)
            for p in chunks for c in chunks if (p ^ c) & fixed == 0
        ))  # fmt: skip
    for d in _distances(size):
        moves: list[Move] = [
            Copy(at[p], (at[p ^ d],), c, cube + c)
            for p in chunks for c in chunks if (p ^ c) & fixed == 0
        ]  # fmt: skip
        rounds.append(tuple(moves))
        fixed &= ~d
    if size > cube:
        rounds.append(tuple(
            Copy(at[p - cube], (at[p],), c, cube + c) for p in range(cube, size) for c in chunks
        ))  # fmt: skip
    detours = embedding.detours(range(2 * cube))
    return Algorithm("halving_doubling", size, cube, (tuple(rounds),), (), detours)
