"""Rows of `bench.gpu_suite` for the sparse kernels.

Results are checked against the CPU's kernels, then timed beside torch and beside a copy of the
bytes that any implementation must move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from linkweave import kernels
from linkweave.bench.gpu.api import Arrays, on_ranks, same
from linkweave.bench.gpu.meter import Meter, call_settings
from linkweave.bench.gpu.runner import Failed, Result, Row
from linkweave.bench.sparse import medians, torch_coalesce, torch_sparsify, zipf
from linkweave.collectives import get_default
from linkweave.collectives.calls.sparse import allreduce
from linkweave.collectives.planning.sparse_tree import binomial_tree
from linkweave.kernels.gpu.source import THREADS

DENSITY = 0.001
ROWS = ((1 << 25, 10), (1 << 28, 10))  # (elements, expected seconds of a row)
TABLES = ((4096, 1024, 32_000), (65_536, 128, 32_000))  # (rows, width, vocabulary)
CASES = ((60, 9, 20), (5003, 50, 120), (5003, 0, 7))  # (elements, k, entries of a rank)
GRADIENT = 1 << 24  # elements


def integers(rank: int, numel: int, entries: int) -> tuple[np.ndarray, np.ndarray]:
    """A sparse vector whose sums overflow the precision of 16-bit floats."""
    rng = np.random.default_rng([rank, numel])
    indices = np.sort(rng.choice(numel, entries, replace=False)).astype(np.int32)
    return 201 * rng.integers(-9, 10, entries).astype(np.float32), indices


def one_tree() -> AbstractContextManager[Any]:
    """Merges by one tree on CPUs and on GPUs, whose own links may have another one."""
    return patch.object(allreduce, "merge_tree", lambda t, _: binomial_tree(len(t.gpus)))


def check_sparse(rank: int, arrays: Arrays) -> int:
    with one_tree() if arrays.device == "cuda" else nullcontext():
        return _check_sparse(rank, arrays)


def _check_sparse(rank: int, arrays: Arrays) -> int:
    comm, checked = get_default(), 0
    for numel, k, entries in CASES:
        for mode in ("gtopk", "topk", "dense"):
            for dtype in ("float32", "float16"):
                for conserve in (True, False):
                    values, indices = integers(rank, numel, entries - rank)
                    values = values.astype(dtype)
                    mine = np.full(numel, rank, np.float32)
                    theirs = arrays.put(mine)
                    how: dict[str, Any] = {"mode": mode, "conserve": conserve}
                    want = comm.sparse_allreduce(values, indices, numel, k, residual=mine, **how)
                    got = comm.sparse_allreduce(
                        arrays.put(values), arrays.put(indices), numel, k, residual=theirs, **how
                    )
                    comm.synchronize()
                    what = f"sparse_allreduce by {mode} of {dtype}, {numel} elements, rank {rank}"
                    for a, b in zip((*got, theirs), (*want, mine), strict=True):
                        same(arrays.get(a), b, what)
                    checked += 1
    return checked


def time_sparse(rank: int, arrays: Arrays, numel: int, rounds: int) -> tuple[float, float]:
    """Medians in seconds of gTop-k's and of a dense all-reduce of a gradient."""
    comm, k = get_default(), round(numel * DENSITY)
    grad = gradient(numel, rank)
    values, indices = map(arrays.put, kernels.topk_abs(grad, k))
    dense, residual = arrays.put(grad), arrays.put(gradient(numel, comm.size + rank))

    def gtopk() -> None:
        comm.sparse_allreduce(values, indices, numel, k, residual=residual, mode="gtopk")
        comm.synchronize()

    def whole() -> None:
        comm.allreduce(dense, "max")
        comm.synchronize()

    found = medians({"gtopk": gtopk, "dense": whole}, rounds, comm.barrier)
    return found["gtopk"], found["dense"]


def sparse_ranks(
    meter: Meter, arrays: Arrays, ranks: int, virtual: bool, numel: int, rounds: int = 10
) -> Result:
    """Check `sparse_allreduce` on ranks of one GPU; time it beside a dense one of `numel` elements.

    With `numel` 0 nothing is timed. The settings are those of the dense one.
    """
    row: Result = {"checked": sum(on_ranks(check_sparse, ranks, arrays, virtual=virtual))}
    if numel:
        times = on_ranks(time_sparse, ranks, arrays, numel, rounds, virtual=virtual)
        sparse, dense = (max(column) for column in zip(*times, strict=True))
        row |= {"elements": numel, "k": round(numel * DENSITY), "seconds": sparse,
                "dense": {"seconds": dense, "times_ours": dense / sparse},
                "settings": call_settings(meter, ranks, 4 * numel)}  # fmt: skip
    return row


def gradient(n: int, seed: int = 0) -> np.ndarray:
    """n normal numbers; a long row repeats 2^24 of them, a little larger each time."""
    part = np.random.default_rng(seed).standard_normal(min(n, 1 << 24)).astype(np.float32)
    made = np.resize(part, n)
    for start in range(part.size, n, part.size):
        made[start : start + part.size] *= np.float32(1 + start / n / 100)
    return made


