"""The rows of the suite for one GPU that train, on CPU ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from linkweave import collectives
from linkweave.bench.gpu import systems, train
from linkweave.bench.gpu.api import CupyArrays, TorchTensors
from linkweave.bench.gpu.runner import Failed, LeftOut
from linkweave.collectives.training.embedding.exchange import RowExchange


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(fn: Any, ranks: int, *args: Any, timeout: float) -> list[Any]:
        return collectives.spawn(fn, ranks, args=args, timeout=timeout)

    monkeypatch.setattr(train, "on_ranks", on_ranks)
    monkeypatch.setattr(systems, "on_ranks", on_ranks)


@pytest.mark.parametrize("policy", [*train.POLICIES, train.DDP])
def test_parameters_are_those_of_one_process(policy: str, on_cpu: None) -> None:
    row = train.train(TorchTensors("cpu"), 2, policy, "cpu")
    assert (row["ranks"], row["policy"]) == (2, policy)
    assert row["step_s"] > 0


def test_calls_of_torch_are_checked(on_cpu: None) -> None:
    """On the CPU they are linkweave's."""
    assert train.over_nccl(TorchTensors("cpu"), 3, "cpu") == {"checked": 3 * 6}


def test_ddp_is_left_out_where_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "version", lambda name: "2.10.0+cu128")
    with pytest.raises(LeftOut, match=r"needs torch 2\.13"):
        train.train(TorchTensors("cpu"), 2, train.DDP, "cpu")


def test_other_parameters_fail(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CLOSE", -1.0)
    with pytest.raises(Failed, match="from those of one process"):
        train.train(CupyArrays(), 2, "wfbp", "cpu")


@pytest.mark.parametrize("mode", ["gtopk", "topk"])
def test_gtopk_as_on_the_cpu(mode: str, on_cpu: None) -> None:
    row = systems.gtopk(CupyArrays(), 3, mode, 10_000, "cpu")
    assert row["elements"] == 10_000 and row["exchange_s"] > 0


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_an_embedding_as_on_the_cpu(kind: str, on_cpu: None) -> None:
    assert systems.embedding(CupyArrays(), 3, kind, "cpu")["step_s"] > 0


FAULTS: dict[str, Callable[[Any], Any]] = {
    "fetch": lambda right: lambda self, tokens: torch.full_like(right(self, tokens), 7.0),
    "add": lambda right: lambda self, tokens, gradient: right(self, tokens, gradient.flip(1)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_exchange_of_rows_is_seen(
    name: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that are looked up, and of the columns of a gradient."""
    given = 2, CupyArrays(), "SGD", "cpu"
    (right, _), _ = systems.on_ranks(systems.rows_trained, *given, timeout=60)
    monkeypatch.setattr(RowExchange, name, FAULTS[name](getattr(RowExchange, name)))
    (wrong, _), _ = systems.on_ranks(systems.rows_trained, *given, timeout=60)
    assert wrong != right


def test_gtopk_converges_beside_dense(on_cpu: None) -> None:
    assert {*systems.converge(CupyArrays(), 2, "cpu")["loss"]} == {"dense", "gtopk"}


def test_other_bits_and_losses_fail(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(fn: Any, ranks: int, *args: Any, timeout: float) -> list[Any]:
        return [(repr(args[-1]).encode(), 0.0)] * ranks

    monkeypatch.setattr(systems, "BELOW", 0.0)
    with pytest.raises(Failed, match=r"dense: a loss of .* came down to"):
        systems.converge(CupyArrays(), 2, "cpu")
    monkeypatch.setattr(systems, "on_ranks", other)
    with pytest.raises(Failed, match="gtopk on rank 0 has other bits than on the CPU"):
        systems.gtopk(CupyArrays(), 3, "gtopk", 10, "cuda")
    with pytest.raises(Failed, match="SGD on rank 0: the table has other bits"):
        systems.embedding(CupyArrays(), 3, "SGD", "cuda")
