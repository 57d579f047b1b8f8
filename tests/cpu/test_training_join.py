"""Batches of unequal number: `DataParallel.join`, beside one process that has them all."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distributed import run
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave import collectives
from linkweave.collectives import CollectiveError, DataParallel, GTopK, ShardedEmbedding
from linkweave.collectives.training import checks
from tests.cpu.on_ranks import on_ranks
from tests.cpu.training_models import adamw, apart, error_of, images, made, on_all, sgd

MODES: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in ("ddp", "c-cube", "bytescheduler", "dear")},
    "auto": {}, "gtopk": {"exchange": GTopK(density=1)},
}  # fmt: skip
COUNTS = [(5, 2), (0, 4), (19, 1), (2, 6, 4)]


def share_of(step: int, rank: int, size: int, dtype: torch.dtype) -> Any:
    x, y = images(step, 2 * size)
    return x.chunk(size)[rank].to(dtype), y.chunk(size)[rank]


def loss_of(model: Any, step: int, rank: int, size: int) -> torch.Tensor:
    dtype = next(iter(model.state_dict().values())).dtype
    x, y = share_of(step, rank, size, dtype)
    return cross_entropy(model(x), y)


def train(model: Any, optimizer: Any, steps: Sequence[int], rank: int, size: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank, size).backward()
        optimizer.step()


def wrapped(schedule: str = "ddp", make: Any = sgd, dtype: Any = torch.float64) -> tuple[Any, Any]:
    """A model on this rank, and its optimizer."""
    inner = made("cnn", dtype)
    optimizer = make(inner.parameters())
    return DataParallel(inner, optimizer, schedule=schedule), optimizer


def alone(model: nn.Module, optimizer: Any, steps: Sequence[int], counts: Sequence[int]) -> None:
    """One process, in which ranks with as many batches give their part of each average."""
    for step in steps:
        optimizer.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                (loss_of(model, step, rank, len(counts)) / len(counts)).backward()
        optimizer.step()


def together(comm: Any, counts: Sequence[int], mode: str, make: Any) -> float:
    """How far a rank's parameters are from those of one process, after batches in unequal number
    and four in equal number. Raises unless all ranks have the same parameters and states."""
    dtype = torch.float32 if mode == "gtopk" else torch.float64
    rank, size = comm.rank, comm.size
    inner, whole = made("cnn", dtype), made("cnn", dtype)
    optimizer, other = make(inner.parameters()), make(whole.parameters())
    group = None if mode == "auto" else comm
    with DataParallel(inner, optimizer, group=group, **MODES[mode]) as model:
        with model.join():
            train(model, optimizer, range(counts[rank]), rank, size)
        alone(whole, other, range(max(counts)), counts)
        found = apart(model.state_dict(), whole.state_dict())
        states = optimizer.state_dict()["state"]
        assert states.keys() == other.state_dict()["state"].keys()
        flat = {f"{key} {name}": x for key, s in states.items() for name, x in s.items()}
        assert on_all(comm, {**model.state_dict(), **flat})
        train(model, optimizer, range(30, 34), rank, size)
        alone(whole, other, range(30, 34), [99] * size)
        assert on_all(comm, model.state_dict())
        return max(found, apart(model.state_dict(), whole.state_dict()))


def every_mode(rank: int, counts: Sequence[int]) -> dict[str, float]:
    checks.EVERY = 1  # ranks that are over early differ meanwhile
    comm = collectives.get_default()
    return {mode: together(comm, counts, mode, sgd if mode == "ddp" else adamw) for mode in MODES}


@on_ranks(2)
def test_without_join_the_error_names_it(rank: int) -> None:
    model, optimizer = wrapped()
    train(model, optimizer, range(2), rank, 2)
    if rank:  # the other one has no more batches
        said = error_of(lambda: train(model, optimizer, range(2, 4), rank, 2))
        assert "rank 0 has returned or was closed" in said, said
        assert said.endswith("have fewer batches than others train inside `with model.join():`")


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_batches_in_unequal_number(counts: Sequence[int]) -> None:
    for found in collectives.spawn(every_mode, len(counts), args=(counts,), timeout=60):
        rounds = found.pop("gtopk")  # in float32, and AdamW divides by it
        assert max(found.values()) < 1e-10 and rounds < 1e-3, (found, rounds)


def over_gloo(rank: int) -> float:
    counts = (2, 5, 3)
    model, optimizer = wrapped("c-cube")
    with model:
        with model.join():
            train(model, optimizer, range(counts[rank]), rank, 3)
        whole = made("cnn")
        alone(whole, sgd(whole.parameters()), range(5), counts)
        return apart(model.state_dict(), whole.state_dict())


def test_over_a_process_group() -> None:
    assert all(found < 1e-10 for found in run(3, over_gloo, backend="gloo"))


@on_ranks(2)
def test_with_buffers(rank: int) -> None:
    """Statistics are those of a rank whose loop goes on."""
    comm = collectives.get_default()
    inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = sgd(inner.parameters())
    with DataParallel(inner, optimizer, schedule="ddp") as model:
        with model.join():
            for step in range(3 if rank else 1):
                model(torch.full((2, 4), float(step + rank)) + torch.eye(4)[:2]).sum().backward()
                optimizer.step()
        assert int(inner[1].num_batches_tracked) == 3
        assert on_all(comm, model.state_dict())


@on_ranks(2)
def test_accumulated_gradients(rank: int) -> None:
    """What a rank has added and not sent goes along with the next pass of the others."""
    model, optimizer = wrapped()
    with model, model.join():
        if rank:
            with model.no_sync():
                loss_of(model, 0, 1, 2).backward()
        else:
            loss_of(model, 0, 0, 2).backward()
            optimizer.step()
    whole = made("cnn")
    alone(whole, sgd(whole.parameters()), [0], [1, 1])
    assert apart(model.module.state_dict(), whole.state_dict()) < 1e-12


@on_ranks(2)
def test_options_go_along(rank: int) -> None:
    """A learning rate that a rank has set while others were over is that of all."""
    model, optimizer = wrapped(make=adamw)
    with model:
        with model.join():
            for step in range(3 - 2 * rank):
                loss_of(model, step, rank, 2).backward()
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 / 3
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert steps == {3}


@on_ranks(2)
def test_a_tensor_as_the_learning_rate(rank: int) -> None:
    rate = torch.tensor(0.5)
    model, optimizer = wrapped(make=lambda p: torch.optim.SGD(p, rate))
    with model:
        with model.join():
            for step in range(1 + rank):
                loss_of(model, step, rank, 2).backward()
                rate.mul_(0.5)
                optimizer.step()
        assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.125


@on_ranks(2)
def test_after_a_batch_that_was_left_out(rank: int) -> None:
    """The last forward pass of a rank that is over early was in no_sync(), with no backward."""
    model, optimizer = wrapped("c-cube")
    with model:
        with model.join():
            train(model, optimizer, range(2 + rank), rank, 2)
            if rank == 0:
                with model.no_sync():
                    loss_of(model, 9, rank, 2)
        whole = made("cnn")
        alone(whole, sgd(whole.parameters()), range(3), (2, 3))
        assert apart(model.state_dict(), whole.state_dict()) < 1e-12


@on_ranks(2)
def test_a_grad_scaler_is_refused(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    model, optimizer = wrapped(dtype=torch.float32)
    with pytest.raises(CollectiveError, match="does not work with join"), model.join():
        scaler.scale(loss_of(model, 0, rank, 2)).backward()
        scaler.step(optimizer)
    model.close()


def dies(rank: int) -> None:
    model, optimizer = wrapped()
    with model.join():
        for step in range(5):
            if rank and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model, step, rank, 2).backward()
            optimizer.step()


def says(rank: int, path: str) -> None:
    try:
        dies(rank)
    except CollectiveError as error:
        Path(path).write_text(str(error))
        raise


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        collectives.spawn(says, 2, args=(str(tmp_path / "said"),), timeout=60)
    assert "rank 1" in (tmp_path / "said").read_text()
    assert "died" in (tmp_path / "said").read_text()


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    inner = made("cnn")
    with DataParallel(inner, sgd(inner.parameters())) as model:
        second = made("transformer")
        other = DataParallel(second, sgd(second.parameters()))
        with model.join():
            for one in (model, other):
                assert "inside another join()" in error_of(one.join().__enter__)
        other.close()
        with model.no_sync():
            assert "or no_sync()" in error_of(model.join().__enter__)
        with pytest.raises(ZeroDivisionError), model.join():  # nobody waits for the others then
            raise ZeroDivisionError
        with model.join():
            pass
    rows = nn.Sequential(ShardedEmbedding(8, 4), nn.Linear(4, 2))
    with DataParallel(rows, torch.optim.SGD(rows.parameters(), 0.1)) as model:
        assert "with the ShardedEmbedding 0, whose" in error_of(model.join().__enter__)
    with DataParallel(inner := made("cnn"), sgd(inner.parameters())) as model:
        inner.norm = nn.SyncBatchNorm(3)
        assert "with the SyncBatchNorm norm, whose" in error_of(model.join().__enter__)


def test_a_single_rank_has_nobody_to_wait_for() -> None:
    model, optimizer = wrapped("auto")
    with model.join():
        train(model, optimizer, [0], 0, 1)