class SparseRows:
    """Rows for one library's arrays; `api` has the functions of `kernels`."""

    checked_sizes: Sequence[int] = (1, 1000, 100_003, 3_000_017)

    def __init__(self, meter: Meter, arrays: Arrays, api: Any = kernels) -> None:
        self.meter, self.arrays, self.api = meter, arrays, api

    def rows(self) -> Iterator[Row]:
        yield self.row("sparse kernels, correct", 15, self.correct)
        for n, seconds in ROWS:
            yield self.row(f"topk_abs of {n}", seconds, self.topk, n)
            yield self.row(f"sparsify of {n}", seconds, self.sparsify, n)
        for table in TABLES:
            yield self.row(f"coalesce {table[0]} x {table[1]}", 6, self.coalesce, *table)

    def row(self, name: str, seconds: float, measure: Callable[..., Result], *args: int) -> Row:
        def loaded() -> Result:
            self.arrays.load()
            device = self.meter.device
            settings = {"threads": THREADS, "blocks": device.blocks_to_fill()}
            return {**measure(*args), "settings": settings}

        return Row(name, "core", seconds, loaded)

    def correct(self) -> Result:
        checked = 0
        for n in self.checked_sizes:
            grad, residual = gradient(n), gradient(n, 1)
            for x in (grad, np.zeros(n, np.float32), np.round(grad)):
                for dtype in ("float32", "float16"):
                    for k in sorted({0, 1, n // 1000, n // 4, n}):
                        self.same_topk(x.astype(dtype), k)
                        checked += 1
            mine = self.arrays.put(residual)
            pair = self.api.sparsify(self.arrays.put(grad), mine, n // 100)
            self.same(pair, kernels.sparsify(grad, residual, n // 100), f"sparsify of {n}")
            self.same([mine], [residual], f"residual of {n}")
            checked += 2
        vectors = [kernels.topk_abs(gradient(200_000, seed), 5000) for seed in (0, 1)]
        ours = [tuple(self.arrays.put(x) for x in vector) for vector in vectors]
        for got, want in zip(self.api.merge_topk(*ours, 5000),
                             kernels.merge_topk(*vectors, 5000), strict=True):  # fmt: skip
            self.same(got, want, "merge_topk")
            checked += 1
        for width, vocabulary in ((1, 70_000), (7, 300), (64, 20)):
            indices, values = zipf(5003, width, vocabulary)
            for dtype in ("float32", "float64"):
                whole, where = np.round(4 * values).astype(dtype), self.arrays.put(indices)
                got = self.api.coalesce(where, self.arrays.put(whole), vocabulary)
                wanted = kernels.coalesce(indices, whole, vocabulary)
                self.same(got, wanted, f"coalesce of {dtype} x {width}")
                checked += 1
        return {"checked": checked}

    def topk(self, n: int) -> Result:
        x, k = gradient(n), round(n * DENSITY)
        self.same_topk(x, k)
        ours = self.arrays.put(x)
        seconds = self.timed(lambda: self.api.topk_abs(ours, k))
        read = 4 * n / self.meter.copy_rate(4 * n)
        row = {"elements": n, "k": k, "seconds": seconds, "of_one_read": seconds / read}
        if self.arrays.name == "torch":
            import torch

            theirs = self.timed(lambda: torch.topk(ours.abs(), k, sorted=False))
            row["torch"] = {"seconds": theirs, "times_ours": theirs / seconds}
        if self.arrays.name in ("torch", "cupy"):
            import cupy

            same = cupy.asarray(ours)
            theirs = self.timed(lambda: cupy.argpartition(cupy.abs(same), n - k))
            row["cupy"] = {"seconds": theirs, "times_ours": theirs / seconds}
        return row

    def sparsify(self, n: int) -> Result:
        """Check and time sparsify; the residual grows from call to call, which does not matter."""
        given, kept, k = gradient(n), gradient(n, 1), round(n * DENSITY)
        grad, residual = self.arrays.put(given), self.arrays.put(kept)
        found = self.api.sparsify(grad, residual, k)
        self.same(found, kernels.sparsify(given, kept, k), f"sparsify of {n}")
        self.same([residual], [kept], f"residual of {n}")
        seconds = self.timed(lambda: self.api.sparsify(grad, residual, k))
        floor = 12 * n / self.meter.copy_rate(4 * n)
        row = {"elements": n, "k": k, "seconds": seconds, "of_floor": seconds / floor}
        if self.arrays.name == "torch":
            theirs = self.timed(lambda: torch_sparsify(grad, residual, k))
            row["torch"] = {"seconds": theirs, "times_ours": theirs / seconds}
        return row

    def coalesce(self, num: int, width: int, vocabulary: int) -> Result:
        indices, values = zipf(num, width, vocabulary)
        where, rows = self.arrays.put(indices), self.arrays.put(values)
        unique, sums = self.api.coalesce(where, rows, vocabulary)
        wanted = kernels.coalesce(indices, values, vocabulary)
        self.same([unique], wanted[:1], "coalesced rows")
        if not np.allclose(self.arrays.get(sums), wanted[1], rtol=1e-4, atol=1e-3):
            raise Failed("coalesced sums are wrong")
        seconds = self.timed(lambda: self.api.coalesce(where, rows, vocabulary))
        nbytes = values.nbytes + wanted[1].nbytes
        floor = nbytes / self.meter.copy_rate(values.nbytes)
        row = {"rows": num, "width": width, "seconds": seconds, "of_floor": seconds / floor}
        if self.arrays.name == "torch":
            taken = self.timed(lambda: torch_coalesce(where, rows, vocabulary))
            row["torch"] = {"seconds": taken, "times_ours": taken / seconds}
        return row

    def timed(self, call: Callable[[], object]) -> float:
        return self.meter.seconds(call, self.meter.device.finish)

    def same_topk(self, x: np.ndarray, k: int) -> None:
        got = self.api.topk_abs(self.arrays.put(x), k)
        self.same(got, kernels.topk_abs(x, k), f"topk_abs of {x.size} {x.dtype}, k = {k}")

    def same(self, got: Any, want: Any, what: str) -> None:
        for mine, theirs in zip(got, want, strict=True):
            found = np.ascontiguousarray(self.arrays.get(mine))
            if found.shape != theirs.shape or found.tobytes() != theirs.tobytes():
                raise Failed(f"{what} is not what the CPU finds")
