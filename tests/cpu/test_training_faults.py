"""Ranks that die, part or differ in the order of their hooks; groups of torch.distributed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import on_group
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import (
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,
    made,
    on_all,
    same,
    schedule_for,
    sgd,
    share,
    train,
    wrong_order,
)

import linkweave
from linkweave import collectives
from linkweave.collectives import CollectiveError, DataParallel
from linkweave.kernels.plan import counters
from tests.cpu.helpers import outlive
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
CNN = partial(made, "cnn")


def wrapped(
    make: Callable[[], nn.Module] = CNN, optim: Any = sgd, group: Any = None,
    **planned: Any,
) -> tuple[DataParallel, Any]:  # fmt: skip
    """A model on this rank, and its optimizer."""
    inner = make()
    optimizer = optim(inner.parameters())
    schedule = schedule_for(make(), images(0, 2)[0], **planned)
    return DataParallel(inner, optimizer, schedule=schedule, group=group), optimizer


class Dies(nn.Module):
    """Ends its process in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = made("cnn")
        self.last = nn.Linear(10, 10).double()
        self.when = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.when == "forward":
            os._exit(3)
        if self.when == "backward":
            x.register_hook(lambda _: os._exit(3))
        return self.last(x)


def survive(rank: int, when: str, chained: bool, path: Path) -> None:
    model, optimizer = wrapped(Dies, adamw, chained=chained)
    train("cnn", model, optimizer, range(2), rank, 3)
    model.module.when = when if rank == 1 else ""
    start = time.monotonic()
    said = error_of(lambda: train("cnn", model, optimizer, range(2, 9), rank, 3))
    again = error_of(lambda: model(images(0, 2)[0]))
    (path / str(rank)).write_text(f"{time.monotonic() - start}\n{said}\n{again}")
    outlive(path, 2)  # so that this rank's end is not what another one sees


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_dies_in_a_step(when: str, chained: bool, tmp_path: Path, patient: None) -> None:
    with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) exited with status 3"):
        collectives.spawn(survive, 3, args=(when, chained, tmp_path), timeout=200)
    for rank in (0, 2):
        seconds, *said = (tmp_path / str(rank)).read_text().splitlines()
        assert float(seconds) < 100
        assert len(said) == 2
        assert all("rank 1" in one for one in said), said


class Crossing(nn.Module):
    """Visits two branches, in an order that a rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(64, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 10) for _ in range(3))
        self.order = [0, 1, 2]
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.flatten(1))
        found = {number: self.branches[number](x) for number in self.order}
        return found[0] * found[1].sigmoid() + found[2]


@on_ranks(3, order="fixed")
def test_hooks_fire_in_another_order_on_each_rank(rank: int) -> None:
    comm, states = collectives.get_default(), []
    for policy in ("wfbp", "bytescheduler", "c-cube"):
        for chained in (True, False):
            model, optimizer = wrapped(Crossing, policy=policy, chained=chained)
            model.record_steps()
            for step in range(6):
                model.module.order = [(rank + step + i) % 3 for i in range(3)]
                train("cnn", model, optimizer, range(step, step + 1), rank, comm.size)
            assert wrong_order(model) == []
            states.append(copied(model.state_dict()))
            assert on_all(comm, states[-1])
            model.close()
    assert all(same(state, states[0]) for state in states)
    alone = Crossing()
    train("cnn", alone, sgd(alone.parameters()), range(6), each=6)
    assert apart(states[0], alone.state_dict()) < 1e-13


class Branch(nn.Module):
    """A layer that some ranks do not visit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = made("cnn")  # which seeds the generator of all
        self.extra = nn.Linear(10, 10).double()
        self.visits = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.extra(x) if self.visits else x


@on_ranks(3, order="fixed")
def test_a_layer_that_one_rank_visits(rank: int) -> None:
    """Each step, another rank visits the branch; then none does."""
    comm, found = collectives.get_default(), []
    for chained in (True, False):
        model, optimizer = wrapped(Branch, adamw, chained=chained)
        for step in range(8):
            model.module.visits = step in (0, 7) or (rank == step % comm.size and step < 5)
            train("cnn", model, optimizer, range(step, step + 1), rank, comm.size)
        found.append(copied(model.state_dict()))
        assert on_all(comm, found[-1])
        model.close()
    assert same(*found)
    alone = Branch()
    optimizer = adamw(alone.parameters())
    for step in range(8):
        optimizer.zero_grad()
        for one in range(3):
            alone.visits = step in (0, 7) or (one == step % 3 and step < 5)
            x, y = share(images(step, 6), one, 3)
            (cross_entropy(alone(x), y) / 3).backward()
        optimizer.step()
    assert apart(found[0], alone.state_dict()) < 1e-12


