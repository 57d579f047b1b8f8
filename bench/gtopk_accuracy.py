"""Time until a small CNN knows digits, when its gradients are as many as a large model's.

The CNN trains under DDP beside a parameter that it does not need and whose gradient is zero, so
that the dense exchange takes what the large model's does. The ranks are torchrun's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave.bench.gtopk import on_gloo
from linkweave.bench.tasks import Task, digits
from linkweave.bench.train_models import SHAPES
from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed import GTopKState, gtopk_hook

MOMENTUM = 0.9  # of the optimizer, or of the hook
TESTED = 5  # steps between two tests
MOST = 1000  # steps
HEADER = f"{'exchange':10}{'values':>12}{'ranks':>6}{'steps':>7}{'seconds':>10}{'ms a step':>11}"
LEGEND = (
    f"until so many of the test digits are right; tested every {TESTED} steps, beside the clock"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A training, of the slowest rank."""

    exchange: str
    values: int
    ranks: int
    percent: float
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.exchange:10}{self.values:12}{self.ranks:6}{self.steps:7}{self.seconds:10.1f}"
            f"{1e3 * self.seconds / self.steps:11.1f}"
        )


class _Zero(torch.autograd.Function):
    """x as it is; the gradient of the padding is zero, and takes no memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, padding: Any) -> Any:
        ctx.shape = padding.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.new_zeros(()).expand(ctx.shape)


class _Padded(nn.Module):
    def __init__(self, model: nn.Module, padding: int) -> None:
        super().__init__()
        self.model, self.padding = model, nn.Parameter(torch.zeros(padding))

    def forward(self, x: Any) -> Any:
        return _Zero.apply(self.model(x), self.padding)


def measure(model: str, density: float, percent: float) -> list[Row]:
    """Train with the dense exchange and by gTop-k until `percent` of the test digits are right.

    Runs as one rank of those that torchrun has started. Returns rows on rank 0. Raises
    CollectiveError for an unknown model, and if MOST steps do not suffice.
    """
    if model not in SHAPES:
        raise CollectiveError(f"--model must be one of {', '.join(SHAPES)}, not {model!r}")
    values = sum(math.prod(shape) for layer in SHAPES[model]() for shape in layer)
    task = digits(0)
    with on_gloo():
        exchanges: dict[str, Callable[[], Any]] = {
            "dense": lambda: None,
            "gTop-k": lambda: GTopKState(
                dist.group.WORLD, density=density, momentum=MOMENTUM, mode="gtopk"
            ),
        }
        rows = [
            Row(
                name, values, dist.get_world_size(), percent, *_train(task, values, make(), percent)
            )
            for name, make in exchanges.items()
        ]
        return rows if dist.get_rank() == 0 else []


def _train(task: Task, values: int, state: GTopKState | None, percent: float) -> tuple[int, float]:
    """(steps, seconds) until `percent` are right; all ranks judge the same weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    small = task.model()
    padded = _Padded(small, values - sum(p.numel() for p in small.parameters()))
    ddp: Any = nn.parallel.DistributedDataParallel(padded, gradient_as_bucket_view=True)
    if state:
        ddp.register_comm_hook(state, gtopk_hook)
    # the padding has no momentum: its update would only take time, of both
    optimizer = torch.optim.SGD(small.parameters(), task.rate, 0.0 if state else MOMENTUM)
    x, y = map(torch.from_numpy, task.train)
    rng = np.random.default_rng(1)
    seconds = 0.0
    for step in range(1, MOST + 1):
        chosen = rng.choice(len(y), task.batch, replace=False)[rank::size]
        dist.barrier()
        start = time.perf_counter()
        ddp.zero_grad()
        cross_entropy(ddp(x[chosen]), y[chosen]).backward()
        optimizer.step()
        took = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds += float(took)
        if step % TESTED == 0 and task.judge(small) >= percent:
            return step, seconds
    raise CollectiveError(f"{MOST} steps do not suffice for {percent:g} % of the test digits")
