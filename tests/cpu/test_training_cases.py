"""What users do with a `DataParallel`: each case on two ranks, with a chained schedule if not said
otherwise, compared with one process that trains on the batches of both."""

from __future__ import annotations

import copy
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from training_models import (
    Batch,
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,  # noqa: F401
    made,
    on_all,
    same,
    schedule_for,
    sgd,
    share,
    train,
    wrong_order,
)

from linkweave import collectives
from linkweave.collectives import DataParallel
from linkweave.collectives.training import planner

pytestmark = pytest.mark.usefixtures("imported")
CASES: list[Callable[[int], None]] = []
SIZE = 2


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    collectives.spawn(body, SIZE, timeout=8)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three units."""
    torch.manual_seed(5)
    found = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)
    )  # fmt: skip
    return found.to(dtype)


class Pair:
    """A DataParallel, and a model of one process that trains on all batches."""

    def __init__(
        self, make: Callable[[], nn.Module] = net, optimizer: Callable[[Any], Any] = sgd,
        x: torch.Tensor | None = None, chained: bool = True, **extra: Any,
    ) -> None:  # fmt: skip
        self.comm = collectives.get_default()
        self.inner, self.alone = make(), make()
        inputs = self.batch(0)[0] if x is None else x
        schedule = schedule_for(make(), inputs, chained=chained)
        self.optimizer = optimizer(self.inner.parameters())
        self.alone_optimizer = optimizer(self.alone.parameters())
        self.model = DataParallel(self.inner, self.optimizer, schedule=schedule, **extra)

    def batch(self, step: int, each: int = 3) -> Batch:
        """This rank's."""
        size = self.comm.size
        return share(images(step, each * size), self.comm.rank, size)

    def loss(self, step: int, part: str = "mine") -> torch.Tensor:
        """Of this rank's batch in the model; of both ranks' in the one of one process."""
        if part == "mine":
            x, y = self.batch(step)
            return cross_entropy(self.model(x), y)
        x, y = images(step, 3 * self.comm.size)
        return cross_entropy(self.alone(x), y)

    def step(self, step: int) -> None:
        for optimizer, part in ((self.optimizer, "mine"), (self.alone_optimizer, "all")):
            optimizer.zero_grad()
            self.loss(step, part).backward()
            optimizer.step()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def check(self) -> None:
        """Parameters are those of one process, bit for bit the same on all ranks."""
        state = self.model.state_dict()
        assert on_all(self.comm, state)
        assert apart(state, self.alone.state_dict()) < 1e-13

    def close(self) -> None:
        self.check()
        self.model.close()


@case
def a_frozen_parameter_stays_as_it_is(rank: int) -> None:
    def make() -> nn.Module:
        found = net()
        found[1].requires_grad_(False)
        found[3].bias.requires_grad_(False)
        return found

    pair = Pair(make)
    pair.steps(0, 1, 2)
    assert pair.inner[1].weight.grad is None
    pair.close()


@case
def requires_grad_changes_between_steps(rank: int) -> None:
    pair = Pair()
    model = DataParallel(pair.inner, pair.optimizer) if pair.model.close() else None
    assert model is None  # closed: the optimizer is as before
    pair.model = DataParallel(pair.inner, pair.optimizer)
    pair.steps(0, 1)
    for frozen in (True, False):
        for one in (pair.inner, pair.alone):
            one[3].requires_grad_(not frozen)
        pair.steps(2, 3)
        assert len(pair.model.program.names) == (2 if frozen else 3)
    pair.close()


