"""The k largest |x| of one long row on the CPU, exact.

The key of x is the bit pattern of |x|, which has the same order; all NaN share one key above
infinity. For float32 one pass over the row is enough: a sample yields a threshold that somewhat
more than k keys reach, these are gathered, and the k-th largest is found among them. If the sample
was misleading, and for 16-bit floats, histograms of the keys' digits find the k-th largest (radix
select), and another pass gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numba import njit

from linkweave.kernels.dtypes import DTYPES
from linkweave.kernels.parallel import parts, run_parts

BLOCK = 64  # keys per block; blocks whose maximum is too small are skipped
SAMPLE, _FEW = 1 << 16, 1024  # the most and the fewest keys of a sample
_SPREAD = 4.5  # standard deviations by which a sample may err

# Loop indices are unsigned: Numba tests signed ones for wraparound, which prevents vectorisation.
U = np.uint64


@njit(inline="always")
def _most_of(bits, mask, first, last):
    """The largest key from `first` to `last`; NaN are not yet mapped to one key."""
    most = bits[first] & mask
    for i in range(first, last):
        most = max(most, bits[i] & mask)
    return most


@njit(nogil=True, cache=True)
def _gather(bits, start, stop, mask, low, at):
    """Write the positions of keys >= `low` to `at`; returns their number, or -1 if `at` is full."""
    found = U(0)
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        if _most_of(bits, mask, first, last) >= low:
            if found + U(BLOCK) > U(at.size):
                return -1
            for i in range(first, last):
                at[found] = i
                found += U((bits[i] & mask) >= low)
    return np.int64(found)


@njit(nogil=True, cache=True)
def _histogram(bits, start, stop, mask, nan, prefix, above, shift, counts):
    """Count the digits (key >> shift) & (counts.size - 1) of keys with key >> above == prefix."""
    digit = U(counts.size - 1)
    for i in range(U(start), U(stop)):
        key = U(min(bits[i] & mask, nan))
        if key >> U(above) == U(prefix):
            counts[(key >> U(shift)) & digit] += 1


@njit(nogil=True, cache=True)
def _collect(bits, start, stop, mask, nan, least, equal, at):
    """Write the positions of keys > `least` and of the first `equal` keys == `least` to `at`;
    returns their number."""
    found = U(0)
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        most = min(_most_of(bits, mask, first, last), nan)
        if most < least or (not equal and most == least):
            continue
        for i in range(first, last):
            key = min(bits[i] & mask, nan)
            if key > least:
                at[found] = i
                found += U(1)
            elif key == least and equal:
                at[found] = i
                found += U(1)
                equal -= 1
    return np.int64(found)


class Keys:
    """How a dtype's bit patterns become keys."""

    def __init__(self, dtype: str) -> None:
        wide = DTYPES[dtype].size == 4
        self.dtype = np.uint32 if wide else np.uint16
        self.bits = 31 if wide else 15
        self.mask = self.dtype((1 << self.bits) - 1)
        self.nan = self.dtype(DTYPES[dtype].infinity + 1)  # the smallest NaN stands for all
        self.shifts = (20, 10, 0) if wide else (0,)

    def of(self, bits: np.ndarray) -> np.ndarray:
        return np.minimum(bits & self.mask, self.nan)


def select(bits: np.ndarray, dtype: str, k: int) -> np.ndarray:
    """Ascending int64 positions of the k largest |x|; of equal ones, the first are selected.

    `bits` (uint32 or uint16 [n]) are the bit patterns of the row; 0 <= k <= n.
    """
    if k in (0, bits.size):
        return np.arange(k, dtype=np.int64)
    keys = Keys(dtype)
    if dtype == "float32" and k <= bits.size // 8:
        at = _sampled(bits, keys, k)
        if at is not None:
            return at[largest(keys.of(bits[at]), k)]
    return _by_histograms(bits, keys, k)


