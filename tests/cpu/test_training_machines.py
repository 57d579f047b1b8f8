"""`DataParallel` over machines: units of streamed all-reduces arrive, and are updated, in parts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from machines import on_machines
from torch import nn
from training_models import (
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,  # noqa: F401
    made,
    schedule_for,
    sgd,
    train,
    wrong_order,
)

from linkweave.collectives import DataParallel
from linkweave.collectives.distributed import pieces
from linkweave.collectives.distributed.cluster import ClusterCommunicator
from linkweave.collectives.training import program, update

pytestmark = pytest.mark.usefixtures("imported")
STEPS = 5


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let units of the small models take many pieces."""
    monkeypatch.setattr(pieces, "QUEUED", 1 << 12)
    monkeypatch.setattr(program, "STREAMED", 1 << 12)


def streamed(comm: ClusterCommunicator) -> list[dict[str, Any]]:
    """Train by one streamed all-reduce; kernels are told of several arrivals."""
    parts: list[int] = []
    table_part = update.optim.Table.part

    def counted(table: Any, start: int, stop: int) -> Any:
        parts.append(stop - start)
        return table_part(table, start, stop)

    update.optim.Table.part = counted  # type: ignore[method-assign]
    states = []
    for optim in (sgd, adamw):
        inner = made("cnn")
        optimizer = optim(inner.parameters())
        schedule = schedule_for(made("cnn"), images(0, 2)[0], policy="c-cube", chained=True)
        model = DataParallel(inner, optimizer, schedule=schedule, group=comm)
        assert all(op.streamed for op in model.program.ops)
        assert max(len(op.spans) for op in model.program.ops) > len(model.program.names)
        train("cnn", model, optimizer, range(STEPS), comm.rank, comm.size)
        assert wrong_order(model) == []
        states.append(copied(model.state_dict()))
        model.close()
    assert len(parts) > 2 * (STEPS - 1) * len(schedule.profile.layers)
    return states


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_streamed_units(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    found = on_machines(sizes, streamed)
    assert not any(isinstance(states, str) for states in found), found
    for number, optim in enumerate((sgd, adamw)):
        alone = made("cnn")
        train("cnn", alone, optim(alone.parameters()), range(STEPS), each=2 * sum(sizes))
        for states in found:
            assert apart(states[number], alone.state_dict()) < 1e-12


class Leaves(nn.Module):
    """Ends its process before the second layer's forward pass, while units still arrive."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.body, self.leaves, self.steps = made("cnn"), leaves, 0
        self.body.last.register_forward_pre_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        self.steps += 1
        if self.leaves and self.steps == 3:
            os._exit(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def left(comm: ClusterCommunicator) -> str:
    inner = Leaves(comm.rank == 1)
    optimizer = sgd(inner.parameters())
    schedule = schedule_for(Leaves(False), images(0, 2)[0], policy="c-cube", chained=True)
    model = DataParallel(inner, optimizer, schedule=schedule, group=comm)
    return error_of(lambda: train("cnn", model, optimizer, range(9), comm.rank, comm.size))


def test_a_rank_dies_in_a_chained_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    found = on_machines((1, 1, 1), left, timeout=5, lost=[1])
    assert found[1] is None
    for said in (found[0], found[2]):
        assert "all-reduce 0 of" in said or "rank 1" in said, said
