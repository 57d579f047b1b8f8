"""float32 gradients that travel as bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch.nn.functional import cross_entropy
from training_models import (
    adamw,
    copied,
    error_of,
    images,
    imported,  # noqa: F401
    made,
    on_all,
    schedule_for,
    sgd,
    share,
    train,
)

from linkweave import collectives
from linkweave.collectives import DataParallel, GTopK

pytestmark = pytest.mark.usefixtures("imported")
HALF = torch.bfloat16


@on_ranks(2, 3, order="fixed")
def test_gradients_are_rounded_once_on_each_rank(rank: int) -> None:
    """Each rank's gradient is rounded once, and the average as the all-reduce rounds it."""
    comm = collectives.get_default()
    for policy in ("ddp", "asc-wfbp", "c-cube", "bytescheduler"):
        inner, alone = made("cnn", torch.float32), made("cnn", torch.float32)
        schedule = schedule_for(made("cnn", torch.float32), images(0, 2)[0].float(), policy=policy)
        model = DataParallel(inner, sgd(inner.parameters()), schedule=schedule, reduce_dtype=HALF)
        for step in range(3):
            x, y = share(images(step, 6), rank, comm.size)
            model.zero_grad()
            alone.zero_grad()
            cross_entropy(model(x.float()), y).backward()
            cross_entropy(alone(x.float()), y).backward()
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                want = q.grad.to(HALF).flatten()
                comm.allreduce(want, "avg")
                assert p.grad.dtype == torch.float32, name
                assert torch.equal(p.grad.flatten(), want.float()), (name, policy)
        model.close()


@on_ranks(2)
def test_ranks_stay_alike(rank: int) -> None:
    comm = collectives.get_default()
    for name in ("auto", "wfbp", "c-cube"):
        inner = made("transformer", torch.float32)
        optimizer = adamw(inner.parameters())
        with DataParallel(inner, optimizer, schedule=name, reduce_dtype=HALF) as model:
            train("transformer", model, optimizer, range(20), rank, comm.size)
            assert on_all(comm, copied(model.state_dict()))


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    inner = made("cnn", torch.float32)
    for words, options in {
        "reduce_dtype must be torch.bfloat16 or None, not torch.float16": {
            "reduce_dtype": torch.float16
        },
        "GTopK sends values as they are": {"reduce_dtype": HALF, "exchange": GTopK()},
        "ranks 0 and 1 have different exchanges": {"reduce_dtype": HALF if rank else None},
    }.items():
        made_of: dict[str, Any] = options
        assert words in error_of(
            lambda o=made_of: DataParallel(inner, sgd(inner.parameters()), **o)
        ), words
