"""Optimizers and schedulers with a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import (
    apart,
    error_of,
    images,
    imported,  # noqa: F401
    on_all,
    schedule_for,
    sgd,
    share,
    train,
)
from training_pair import SIZE, Cases, Pair, net, pairs

from linkweave import collectives
from linkweave.collectives import DataParallel
from linkweave.collectives.training import data_parallel, tuner
from linkweave.collectives.training.states import State
from linkweave.collectives.training.tuner import at_once

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


@case
def a_plain_loop_stays_chained_until_the_next_forward_pass(rank: int) -> None:
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


@case
def evaluation_waits_for_nothing_once_all_is_final(rank: int) -> None:
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


@case
def a_scheduler_does_not_warn(rank: int) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for early in (True, False):
            inner = net()
            optimizer = sgd(inner.parameters())
            make = lambda optimizer=optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
            scheduler = make() if early else None
            model = DataParallel(inner, optimizer)
            scheduler = scheduler or make()
            train("cnn", model, optimizer, range(1), rank, 2)
            scheduler.step()
            model.close()


@case
def a_learning_rate_tensor_and_cyclic_momentum(rank: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01, dtype=torch.float64))

    pair = Pair(optimizer=optimizer)
    for number in range(4):
        pair.step(number)
        for one in (pair.optimizer, pair.alone_optimizer):
            one.param_groups[0]["lr"].mul_(0.5)
            one.param_groups[0]["betas"] = (0.9 - number / 10, 0.99)
    pair.close()


@case
def policies_are_planned_where_steps_have_several_backward_passes(rank: int) -> None:
    comm, inner, alone = collectives.get_default(), net(), net()
    optimizer, other = sgd(inner.parameters()), sgd(alone.parameters())
    model = DataParallel(inner, optimizer, schedule="us-byte")
    for step in range(8):
        x, y = share(images(step, 6), comm.rank, comm.size)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        if step % 2:
            optimizer.step()
        x, y = images(step, 6)
        other.zero_grad()
        (2 * cross_entropy(alone(x), y)).backward()
        if step % 2:
            other.step()
    assert model.schedule is not None
    assert apart(model.state_dict(), alone.state_dict()) < 1e-13
    model.close()


@case
def planning_ends_after_one_trial(rank: int) -> None:
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


@case
def finalists_take_turns_and_the_fastest_stays(rank: int) -> None:
    tuner.TRIED, tuner.LEFT = 3, (2, 2)
    turns: list[str] = []
    # seconds of a step in each round, as the mean of ranks of which one measures 0.5
    times = {"wfbp": [2.0, 2.0, 9.0], "c-cube": [5.0], "at once": [1.0, 4.0, 4.0]}

    def found(profile: Any, network: Any, *_: Any, **__: Any) -> Any:
        for policy in ("wfbp", "c-cube", "wfbp"):  # the last is not tried again
            yield tuner.plan(profile, network, policy)
        yield at_once(profile, network)

    class Told(tuner.Tuner):
        def _adopt(self, schedule: Any) -> None:
            turns.append(schedule.policy)
            super()._adopt(schedule)

        def _pace(self, records: Any) -> float:
            policy = turns[-1] if turns else "at once"  # at first only measured
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
    for step in range(9 + (1 + 3 + 2 + 2) * 3 + 1):
        x, y = share(images(step, 6), rank, SIZE)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    first = ["wfbp", "c-cube", "at once"]
    assert turns == ["wfbp", *first, "at once", "wfbp", "wfbp", "at once", "wfbp"]
    assert model.schedule.policy == "wfbp"  # medians 2 and 4
    assert on_all(collectives.get_default(), model.state_dict())
    model.close()


@case
def optimizer_parameters_outside_the_module(rank: int) -> None:
    for chained in (True, False):
        inner, extra = net(), nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD([*inner.parameters(), extra], 0.1)
        schedule = schedule_for(net(), images(0, 2)[0], chained=chained)
        model = DataParallel(inner, optimizer, schedule=schedule)
        train("cnn", model, optimizer, range(2), rank, 2)  # which give it no gradient
        optimizer.zero_grad()
        x, y = share(images(2, 6), rank, 2)
        (cross_entropy(model(x), y) + (rank + 1) * extra.sum()).backward()
        said = error_of(optimizer.step)
        assert "a parameter of shape (3,) with a gradient of this rank alone" in said
        model.close()


@case
def an_optimizer_of_the_users(rank: int) -> None:
    """Its step is carried out as a whole."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            total = sum(
                float(p.grad.square().sum()) for g in self.param_groups for p in g["params"]
            )
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad / (1 + total) ** 0.5)

    said = error_of(lambda: Pair(optimizer=lambda p: Own(p, 0.1)))
    assert "parts of a step are not known to add up to the step of Own" in said
    pair = Pair(optimizer=lambda p: Own(p, 0.1), chained=False)
    pair.steps(0, 1, 2)
    pair.close()


@case
def hooks_of_the_optimizer_run_once_a_step(rank: int) -> None:
    for pair in pairs():  # chained: what is under way is waited for
        calls: list[str] = []
        pair.steps(0, 1)
        pair.optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        pair.optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        pair.steps(2, 3)
        assert calls == ["before", "after"] * 2


@case
def parameter_groups(rank: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.1}, {"params": others[:2], "weight_decay": 0.5}], 1e-2
        )

    pair = Pair(optimizer=optimizer, chained=False)
    pair.steps(0, 1)
    for one, model in ((pair.optimizer, pair.inner), (pair.alone_optimizer, pair.alone)):
        one.add_param_group({"params": [*model.parameters()][3:], "lr": 0.2})
    pair.steps(2, 3)
    pair.close()
    pair = Pair(optimizer=optimizer)
    assert "its optimizer lacks the parameter 3.bias" in error_of(lambda: pair.steps(0))


@case
def other_optimizers(rank: int) -> None:
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


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
