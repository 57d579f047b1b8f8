"""`DataParallel` over machines: units of streamed all-reduces arrive, and are updated, in parts."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing import get_context
from threading import Semaphore
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import on_group, on_machines
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from training_models import (
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,
    schedule_for,
    sgd,
    share,
    train,
    wrong_order,
)

from linkweave.collectives import DataParallel
from linkweave.collectives.cluster import pieces
from linkweave.collectives.cluster.gloo import Across
from linkweave.collectives.training import transport, update
from linkweave.collectives.training.transport import GroupQueue, transport_of

pytestmark = pytest.mark.usefixtures(imported.__name__)
STEPS = 4
PIECES = 19  # of a step

Body = Callable[[Any, int, int], Any]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "QUEUED", 1 << 13)


def wide() -> nn.Module:
    """18 KiB, 131 KiB: 16 blocks of the kernels that update; and less than a piece."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).double()


def beside_ddp(rank: int, dtype: torch.dtype) -> list[list[float]]:
    """The losses of a model with running statistics, by `DataParallel` and by DDP."""
    size, curves = dist.get_world_size(), []
    for ours in (True, False):
        torch.manual_seed(3)
        inner: Any = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        ).to(dtype)
        optimizer = sgd(inner.parameters())
        x = images(0, 2)[0].to(dtype)
        schedule = schedule_for(copy.deepcopy(inner), x, policy="us-byte", chained=True)
        model = (
            DataParallel(inner, optimizer, schedule=schedule) if ours
            else DistributedDataParallel(inner, forward_sync_buffers=False)
        )  # fmt: skip
        losses = []
        for step in range(100):
            x, y = share(images(step, 4 * size), rank, size)
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(dtype)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    return curves


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (2, torch.float64), (3, torch.float64)]
)
def test_losses_are_those_of_ddp(size: int, dtype: torch.dtype) -> None:
    for ours, theirs in on_group(size, lambda rank: beside_ddp(rank, dtype)):
        assert statistics.median(theirs[-10:]) < theirs[0] / 2
        if size == 2:  # a sum of two has no order
            assert ours == theirs
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-11


def in_group(body: Body, size: int, lost: tuple[int, ...] = ()) -> list[Any]:
    return on_group(size, lambda rank: body(dist.group.WORLD, rank, size), timeout=200, lost=lost)


def on_communicator(body: Body, sizes: tuple[int, ...], lost: tuple[int, ...] = ()) -> list[Any]:
    return on_machines(sizes, lambda comm: body(comm, comm.rank, comm.size), timeout=200, lost=lost)


def streaming(group: Any, optim: Any) -> tuple[DataParallel, Any]:
    inner = wide()
    optimizer = optim(inner.parameters())
    schedule = schedule_for(wide(), images(0, 2)[0], policy="c-cube", chained=True)
    model = DataParallel(inner, optimizer, schedule=schedule, group=group)
    model.record_steps()
    return model, optimizer


