"""`linkweave bench gtopk --accuracy`: time until a CNN recognises digits, beside a large gradient.

The CNN of `linkweave bench convergence` trains under DDP beside a parameter of padding, so that a
step exchanges as many gradients as a large model has. The padding's gradients are random numbers.
From the second step on they fill a bucket of their own, and so have no influence on which entries
the CNN sends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave.bench.convergence import batches
from linkweave.bench.gtopk import Hook, Layer, hooks, layers_of
from linkweave.bench.peers import on_gloo
from linkweave.bench.tasks import TASKS
from linkweave.bench.timing import schedule

HOOKS = ("dense", "gTop-k")
INTERVAL = 5  # steps from one test to the next
MOST = 500  # steps
HEADER = (
    f"{'hook':18}{'values':>12}{'ranks':>6}{'density':>9}{'accuracy':>10}{'steps':>7}"
    f"{'seconds':>10}{'ms a step':>11}"
)
LEGEND = (
    f"until the CNN is that accurate on digits it has not seen (tested every {INTERVAL} steps, not "
    f"timed), or\nfor {MOST} steps; seconds: of the slowest rank in each step; only the CNN's "
    "parameters are updated"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A training; `LEGEND` explains the figures. `values` are the CNN's and the padding's."""

    hook: str
    values: int
    ranks: int
    density: float
    accuracy: float
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.hook:18}{self.values:12}{self.ranks:6}{self.density:9g}{self.accuracy:10.1%}"
            f"{self.steps:7}{self.seconds:10.1f}{1e3 * self.seconds / self.steps:11.1f}"
        )


def measure(model: str, density: float, accuracy: float, batch_scheduling: bool) -> list[Row]:
    """Measure as one rank of those that torchrun has started. Returns rows on rank 0.

    `accuracy` is a share of the test digits. Raises CollectiveError for an unknown model.
    """
    values = sum(shape.numel() for layer in layers_of(model) for shape in layer)
    schedule(batch_scheduling)
    with on_gloo():
        found = list(rows(values, density, accuracy))
        return found if dist.get_rank() == 0 else []


def rows(values: int, density: float, accuracy: float) -> Iterator[Row]:
    """Train under each hook of `MOMENTA`, with as many gradients as `values` in all."""
    known = hooks(density)
    for name in HOOKS:
        reached, steps, seconds = _trained(known[name], values, accuracy)
        share = 1.0 if known[name] is None else density
        yield Row(name, values, dist.get_world_size(), share, reached, steps, seconds)


def _trained(hook: Hook | None, values: int, accuracy: float) -> tuple[float, int, float]:
    """(accuracy, steps, seconds)"""
    rank, size = dist.get_rank(), dist.get_world_size()
    task = TASKS["digits"](0)
    torch.manual_seed(0)
    cnn = task.model()
    torch.manual_seed(rank)  # the padding's gradients differ between ranks
    padding = Layer([torch.randn(values - sum(p.numel() for p in cnn.parameters()))])
    ddp: Any = nn.parallel.DistributedDataParallel(
        nn.Sequential(cnn, padding), gradient_as_bucket_view=True, init_sync=False
    )
    if hook:
        ddp.register_comm_hook(*hook())
    optimizer = task.optimizer(cnn.parameters(), task.rate)
    x, y = (torch.from_numpy(part) for part in task.train)
    share, seconds, reached = task.batch // size, 0.0, 0.0
    for step, batch in enumerate(batches(len(x), task.batch, 0), 1):
        mine = batch[rank * share : (rank + 1) * share]
        dist.barrier()
        start = time.perf_counter()
        ddp.zero_grad(set_to_none=False)  # new gradients would be copied into the buckets
        cross_entropy(ddp(x[mine]), y[mine]).backward()
        optimizer.step()
        took = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds += float(took)
        if step % INTERVAL == 0:
            judged = torch.tensor([task.judge(cnn) / 100])
            dist.broadcast(judged, 0)  # so that all ranks stop alike
            reached = float(judged)
            if reached >= accuracy or step == MOST:
                break
    return reached, step, seconds
