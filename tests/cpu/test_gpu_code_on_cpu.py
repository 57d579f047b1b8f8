"""The code of a training step that GPUs run, on CPU tensors of ranks that are threads: it has the
bits of the code of CPUs. Streams are stand-ins whose work is done when it is enqueued."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ThreadTransport, on_threads

from linkweave.collectives.training.embedding import exchange as row_exchange
from linkweave.collectives.training.embedding.exchange import RowExchange
from linkweave.collectives.training.embedding.optimizer import RowOptimizer
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.gtopk.exchange import SparseAverage
from linkweave.collectives.training.gtopk.options import GTopK
from linkweave.kernels.embedding import cpu as rows_cpu
from linkweave.kernels.embedding import gpu as rows_gpu
from linkweave.kernels.embedding import steps as rows
from linkweave.kernels.gtopk import cpu, gpu, steps


# ---- gTop-k -------------------------------------------------------------------------------------
def averages(seed: int, mode: str, conserve: bool, transport: ThreadTransport) -> list[bytes]:
    """Averages and residuals of some steps, with gradients that are not finite in one of them."""
    rng = np.random.default_rng([seed, transport.rank])
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    counts, found = [50 + seed, 7, 300], []
    spec = GTopK(0.02, mode=mode, conserve=conserve)
    average, residual = SparseAverage(transport, spec), torch.zeros(sum(counts))
    for step in range(4):
        g = rng.standard_normal(len(residual)).astype(np.float32)
        if step == 2 and transport.rank == 1:
            g[rng.integers(0, len(g), 40)] = rng.choice([np.nan, np.inf])
        x = torch.from_numpy(g).to(dtype)
        sent = average(0, x, residual, counts, step)
        assert bool(sent.fine) is (step != 2)
        for y in (x.float(), residual):
            y.nan_to_num_(7, 8, 9)  # of a NaN the payload may differ
            found.append(y.numpy().tobytes())
        residual.nan_to_num_(0, 0, 0)
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("conserve", [False, True])
@pytest.mark.parametrize("mode", ["gtopk", "topk"])
def test_gtopk(mode: str, conserve: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = partial(averages, seed, mode, conserve)
    want, _ = on_threads(2 + seed % 4, body)
    kernels = SimpleNamespace(**{**vars(gpu), "select": cpu.select})  # that of GPUs is in CUDA C++
    monkeypatch.setattr(steps, "_kernels", lambda device: kernels)
    assert on_threads(2 + seed % 4, body)[0] == want


# ---- embeddings ---------------------------------------------------------------------------------
ROWS, WIDTH, PADDING = 40, 7, 3


def ids_of(step: int, rank: int, seed: int) -> torch.Tensor:
    """Tokens of a step, of which a rank may have none."""
    rng = np.random.default_rng([seed, step, rank])
    return torch.from_numpy(rng.integers(0, ROWS, (int(rng.integers(0, 6)), 3)))


def trained(kind: str, seed: int, prefetches: bool, transport: ThreadTransport) -> list[bytes]:
    """The table and its optimizer's states after some steps. Every third one has two calls, and
    every other one is clipped."""
    whole = np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)
    table = ShardedEmbedding.from_pretrained(
        torch.from_numpy(whole), freeze=False, padding_idx=PADDING, group=transport
    )
    optimizer = getattr(torch.optim, kind)([table.weight], lr=0.1)
    steps_of, schedule = RowOptimizer(optimizer, [table]), table.schedule
    assert schedule is not None
    schedule.on_gradient = lambda: None  # as `DataParallel` listens
    ids = [ids_of(step, transport.rank, seed) for step in range(8)]
    for step in range(7):
        result = [schedule.look_up(ids[step], True)]
        if prefetches and step < 6:
            schedule.announce(ids[step + 1] if (step, transport.rank) != (4, 1) else None)
        if step % 3 == 2:
            result.append(schedule.look_up(ids_of(step + 100, transport.rank, seed), True))
        sum((x * torch.arange(1, WIDTH + 1)).sin().sum() for x in result).backward()
        schedule.end_backward()
        if step % 2:
            for part in schedule.averaged():
                part *= 0.5
        steps_of.step()
    schedule.finish()
    states = optimizer.state[table.weight].values()
    found = [table.whole(table.weight)] + [x for x in states if getattr(x, "ndim", 0) == 2]
    table.close()
    return [x.numpy().tobytes() for x in found]


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    def record_event(self) -> Stream:
        return self

    def wait_event(self, event: Stream) -> None: ...

    def synchronize(self) -> None: ...


def only_rows(update: Any, indices: torch.Tensor, gradient: torch.Tensor, *others: Any) -> None:
    """Leaves out rows that do not exist, as the kernels of GPUs do."""
    n = int((indices < ROWS).sum())
    update(indices[:n], gradient[:n], *others)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dict(vars(rows_cpu))  # for the kernels in Triton, which have tests of their own
    kernels |= {name: getattr(rows_gpu, name) for name in ("unique", "sum_rows")}
    for name in ("sgd", "adagrad", "adam"):
        kernels[name] = partial(only_rows, getattr(rows_cpu, name))
    monkeypatch.setattr(rows, "_kernels", lambda device: SimpleNamespace(**kernels))
    monkeypatch.setattr(rows.cpu, "first_wrong", lambda *_: -1)
    monkeypatch.setattr(RowExchange, "device", property(lambda _: torch.device("cuda:0")))
    monkeypatch.setattr(row_exchange, "_copied", torch.clone)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda of: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_embeddings(kind: str, prefetches: bool, seed: int, request: pytest.FixtureRequest) -> None:
    body = partial(trained, kind, seed, prefetches)
    want, _ = on_threads(1 + seed, body) if seed else on_threads(9, body)  # more ranks than columns
    request.getfixturevalue("as_on_a_gpu")
    assert on_threads(1 + seed if seed else 9, body)[0] == want


def test_an_op_fails_between_its_parts(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error names it, on the rank where it fails, and ends the others."""

    def copied(lengths: torch.Tensor) -> torch.Tensor:
        if len(lengths) == 2 and made.pop():
            raise RuntimeError("no pinned memory")
        return lengths.clone()

    made = [False, False, True, False]
    monkeypatch.setattr(row_exchange, "_copied", copied)

    def body(transport: ThreadTransport) -> str:
        try:
            trained("SGD", 0, True, transport)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found, _ = on_threads(2, body)
    assert all("CollectiveAborted: rank" in words for words in found), found
    assert any("of embedding: no pinned memory" in words for words in found), found


def test_an_op_that_nobody_completes_is_no_failure(as_on_a_gpu: None) -> None:
    def body(transport: ThreadTransport) -> str:
        table = ShardedEmbedding(ROWS, WIDTH, group=transport)
        assert table.schedule is not None
        table.schedule.announce(torch.tensor([1, 2]))
        lane = table.schedule.lane
        assert lane._begun is not None
        lane._begun.steps.close()
        return str(lane._error)

    assert on_threads(2, body)[0] == ["None"] * 2


def outside(transport: ThreadTransport) -> str:
    table = ShardedEmbedding(ROWS, WIDTH, group=transport)
    ids = torch.tensor([1, ROWS if transport.rank == 1 else 2])
    assert table.schedule is not None
    try:
        table.schedule.look_up(ids, True)
    except Exception as error:
        return str(error)
    return ""


def test_tokens_out_of_range_are_told_to_all_ranks(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found, _ = on_threads(3, outside)
    assert all("tokens of embedding" in words for words in found), found  # some by another's abort
    assert any(f"ids of rank 1 must be from 0 to {ROWS - 1}" in words for words in found), found
