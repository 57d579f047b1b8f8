"""The rows of the suite for one GPU that train, on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

from linkweave import collectives
from linkweave.bench.gpu import train
from linkweave.bench.gpu.api import CupyArrays
from linkweave.bench.gpu.runner import Failed


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_ranks(fn: Any, ranks: int, *args: Any, timeout: float) -> list[Any]:
        return collectives.spawn(fn, ranks, args=args, timeout=timeout)

    monkeypatch.setattr(train, "on_ranks", on_ranks)


@pytest.mark.parametrize("policy", train.POLICIES)
def test_parameters_are_those_of_one_process(policy: str, on_cpu: None) -> None:
    row = train.train(CupyArrays(), 2, policy, "cpu")
    assert (row["ranks"], row["policy"]) == (2, policy)
    assert row["step_s"] > 0


def test_other_parameters_fail(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CLOSE", -1.0)
    with pytest.raises(Failed, match="from those of one process"):
        train.train(CupyArrays(), 2, "wfbp", "cpu")
