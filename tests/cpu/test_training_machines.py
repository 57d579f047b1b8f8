"""`DataParallel` over machines: units of streamed all-reduces arrive, and are updated, in parts."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from itertools import count
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
    imported,  # noqa: F401
    schedule_for,
    sgd,
    share,
    train,
    wrong_order,
)

from linkweave.collectives import DataParallel
from linkweave.collectives.distributed import pieces
from linkweave.collectives.distributed.across import Across
from linkweave.collectives.training import group_queue, update
from linkweave.collectives.training.transport import transport_of

pytestmark = pytest.mark.usefixtures("imported")
STEPS = 4
PIECES = 19  # of a step

Body = Callable[[Any, int, int], Any]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "QUEUED", 1 << 13)


def wide() -> nn.Module:
    """18 KiB, 131 KiB: 16 blocks of the kernels that update; and less than a piece."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)
    ).double()  # fmt: skip


def beside_ddp(rank: int, dtype: torch.dtype) -> list[list[float]]:
    """The losses of a model with running statistics, by `DataParallel` and by DDP."""
    size, curves = dist.get_world_size(), []
    for ours in (True, False):
        torch.manual_seed(3)
        inner: Any = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        ).to(dtype)  # fmt: skip
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
    return on_group(size, lambda rank: body(dist.group.WORLD, rank, size), timeout=5, lost=lost)


def on_communicator(body: Body, sizes: tuple[int, ...], lost: tuple[int, ...] = ()) -> list[Any]:
    return on_machines(
        sizes, lambda comm: body(comm, comm.rank, comm.size), timeout=5, lost=lost
    )  # fmt: skip


def streaming(group: Any, optim: Any) -> tuple[DataParallel, Any]:
    inner = wide()
    optimizer = optim(inner.parameters())
    schedule = schedule_for(wide(), images(0, 2)[0], policy="c-cube", chained=True)
    model = DataParallel(inner, optimizer, schedule=schedule, group=group)
    model.record_steps()
    return model, optimizer


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    """Pieces that arrive later than the forward pass comes to their units."""

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(2e-3)
        return call(*args, **kwargs)

    return late


def streamed(group: Any, rank: int, size: int) -> list[dict[str, Any]]:
    sizes: list[int] = []
    part = update.optim.Table.part

    def counted(table: Any, start: int, stop: int) -> Any:
        sizes.append(stop - start)
        return part(table, start, stop)

    update.optim.Table.part = counted  # type: ignore[method-assign]
    Across.allreduce = slowly(Across.allreduce)  # type: ignore[method-assign]
    group_queue.GroupQueue.dequeue = slowly(  # type: ignore[method-assign]
        group_queue.GroupQueue.dequeue
    )
    states = []
    for optim in (sgd, adamw):
        model, optimizer = streaming(group, optim)
        train("cnn", model, optimizer, range(STEPS), rank, size)
        assert [op.streamed for op in model.program.ops] == [True]  # type: ignore[union-attr]
        assert wrong_order(model) == []
        states.append(copied(model.state_dict()))
        model.close()
    assert sum(0 < n < 16 for n in sizes) > 2 * STEPS, sizes
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
    calls = count()

    def until(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            streamed = group is not dist.group.WORLD or kwargs.get("async_op")
            if rank == 1 and streamed and next(calls) == PIECES + 5:
                os._exit(3)
            return call(*args, **kwargs)

        return counted

    Across.allreduce = until(Across.allreduce)  # type: ignore[method-assign]
    dist.all_reduce = until(dist.all_reduce)
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
)  # fmt: skip
def test_a_rank_that_dies_between_pieces(run: Callable[[], list[Any]]) -> None:
    found = run()
    assert found[1] is None
    for rank in (0, 2):
        assert not isinstance(found[rank], str), found
        said, seconds = found[rank]
        assert f"rank {rank}, all-reduce 0 of" in said
        assert seconds < 10


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
        assert rank or next(sent) < 4 or told.acquire(timeout=10)
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


def waits(rank: int) -> float:
    """The seconds until a rank that waits for the other one on a lane gives up."""
    transport = transport_of(dist.group.WORLD)
    assert transport is not None
    transport.open(2)
    start = time.monotonic()
    if rank == 0:
        assert "Timed out" in error_of(lambda: transport.average(1, torch.ones(3)), RuntimeError)
    else:
        time.sleep(6)
    return time.monotonic() - start


def test_lanes_wait_as_long_as_the_group_of_the_caller() -> None:
    assert 3.9 < on_group(2, waits, timeout=4)[0] < 6
