"""`linkweave bench gtopk`: what DDP's hooks take for a model's gradients, on the same network.

Every rank runs the command, started by torchrun on one machine or several. The model has a real
model's parameters and computes nothing: in its backward pass each gradient is a copy of the
parameter, which is random. So a step under a hook that sends nothing is the time of DDP itself, and
by how much another hook's step is longer is what the exchange takes, compression included. DDP's
buckets and all hooks use one gloo group.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from linkweave.bench.peers import on_gloo
from linkweave.bench.timing import rounds_of, schedule, sent_bytes
from linkweave.bench.training.ddp import send_nothing
from linkweave.bench.training.train_models import SHAPES
from linkweave.collectives import CollectiveError
from linkweave.collectives.distributed import GTopKState, gtopk_hook

WARM_UP = 4  # steps; DDP orders its buckets after the first, PowerSGD begins with the third
HEADER = (
    f"{'model':10}{'values':>12}{'ranks':>6}  {'hook':22}{'step ms':>10}{'exchange':>10}"
    f"{'x dense':>9}{'sent MB':>10}"
)
LEGEND = (
    "ms of a step of the slowest rank, and without DDP's own share; x dense: the dense exchange's "
    "time over\nthis one's; sent MB: what rank 0's network interfaces sent in a step, headers "
    "included (0 inside one\nmachine). PowerSGD has one bucket: over gloo, it mixes up the calls "
    "of several"
)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    values: int
    ranks: int
    hook: str
    step_ms: float
    exchange_ms: float
    ratio: float
    sent_mb: float

    def __str__(self) -> str:
        return (
            f"{self.model:10}{self.values:12}{self.ranks:6}  {self.hook:22}{self.step_ms:10.1f}"
            f"{self.exchange_ms:10.1f}{self.ratio:9.1f}{self.sent_mb:10.2f}"
        )


Layers = Sequence[Sequence[torch.Size]]  # the shapes of the parameters of each layer


class _Copied(torch.autograd.Function):
    """Nothing forward; backward, the gradient of each parameter is the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Any, *parameters: Any) -> Any:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, *ctx.saved_tensors


class Layer(nn.Module):
    """Parameters that equal their gradients, which become ready together."""

    def __init__(self, values: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList(values)

    def forward(self, x: Any) -> Any:
        return _Copied.apply(x, *self.values)


Hook = Callable[[], tuple[Any, Any]]
"""Makes the (state, hook) that a DDP registers; None for DDP's own all-reduce."""


def hooks(density: float) -> dict[str, Hook | None]:
    return {
        "nothing sent": lambda: (None, send_nothing),
        "dense": None,
        "fp16": lambda: (None, default_hooks.fp16_compress_hook),
        "PowerSGD, rank 1": lambda: (
            powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        "top-k": lambda: (GTopKState(dist.group.WORLD, density=density, mode="topk"), gtopk_hook),
        "gTop-k": lambda: (GTopKState(dist.group.WORLD, density=density, mode="gtopk"), gtopk_hook),
    }


class _Stepped:
    def __init__(
        self, layers: Sequence[Sequence[torch.Tensor]], hook: Hook | None, bucket_mb: int | None
    ) -> None:
        model = nn.Sequential(*map(Layer, layers))
        self._ddp: Any = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=bucket_mb
        )
        if hook:
            self._ddp.register_comm_hook(*hook())
        self._x = torch.zeros(1, requires_grad=True)

    def step(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self._ddp(self._x).sum().backward()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def measure(
    model: str, density: float, rounds: int, batch_scheduling: bool, only: Sequence[str] = ()
) -> list[Row]:
    """Measure as one rank of those that torchrun has started. Returns rows on rank 0.

    `only`: names of hooks; all by default. Raises CollectiveError for an unknown model or hook.
    """
    layers, known = layers_of(model), hooks(density)
    if unknown := [name for name in only if name not in known]:
        raise CollectiveError(f"--hook must be one of {', '.join(known)}, not {unknown[0]!r}")
    schedule(batch_scheduling)
    with on_gloo():
        chosen = [name for name in known if not only or name in only or name in _NEEDED]
        return list(_rows(model, layers, {name: known[name] for name in chosen}, rounds))


def layers_of(model: str) -> Layers:
    """The shapes of a model's parameters, by layer. Raises CollectiveError for an unknown model."""
    if model not in SHAPES:
        raise CollectiveError(f"--model must be one of {', '.join(SHAPES)}, not {model!r}")
    return SHAPES[model]()


_NEEDED = ("nothing sent", "dense")


def _rows(model: str, layers: Layers, chosen: dict[str, Hook | None], rounds: int) -> Iterator[Row]:
    """One hook after another, as all together may not fit into memory."""
    rank = dist.get_rank()
    times: dict[str, float] = {}
    sizes = [shape.numel() for shapes in layers for shape in shapes]
    count = sum(sizes)
    parts = iter(_random(count).split(sizes))
    values = [[next(parts).view(shape) for shape in shapes] for shapes in layers]
    for name, hook in chosen.items():
        stepped = _Stepped(values, hook, 1 << 20 if "PowerSGD" in name else None)
        for _ in range(WARM_UP):
            stepped.step()
        before, found = sent_bytes(), []
        for _ in rounds_of(rounds, rank == 0):
            found.append(stepped.step())
        sent = (sent_bytes() - before) / rounds
        times[name] = statistics.median(found)
        del stepped
        if rank == 0 and name != "nothing sent":
            own = times["nothing sent"]
            exchange = max(times[name] - own, 1e-9)
            yield Row(
                model, count, dist.get_world_size(), name, 1e3 * times[name], 1e3 * exchange,
                (times["dense"] - own) / exchange, sent / 1e6,
            )  # fmt: skip


def _random(count: int) -> torch.Tensor:
    """Random values of this rank, in memory that all ranks of a machine share: it may not have
    room for each rank's own. Each rank's begin at another place, so that gradients differ."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [uuid4().hex]  # which nobody can guess, and so put a link there
    dist.broadcast_object_list(names)
    path = Path(tempfile.gettempdir(), f"linkweave-gradients-{names[0]}")
    try:
        whole = torch.from_file(str(path), shared=True, size=count + 16 * size)
        source = torch.Generator().manual_seed(0)
        for part in torch.split(whole, 1 << 20):  # all ranks write the same
            part.copy_(torch.randn(len(part), generator=source))
        dist.barrier()
    finally:
        path.unlink(missing_ok=True)  # memory is freed when the last rank ends
    return whole[16 * rank :][:count]
