"""What users do with gradients of a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_models import (
    error_of,
    imported,  # noqa: F401
    on_all,
    schedule_for,
    sgd,
    wrong_order,
)
from training_pair import Cases, Pair, net

from linkweave.collectives import DataParallel

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


@case
def training_begins_in_no_sync(rank: int) -> None:
    pair = Pair()
    with pair.model.no_sync():
        pair.backward(0)
    assert not on_all(pair.comm, {"grad": pair.inner[1].weight.grad})
    pair.backward(1)
    pair.update()
    pair.steps(2)
    pair.close()


@case
def clip_grad_norm_is_that_of_averaged_gradients(rank: int) -> None:
    for chained in (True, False):
        for norm in (2.0, float("inf")):
            pair = Pair(chained=chained)
            for number in range(3):
                pair.clear()
                pair.backward(number)
                if number == 1:  # torch's, on what DataParallel.parameters gives
                    mine = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1, norm)
                else:
                    mine = pair.model.clip_grad_norm_(0.1, norm)
                want = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.1, norm)
                assert abs(mine - want) < 1e-14
                pair.update()
            pair.close()


@case
def clipping_by_hand_raises_on_every_rank(rank: int) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    pair.optimizer.zero_grad()
    pair.loss(2).backward()
    nn.utils.clip_grad_norm_(held, 0.1)
    assert "gradients were changed between backward() and step()" in error_of(pair.optimizer.step)
    assert error_of(pair.optimizer.step)  # and again


@case
def clipping_by_hand_on_one_rank_raises_on_every_rank(rank: int) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    pair.optimizer.zero_grad()
    pair.loss(2).backward()
    if rank == 1:
        nn.utils.clip_grad_norm_(held, 0.1)

    def rest() -> None:
        pair.optimizer.step()
        for number in range(3, 6):
            pair.step(number)

    assert "rank 1" in error_of(rest)


@case
def gradients_changed_after_step_raise(rank: int) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    for parameter in held:
        parameter.grad.zero_()
    assert "gradient was changed after optimizer.step()" in error_of(lambda: pair.loss(2))


@case
def gradients_changed_after_step_raise_in_state_dict(rank: int) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    for parameter in held:
        parameter.grad.zero_()
    assert "gradient was changed after optimizer.step()" in error_of(pair.model.state_dict)


@case
def a_batch_is_dropped_after_its_backward_pass(rank: int) -> None:
    for chained in (True, False):
        for how in ("model", "optimizer"):
            pair = Pair(chained=chained)
            pair.steps(0, 1)
            pair.optimizer.zero_grad()
            pair.loss(5).backward()
            (pair.model if how == "model" else pair.optimizer).zero_grad()
            pair.steps(2, 3)
            pair.close()


@case
def no_sync_inside_no_sync(rank: int) -> None:
    pair = Pair()
    pair.steps(0)
    with pair.model.no_sync():
        with pair.model.no_sync():
            pair.loss(1).backward()
        pair.loss(2).backward()
    pair.loss(3).backward()
    for number in (1, 2, 3):
        pair.loss(number, "all").backward()
    pair.update()
    pair.clear()
    pair.close()


@case
def zeros_wait_for_gradient_queues_to_end(rank: int) -> None:
    """All units have arrived here before others have read what they need from this rank."""
    pair = Pair(chained=True)
    schedule = schedule_for(net(), pair.batch(0)[0], policy="c-cube", chained=True)
    pair.model.close()
    pair.model = DataParallel(pair.inner, pair.optimizer, schedule=schedule)
    pair.step(0)
    begun, ended = [], []
    exchange = pair.model._engine.exchange
    carry_out = exchange.carry_out

    def slow(*given: Any) -> None:
        begun.append(given)
        carry_out(*given)
        time.sleep(0.2)
        ended.append(given)

    exchange.carry_out = slow
    for number in range(1, 4):
        pair.step(number)
        pair.optimizer.zero_grad(set_to_none=False)
        assert begun
        assert len(ended) == len(begun)
    pair.close()


class Checkpointed(nn.Module):
    """Some of its layers compute their activations again in the backward pass."""

    def __init__(self, which: str, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList([net()[:3], net()[3:5], net()[5:]])
        self.which, self.reentrant = which, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, part in zip("abc", self.parts, strict=True):
            again = name in self.which
            x = checkpoint(part, x, use_reentrant=self.reentrant) if again else part(x)
        return x


@case
def activation_checkpointing(rank: int) -> None:
    for reentrant in (False, True):
        for which in ("b", "c", "bc", "abc"):
            if reentrant and which == "abc":
                continue  # inputs without a gradient: torch warns, and computes none
            pair = Pair(lambda r=reentrant, w=which: Checkpointed(w, r))
            pair.steps(0, 1, 2)
            record = pair.model.last_step  # of a whole step, not of a checkpoint's pass
            assert (
                record.step[1] > record.backward_end > max(record.ready.values()) > record.begun > 0
            )
            assert wrong_order(pair.model) == []
            pair.close()


@case
def a_checkpointed_layer_that_is_used_twice(rank: int) -> None:
    class Twice(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.middle, self.last = net()[:3], net()[3:5], net()[5:]
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
            return self.last(x)

    pair = Pair(lambda: Twice(False))
    pair.steps(0, 1, 2)
    pair.close()
    pair = Pair(lambda: Twice(True))
    pair.step(0)  # nothing is sent before the end of the first backward pass
    pair.optimizer.zero_grad()
    said = error_of(pair.loss(1).backward)
    assert re.search(r"rank \d: middle.\d got gradients twice in a backward pass", said), said


@case
def a_sparse_gradient_is_named(rank: int) -> None:
    inner = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    model = DataParallel(inner, sgd(inner.parameters()))
    said = error_of(lambda: model(torch.tensor([1, 2])).sum().backward())
    assert "0.weight" in said
    assert "sparse" in said


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
