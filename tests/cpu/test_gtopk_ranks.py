"""`GTopK` with ranks that die, over process groups of torch.distributed, and over machines."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gtopk_reference import batch
from gtopk_training import SGD, Training, schedule, small
from machines import on_group, on_machines
from torch.nn.functional import cross_entropy
from training_models import copied, error_of, imported, same

from linkweave import GTopK, collectives
from linkweave.collectives import CollectiveError, DataParallel
from linkweave.collectives.training.gtopk.options import kept_in
from linkweave.kernels import gtopk
from tests.cpu.helpers import outlive
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)
SPEC = GTopK(0.03, warmup=(0.2,), epoch_steps=3, mode="gtopk")
VICTIM, SIZE = 2, 4  # which merges what rank 3 sends


# ---- a rank dies ---------------------------------------------------------------------------------
def dies_in_a_merge() -> None:
    gtopk.merge = lambda *_: os._exit(3)


def survive(rank: int, path: Path) -> None:
    mine = Training(SPEC, lr=0.1, momentum=0.9).steps(0, 1)
    if rank == VICTIM:
        dies_in_a_merge()
    start = time.monotonic()
    said = error_of(lambda: mine.steps(2, 3, 4))
    again = error_of(lambda: mine.backward(5))
    (path / str(rank)).write_text(f"{time.monotonic() - start}\n{said}\n{again}")
    outlive(path, SIZE - 1)  # so that this rank's end is not what another one sees


def test_a_rank_dies_in_a_merge(tmp_path: Path, patient: None) -> None:
    with pytest.raises(CollectiveError, match=r"rank 2 \(process \d+\) exited with status 3"):
        collectives.spawn(survive, SIZE, args=(tmp_path,), timeout=200)
    for rank in (0, 1, 3):
        seconds, *said = (tmp_path / str(rank)).read_text().splitlines()
        assert float(seconds) < 100
        assert len(said) == 2
        assert all("rank 2" in one for one in said), said


@on_ranks(SIZE)
def test_a_merge_raises(rank: int) -> None:
    mine = Training(SPEC, lr=0.1, momentum=0.9).steps(0, 1)
    if rank == VICTIM:

        def merge(*_: Any) -> None:
            raise ValueError("no memory")

        gtopk.merge = merge
    found = [error_of(lambda: mine.steps(2, 3, 4)), error_of(lambda: mine.model.finish())]
    error_of(mine.model.close)
    assert all("rank 2" in said for said in found), found


class OverGroup(Training):
    """Over a group that is not the default: that of gloo, or machines."""

    def __init__(self, exchange: Any, size: int, rank: int, group: Any = None) -> None:
        self.rank, self.size, self.inner = rank, size, small()
        self.optimizer = SGD(self.inner.parameters(), 0.1, momentum=0.9)
        self.model = DataParallel(
            self.inner, self.optimizer, schedule=schedule(), exchange=exchange,
            group=group or dist.group.WORLD,
        )  # fmt: skip

    def loss(self, step: int) -> torch.Tensor:
        x, y = batch(step, self.rank, self.size)
        return cross_entropy(self.model(x), y)


def survive_by_gloo(rank: int) -> tuple[float, str]:
    mine = OverGroup(SPEC, SIZE, rank)
    mine.steps(0, 1)
    if rank == VICTIM:
        dies_in_a_merge()
    start = time.monotonic()
    said = error_of(lambda: mine.steps(2, 3, 4))
    return time.monotonic() - start, said


def test_a_rank_of_a_process_group_dies_in_a_merge() -> None:
    """Its ranks learn that a connection was closed, not whose rank it was."""
    found = on_group(SIZE, survive_by_gloo, timeout=200)
    assert found[VICTIM] is None
    for rank in (0, 1, 3):
        seconds, said = found[rank]
        assert seconds < 100
        assert f"rank {rank}, all-reduce" in said


# ---- process groups ------------------------------------------------------------------------------
def trained(mine: Training) -> list[dict[str, torch.Tensor]]:
    mine.steps(*range(8))
    state = kept_in(mine.optimizer.state_dict())
    found = [copied(mine.model.state_dict()), state["residual"]]
    mine.model.close()
    return found


MODES = [GTopK(0.03, warmup=(0.2,), epoch_steps=3, mode=mode) for mode in ("gtopk", "topk")]


def over_gloo(rank: int) -> Any:
    return [trained(OverGroup(spec, dist.get_world_size(), rank)) for spec in MODES]


def over_communicator(rank: int) -> Any:
    return [trained(Training(spec, lr=0.1, momentum=0.9)) for spec in MODES]


def as_one_communicator(found: list[Any]) -> None:
    """Raise unless ranks have trained to the bit as those of one machine do."""
    want = collectives.spawn(over_communicator, len(found), timeout=60)
    for mine, its in zip(found, want, strict=True):
        assert not isinstance(mine, str), mine
        for a, b in zip(mine, its, strict=True):
            assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_process_group_trains_as_a_communicator(size: int) -> None:
    """To the bit: merges follow the same tree."""
    as_one_communicator(on_group(size, over_gloo))


def over_machines(comm: Any) -> Any:
    return [trained(OverGroup(spec, comm.size, comm.rank, comm)) for spec in MODES]


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_machines_train_as_one(sizes: tuple[int, ...]) -> None:
    """To the bit: with two ranks on the first, merges inside machines come first in any case."""
    as_one_communicator(on_machines(sizes, over_machines))