# ---- groups ------------------------------------------------------------------------------------
def by_gloo(rank: int) -> list[dict[str, torch.Tensor]]:
    states = []
    for group in (None, dist.group.WORLD, dist.new_group()):
        for policy in ("c-cube", "bytescheduler"):
            model, optimizer = wrapped(optim=adamw, group=group, policy=policy, chained=True)
            model.record_steps()
            train("cnn", model, optimizer, range(4), rank, 2)
            assert wrong_order(model) == []
            states.append(copied(model.state_dict()))
    x = torch.ones(1)
    dist.all_reduce(x)  # the caller's group goes on
    assert x == 2
    inner = made("cnn")
    optimizer = adamw(inner.parameters())
    auto = DataParallel(inner, optimizer, schedule="c-cube")
    train("cnn", auto, optimizer, range(10), rank, 2)
    assert all(op.streamed for op in auto.program.ops)
    states.append({"checksum": torch.tensor(list(auto.program.checksum.encode()))})
    model, optimizer = wrapped(optim=adamw, policy=policy, chained=True)
    held = [*model.module.parameters()]
    train("cnn", model, optimizer, range(2), rank, 2)
    cross_entropy(model(images(0, 2)[0]), images(0, 2)[1]).backward()
    nn.utils.clip_grad_norm_(held, 0.1)
    assert "gradients were changed" in error_of(optimizer.step)
    return states


def test_a_process_group_of_gloo() -> None:
    a, b = on_group(2, by_gloo)
    alone = made("cnn")
    train("cnn", alone, adamw(alone.parameters()), range(4), each=4)
    assert len(a) == 7
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert all(apart(state, alone.state_dict()) < 1e-12 for state in a[:-1])


def again_by_gloo(rank: int) -> None:
    for number in range(4):
        model, optimizer = wrapped(policy=("wfbp", "asc-wfbp")[number % 2])  # one lane, two
        with model:
            train("cnn", model, optimizer, range(2), rank, 2)
            assert float(model.state_dict()["last.bias"][0]) != 0


def test_a_second_model_on_a_process_group_whose_first_is_closed() -> None:
    assert on_group(2, again_by_gloo) == [None, None]


@on_ranks(4)
def test_groups_of_ranks(rank: int) -> None:
    """A communicator, a part of one, and one with a single rank."""
    comm = collectives.get_default()
    pair, single = comm.split(rank // 2), comm.split(rank)
    for group, size in ((comm, 4), (pair, 2), (single, 1)):
        alone = made("cnn")
        model, optimizer = wrapped(group=group)
        train("cnn", model, optimizer, range(3), rank % size, size)
        train("cnn", alone, sgd(alone.parameters()), range(3), each=2 * size)
        assert apart(model.state_dict(), alone.state_dict()) < 1e-13
        assert (model.program is None) == (size == 1)
        lanes = model._transport._lanes if size > 1 else []  # beside computations
        rounds = {lane._calls.control.yields for lane in lanes}
        assert rounds == ({counters.BESIDE} if size > 1 else set())
        assert group._calls.control.yields == counters.YIELDS
        model.close()
    x = torch.ones(1)
    comm.allreduce(x)
    assert x == 4


def test_a_single_process_trains_as_without_it() -> None:
    inner, alone = made("cnn"), made("cnn")
    optimizer, alone_optimizer = adamw(inner.parameters()), adamw(alone.parameters())
    with linkweave.DataParallel(inner, optimizer) as model:
        train("cnn", model, optimizer, range(3))
        with model.no_sync():
            model(images(0, 2)[0]).sum().backward()
        model.zero_grad()
        model.synchronize()
        model.finish()
        assert float(model.clip_grad_norm_(1.0)) == 0.0
        assert model.program is model.schedule is model.last_step is None
        assert type(optimizer) is torch.optim.AdamW
        assert not any(part._forward_pre_hooks for part in inner.modules())  # nothing costs time
        assert not any(p._post_accumulate_grad_hooks for p in inner.parameters())
    train("cnn", alone, alone_optimizer, range(3))
    assert same(inner.state_dict(), alone.state_dict())
    assert type(optimizer) is torch.optim.AdamW


@on_ranks(2)
def test_many_engines_one_after_another(rank: int) -> None:
    """Parameters are frozen and thawed often; nothing runs out."""
    inner = made("cnn")
    optimizer = sgd(inner.parameters())
    model = DataParallel(inner, optimizer)
    for step in range(60):
        inner.second.requires_grad_(step % 2 == 0)
        train("cnn", model, optimizer, range(step, step + 1), rank, 2)
    assert on_all(collectives.get_default(), model.state_dict())
    model.close()
    for _ in range(20):
        again = DataParallel(inner, optimizer)
        train("cnn", again, optimizer, range(1), rank, 2)
        again.close()


# ---- processes that are forked from a rank -------------------------------------------------------
def in_child(work: Callable[[], Any]) -> str:
    """What `work` returns in a forked process, or the error that it raises."""
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said


@on_ranks(2)
def test_a_forked_process_has_what_was_complete(rank: int) -> None:
    """A checkpoint written in the background; a step that is put off has no lanes there."""
    model, optimizer = wrapped(chained=True)
    train("cnn", model, optimizer, range(3), rank, 2)
    if rank == 1:
        collectives.barrier()
    train("cnn", model, optimizer, range(3, 4), rank, 2)
    if rank == 0:  # whose gradients cannot have been averaged yet
        found = [in_child(call) for call in (model.state_dict, model.eval, model.close)]
        assert all("CollectiveError: process" in said for said in found), found
        assert all("was forked from rank 0 " in said for said in found)
        assert all("call finish() of DataParallel before you fork" in said for said in found)
        collectives.barrier()
    model.finish()
    total = sum(float(p.detach().sum()) for p in model.module.parameters())
    assert (
        float(in_child(lambda: sum(float(x.sum()) for x in model.state_dict().values()))) == total
    )
    assert in_child(model.close) == "None"
    train("cnn", model, optimizer, range(4, 6), rank, 2)  # the rank itself goes on
    model.close()
