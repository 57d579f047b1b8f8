"""States, errors and the end of a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_models import (
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
    train,
)
from training_pair import Cases, Pair, net

from linkweave.collectives import DataParallel

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


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
def one_optimizer_takes_part_in_one_training(rank: int) -> None:
    pair = Pair()
    assert "SGD has none of the module's parameters" in error_of(
        lambda: DataParallel(net(), pair.optimizer)
    )
    assert "another DataParallel trains 1.weight" in error_of(
        lambda: DataParallel(pair.inner, pair.optimizer)
    )
    assert "DataParallel averages gradients itself" in error_of(
        lambda: DataParallel(pair.model, sgd(pair.inner.parameters()))
    )
    pair.model.close()


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
        "exchange must be 'dense' or a GTopK, not 'sparse'": {"exchange": "sparse"},
        "group must be a Communicator or a ProcessGroup": {"group": "world"},
    }.items():
        assert words in error_of(lambda e=extra: DataParallel(inner, good, **e))
    assert "not a list" in error_of(lambda: DataParallel(inner, good, schedule=["auto"]))
    other = schedule_for(made("cnn"), images(0, 2)[0])
    model = DataParallel(inner, good, schedule=other)
    loss = model(images(0, 2)[0]).sum()
    assert "plan for a profile by overlap.measure" in error_of(loss.backward)
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
        inner, x = net(), images(0, 2)[0]
        model = DataParallel(inner, sgd(inner.parameters()))
        around = nn.parallel.DistributedDataParallel(nn.Sequential(model))  # as trainers wrap
        assert "this DataParallel is inside DistributedDataParallel" in error_of(lambda: around(x))
        with torch.no_grad():
            assert around(x).shape == model(x).shape
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
    loss = model(x).sum()
    assert "ranks 0 and 1 have different schedules" in error_of(loss.backward)


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


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
