"""States, errors and the end of a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from training_models import (
    apart,
    error_of,
    images,
    imported,
    made,
    on_all,
    schedule_for,
    sgd,
    train,
)
from training_pair import Pair, net

from linkweave.collectives import DataParallel, GTopK
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


@on_ranks(2)
def test_the_last_state_on_rank_0_only(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    if rank == 0:
        time.sleep(0.3)  # the other has returned
        assert apart(pair.model.state_dict(), pair.alone.state_dict()) < 1e-13


@on_ranks(2)
def test_one_optimizer_takes_part_in_one_training(rank: int) -> None:
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


@on_ranks(2)
def test_an_exception_in_the_forward_pass(rank: int) -> None:
    for optimizer in (
        sgd,
        torch.optim.AdamW,
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


@on_ranks(2)
def test_an_exception_in_the_backward_pass_of_one_rank(rank: int) -> None:
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


@on_ranks(2)
def test_an_exception_in_the_backward_pass_of_all_ranks(rank: int) -> None:
    pair = Pair(Raises)
    pair.steps(0, 1)
    pair.inner.when = "backward"
    assert error_of(pair.loss(2).backward, ValueError) == "backward"
    assert "a backward pass ended with an error" in error_of(pair.model.finish)
    pair.model.close()


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
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
        "leave out chained=True": {"exchange": GTopK(0.1), "chained": True},
        "group must be a Communicator or a ProcessGroup": {"group": "world"},
    }.items():
        assert words in error_of(lambda e=extra: DataParallel(inner, good, **e))
    assert "not a list" in error_of(lambda: DataParallel(inner, good, schedule=["auto"]))
    other = schedule_for(made("cnn"), images(0, 2)[0])
    model = DataParallel(inner, good, schedule=other)
    loss = model(images(0, 2)[0]).sum()
    assert "plan for a profile by overlap.measure" in error_of(loss.backward)
    assert type(good).__name__ == "SGD"


@on_ranks(2)
def test_a_ddp_module_is_refused(rank: int) -> None:
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


@on_ranks(2)
def test_different_models_raise_on_every_rank(rank: int) -> None:
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


@on_ranks(2)
def test_different_schedules_raise_on_every_rank(rank: int) -> None:
    inner = net()
    x = images(0, 2)[0]
    schedule = schedule_for(inner, x, policy="wfbp" if rank else "c-cube")
    model = DataParallel(inner, sgd(inner.parameters()), schedule=schedule)
    loss = model(x).sum()
    assert "ranks 0 and 1 have different schedules" in error_of(loss.backward)


@on_ranks(2)
def test_close_leaves_everything_as_it_was(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    pair.close()
    pair.model.close()
    assert type(pair.optimizer) is torch.optim.SGD
    assert pair.model.program is None
    train("cnn", pair.inner, pair.optimizer, range(3), rank, 2)  # each rank alone
    assert not on_all(pair.comm, pair.inner.state_dict())
    assert not pair.inner._forward_pre_hooks
    optimizer = sgd(pair.inner.parameters())  # with no momentum of a rank's own
    again = DataParallel(pair.inner, optimizer)
    train("cnn", again, optimizer, range(2), rank, 2)
    assert on_all(pair.comm, again.state_dict())
    again.close()
