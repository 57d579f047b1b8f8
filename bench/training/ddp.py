"""`linkweave bench ddp`: training by DDP, or FSDP2, over linkweave and over gloo.

Timed in each round, with the backends in turn, each from a barrier to the end of the slowest rank:

- a step: forward, backward with the all-reduces, optimizer;
- forward and backward, and the same with a hook in place of each all-reduce that returns at once.
  The difference is what communication costs; DDP copies gradients to buckets and back in both. With
  FSDP2, where each layer is a bucket, the same by the layers alone, which are not sharded;
- the collectives of the buckets alone, one after another.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linkweave import collectives
from linkweave.bench.command.options import install
from linkweave.bench.peers import Gloo, single_calls, timed
from linkweave.bench.timing import rounds_of, schedule
from linkweave.collectives import CollectiveError
from linkweave.collectives.calls.communicator import get_default

LAYERS = 8
BATCH = 4  # of each rank
BACKENDS = ("gloo", "linkweave")
HEADER = (
    f"{'bytes':>12}{'ranks':>7}{'buckets':>9}  {'backend':10}{'step ms':>9}{'compute':>9}"
    f"{'comm':>8}{'ratio':>7}{'alone':>8}{'ratio':>7}"
)
LEGEND = (
    "ms of a step; of its forward and backward without communication; by how much communication\n"
    "prolongs them; of the buckets' collectives alone. Ratios are gloo's time over this one's.\n"
    "The weights were equal on all ranks, to the bit, and with both backends but for rounding"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds; `LEGEND` explains them. Ratios are of times in the same round."""

    nbytes: int
    ranks: int
    buckets: int
    backend: str
    step_ms: float
    compute_ms: float
    communication_ms: float
    ratio: float
    alone_ms: float
    alone_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.nbytes:12}{self.ranks:7}{self.buckets:9}  {self.backend:10}{self.step_ms:9.1f}"
            f"{self.compute_ms:9.1f}{self.communication_ms:8.1f}{self.ratio:7.2f}"
            f"{self.alone_ms:8.1f}{self.alone_ratio:7.2f}"
        )


class Trained:
    def __init__(self, group: Any, width: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        self._layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self._group = group
        self._model = self._wrapped(self._layers)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.01)
        self._x = torch.randn(BATCH, width) + get_default().rank
        self.forget = self._optimizer.zero_grad  # so that each call that is timed has the same work
        self.step()
        self.step()

    def _wrapped(self, layers: Any) -> Any:
        return layers

    def backward(self) -> None:
        self._model(self._x).square().mean().backward()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self.backward()
        self._optimizer.step()

    def weights(self) -> Any:
        import torch

        return torch.cat([_whole(p).flatten() for p in self._layers.parameters()]).numpy()


def _whole(parameter: Any) -> Any:
    return getattr(parameter, "full_tensor", lambda: parameter)().detach()


class Replicated(Trained):
    def _wrapped(self, layers: Any) -> Any:
        from torch import nn

        return nn.parallel.DistributedDataParallel(layers, process_group=self._group)

    @cached_property
    def _buckets(self) -> list[Any]:
        found = self._model.reducer._get_zeros_like_grad_buckets()  # ordered anew after a step
        return [bucket.buffer() for bucket in found]

    def buckets(self) -> int:
        return len(self._buckets)

    def collectives(self) -> None:
        import torch.distributed as dist

        for bucket in self._buckets:
            dist.all_reduce(bucket, group=self._group)


class Silent(Replicated):
    def _wrapped(self, layers: Any) -> Any:
        model = super()._wrapped(layers)
        model.register_comm_hook(None, send_nothing)
        return model


class Sharded(Trained):
    def _wrapped(self, layers: Any) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(self._group, "cpu")
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(layers, mesh=mesh)

    def buckets(self) -> int:
        return LAYERS

    @cached_property
    def _layer(self) -> tuple[Any, Any]:
        weight = self._layers[0].weight.detach()
        return weight.full_tensor().flatten(), weight.to_local().flatten().clone()

    def collectives(self) -> None:
        all_gather_single, reduce_scatter_single = single_calls()
        whole, shard = self._layer
        for _ in range(2 * LAYERS):  # in each pass
            all_gather_single(whole, shard, group=self._group)
        for _ in range(LAYERS):
            reduce_scatter_single(shard, whole, group=self._group)


def send_nothing(state, bucket):  # DDP refuses annotations that are text
    """A hook of DDP that takes this rank's gradients for everyone's."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _rank(rank: int, width: int, rounds: int, store: str, fsdp: bool) -> tuple[Any, list[int]]:
    """Seconds of the slowest rank by [round, backend, what], and the buckets of each backend.

    What: step, forward and backward, the same without communication, collectives alone.
    """
    import torch
    import torch.distributed as dist

    comm = get_default()
    torch.set_num_threads(1)
    schedule(True)
    gloo = Gloo(rank, comm.size, store, True)
    groups = (gloo.batch, dist.new_group(backend="linkweave"))
    make = Sharded if fsdp else Replicated
    trained = [make(group, width) for group in groups]
    silent = (Trained if fsdp else Silent)(gloo.batch, width)
    times = np.zeros((rounds, len(groups), 4))
    for number in rounds_of(rounds, rank == 0):
        for at, one in enumerate(trained):
            calls = (one.step, one), (one.backward, one), (silent.backward, silent)
            times[number, at] = [
                timed(call, of.forget, comm.barrier, 1)[0]
                for call, of in (*calls, (one.collectives, one))
            ]
    _check([one.weights() for one in trained])
    comm.allreduce(times, "max")
    gloo.close()
    return times, [one.buckets() for one in trained]


def _check(weights: list[Any]) -> None:
    """Raise CollectiveError if ranks differ by a bit, or the backends by more than rounding."""
    comm = get_default()
    for mine in weights:
        first = mine.copy()
        comm.broadcast(first, 0)
        if (first.view(np.int32) != mine.view(np.int32)).any():
            raise CollectiveError("the ranks' weights differ")
    if not np.allclose(*weights, rtol=1e-4, atol=1e-6):
        raise CollectiveError("the weights by linkweave and by gloo differ")


def ddp(ranks: int, nbytes: int, rounds: int, fsdp: bool = False) -> list[Row]:
    """Measure under SCHED_BATCH. Raises CollectiveError if torch is missing or weights differ."""
    try:
        import torch._dynamo  # noqa: F401  (as DDP does; once, before the ranks are forked)
    except ImportError:
        raise CollectiveError(f"bench ddp needs torch: {install('torch')}") from None
    from linkweave.torch_backend import register

    register()
    width = math.isqrt(nbytes // (4 * LAYERS))
    if fsdp:
        width -= width % ranks  # so that shards are of one size
    with tempfile.TemporaryDirectory() as folder:
        arguments = (width, rounds, str(Path(folder) / "store"), fsdp)
        times, buckets = collectives.spawn(_rank, ranks, args=arguments, timeout=120)[0]
    step, both, compute, alone = times.transpose(2, 1, 0)
    communication = both - compute

    def median(column: Any, factor: float = 1e3) -> float:
        return factor * float(np.median(column))

    return [
        Row(
            4 * LAYERS * width**2, ranks, buckets[at], backend, median(step[at]),
            median(compute[at]), median(communication[at]),
            median(communication[0] / communication[at], 1),
            median(alone[at]), median(alone[0] / alone[at], 1),
        )
        for at, backend in enumerate(BACKENDS)
    ]  # fmt: skip
