"""The k largest |x| of one long row on the CPU, exact.

A key is the bit pattern of |x|, in which larger is larger; all NaN are alike, above infinity.
Float32 goes over the row once: a sample tells a key that somewhat more than k others reach, those
are gathered, and the k-th largest is found among them. Where the sample was misleading, and for
16-bit floats, histograms of the keys find it exactly (radix select); one more pass gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts

BLOCK = 64  # keys whose maximum is looked at before any of them is
SAMPLE, _FEW = 1 << 16, 1024  # keys, at most and at least
_SPREAD = 4.5  # standard deviations by which a sample may mislead


# Indices are unsigned: a signed one might count from the end, and to find out keeps loops from
# being vectorised.
U = np.uint64


@njit(inline="always")
def most_of(bits, mask, first, last):
    """The largest key, all NaN apart."""
    most = bits[first] & mask
    for i in range(first, last):
        most = max(most, bits[i] & mask)
    return most


@njit(nogil=True, cache=True)
def _gather(bits, start, stop, mask, low, at):
    """Positions from `start` to `stop` of keys >= `low`: their number, or -1 where `at` is full."""
    found = U(0)
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        if most_of(bits, mask, first, last) >= low:
            if found + U(BLOCK) > U(at.size):
                return -1
            for i in range(first, last):
                at[found] = i
                found += U((bits[i] & mask) >= low)
    return np.int64(found)


@njit(nogil=True, cache=True)
def _histogram(bits, start, stop, mask, nan, prefix, above, shift, counts):
    """Count (key >> shift) & (counts' size - 1) of keys whose bits from `above` on are `prefix`."""
    digit = U(counts.size - 1)
    for i in range(U(start), U(stop)):
        key = U(min(bits[i] & mask, nan))
        if key >> U(above) == U(prefix):
            counts[(key >> U(shift)) & digit] += 1


@njit(nogil=True, cache=True)
def _collect(bits, start, stop, mask, nan, least, equal, at):
    """Positions of keys > `least`, and of the first `equal` keys that are `least`."""
    found = U(0)
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        most = min(most_of(bits, mask, first, last), nan)
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
        wide = dtype == "float32"
        self.dtype = np.uint32 if wide else np.uint16
        self.mask = self.dtype(0x7FFFFFFF if wide else 0x7FFF)
        # the least NaN, which stands for all
        self.nan = self.dtype({"float32": 0x7F800001, "float16": 0x7C01, "bfloat16": 0x7F81}[dtype])
        self.shifts = (20, 10, 0) if wide else (0,)
        self.bits = 31 if wide else 15

    def of(self, bits: np.ndarray) -> np.ndarray:
        return np.minimum(bits & self.mask, self.nan)


def select(bits: np.ndarray, dtype: str, k: int) -> np.ndarray:
    """int64 positions, ascending, of the k largest |x|; of equals the first ones.

    `bits`: uint32 or uint16 [n], the row's bit patterns; 0 <= k <= n.
    """
    if k in (0, bits.size):
        return np.arange(k, dtype=np.int64)
    keys = Keys(dtype)
    if dtype == "float32" and k <= bits.size // 8:
        at = _sampled(bits, keys, k)
        if at is not None:
            return among(bits, keys, k, at)
    return _by_histograms(bits, keys, k)


def at_least(bits: np.ndarray, dtype: str, k: int) -> np.ndarray:
    """Positions of all keys from one on that a sample tells; of exactly k where it cannot."""
    keys = Keys(dtype)
    if dtype == "float32" and 0 < k <= bits.size // 8:
        at = _sampled(bits, keys, k)
        if at is not None:
            return at
    return select(bits, dtype, k)


def _sampled(bits: np.ndarray, keys: Keys, k: int) -> np.ndarray | None:
    """Positions of at least k of the largest keys, if a sample can tell from which one on."""
    limits = bound(keys.of(bits[places(bits.size)]), bits.size, k)
    return _candidates(bits, keys, k, *limits) if limits else None


@lru_cache(maxsize=16)
def places(n: int) -> np.ndarray:
    """Where a row of that length is sampled: in no pattern, always the same."""
    step = int(n * 0.6180339887498949) | 1
    return np.arange(min(n, max(_FEW, min(n // 16, SAMPLE))), dtype=np.int64) * step % n


def rank_of(samples: int, n: int, k: int) -> int:
    """Which of so many sampled keys, from the largest, at least k of n keys should reach."""
    wanted = samples * k / n
    return int(wanted + _SPREAD * wanted**0.5) + 8


def bound(sampled: np.ndarray, n: int, k: int) -> tuple[np.generic, int] | None:
    """(a key that at least k of n keys should reach, a number that should not be exceeded), from a
    sample of them; None where it is too small to tell."""
    rank = rank_of(sampled.size, n, k)
    if rank >= sampled.size:
        return None
    return np.partition(sampled, -rank)[-rank], 4 * rank * n // sampled.size + 4096


def _candidates(
    bits: np.ndarray, keys: Keys, k: int, low: np.generic, room: int
) -> np.ndarray | None:
    """Positions of keys >= low; None if these are fewer than k or more than `room`."""
    spans = parts(bits.size, BLOCK)
    at = [np.empty(min(room, stop - start) + BLOCK, np.int64) for start, stop in spans]
    counts = run_parts(lambda i: _gather(bits, *spans[i], keys.mask, low, at[i]), len(spans))
    if min(counts) < 0 or not k <= sum(counts) <= room:
        return None
    return joined(at, counts)


def among(bits: np.ndarray, keys: Keys, k: int, at: np.ndarray) -> np.ndarray:
    """The k largest of those at these ascending positions."""
    if at.size == k:
        return at
    found = keys.of(bits[at])
    least = np.partition(found, found.size - k)[found.size - k]
    take = found > least
    equal = np.flatnonzero(found == least)
    take[equal[: k - int(np.count_nonzero(take))]] = True
    return at[take]


def kth(
    bits: np.ndarray, keys: Keys, k: int, spans: Sequence[tuple[int, int]]
) -> tuple[np.generic, int, list[int]]:
    """(the k-th largest key, how many equal to it are among the k, and in each span), digit by
    digit from the highest: the digit at which the count from above reaches k."""
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
        place = int(np.searchsorted(from_above, left))
        digit = counts.shape[1] - 1 - place
        left -= int(from_above[place - 1]) if place else 0
        prefix, above = prefix << (above - shift) | digit, shift
    return keys.dtype(prefix), left, counts[:, digit].tolist()


def _by_histograms(bits: np.ndarray, keys: Keys, k: int) -> np.ndarray:
    spans = parts(bits.size, BLOCK)
    least, left, equals = kth(bits, keys, k, spans)
    shares = []  # of those equal to the k-th largest the first ones
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
