"""`bench train` on one rank, and what `bench steps --unchained` runs."""

from __future__ import annotations

from typing import Any

import torch
from machines import forked
from torch import nn
from training_models import imported, schedule_for  # noqa: F401

from linkweave.bench.training import sleeping, train
from linkweave.collectives import overlap


def test_one_rank_trains_by_the_engine(imported: None, monkeypatch: Any) -> None:  # noqa: F811
    def tiny(batch: int) -> Any:
        return nn.Linear(8, 3), lambda: (torch.randn(batch, 8), torch.randint(3, (batch,)))

    monkeypatch.setitem(train.MODELS, "tiny", tiny)
    monkeypatch.setattr(train, "WARM_UP", 2)
    monkeypatch.delenv("RANK", raising=False)
    ((row,),) = forked(1, lambda rank: train.measure("tiny", 4, 1, "ddp", False))
    assert (row.ranks, row.batch, row.nbytes, row.loss_difference) == (1, 4, 4 * 27, 0)
    assert row.program == "ddp, 1 all-reduce"
    assert min(row.ms, row.ddp_ms, row.compute_ms, row.ratio) > 0


def test_a_chained_schedule_is_run_unchained_too() -> None:
    model, x = nn.Linear(8, 3), torch.zeros(1, 8)
    plans = [schedule_for(model, x, policy=name) for name in ("c-cube", "ddp")]
    made = sleeping.with_unchained(plans)
    assert [(one.policy, one.chained) for one in made] == [
        ("c-cube", True), ("c-cube", False), ("ddp", False)
    ]  # fmt: skip
    assert all(one.communications == plans[one.policy == "ddp"].communications for one in made)


def test_a_sparse_exchange_is_run(imported: None) -> None:  # noqa: F811
    """With the check that what has not been sent is kept."""
    known = overlap.model("vgg16-cifar"), overlap.network("1GbE", 2)
    plans = sleeping.sparse_plans(*sleeping.scaled(*known, 1 << 20, 0.02))[:1]
    (row,) = sleeping.rows(plans, 2, 2, density=0.01)
    assert (row.policy, row.chained, row.all_reduces) == ("after-backward", False, 1)
