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
    images,
    imported,  # noqa: F401
    on_all,
    schedule_for,
    sgd,
    wrong_order,
)
from training_pair import Cases, Pair, net, pairs

from linkweave.collectives import DataParallel

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


@case
def gradients_accumulate_in_no_sync(rank: int) -> None:
    for pair in pairs():
        pair.steps(0)
        for start in (1, 4):
            for optimizer in (pair.optimizer, pair.alone_optimizer):
                optimizer.zero_grad()
            with pair.model.no_sync():
                for number in (start, start + 1):
                    pair.loss(number).backward()
            pair.loss(start + 2).backward()
            for number in range(start, start + 3):
                pair.loss(number, "all").backward()
            pair.update()


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
def gradients_accumulate_without_no_sync(rank: int) -> None:
    for pair in pairs():
        pair.steps(0)
        for optimizer, part in pair.both:
            optimizer.zero_grad()
            for number in (1, 2):
                pair.loss(number, part).backward()
            optimizer.step()


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
def clipping_by_hand_is_right_when_not_chained(rank: int) -> None:
    pair = Pair(chained=False)
    pair.steps(0)
    for optimizer, one, part in (
        (pair.optimizer, pair.inner, "mine"), (pair.alone_optimizer, pair.alone, "all")
    ):  # fmt: skip
        optimizer.zero_grad()
        pair.loss(1, part).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optimizer.step()
    pair.close()


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
def two_backward_passes_of_one_forward_pass(rank: int) -> None:
    for pair in pairs():
        pair.steps(0)
        for optimizer, part in pair.both:
            optimizer.zero_grad()
            loss = pair.loss(1, part)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            optimizer.step()
        pair.steps(2)


@case
def gradients_are_kept_and_added_to_the_next(rank: int) -> None:
    for pair in pairs():
        for number in range(3):  # no zero_grad
            for optimizer, part in pair.both:
                pair.loss(number, part).backward()
                optimizer.step()


@case
def zeros_right_after_step(rank: int) -> None:
    for who in ("optimizer", "model"):
        for pair in pairs():
            for number in range(3):
                pair.step(number)
                zeroes = pair.optimizer if who == "optimizer" else pair.model
                zeroes.zero_grad(set_to_none=False)
                assert not any(p.grad.any() for p in pair.inner.parameters())
                pair.alone_optimizer.zero_grad(set_to_none=False)


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


@case
def gradients_are_read_between(rank: int) -> None:
    for pair in pairs():
        for number in range(3):
            pair.clear()
            pair.backward(number)
            for mine, want in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
                assert (mine.grad - want.grad).abs().max() < 1e-14
            pair.update()


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


@case
def create_graph_is_refused(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        pair.steps(0)
        pair.optimizer.zero_grad()
        loss = pair.loss(1)
        assert "create_graph" in error_of(lambda loss=loss: loss.backward(create_graph=True))


@case
def gradients_by_autograd_grad(rank: int) -> None:
    """`torch.autograd.grad`, of inputs and of parameters, is no backward pass of training."""
    for pair in pairs():
        for number in range(3):
            for optimizer, part, model in (
                (pair.optimizer, "mine", pair.model), (pair.alone_optimizer, "all", pair.alone)
            ):  # fmt: skip
                optimizer.zero_grad()
                loss = pair.loss(number, part)
                given = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
                assert given[0].shape == (12, 64)
                x = images(number, 4)[0].requires_grad_()
                torch.autograd.grad(model(x).sum(), x)
                loss.backward()
                optimizer.step()


@case
def several_passes_before_one_backward_pass(rank: int) -> None:
    for pair in pairs():
        pair.steps(0)
        for number in (1, 2):
            for optimizer, part in pair.both:
                optimizer.zero_grad()
                (pair.loss(number, part) + pair.loss(number + 1, part)).backward()
                optimizer.step()


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
