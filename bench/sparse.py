"""`linkweave bench topk | sparsify | coalesce | sparse-allreduce`, beside torch on the CPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linkweave import collectives, kernels
from linkweave.bench.command.options import missing
from linkweave.bench.timing import rounds_of, schedule
from linkweave.collectives import CollectiveError, get_default

HEADER = (
    f"{'':12}{'elements':>11}{'k':>9}{'threads':>9}  {'':24}{'ms':>9}{'x ours':>8}{'of floor':>10}"
)

LEGEND = (
    "x ours: its time over linkweave's; of floor: the bytes that any implementation must move, "
    "over the\ntime, as a share of the rate at which this machine copies memory"
)


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    elements: int
    k: int
    threads: int
    implementation: str
    ms: float
    times_ours: float
    of_floor: float | None

    def __str__(self) -> str:
        floor = f"{self.of_floor:10.0%}" if self.of_floor is not None else f"{'-':>10}"
        return (
            f"{self.what:12}{self.elements:11}{self.k:9}{self.threads:9}  "
            f"{self.implementation:24}{self.ms:9.2f}{self.times_ours:8.1f}{floor}"
        )


def medians(
    calls: dict[str, Callable[[], object]], rounds: int,
    ready: Callable[[], object] = lambda: None, shown: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Seconds of each call, all taking turns within a round; a first round is not counted.

    The clock starts after `ready`; with `shown` a progress bar is drawn.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in rounds_of(rounds + 1, shown):
        for name, call in calls.items():
            ready()
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def _rows(
    what: str, elements: int, k: int, threads: int, nbytes: int,
    calls: dict[str, Callable[[], object]], rounds: int,
) -> Iterator[Row]:  # fmt: skip
    source = np.ones(64 << 20, np.uint8)
    target = np.empty_like(source)
    copy = {"copy": lambda: np.copyto(target, source)}
    rate = 2 * source.nbytes / medians(copy, 5)["copy"]
    times = medians(calls, rounds, shown=True)
    for name, seconds in times.items():
        share = nbytes / seconds / rate if name == "linkweave" else None
        ratio = seconds / times["linkweave"]
        yield Row(what, elements, k, threads, name, seconds * 1e3, ratio, share)


def _check(right: bool, what: str) -> None:
    if not right:
        raise CollectiveError(f"{what} is wrong")


def zipf(num: int, width: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [num] indices with Zipf's distribution over `vocabulary`; float32 [num, width]."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, vocabulary + 1)
    indices = rng.choice(vocabulary, num, p=share / share.sum())
    return indices, rng.standard_normal((num, width), np.float32)


def _torch(threads: int) -> Any:
    """The module torch with so many threads; None, with a message, if not installed."""
    if missing("torch"):
        return None
    import torch

    torch.set_num_threads(threads)
    return torch


def torch_sparsify(grad: Any, residual: Any, k: int) -> None:
    """The torch calls that `kernels.sparsify` replaces."""
    import torch

    total = grad + residual
    _, where = torch.topk(total.abs(), k, sorted=False)
    total[where].clone()
    residual.copy_(total)
    residual[where] = 0


def torch_coalesce(where: Any, rows: Any, vocabulary: int) -> Any:
    """The torch calls that `kernels.coalesce` replaces."""
    import torch

    shape = (vocabulary, rows.shape[1])
    return torch.sparse_coo_tensor(where[None], rows, shape, check_invariants=False).coalesce()


def topk(elements: int, density: float, threads: int, rounds: int) -> Iterator[Row]:
    """Top-k of |x|. Everyone's time includes |x|; numpy.partition gives no indices."""
    x = np.random.default_rng(0).standard_normal(elements, np.float32)
    k = max(1, round(elements * density))
    values, indices = kernels.topk_abs(x, k)
    least = np.partition(np.abs(x), elements - k)[elements - k :]
    _check(np.array_equal(np.sort(np.abs(values)), np.sort(least)), "topk_abs")
    _check(np.array_equal(x[indices], values), "topk_abs")
    calls: dict[str, Callable[[], object]] = {"linkweave": lambda: kernels.topk_abs(x, k)}
    if torch := _torch(threads):
        tensor = torch.from_numpy(x)
        calls["torch.topk"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    calls["numpy.partition"] = lambda: np.partition(np.abs(x), elements - k)
    yield from _rows("topk", elements, k, threads, x.nbytes, calls, rounds)


def sparsify(elements: int, density: float, threads: int, rounds: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(elements, np.float32)
    residual = rng.standard_normal(elements, np.float32)
    k = max(1, round(elements * density))
    total = grad + residual
    values, indices = kernels.sparsify(grad, residual, k)
    _check(np.array_equal(indices, kernels.topk_abs(total, k)[1]), "sparsify")
    total[indices] -= values
    _check(np.array_equal(total, residual), "sparsify's residual")
    calls: dict[str, Callable[[], object]] = {
        "linkweave": lambda: kernels.sparsify(grad, residual, k)
    }
    if torch := _torch(threads):
        tensor, rest = torch.from_numpy(grad), torch.from_numpy(residual.copy())
        calls["torch, call by call"] = lambda: torch_sparsify(tensor, rest, k)
    yield from _rows("sparsify", elements, k, threads, 3 * grad.nbytes, calls, rounds)


def coalesce(num: int, width: int, vocabulary: int, threads: int, rounds: int) -> Iterator[Row]:
    """Sum rows with equal indices (Zipf's distribution), beside torch's sparse tensors."""
    indices, values = zipf(num, width, vocabulary)
    unique, sums = kernels.coalesce(indices, values, vocabulary)
    calls: dict[str, Callable[[], object]] = {
        "linkweave": lambda: kernels.coalesce(indices, values, vocabulary)
    }
    if torch := _torch(threads):
        where, rows = torch.from_numpy(indices), torch.from_numpy(values)
        theirs = torch_coalesce(where, rows, vocabulary)
        _check(np.array_equal(unique, theirs.indices()[0].numpy()), "coalesce")
        _check(np.allclose(sums, theirs.values().numpy(), rtol=1e-3, atol=1e-3), "coalesce")
        calls["torch"] = lambda: torch_coalesce(where, rows, vocabulary)
    yield from _rows(
        "coalesce", num, unique.size, threads, values.nbytes + sums.nbytes, calls, rounds
    )


def _rank(
    rank: int, elements: int, k: int, rounds: int, store: str | None
) -> list[tuple[str, float]]:
    """Medians in seconds on one rank under SCHED_BATCH; `store` None leaves out gloo."""
    from linkweave.bench.peers import Gloo, by_torch

    schedule(True)
    comm = get_default()
    gloo = None if store is None else Gloo(rank, comm.size, store, True)
    whole = (np.random.default_rng(rank).integers(-9, 10, elements)).astype(np.float32)
    residual = np.zeros(elements, np.float32)
    pair = kernels.sparsify(whole, residual, k)
    result = comm.sparse_allreduce(*pair, elements, k, residual=residual, mode="gtopk")
    total, kept = whole.copy(), residual.copy()
    comm.allreduce(total)
    comm.allreduce(kept)
    kept[result[1]] += result[0]
    _check(np.array_equal(total, kept), "gtopk: mass was lost, which")
    grad = np.random.default_rng(rank).standard_normal(elements, np.float32)
    dense = grad.copy()  # grows from round to round, which does not matter
    pair = kernels.topk_abs(grad, k)

    def selected() -> None:
        found = kernels.sparsify(grad, residual, k)
        comm.sparse_allreduce(*found, elements, k, residual=residual, mode="gtopk")

    calls: dict[str, Callable[[], object]] = {
        "linkweave": lambda: comm.sparse_allreduce(
            *pair, elements, k, residual=residual, mode="gtopk"
        ),
        "gtopk with selection": selected,
        "all-gather and sum": lambda: comm.sparse_allreduce(
            *pair, elements, k, mode="topk", conserve=False
        ),
        "linkweave, dense": lambda: comm.allreduce(dense),
    }
    if gloo is not None:
        calls["gloo, dense"] = by_torch("allreduce", dense, dense, dense.size, gloo.batch)
    # the barrier keeps waiting for other ranks out of the times
    times = medians(calls, rounds, comm.barrier, shown=rank == 0)
    if gloo is not None:
        gloo.close()
    return list(times.items())


def sparse_allreduce(ranks: int, elements: int, density: float, rounds: int) -> Iterator[Row]:
    """gTop-k's tree beside dense all-reduces: medians of the slowest rank."""
    k = max(1, round(elements * density))
    with tempfile.TemporaryDirectory() as folder:
        store = None if missing("torch") else f"{folder}/store"
        arguments = (elements, k, rounds, store)
        found = collectives.spawn(_rank, ranks, args=arguments, timeout=120)
    times = {name: max(dict(one)[name] for one in found) for name, _ in found[0]}
    for name, seconds in times.items():
        ratio = seconds / times["linkweave"]
        yield Row(f"{ranks} ranks", elements, k, 1, name, seconds * 1e3, ratio, None)