def streamed(group: Any, rank: int, size: int) -> list[dict[str, Any]]:
    """From the second step on, which has the optimizer's states, pieces wait for the update: some
    until it waits for a unit, and others until it has updated part of it."""
    begun, updated, numbers = Semaphore(0), Semaphore(0), count()
    waits_for = {10: begun, 14: updated}
    waited = 0
    part = update.optim.Table.part

    def counted(table: Any, start: int, stop: int) -> Any:
        if 0 < stop - start < 16:
            updated.release()
        return part(table, start, stop)

    def held_back(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            step, number = divmod(next(numbers), calls)
            for semaphore in waits_for.values() if number == 0 else ():
                while semaphore.acquire(blocking=False):
                    pass  # of the step before
            if step % STEPS and number in waits_for:
                assert waits_for[number].acquire(timeout=60)
                waited += 1
            return call(*args, **kwargs)

        return late

    def told(arrivals: Callable[[int], Any], unit: int) -> Any:
        for nbytes in arrivals(unit):
            begun.release()
            yield nbytes

    update.optim.Table.part = counted  # type: ignore[method-assign]
    Across.allreduce = held_back(Across.allreduce, PIECES)  # type: ignore[method-assign]
    transport.GroupQueue.dequeue = held_back(  # type: ignore[method-assign]
        transport.GroupQueue.dequeue, PIECES + 1
    )
    states = []
    for optim in (sgd, adamw):
        model, optimizer = streaming(group, optim)
        train("cnn", model, optimizer, range(1), rank, size)
        lanes: Any = model._engine.lanes
        lanes.arrivals = partial(told, lanes.arrivals)
        train("cnn", model, optimizer, range(1, STEPS), rank, size)
        assert [op.streamed for op in model.program.ops] == [True]  # type: ignore[union-attr]
        assert wrong_order(model) == []
        states.append(copied(model.state_dict()))
        model.close()
    assert rank or waited == 4 * (STEPS - 1)  # not every rank sends pieces
    return states


@pytest.mark.parametrize(
    "run",
    [
        lambda: on_communicator(streamed, (1, 1)), lambda: on_communicator(streamed, (2, 1)),
        lambda: in_group(streamed, 2),
    ],
    ids=["2 machines", "3 ranks on 2 machines", "gloo"],
)  # fmt: skip
def test_units_that_arrive_in_parts(run: Callable[[], list[Any]]) -> None:
    found = run()
    assert not any(isinstance(states, str) for states in found), found
    for number, optim in enumerate((sgd, adamw)):
        alone = wide()
        train("cnn", alone, optim(alone.parameters()), range(STEPS), each=2 * len(found))
        for states in found:
            assert apart(states[number], alone.state_dict()) < 1e-12


def dies_in_a_piece(group: Any, rank: int, size: int) -> tuple[str, float]:
    """Rank 1 ends when it comes to the sixth piece of the second step."""
    calls, allreduce = count(), Across.allreduce

    def sends() -> None:
        if rank == 1 and next(calls) == PIECES + 5:
            os._exit(3)

    def across(*args: Any) -> Any:
        sends()
        return allreduce(*args)

    class Told(GroupQueue):
        def _send(self, part: torch.Tensor) -> Any:
            sends()
            return super()._send(part)

    Across.allreduce = across  # type: ignore[method-assign]
    transport.GroupQueue = Told  # type: ignore[misc]
    model, optimizer = streaming(group, sgd)
    begun = time.monotonic()
    said = error_of(lambda: train("cnn", model, optimizer, range(9), rank, size))
    return said, time.monotonic() - begun


@pytest.mark.parametrize(
    "run",
    [
        lambda: on_communicator(dies_in_a_piece, (1, 1, 1), (1,)),
        lambda: in_group(dies_in_a_piece, 3, (1,)),
    ],
    ids=["machines", "gloo"],
)
def test_a_rank_that_dies_between_pieces(run: Callable[[], list[Any]]) -> None:
    found = run()
    assert found[1] is None
    for rank in (0, 2):
        assert not isinstance(found[rank], str), found
        said, seconds = found[rank]
        assert f"rank {rank}, all-reduce 0 of unit" in said
        assert seconds < 100


def interrupted(group: Any, rank: int, size: int, parts: int) -> tuple[list[str], Any]:
    """Rank 0 is interrupted when it has been told of so many parts of a unit: from the fifth on, it
    sends a piece when it has been told of one."""
    model, optimizer = streaming(group, sgd)
    train("cnn", model, optimizer, range(1), rank, size)
    lanes: Any = model._engine.lanes
    arrivals, allreduce, told, sent = lanes.arrivals, Across.allreduce, Semaphore(), count()

    def stops(unit: int) -> Any:
        for number, nbytes in enumerate(arrivals(unit)):
            told.release()
            if rank == 0 and number == parts:
                raise KeyboardInterrupt
            yield nbytes

    def held_back(*args: Any) -> Any:
        assert rank or next(sent) < 4 or told.acquire(timeout=60)
        return allreduce(*args)

    lanes.arrivals = stops
    Across.allreduce = held_back  # type: ignore[method-assign]
    x, _ = share(images(1, 2 * size), rank, size)
    error_of(lambda: model(x), BaseException)
    lanes.arrivals = arrivals
    told.release(PIECES)
    said = [error_of(model.finish) for _ in range(2)]
    return said, None if said[0] else copied(model.module.state_dict())


def test_an_interrupt_before_a_unit_has_arrived_is_made_up_for() -> None:
    found = on_communicator(lambda *where: interrupted(*where, 0), (1, 1))
    assert not any(isinstance(one, str) for one in found), found
    (said, state), (others, other) = found
    assert said == others == ["", ""]
    assert apart(state, other) == 0


def test_an_interrupt_in_the_middle_of_a_unit_ends_the_training() -> None:
    found = on_communicator(lambda *where: interrupted(*where, 2), (1, 1))
    assert not any(isinstance(one, str) for one in found), found
    (said, _), (others, _) = found
    assert all("KeyboardInterrupt() ended the update of 1" in one for one in said), said
    assert all(others), others


def waits(rank: int, given_up: Any) -> float:
    """The seconds until a rank that waits for the other one on a lane gives up."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    transport = transport_of(group)
    assert transport is not None
    transport.open(2)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        assert "Timed out" in error_of(lambda: transport.average(1, torch.ones(3)), RuntimeError)
        given_up.set()
    assert given_up.wait(60)
    return time.monotonic() - start


def test_lanes_wait_as_long_as_the_group_of_the_caller() -> None:
    given_up = get_context("fork").Event()
    found = on_group(2, lambda rank: waits(rank, given_up), timeout=200)
    assert not any(isinstance(one, str) for one in found), found
    assert found[0] > 3.9