def _sampled(bits: np.ndarray, keys: Keys, k: int) -> np.ndarray | None:
    """Positions of at least k of the largest keys; None if a sample yields no useful threshold."""
    limits = bound(keys.of(bits[sample_positions(bits.size)]), bits.size, k)
    if limits is None:
        return None
    low, most = limits
    spans = parts(bits.size, BLOCK)
    at = [np.empty(min(most, stop - start) + BLOCK, np.int64) for start, stop in spans]
    counts = run_parts(lambda i: _gather(bits, *spans[i], keys.mask, low, at[i]), len(spans))
    if min(counts) < 0 or not k <= sum(counts) <= most:
        return None
    return joined(at, counts)


@lru_cache(maxsize=16)
def sample_positions(n: int) -> np.ndarray:
    """The positions at which a row of n is sampled: irregular, and always the same."""
    step = int(n * 0.6180339887498949) | 1
    return np.arange(min(n, max(_FEW, min(n // 16, SAMPLE))), dtype=np.int64) * step % n


def rank_of(samples: int, n: int, k: int) -> int:
    """The rank, from the largest, of the sampled key that at least k of n keys should reach."""
    wanted = samples * k / n
    return int(wanted + _SPREAD * wanted**0.5) + 8


def bound(sampled: np.ndarray, n: int, k: int) -> tuple[np.generic, int] | None:
    """(threshold, most): at least k and at most `most` of n keys should reach the threshold.

    None if the sample is too small for k.
    """
    rank = rank_of(sampled.size, n, k)
    if rank >= sampled.size:
        return None
    return np.partition(sampled, -rank)[-rank], 4 * rank * n // sampled.size + 4096


def largest(keys: np.ndarray, k: int) -> np.ndarray:
    """Which keys (bool) are the k largest; of equal ones, the first are."""
    if keys.size == k:
        return np.ones(k, bool)
    least = np.partition(keys, keys.size - k)[keys.size - k]
    take: np.ndarray = keys > least
    equal = np.flatnonzero(keys == least)
    take[equal[: k - int(np.count_nonzero(take))]] = True
    return take


def kth(
    bits: np.ndarray, keys: Keys, k: int, spans: Sequence[tuple[int, int]]
) -> tuple[np.generic, int, list[int]]:
    """(the k-th largest key, how many keys equal to it are among the k largest, how many keys of
    each span equal it). Radix select: one histogram for each digit, from the highest."""
    prefix, above, left = 0, keys.bits, k
    counts = np.zeros((len(spans), 0), np.int64)
    digit = 0
    for shift in keys.shifts:
        counts = np.zeros((len(spans), 1 << (above - shift)), np.int64)
        run_parts(
            lambda i, s=shift, p=prefix, a=above, c=counts: _histogram(
                bits, *spans[i], keys.mask, keys.nan, p, a, s, c[i]
            ),
            len(spans),
        )
        from_above = np.cumsum(counts.sum(0)[::-1])
        higher = int(np.searchsorted(from_above, left))  # digits above the one that reaches k
        digit = counts.shape[1] - 1 - higher
        left -= int(from_above[higher - 1]) if higher else 0
        prefix, above = prefix << (above - shift) | digit, shift
    return keys.dtype(prefix), left, counts[:, digit].tolist()


def _by_histograms(bits: np.ndarray, keys: Keys, k: int) -> np.ndarray:
    spans = parts(bits.size, BLOCK)
    least, left, equals = kth(bits, keys, k, spans)
    shares = []  # the keys equal to the k-th largest that each span contributes: the first ones
    for equal in equals:
        shares.append(min(equal, left))
        left -= shares[-1]
    at = [np.empty(min(k, stop - start), np.int64) for start, stop in spans]
    found = run_parts(
        lambda i: _collect(bits, *spans[i], keys.mask, keys.nan, least, shares[i], at[i]),
        len(spans),
    )
    return joined(at, found)


def joined(at: Sequence[np.ndarray], counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([p[:n] for p, n in zip(at, counts, strict=True)])
