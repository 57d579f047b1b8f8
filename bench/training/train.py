"""`linkweave bench train`: steps of DataParallel and of DDP over gloo, on the same ranks.

Every rank runs the command, started by torchrun on one machine or several; without torchrun there
is one rank. Both train the same model from the same weights on the same batches, by turns: a block
of steps of one, then a block of the other. Each step is timed to its end from the end of the one
before, because a chained step ends in the next forward pass; so the first step of a block is not.
Ranks that train chained may be a part of a step apart, so their mean counts. On one rank the engine
runs all the same, and sends nothing: what it takes longer than the model alone is what it costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from linkweave import collectives
from linkweave.bench.peers import on_gloo
from linkweave.bench.timing import rounds_of, schedule
from linkweave.bench.training.train_models import MODELS
from linkweave.collectives import CollectiveError
from linkweave.collectives.overlap import Schedule
from linkweave.collectives.training.transport import OverCommunicator
from linkweave.collectives.training.tuner import SETTLED
from linkweave.topology.text import counted

STEPS = 12  # of a block
WARM_UP = -(-(SETTLED + 1) // STEPS)  # blocks
HEADER = (
    f"{'model':12}{'MB':>7}{'batch':>7}{'ranks':>7}{'compute ms':>12}{'DDP ms':>9}"
    f"{'linkweave ms':>14}{'x DDP':>7}{'loss differs by':>17}  program"
)
LEGEND = (
    "ms a step: of a rank alone; of DDP over gloo with buckets of 25 MiB; of DataParallel. x DDP: "
    "the median of\nthe ratios of neighbouring blocks of steps. The loss differs by rounding alone"
)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    nbytes: int
    batch: int
    ranks: int
    compute_ms: float
    ddp_ms: float
    ms: float
    ratio: float
    loss_difference: float
    program: str
    predicted_ms: float | None

    def __str__(self) -> str:
        return (
            f"{self.model:12}{self.nbytes / 1e6:7.1f}{self.batch:7}{self.ranks:7}"
            f"{self.compute_ms:12.1f}{self.ddp_ms:9.1f}{self.ms:14.1f}{self.ratio:7.2f}"
            f"{self.loss_difference:17.1e}  {self.program}"
        )


class _Trained:
    """A model, its optimizer and its batches; `wrap` makes it train on all ranks."""

    def __init__(self, name: str, batch: int, rank: int, wrap: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        model, self._draw = MODELS[name](batch)
        self.nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        self.model = wrap(model, self._optimizer)
        torch.manual_seed(rank + 1)
        self._state = torch.get_rng_state()
        self.losses: list[float] = []

    def go_on_from(self, other: _Trained) -> None:
        """Train a DDP on the other's next batches, from its weights and momentum; losses since
        then are kept."""
        self.model.module.load_state_dict(other.model.state_dict())
        self._optimizer.load_state_dict(deepcopy(other._optimizer.state_dict()))
        self._state = other._state
        other.losses.clear()

    def block(self) -> float:
        torch.set_rng_state(self._state)
        batches = [self._draw() for _ in range(STEPS)]
        self._state = torch.get_rng_state()
        return seconds_of(self.model, self._optimizer, batches, self.losses)


def seconds_of(model: Any, optimizer: Any, batches: Iterable[Any], losses: list[float]) -> float:
    """Train on some batches of inputs and classes. Returns the mean seconds of a step but the
    first. The batches' losses are added to `losses`."""
    ends = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        ends.append(time.perf_counter())
    if isinstance(model, collectives.DataParallel):
        model.finish()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def over_ranks(seconds: float) -> float:
    total = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def measure(
    model: str, batch: int, blocks: int, policy: str, batch_scheduling: bool,
    unchained: bool = False,
) -> list[Row]:  # fmt: skip
    """Measure as one rank of those that torchrun has started. Returns a row on rank 0.

    unchained: carry out what the policy has planned without the chain to the next forward pass.
    Raises CollectiveError for an unknown model, and for "auto" with `unchained`.
    """
    if unchained and policy == "auto":
        raise CollectiveError("--unchained needs a --schedule: auto chooses itself")
    if model not in MODELS:
        raise CollectiveError(f"--model must be one of {', '.join(MODELS)}, not {model!r}")
    schedule(batch_scheduling)
    with on_gloo(), collectives.init(timeout=120) as comm:
        return _measured(comm, model, batch, blocks, policy, unchained)


def _measured(
    comm: Any, model: str, batch: int, blocks: int, policy: str | Schedule, unchained: bool
) -> list[Row]:
    group = comm if comm.size > 1 else OverCommunicator(comm)  # on which the engine runs

    def trained(policy: str | Schedule, chained: bool) -> _Trained:
        return _Trained(
            model, batch, comm.rank,
            lambda *pair: collectives.DataParallel(*pair, schedule=policy, chained=chained,
                                                   group=group, broadcast_buffers=False),
        )  # fmt: skip

    if unchained:
        planned = trained(policy, True)
        for _ in range(WARM_UP):
            planned.block()
        policy = replace(planned.model.schedule, chained=False)
        planned.model.close()
    ours = trained(policy, not unchained)
    theirs = _Trained(
        model, batch, comm.rank,
        lambda net, _: DistributedDataParallel(net, forward_sync_buffers=False),
    )  # fmt: skip
    alone = _Trained(model, batch, comm.rank, lambda net, _: net)
    for _ in rounds_of(WARM_UP, comm.rank == 0):
        ours.block()
    theirs.go_on_from(ours)
    for one in (ours, theirs, alone):
        one.block()
    times: list[list[float]] = [[], [], []]
    for _ in rounds_of(blocks, comm.rank == 0):
        for found, one in zip(times, (theirs, ours, alone), strict=True):
            dist.barrier()
            found.append(over_ranks(one.block()))
    ddp, mine, compute = (statistics.median(found) for found in times)
    ratio = statistics.median(a / b for a, b in zip(times[0], times[1], strict=True))
    differs = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    plan = ours.model.schedule
    program, sends = ours.model.program, len(ours.model.program.ops)
    ours.model.close()
    if comm.rank:
        return []
    row = Row(
        model, ours.nbytes, batch, comm.size, 1e3 * compute, 1e3 * ddp, 1e3 * mine, ratio, differs,
        f"{program.policy}, {counted(sends, 'all-reduce')}" + ", chained" * program.chained,
        1e3 * plan.predicted_seconds if plan else None,
    )  # fmt: skip
    return [row]
