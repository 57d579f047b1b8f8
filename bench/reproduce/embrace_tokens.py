"""Sizes of an embedding's gradients in rows, from streams of tokens: EmbRace's table 3.

A stream is an int64 array of steps x workers x tokens. Original gradients have a row for each
token, coalesced ones a row for each distinct token. Prior rows are those that the next batch looks
up too: the worker's own next batch, or the next batches of all workers, which is what a table
divided by columns must wait for (algorithm 1 takes gathered data).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EXPONENT = 1.0
"""Of the Zipf streams: the word of rank r has a frequency in proportion to 1 / r."""
STEPS = 8
"""Batches of a stream at most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows of a worker's gradient, averaged over workers and steps."""

    original: float
    coalesced: float
    prior: float
    own_prior: float


def zipf(vocabulary: int, workers: int, tokens: int) -> np.ndarray:
    """Return a stream of independent tokens, always the same one."""
    upto = np.cumsum(np.arange(1, vocabulary + 1) ** -EXPONENT)
    drawn = np.random.default_rng(0).random((STEPS, workers, tokens)) * upto[-1]
    return np.minimum(np.searchsorted(upto, drawn), vocabulary - 1)


def sizes(stream: np.ndarray) -> Sizes:
    """Count rows of the gradients of all steps but the last, after which nothing is looked up."""
    tokens = stream.shape[-1]
    distinct = [[np.unique(batch) for batch in step] for step in stream]
    counts = []
    for now, after in zip(distinct, distinct[1:], strict=False):
        union = np.unique(np.concatenate(after))
        for mine, own in zip(now, after, strict=True):
            prior = np.intersect1d(mine, union, assume_unique=True).size
            own_prior = np.intersect1d(mine, own, assume_unique=True).size
            counts.append((tokens, mine.size, prior, own_prior))
    return Sizes(*np.mean(counts, axis=0).tolist())
