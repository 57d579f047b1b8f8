"""Selection fused with a residual, on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk.cpu import BLOCK, U, most_of


@njit(nogil=True, cache=True)
def _add_and_gather(grad, residual, start, stop, low, at):
    """residual += grad; positions of sums whose keys are >= low, or -1 where `at` is full."""
    bits = residual.view(np.uint32)
    mask = np.uint32(0x7FFFFFFF)
    found, full = U(0), False
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        for i in range(first, last):
            residual[i] = grad[i] + residual[i]
        if not full and most_of(bits, mask, first, last) >= low:
            full = found + U(BLOCK) > U(at.size)
            if not full:
                for i in range(first, last):
                    at[found] = i
                    found += U((bits[i] & mask) >= low)
    return -1 if full else np.int64(found)


def sparsify(grad: np.ndarray, residual: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, positions) of the k largest |grad + residual|, which leave the residual; the rest
    stays in it. Both float32 [n]. Each is read once and the residual written once."""
    keys = topk.Keys("float32")
    n = grad.size
    low = np.uint32(0xFFFFFFFF)
    room = 0
    if 0 < k <= n // 8:
        places = topk.places(n)
        sums = keys.of((grad[places] + residual[places]).view(np.uint32))
        bound = topk.bound(sums, n, k)
        if bound is not None:
            low, room = bound
    spans = parts(n, BLOCK)
    at = [np.empty(min(room, stop - start) + BLOCK, np.int64) for start, stop in spans]
    counts = run_parts(lambda i: _add_and_gather(grad, residual, *spans[i], low, at[i]), len(spans))
    bits = residual.view(np.uint32)
    if room and min(counts) >= 0 and k <= sum(counts) <= room:
        found = topk.among(bits, keys, k, topk.joined(at, counts))
    else:
        found = topk.select(bits, "float32", k)
    values = residual[found]
    residual[found] = 0
    return values, found
