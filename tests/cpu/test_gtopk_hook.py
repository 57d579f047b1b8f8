"""gTop-k in plain DDP, and its benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_distributed import run
from torch import nn

import linkweave
from linkweave.bench.training.gtopk import measure
from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed import GTopKState, gtopk_hook
from linkweave.kernels import topk_abs

ROOT = Path(__file__).parents[2]
STEPS = 4


class Plain(nn.Module):
    """Gradients are the input: integers that tests choose. Layers become ready from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (300, 7, 501))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split([p.numel() for p in self.layers])
        return sum((p * part).sum() for p, part in zip(self.layers, parts, strict=True))


def gradients(rank: int, step: int) -> torch.Tensor:
    rng = np.random.default_rng([rank, step])
    return torch.from_numpy(60 * rng.integers(-99, 99, 808).astype(np.float32))


def noise(rank: int, step: int) -> torch.Tensor:
    """Gradients of which no two are equal: the order in a bucket decides between equal ones."""
    return torch.from_numpy(np.random.default_rng([rank, step]).standard_normal(808, np.float32))


def flat(parts: Any) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def conserve(rank: int, own: str) -> list[Any]:
    """(residual, what arrived, gradients) in all, after each step; residuals by buckets."""
    group = linkweave.init() if own == "communicator" else dist.group.WORLD
    model = Plain()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = GTopKState(group, density=0.02, mode="gtopk", conserve=True)
    ddp.register_comm_hook(state, gtopk_hook)
    arrived, given, found = torch.zeros(808), torch.zeros(808), []
    for step in range(STEPS):
        ddp.zero_grad()
        x = gradients(rank, step)
        ddp(x).backward()
        given += x
        arrived += dist.get_world_size() * flat(p.grad for p in model.parameters())
        residual = state.state_dict(model)["residual"]
        kept = flat(residual[name] for name, _ in model.named_parameters())
        found.append((kept.tolist(), arrived.tolist(), given.tolist()))
    assert state.steps == STEPS and len(state._residuals) > 1
    return found


@pytest.mark.parametrize(
    ("size", "own"), [(2, "group"), (3, "group"), (3, "communicator"), (5, "group")]
)
def test_nothing_is_lost_when_ddp_makes_new_buckets(size: int, own: str) -> None:
    for rows in zip(*run(size, conserve, own, backend="gloo"), strict=True):
        kept, arrived, given = (np.array([row[i] for row in rows]) for i in range(3))
        assert (arrived == arrived[0]).all() and arrived[0].any()
        assert (kept.sum(0) + arrived[0] == given.sum(0)).all()


def first_step(rank: int) -> list[Any]:
    """What some steps of one bucket leave, and what a plain reading of them leaves."""
    model = Plain()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(GTopKState(dist.group.WORLD, density=0.1, mode="topk"), gtopk_hook)
    size = dist.get_world_size()
    residual = np.zeros((size, 808), np.float32)
    same = []
    for step in range(3):
        ddp.zero_grad()
        ddp(noise(rank, step)).backward()
        total = np.zeros(808, np.float32)
        for r in range(size):
            residual[r] += noise(r, step).numpy()
            values, at = topk_abs(residual[r], round(0.1 * 808))
            total[at] += values
            residual[r, at] = 0
        wanted = torch.from_numpy(total / np.float32(size))
        same.append(torch.equal(flat(p.grad for p in model.parameters()), wanted))
    return same


def test_a_bucket_is_averaged_as_defined() -> None:
    assert run(2, first_step, backend="gloo") == [[True] * 3] * 2


def resume(rank: int) -> list[bool]:
    def trained(steps: range, state: GTopKState, model: nn.Module) -> list[torch.Tensor]:
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(state, gtopk_hook)
        found = []
        for step in steps:
            ddp.zero_grad()
            ddp(noise(rank, step)).backward()
            found.append(flat(p.grad.clone() for p in model.parameters()))
        return found

    options: Any = {"density": 0.05, "mode": "gtopk", "warmup": (0.5,)}
    whole = trained(range(6), GTopKState(epoch_steps=4, **options), Plain())
    state, model = GTopKState(epoch_steps=4, **options), Plain()
    trained(range(3), state, model)
    saved = state.state_dict(model)
    later, fresh = GTopKState(epoch_steps=4, **options), Plain()
    later.load_state_dict(fresh, saved)
    rest = trained(range(3, 6), later, fresh)
    return [torch.equal(a, b) for a, b in zip(whole[3:], rest, strict=True)]


def test_it_goes_on_from_a_saved_state() -> None:
    assert run(2, resume, backend="gloo") == [[True] * 3] * 2


def broken(rank: int) -> list[Any]:
    model = Plain()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(GTopKState(density=0.01), gtopk_hook)
    x = gradients(rank, 0)
    if rank == 1:
        x[400] = float("inf")
    ddp(x).backward()
    found = flat(p.grad for p in model.parameters())
    ddp.zero_grad()
    ddp(gradients(rank, 1)).backward()
    again = flat(p.grad for p in model.parameters())
    return [(~found.isfinite()).nonzero().flatten().tolist(), bool(again.isfinite().all())]


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks() -> None:
    assert run(3, broken, backend="gloo") == [[[400], True]] * 3


def refused(rank: int) -> str:
    ddp = nn.parallel.DistributedDataParallel(Plain().double())
    ddp.register_comm_hook(GTopKState(), gtopk_hook)
    try:
        ddp(torch.zeros(808, dtype=torch.float64)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_what_is_refused() -> None:
    assert all("not torch.float64" in words for words in run(2, refused, backend="gloo"))
    with pytest.raises(CollectiveError, match="a density must be above 0"):
        GTopKState(density=0)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
         "linkweave", "bench", "gtopk", *words],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_bench_gtopk() -> None:
    done = bench("--model", "transformer", "-r", "1", "--hook", "gTop-k", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["hook"] for row in rows] == ["dense", "gTop-k"]
    assert {(row["model"], row["ranks"]) for row in rows} == {("transformer", 2)}


def test_bench_gtopk_names_what_it_knows() -> None:
    with pytest.raises(CollectiveError, match="--hook must be one of nothing sent, dense, fp16"):
        measure("resnet18", 0.001, 1, True, ("gossip",))
    with pytest.raises(CollectiveError, match="--model must be one of vgg16, resnet20, resnet18"):
        measure("resnet19", 0.001, 1, True)
