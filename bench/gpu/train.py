"""Rows of `bench.gpu_suite` that train a small model, a process a rank, all on one GPU.

The gradients' all-reduces run on lanes of CUDA streams, beside the backward pass and the next
forward pass. Parameters must be those of one process that trains on all ranks' samples.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.gpu.api import Arrays, on_ranks, same
from linkweave.bench.gpu.runner import Failed, LeftOut, Result
from linkweave.torch_backend import OLDEST, register

DDP = "DDP"
"""Not a policy: torch's DistributedDataParallel over the backend "linkweave"."""
POLICIES = ("asc-wfbp", "us-byte", "c-cube")
"""Two lanes, blocks cut inside tensors, a gradient queue."""
TIMED = 10
SAMPLES = 4  # of a rank
WIDTH = 96
CLOSE = 1e-10  # by how much float64 parameters may differ from those of one process


def before_times() -> int:
    from linkweave.collectives.training.tuner import SETTLED_NAMED  # needs torch

    return SETTLED_NAMED + 1


def model_on(device: str) -> Any:
    """A model of 300 KB in float64, the same in each process."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
              nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
              nn.Linear(WIDTH, 10)]  # fmt: skip
    return nn.Sequential(*layers).to(device, torch.float64)


def batch(step: int, size: int, device: str) -> tuple[Any, Any]:
    """The samples of all ranks and their classes, the same in each process."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (size * SAMPLES,), generator=generator)
    return x.to(device), y.to(device)


def steps_of(model: Any, optimizer: Any, rank: int, size: int, device: str) -> float:
    """Train as one rank of so many. Returns the mean seconds of the last steps."""
    import torch
    from torch.nn.functional import cross_entropy

    settled = before_times()

    def moment() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in range(settled + TIMED):
        if step == settled:
            begun = moment()
        x, y = (of[rank * SAMPLES : (rank + 1) * SAMPLES] for of in batch(step, size, device))
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if hasattr(model, "finish"):
        model.finish()
    return (moment() - begun) / TIMED


@contextmanager
def wrapped(
    model: Any, optimizer: Any, policy: str, rank: int, size: int, folder: str
) -> Iterator[Any]:  # fmt: skip
    if policy != DDP:
        made = collectives.DataParallel(model, optimizer, schedule=policy)
        yield made
        made.close()
        return
    from torch.nn.parallel import DistributedDataParallel

    with on_backend("linkweave", rank, size, folder):  # NCCL takes one rank of a GPU only
        yield DistributedDataParallel(model)


@contextmanager
def on_backend(engine: str, rank: int, size: int, folder: str) -> Iterator[None]:
    """torch's default process group is one of linkweave, whose CUDA calls this engine carries."""
    import torch.distributed as dist

    register()  # linkweave was imported before torch, and may not be installed
    os.environ["LINKWEAVE_CUDA"] = engine
    dist.init_process_group("linkweave", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=size, timeout=timedelta(seconds=60))  # fmt: skip
    yield
    dist.destroy_process_group()


def need_backend(arrays: Arrays) -> None:
    arrays.load()
    if tuple(map(int, version("torch").split(".")[:2])) < OLDEST:
        raise LeftOut(f"the backend of torch.distributed needs torch {OLDEST[0]}.{OLDEST[1]}")


def trained(
    rank: int, arrays: Arrays, policy: str, device: str, folder: str
) -> tuple[float, float, list[Any]]:
    """(mean seconds of a step, the largest difference from one process's parameters, the sums of
    the parameters) on one rank."""
    import torch

    comm = collectives.get_default()
    model, alone = model_on(device), model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with wrapped(model, optimizer, policy, rank, comm.size, folder) as trains:
        seconds = steps_of(trains, optimizer, rank, comm.size, device)
    whole = torch.optim.SGD(alone.parameters(), 0.05, momentum=0.9)
    for step in range(before_times() + TIMED):
        x, y = batch(step, comm.size, device)
        whole.zero_grad()
        torch.nn.functional.cross_entropy(alone(x), y).backward()
        whole.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return seconds, apart, [float(p.detach().sum()) for p in model.parameters()]


def called(rank: int, arrays: Arrays, folder: str, device: str) -> int:
    """How many results of torch.distributed's calls are right, which NCCL carries."""
    import torch
    import torch.distributed as dist

    size = collectives.get_default().size
    x, total = torch.full((1000,), rank + 1.0, device=device), size * (size + 1) / 2
    with on_backend("nccl", rank, size, folder):
        dist.all_reduce(each := x.clone())
        dist.all_reduce(later := x.clone(), async_op=True).wait()
        dist.broadcast(first := x.clone(), 0)
        dist.all_gather(rows := [torch.empty_like(x) for _ in range(size)], x)
        dist.barrier()
    numbered = zip(rows, range(1, size + 1), strict=True)
    found = [(each, total), (later, total), (first, 1.0), *numbered]
    return sum(
        same(got.cpu().numpy(), np.full(1000, want, np.float32), f"call {i} over NCCL, rank {rank}")
        for i, (got, want) in enumerate(found)
    )


def over_nccl(arrays: Arrays, ranks: int, device: str = "cuda") -> Result:
    """torch's own calls over the backend "linkweave", whose CUDA collectives go to NCCL."""
    need_backend(arrays)
    with tempfile.TemporaryDirectory() as folder:
        return {"checked": sum(on_ranks(called, ranks, arrays, folder, device, timeout=60))}


def train(arrays: Arrays, ranks: int, policy: str, device: str = "cuda") -> Result:
    if policy == DDP:
        need_backend(arrays)
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(trained, ranks, arrays, policy, device, folder, timeout=60)
    if (apart := max(row[1] for row in found)) > CLOSE:
        raise Failed(f"parameters differ by {apart:.1e} from those of one process")
    if any(row[2] != found[0][2] for row in found):
        raise Failed("the ranks' parameters differ")
    return {"ranks": ranks, "policy": policy, "step_s": max(row[0] for row in found)}