@case
def requires_grad_changes_under_a_given_schedule(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    pair.inner[3].requires_grad_(False)
    assert "the schedule is for 3 layers" in error_of(lambda: pair.loss(2))


@case
def a_parameter_used_by_one_rank_gets_its_share(rank: int) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.extra = nn.Linear(10, 10).double()
            self.visit = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            return self.extra(x) if self.visit else x

    for chained in (True, False):
        torch.manual_seed(1)
        inner = Branches()
        inner.visit = True
        x, y = share(images(0, 6), rank, 2)
        schedule = schedule_for(inner, x, chained=chained)
        optimizer = adamw(inner.parameters())
        model = DataParallel(inner, optimizer, schedule=schedule)
        train("cnn", model, optimizer, range(1), rank, 2)
        inner.visit = rank == 1
        before = copied(inner.state_dict())
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        model.synchronize()
        mine = inner.extra.weight.grad.clone()
        assert on_all(model_comm(), {"grad": mine})
        alone = Branches()
        alone.load_state_dict(before)
        alone.visit = True
        x1, y1 = share(images(0, 6), 1, 2)
        cross_entropy(alone(x1), y1).backward()
        assert torch.allclose(mine, alone.extra.weight.grad / 2, rtol=0, atol=1e-15)
        optimizer.step()
        assert on_all(model_comm(), model.state_dict())
        model.close()


def model_comm() -> Any:
    return collectives.get_default()


@case
def a_parameter_used_by_no_rank_has_no_gradient(rank: int) -> None:
    for chained in (True, False):
        inner = made("partial")
        optimizer = adamw(inner.parameters())
        schedule = schedule_for(made("partial"), images(0, 2)[0], chained=chained)
        model = DataParallel(inner, optimizer, schedule=schedule)
        before = copied(inner.state_dict())
        train("partial", model, optimizer, range(3), rank, 2)
        model.finish()
        assert inner.unused.weight.grad is None
        assert inner.unused.weight not in optimizer.state
        assert set(optimizer.state) == {inner.scale, *inner.last.parameters()}
        after = model.state_dict()
        assert all(torch.equal(after[k], before[k]) for k in before if "unused" in k)
        model.close()


@case
def gradients_accumulate_in_no_sync(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
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
            pair.optimizer.step()
            pair.alone_optimizer.step()
        pair.close()


@case
def training_begins_in_no_sync(rank: int) -> None:
    pair = Pair()
    with pair.model.no_sync():
        pair.loss(0).backward()
    pair.loss(0, "all").backward()
    assert not on_all(pair.comm, {"grad": pair.inner[1].weight.grad})
    pair.loss(1).backward()
    pair.loss(1, "all").backward()
    pair.optimizer.step()
    pair.alone_optimizer.step()
    pair.steps(2)
    pair.close()


@case
def gradients_accumulate_without_no_sync(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        pair.steps(0)
        for optimizer, part in ((pair.optimizer, "mine"), (pair.alone_optimizer, "all")):
            optimizer.zero_grad()
            for number in (1, 2):
                pair.loss(number, part).backward()
            optimizer.step()
        pair.close()


@case
def clip_grad_norm_is_that_of_averaged_gradients(rank: int) -> None:
    for chained in (True, False):
        for norm in (2.0, float("inf")):
            pair = Pair(chained=chained)
            for number in range(3):
                pair.optimizer.zero_grad()
                pair.alone_optimizer.zero_grad()
                pair.loss(number).backward()
                pair.loss(number, "all").backward()
                if number == 1:  # torch's, on what DataParallel.parameters gives
                    mine = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1, norm)
                else:
                    mine = pair.model.clip_grad_norm_(0.1, norm)
                want = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.1, norm)
                assert abs(mine - want) < 1e-14
                pair.optimizer.step()
                pair.alone_optimizer.step()
            pair.close()


@case
def clipping_by_hand_raises_on_every_rank(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    pair.optimizer.zero_grad()
    pair.loss(2).backward()
    nn.utils.clip_grad_norm_(pair.inner.parameters(), 0.1)
    assert "gradients were changed between backward() and step()" in error_of(pair.optimizer.step)
    assert error_of(pair.optimizer.step)  # and again


@case
def clipping_by_hand_on_one_rank_raises_on_every_rank(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    pair.optimizer.zero_grad()
    pair.loss(2).backward()
    if rank == 1:
        nn.utils.clip_grad_norm_(pair.inner.parameters(), 0.1)

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
    pair.steps(0, 1)
    for parameter in pair.inner.parameters():
        parameter.grad.zero_()
    assert "gradient was changed after optimizer.step()" in error_of(lambda: pair.loss(2))


@case
def gradients_changed_after_step_raise_in_state_dict(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    for parameter in pair.inner.parameters():
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
def grad_scaler_skips_alike(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
        for number in range(5):
            for scaler, optimizer, part in (
                (scalers[0], pair.optimizer, "mine"), (scalers[1], pair.alone_optimizer, "all")
            ):  # fmt: skip
                optimizer.zero_grad()
                loss = pair.loss(number, part)
                if number == 2 and (rank == 1 or part == "all"):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                if number == 3:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
        pair.close()


@case
def bfloat16_autocast(rank: int) -> None:
    states = []
    for chained in (True, False):
        pair = Pair(lambda: net(torch.float32), chained=chained, x=images(0, 2)[0].float())
        for number in range(4):
            x, y = pair.batch(number)
            pair.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(pair.model(x.float()), y)
            loss.backward()
            pair.optimizer.step()
        states.append(copied(pair.model.state_dict()))
        assert on_all(pair.comm, states[-1])
        assert pair.inner[1].weight.dtype == torch.float32
        pair.model.close()
    assert same(*states)


@case
def schedulers_of_the_learning_rate(rank: int) -> None:
    for early in (True, False):
        schedulers = []

        def optimizer(
            parameters: Any, early: bool = early, schedulers: list[Any] = schedulers
        ) -> torch.optim.Optimizer:
            found = sgd(parameters)
            if early:
                schedulers.append(torch.optim.lr_scheduler.StepLR(found, 2, 0.1))
            return found

        pair = Pair(optimizer=optimizer)
        if not early:
            schedulers += [
                torch.optim.lr_scheduler.StepLR(one, 2, 0.1)
                for one in (pair.optimizer, pair.alone_optimizer)
            ]
        for number in range(6):
            pair.step(number)
            for scheduler in schedulers:
                scheduler.step()
        assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)
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
def states_right_after_step(rank: int) -> None:
    for optimizer in (sgd, adamw):
        pair = Pair(optimizer=optimizer)
        for number in range(3):
            pair.step(number)
            state, want = pair.optimizer.state_dict(), pair.alone_optimizer.state_dict()
            for key, row in want["state"].items():
                for name, value in row.items():
                    assert torch.allclose(state["state"][key][name], value, rtol=0, atol=1e-9)
            pair.check()
            pair.step(number + 3)
            assert apart(pair.inner.state_dict(), pair.alone.state_dict()) < 1e-13
        pair.close()


@case
def states_on_rank_0_only(rank: int) -> None:
    pair = Pair()
    for number in range(4):
        pair.step(number)
        if rank == 0:
            assert apart(pair.model.state_dict(), pair.alone.state_dict()) < 1e-13
            pair.optimizer.state_dict()
    pair.close()


@case
def the_last_state_on_rank_0_only(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    if rank == 0:
        time.sleep(0.3)  # the other has returned
        assert apart(pair.model.state_dict(), pair.alone.state_dict()) < 1e-13


@case
def copies_of_the_module_take_no_part(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    inner = pair.model.module
    copies = [copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))]
    pair.steps(2)
    pair.model.finish()
    for one in copies:
        one(torch.zeros(1, 64, dtype=torch.float64)).sum().backward()
        assert apart(one.state_dict(), inner.state_dict()) > 0
    pair.check()


@case
def states_of_submodules_are_complete(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    part, alone = pair.inner[1], pair.alone[1]
    assert apart(part.state_dict(), alone.state_dict()) < 1e-13
    pair.step(2)
    zeros = {name: torch.zeros_like(value) for name, value in part.state_dict().items()}
    part.load_state_dict(zeros)
    assert apart(pair.inner[1].state_dict(), zeros) == 0
    pair.model.close()


@case
def copies_of_the_optimizer_are_plain_ones(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    twin = copy.deepcopy(pair.optimizer)
    assert type(twin) is type(pair.alone_optimizer)
    assert apart(twin.state_dict()["state"][0], pair.optimizer.state_dict()["state"][0]) == 0
    pickle.loads(pickle.dumps(pair.optimizer)).step()
    pair.step(2)
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
    pair.optimizer.step()
    pair.alone_optimizer.step()
    pair.optimizer.zero_grad()
    pair.alone_optimizer.zero_grad()
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
def programs_are_planned_anew_when_times_change(rank: int) -> None:
    planner.CHECKED, planner.DRIFT = 3, -1.0  # whatever steps take, it has changed
    inner = net()
    optimizer = sgd(inner.parameters())
    model = DataParallel(inner, optimizer, schedule="wfbp")
    known = []
    for step in range(25):
        x, y = share(images(step, 6), rank, SIZE)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        known.append(model.schedule is not None)
    changes = [step for step in range(1, 25) if known[step] != known[step - 1]]
    assert changes == [8, 12, 20, 24]
    assert on_all(collectives.get_default(), model.state_dict())
    model.close()


@case
def one_optimizer_takes_part_in_one_training(rank: int) -> None:
    pair = Pair()
    assert "another DataParallel uses this optimizer" in error_of(
        lambda: DataParallel(net(), pair.optimizer)
    )
    assert "DataParallel averages gradients itself" in error_of(
        lambda: DataParallel(pair.model, sgd(pair.inner.parameters()))
    )
    pair.model.close()


@case
def nobody_waits_for_the_last_step(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)


@case
def eval_between_steps(rank: int) -> None:
    x = images(9, 4)[0]
    for chained in (True, False):
        pair = Pair(chained=chained)
        for number in range(3):
            pair.step(number)
            pair.model.eval()
            pair.alone.eval()
            with torch.no_grad():
                assert (pair.model(x) - pair.alone(x)).abs().max() < 1e-13
            with torch.inference_mode():
                assert (pair.inner(x) - pair.alone(x)).abs().max() < 1e-13
            pair.model.train()
            pair.alone.train()
        pair.close()


@case
def a_pass_without_gradients_right_after_step(rank: int) -> None:
    x = images(9, 4)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        pair = Pair()
        for number in range(3):
            pair.step(number)
            with mode():
                if number == 1:
                    pair.inner[:4](x)  # a part
                else:
                    assert (pair.model(x) - pair.alone(x)).abs().max() < 1e-13
        pair.close()


class Raises(nn.Module):
    """Raises in one of its passes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = net()[:-1], net()[-1]
        self.when = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.when == "forward":
            raise ValueError("forward")
        if self.when == "backward":
            x.register_hook(self._raise)
        return self.last(x)

    def _raise(self, _: Any) -> None:
        raise ValueError("backward")


@case
def an_exception_in_the_forward_pass(rank: int) -> None:
    for optimizer in (
        sgd,
        adamw,
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True),
    ):
        pair = Pair(Raises, optimizer)
        for first in (True, False):
            if not first:
                pair.steps(0, 1)
            pair.inner.when = "forward"
            assert error_of(lambda pair=pair: pair.loss(2), ValueError) == "forward"
            pair.inner.when = ""
            pair.steps(2, 3)
        pair.close()


@case
def an_exception_in_the_backward_pass_of_one_rank(rank: int) -> None:
    pair = Pair(Raises)
    pair.steps(0, 1)
    pair.inner.when = "backward" if rank == 1 else ""

    def rest() -> None:
        for number in range(2, 6):
            try:
                pair.step(number)
            except ValueError as error:
                assert rank == 1
                assert str(error) == "backward"

    assert "rank 1: a backward pass ended with an error" in error_of(rest) or rank == 0
    if rank == 0:
        assert "rank 1" in error_of(rest)


@case
def an_exception_in_the_backward_pass_of_all_ranks(rank: int) -> None:
    pair = Pair(Raises)
    pair.steps(0, 1)
    pair.inner.when = "backward"
    assert error_of(pair.loss(2).backward, ValueError) == "backward"
    assert "a backward pass ended with an error" in error_of(pair.model.finish)
    pair.model.close()


@case
def optimizer_parameters_outside_the_module(rank: int) -> None:
    for chained in (True, False):
        inner, extra = net(), nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD([*inner.parameters(), extra], 0.1)
        schedule = schedule_for(net(), images(0, 2)[0], chained=chained)
        model = DataParallel(inner, optimizer, schedule=schedule)
        for number in range(3):
            optimizer.zero_grad()
            x, y = share(images(number, 6), rank, 2)
            (cross_entropy(model(x), y) + (rank + 1) * extra.sum()).backward()
            optimizer.step()
        assert torch.allclose(extra, torch.full_like(extra, 1 - 0.3 * (rank + 1)))
        assert on_all(model_comm(), model.state_dict())
        model.close()


@case
def two_backward_passes_of_one_forward_pass(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        pair.steps(0)
        for optimizer, part in ((pair.optimizer, "mine"), (pair.alone_optimizer, "all")):
            optimizer.zero_grad()
            loss = pair.loss(1, part)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            optimizer.step()
        pair.steps(2)
        pair.close()


@case
def gradients_are_kept_and_added_to_the_next(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        for number in range(3):  # no zero_grad
            for optimizer, part in ((pair.optimizer, "mine"), (pair.alone_optimizer, "all")):
                pair.loss(number, part).backward()
                optimizer.step()
        pair.close()


@case
def two_steps_after_one_backward_pass(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        for number in range(2):
            pair.step(number)
            pair.optimizer.step()
            pair.alone_optimizer.step()
        pair.close()


@case
def zeros_right_after_step(rank: int) -> None:
    for who in ("optimizer", "model"):
        for chained in (True, False):
            pair = Pair(chained=chained)
            for number in range(3):
                pair.step(number)
                zeroes = pair.optimizer if who == "optimizer" else pair.model
                zeroes.zero_grad(set_to_none=False)
                assert not any(p.grad.any() for p in pair.inner.parameters())
                pair.alone_optimizer.zero_grad(set_to_none=False)
            pair.close()


@case
def gradients_are_read_between(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        for number in range(3):
            pair.optimizer.zero_grad()
            pair.alone_optimizer.zero_grad()
            pair.loss(number).backward()
            pair.loss(number, "all").backward()
            for mine, want in zip(pair.model.parameters(), pair.alone.parameters(), strict=True):
                assert (mine.grad - want.grad).abs().max() < 1e-14
            pair.optimizer.step()
            pair.alone_optimizer.step()
        pair.close()


@case
def a_closure(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        for number in range(3):
            found = []
            for optimizer, part in ((pair.optimizer, "mine"), (pair.alone_optimizer, "all")):

                def closure(
                    optimizer: Any = optimizer,
                    part: str = part,
                    number: int = number,
                    pair: Pair = pair,
                ) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = pair.loss(number, part)
                    loss.backward()
                    return loss

                found.append(optimizer.step(closure))
            total = found[0].detach().reshape(1)
            pair.comm.allreduce(total, "avg")
            assert abs(float(total) - float(found[1])) < 1e-14
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
    pair.optimizer.zero_grad()
    said = error_of(pair.loss(0).backward)
    assert re.search(r"rank \d: middle.\d got gradients twice in a backward pass", said), said


@case
def channels_last(rank: int) -> None:
    def make() -> nn.Module:
        return made("cnn").to(memory_format=torch.channels_last)

    for chained in (True, False):
        pair = Pair(make, chained=chained)
        pair.steps(0, 1, 2)
        pair.model.finish()
        assert pair.inner.second.weight.is_contiguous(memory_format=torch.channels_last)
        pair.close()


@case
def mixed_dtypes(rank: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(64, 12, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(12)
            self.last = nn.Linear(12, 10)
            self.last.bias = nn.Parameter(self.last.bias.detach().bfloat16())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x.flatten(1).bfloat16()).float())
            return nn.functional.linear(x, self.last.weight) + self.last.bias

    states = []
    for chained in (True, False):
        inner = Mixed()
        optimizer = adamw(inner.parameters())
        schedule = schedule_for(inner, images(0, 2)[0], chained=chained)
        model = DataParallel(inner, optimizer, schedule=schedule)
        train("cnn", model, optimizer, range(4), rank, 2)
        assert len({op.buffer for op in model.program.ops}) == 2
        states.append(copied(model.state_dict()))
        assert on_all(model_comm(), states[-1])
        model.close()
    assert same(*states)


@case
def buffers_of_batch_norm(rank: int) -> None:
    torch.manual_seed(rank)  # rank 0's parameters and buffers are those of all
    inner = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    ).double()
    inner[2].running_mean += rank + 1
    inner[2].num_batches_tracked += 7 * rank
    optimizer = sgd(inner.parameters())
    schedule = schedule_for(copy.deepcopy(inner), images(0, 4)[0])
    model = DataParallel(inner, optimizer, schedule=schedule)
    assert on_all(model_comm(), inner.state_dict())
    assert int(inner[2].num_batches_tracked) == 0
    assert float(inner[2].running_mean[0]) == 1.0
    train("cnn", model, optimizer, range(3), rank, 2, each=4)
    state = model.state_dict()
    assert int(state["2.num_batches_tracked"]) == 3
    assert on_all(model_comm(), {k: v for k, v in state.items() if "running" not in k})
    assert not on_all(model_comm(), {"mean": state["2.running_mean"]})
    model.close()


@case
def what_is_refused(rank: int) -> None:
    inner = net()
    good = sgd(inner.parameters())
    for words, arguments in {
        "module must be a torch.nn.Module": (3, good),
        "optimizer must be a torch.optim.Optimizer": (inner, None),
        "LBFGS": (inner, torch.optim.LBFGS(inner.parameters())),
    }.items():
        assert words in error_of(lambda a=arguments: DataParallel(*a))
    for words, extra in {
        "schedule must be a Schedule or one of auto, ddp": {"schedule": "fastest"},
        "not 3": {"schedule": 3},
        "exchange must be 'dense', not 'sparse'": {"exchange": "sparse"},
        "group must be a Communicator or a ProcessGroup": {"group": "world"},
    }.items():
        assert words in error_of(lambda e=extra: DataParallel(inner, good, **e))
    assert "not a list" in error_of(lambda: DataParallel(inner, good, schedule=["auto"]))
    other = schedule_for(made("cnn"), images(0, 2)[0])
    model = DataParallel(inner, good, schedule=other)
    assert "plan for a profile by overlap.measure" in error_of(lambda: model(images(0, 2)[0]))
    frozen = net().requires_grad_(False)
    model = DataParallel(frozen, sgd(frozen.parameters()))
    assert "no parameter that requires a gradient" in error_of(lambda: model(images(0, 2)[0]))
    assert type(good).__name__ == "SGD"


@case
def a_ddp_module_is_refused(rank: int) -> None:
    import tempfile

    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/a", rank=0, world_size=1)
        inner = nn.Sequential(nn.parallel.DistributedDataParallel(net()))
        said = error_of(lambda: DataParallel(inner, sgd(inner.parameters())))
        assert "DistributedDataParallel averages gradients itself" in said
        dist.destroy_process_group()


@case
def different_models_raise_on_every_rank(rank: int) -> None:
    def frozen() -> nn.Module:
        found = net()
        found[3].bias.requires_grad_(rank == 1)
        return found

    for make in (
        lambda: nn.Linear(3, 4 + rank), lambda: net(torch.float32 if rank else torch.float64),
        lambda: nn.Sequential(*[nn.Linear(2, 2)] * 1, *([nn.Linear(2, 2)] if rank else [])), frozen,
    ):  # fmt: skip
        inner = make()
        assert "different models" in error_of(lambda i=inner: DataParallel(i, sgd(i.parameters())))


@case
def different_schedules_raise_on_every_rank(rank: int) -> None:
    inner = net()
    x = images(0, 2)[0]
    schedule = schedule_for(inner, x, policy="wfbp" if rank else "c-cube")
    model = DataParallel(inner, sgd(inner.parameters()), schedule=schedule)
    assert "ranks 0 and 1 have different schedules" in error_of(lambda: model(x))


@case
def a_sparse_gradient_is_named(rank: int) -> None:
    inner = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    model = DataParallel(inner, sgd(inner.parameters()))
    said = error_of(lambda: model(torch.tensor([1, 2])).sum().backward())
    assert "0.weight" in said
    assert "sparse" in said


@case
def another_module_uses_a_parameter_first(rank: int) -> None:
    """The first forward pass used it in one module, and a later pass uses it in another."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, bank: nn.Linear) -> torch.Tensor:
            return x + bank.bias

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bank, self.last = net()[:3], net()[3], net()[5]
            self.adds = nn.ModuleList([Adds(), Adds()])
            self.which = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.adds[self.which](self.body(x), self.bank).tanh())

    pair = Pair(Bank)
    pair.steps(0, 1)
    pair.inner.which = 1
    said = error_of(lambda: pair.steps(2))
    assert "bank" in said
    assert "another module" in said


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
    for chained in (True, False):
        pair = Pair(chained=chained)
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
        pair.close()


@case
def the_inner_module_is_called_directly(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    for optimizer, one, part in (
        (pair.optimizer, pair.inner, share(images(2, 6), rank, 2)),
        (pair.alone_optimizer, pair.alone, images(2, 6)),
    ):  # fmt: skip
        optimizer.zero_grad()
        cross_entropy(one(part[0]), part[1]).backward()
        optimizer.step()
    pair.steps(3)
    pair.close()


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

    for chained in (True, False):
        pair = Pair(optimizer=lambda p: Own(p, 0.1), chained=chained)
        pair.steps(0, 1, 2)
        pair.close()


@case
def hooks_of_the_optimizer_run_once_a_step(rank: int) -> None:
    pair = Pair()
    calls: list[str] = []
    pair.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    pair.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    pair.steps(0, 1)
    assert calls == ["before", "after"] * 2
    pair.close()


@case
def parameter_groups(rank: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.1}, {"params": others[:2], "weight_decay": 0.5}], 1e-2
        )

    for chained in (True, False):
        pair = Pair(optimizer=optimizer, chained=chained)
        pair.steps(0, 1)
        for one, model in ((pair.optimizer, pair.inner), (pair.alone_optimizer, pair.alone)):
            one.add_param_group({"params": [*model.parameters()][3:], "lr": 0.2})
        pair.steps(2, 3)
        pair.close()


@case
def other_optimizers(rank: int) -> None:
    for kind, extra in {
        "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True, "foreach": True},
        "RMSprop": {"centered": True}, "NAdam": {}, "Adagrad": {}, "Rprop": {}, "ASGD": {},
        "Adafactor": {}, "AdamW": {"fused": True},
    }.items():  # fmt: skip
        pair = Pair(optimizer=lambda p, k=kind, e=extra: getattr(torch.optim, k)(p, lr=1e-2, **e))
        pair.steps(0, 1, 2)
        state, want = pair.model.state_dict(), pair.alone.state_dict()
        assert on_all(pair.comm, state)
        assert apart(state, want) < 1e-9, kind
        pair.model.close()


@case
def training_goes_on_after_loading(rank: int) -> None:
    for optimizer in (sgd, adamw):
        for chained in (True, False):
            pair = Pair(optimizer=optimizer, chained=chained)
            pair.steps(0, 1, 2)
            kept = copy.deepcopy([pair.model.state_dict(), pair.optimizer.state_dict()])
            pair.steps(3, 4)
            want = copied(pair.model.state_dict())
            other = Pair(optimizer=optimizer, chained=chained)
            for again in (other, pair):  # a new one, and the old one with updates pending
                again.steps(5)
                again.model.load_state_dict(kept[0])
                again.optimizer.load_state_dict(copy.deepcopy(kept[1]))
                again.steps(3, 4)
                assert same(again.model.state_dict(), want)
                again.model.close()


@case
def close_leaves_everything_as_it_was(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    pair.close()
    pair.model.close()
    assert type(pair.optimizer) is torch.optim.SGD
    assert pair.model.program is None
    before = copied(pair.inner.state_dict())
    train("cnn", pair.inner, pair.optimizer, range(3), rank, 2)  # each rank alone
    assert not same(before, pair.inner.state_dict())
    assert not on_all(pair.comm, pair.inner.state_dict())
    assert not pair.inner._forward_pre_hooks
    optimizer = sgd(pair.inner.parameters())  # with no momentum of a rank's own
    again = DataParallel(pair.inner, optimizer)
    train("cnn", again, optimizer, range(2), rank, 2)
    assert on_all(pair.comm, again.state_dict())
    again.close()


@case
def tied_weights_are_one_parameter(rank: int) -> None:
    inner = made("transformer")
    optimizer = sgd(inner.parameters())
    schedule = schedule_for(made("transformer"), torch.zeros(1, 5, dtype=torch.long))
    model = DataParallel(inner, optimizer, schedule=schedule)
    train("transformer", model, optimizer, range(3), rank, 2)
    model.finish()
    assert inner.decoder.weight is inner.embedding.weight
    assert inner.decoder.weight.grad.data_ptr() == inner.embedding.weight.grad.data_ptr()
    assert model.program.names == ("embedding", "attention", "norm", "decoder")
    model.close()


@case
def parameters_of_no_or_one_element(rank: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale + self.empty.sum()

    for chained in (True, False):
        pair = Pair(Odd, chained=chained)
        pair.steps(0, 1, 2)
        pair.model.finish()
        assert pair.inner.empty.grad.shape == (0, 3)
        pair.close()


@case
def outputs_and_losses_of_any_shape(rank: int) -> None:
    """The model returns a dictionary with its loss, as those of Hugging Face do."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            out = self.body(x)
            return {"loss": cross_entropy(out, y), "more": [out, (None, 3)]}

    inner, alone = WithLoss(), net()
    optimizer, alone_optimizer = sgd(inner.parameters()), sgd(alone.parameters())
    model = DataParallel(inner, optimizer, schedule=schedule_for(WithLoss(), *images(0, 2)))
    for number in range(3):
        optimizer.zero_grad()
        alone_optimizer.zero_grad()
        model(*share(images(number, 6), rank, 2))["loss"].backward()
        x, y = images(number, 6)
        cross_entropy(alone(x), y).backward()
        optimizer.step()
        alone_optimizer.step()
    assert (
        apart(inner.body.state_dict() if model.finish() is None else {}, alone.state_dict()) < 1e-13
    )
    model.close()


@case
def several_passes_before_one_backward_pass(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        pair.steps(0)
        for number in (1, 2):
            for optimizer, part in ((pair.optimizer, "mine"), (pair.alone_optimizer, "all")):
                optimizer.zero_grad()
                (pair.loss(number, part) + pair.loss(number + 1, part)).backward()
                optimizer.step()
        pair.close()


@case
def compiled_modules(rank: int) -> None:
    """By a backend without a compiler; hooks before layers do not run in what is compiled."""
    whole, inside = torch.compile(net(), backend="eager"), net()
    inside.compile(backend="eager")
    for inner in (whole, inside):
        pair = Pair(lambda inner=inner: inner)
        pair.alone = net()
        pair.alone_optimizer = sgd(pair.alone.parameters())
        pair.steps(0, 1, 2, 3)
        assert not pair.model.program.chained
        state = {k.removeprefix("_orig_mod."): v for k, v in pair.model.state_dict().items()}
        assert apart(state, pair.alone.state_dict()) < 1e-13
        pair.model.close()
