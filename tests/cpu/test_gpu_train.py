"""The rows of the suite for one GPU that train, on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

from linkweave import collectives
from linkweave.bench import gpu_train
from linkweave.bench.gpu_api import CupyArrays
from linkweave.bench.gpu_runner import Failed


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(fn: Any, ranks: int, *args: Any, timeout: float) -> list[Any]:
        return collectives.spawn(fn, ranks, args=args, timeout=timeout)

    monkeypatch.setattr(gpu_train, "on_ranks", on_ranks)


@pytest.mark.parametrize("policy", gpu_train.POLICIES)
def test_parameters_are_those_of_one_process(policy: str, on_cpu: None) -> None:
    row = gpu_train.train(CupyArrays(), 2, policy, "cpu")
    assert (row["ranks"], row["policy"]) == (2, policy)
    assert row["step_s"] > 0


def test_other_parameters_fail(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_train, "CLOSE", -1.0)
    with pytest.raises(Failed, match="from those of one process"):
        gpu_train.train(CupyArrays(), 2, "wfbp", "cpu")
