"""Optimizers and schedulers with a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training_models import apart, error_of, imported, on_all, sgd, train
from training_pair import SIZE, Pair, net

from linkweave import collectives
from linkweave.collectives import DataParallel
from linkweave.collectives.training import data_parallel, tuner
from linkweave.collectives.training.states import State
from linkweave.collectives.training.tuner import after_backward
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


@on_ranks(2)
def test_a_plain_loop_stays_chained_until_the_next_forward_pass(rank: int) -> None:
    pair = Pair()
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.1) for one, _ in pair.both]
    for number in range(6):
        for optimizer, part in pair.both:
            model = pair.model if part == "mine" else pair.alone
            (model if number % 2 else optimizer).zero_grad()
            if number > 1:  # the first backward pass makes units
                assert pair.model._engine.state is State.PENDING
            pair.loss(number, part).backward()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    pair.close()


@on_ranks(2)
def test_evaluation_waits_for_nothing_once_all_is_final(rank: int) -> None:
    """Without gradients, though the model is not told; the next step is chained again."""
    pair = Pair()
    pair.model.record_steps(False)
    layer = pair.inner[1]
    for number in range(0, 6, 2):
        pair.steps(number, number + 1)
        assert pair.model._engine.state is State.PENDING
        for last in (False, True):
            with torch.no_grad():
                found = pair.model(pair.batch(0)[0])
            assert torch.allclose(found, pair.alone(pair.batch(0)[0]))
            assert (type(layer._parameters) is dict) == (not layer._forward_pre_hooks) == last
    pair.close()


@on_ranks(2)
def test_a_learning_rate_tensor_and_cyclic_momentum(rank: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01, dtype=torch.float64))

    pair = Pair(optimizer=optimizer)
    for number in range(4):
        pair.step(number)
        for one in (pair.optimizer, pair.alone_optimizer):
            one.param_groups[0]["lr"].mul_(0.5)
            one.param_groups[0]["betas"] = (0.9 - number / 10, 0.99)
    pair.close()


@on_ranks(2)
def test_planning_ends_after_one_trial(rank: int) -> None:
    """And with it the record of moments."""
    tuner.TRIED = 3
    pair = Pair()
    pair.model.close()
    pair.model = DataParallel(pair.inner, pair.optimizer, schedule="wfbp")
    assert pair.model.last_step is None
    pair.steps(*range(11))
    assert pair.model._engine.moments.on
    pair.steps(11)
    assert not pair.model._engine.moments.on
    program, record = pair.model.program, pair.model.last_step
    pair.steps(12, 13)
    assert pair.model.program is program and pair.model.last_step is record
    pair.model.record_steps()
    pair.steps(14, 15, 16)
    assert pair.model.last_step is not record
    pair.close()


@on_ranks(2)
def test_finalists_take_turns_and_the_fastest_stays(rank: int) -> None:
    tuner.TRIED, tuner.LEFT = 3, (2, 2)
    turns: list[str] = []
    # seconds of a step in each round, as the mean of ranks of which one measures 0.5
    times = {"wfbp": [2.0, 2.0, 9.0], "c-cube": [5.0], "after-backward": [1.0, 4.0, 4.0]}

    def found(profile: Any, network: Any, *_: Any, **__: Any) -> Any:
        for policy in ("wfbp", "c-cube", "wfbp"):  # the last is not tried again
            yield tuner.plan(profile, network, policy)
        yield after_backward(profile, network)

    class Told(tuner.Tuner):
        def _adopt(self, schedule: Any) -> None:
            turns.append(schedule.policy)
            super()._adopt(schedule)

        def _pace(self, records: Any) -> float:
            policy = turns[-1] if turns else "after-backward"  # at first only measured
            mean = times[policy][turns[1:].count(policy) - 1]
            own = (SIZE * mean - 0.5) / (SIZE - 1) if rank else 0.5
            self._engine.moments.clock.seconds = lambda *_: own * (len(records) - 1)
            found: float = super()._pace(records)
            assert abs(found - mean) < 1e-12
            return found

    data_parallel.Tuner, tuner.finalists = Told, found
    inner = net()
    optimizer = sgd(inner.parameters())
    model = DataParallel(inner, optimizer, schedule="auto", chained=True)
    train("cnn", model, optimizer, range(9 + (1 + 3 + 2 + 2) * 3 + 1), rank, SIZE, each=3)
    first = ["wfbp", "c-cube", "after-backward"]
    assert turns == ["wfbp", *first, "after-backward", "wfbp", "wfbp", "after-backward", "wfbp"]
    assert model.schedule.policy == "wfbp"  # medians 2 and 4
    assert on_all(collectives.get_default(), model.state_dict())
    model.close()


@on_ranks(2)
def test_optimizer_parameters_outside_the_module(rank: int) -> None:
    for chained in (True, False):
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        pair = Pair(optimizer=lambda p, extra=extra: sgd([*p, extra]), chained=chained)
        pair.steps(0, 1)  # which give it no gradient
        pair.optimizer.zero_grad()
        (pair.loss(2) + (rank + 1) * extra.sum()).backward()
        said = error_of(pair.optimizer.step)
        assert "a parameter of shape (3,) with a gradient of this rank alone" in said
        pair.model.close()


@on_ranks(2)
def test_an_optimizer_of_the_users(rank: int) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    said = error_of(lambda: Pair(optimizer=lambda p: Own(p, 0.1)))
    assert "parts of a step are not known to add up to the step of Own" in said


@on_ranks(2)
def test_other_optimizers(rank: int) -> None:
    """A part that wrote to gradients would end the training: others may still read them."""
    nesterov = {"momentum": 0.9, "nesterov": True}
    for kind, extra in (
        ("Adam", {"amsgrad": True}), ("SGD", {"foreach": True, **nesterov}),
        ("SGD", {"fused": True, **nesterov}), ("RMSprop", {"centered": True}), ("NAdam", {}),
        ("Adagrad", {}), ("Rprop", {}), ("ASGD", {}), ("Adafactor", {}), ("AdamW", {"fused": True}),
        *((kind, {"foreach": True}) for kind in ("Adadelta", "Adamax", "RAdam", "RMSprop")),
    ):  # fmt: skip
        pair = Pair(optimizer=lambda p, k=kind, e=extra: getattr(torch.optim, k)(p, lr=1e-2, **e))
        pair.steps(0, 1, 2)
        state, want = pair.model.state_dict(), pair.alone.state_dict()
        assert on_all(pair.comm, state)
        assert apart(state, want) < 1e-9, kind
        pair.model.close()
