"""What users do with gradients of a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_models import error_of, imported, schedule_for, sgd, wrong_order
from training_pair import Pair, net

from linkweave.collectives import DataParallel
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


@on_ranks(2)
def test_clipping_by_hand_on_one_rank_raises_on_every_rank(rank: int) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    pair.optimizer.zero_grad()
    pair.loss(2).backward()
    if rank == 1:
        nn.utils.clip_grad_norm_(held, 0.1)
        words = "gradients were changed between backward() and step()"
        assert words in error_of(pair.optimizer.step)

    def rest() -> None:
        pair.optimizer.step()
        for number in range(3, 6):
            pair.step(number)

    assert "rank 1" in error_of(rest)


@pytest.mark.parametrize("what", ["a forward pass", "state_dict"])
@on_ranks(2)
def test_gradients_changed_after_step_raise(rank: int, what: str) -> None:
    pair = Pair()
    held = [*pair.inner.parameters()]
    pair.steps(0, 1)
    for parameter in held:
        parameter.grad.zero_()
    call = pair.model.state_dict if what == "state_dict" else lambda: pair.loss(2)
    assert "gradient was changed after optimizer.step()" in error_of(call)


@on_ranks(2)
def test_zeros_wait_for_gradient_queues_to_end(rank: int) -> None:
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


@on_ranks(2)
def test_activation_checkpointing(rank: int) -> None:
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


@on_ranks(2)
def test_a_checkpointed_layer_that_is_used_twice(rank: int) -> None:
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


@on_ranks(2)
def test_a_sparse_gradient_is_named(rank: int) -> None:
    inner = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    model = DataParallel(inner, sgd(inner.parameters()))
    said = error_of(lambda: model(torch.tensor([1, 2])).sum().backward())
    assert "0.weight" in said
    assert "sparse" in said
