"""Habits that end in an error which says why, when the model is wrapped or in the first steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from linkweave import ShardedEmbedding
from tests.cpu.habits.run import CLASSES, HIDDEN, INPUTS, TWO, Net, Run, adam, habit, made, sgd


@habit("a wrapper inside a module that is wrapped", error="DataParallel", only=TWO)
def nested(run: Run, model: Any, optimizer: Any) -> None:
    """Both would average the gradients."""
    run.wrap(nn.Sequential(model, nn.Linear(CLASSES, CLASSES).to(run.dtype)), optimizer)


@habit(
    "two wrappers whose modules share an encoder",
    error="DataParallel.*encoder|encoder.*DataParallel",
    only=TWO,
)
def shared_encoder(run: Run) -> None:
    """Its gradients would be sent by both."""
    torch.manual_seed(1)
    encoder = nn.Linear(INPUTS, HIDDEN).to(run.dtype)

    def with_head() -> nn.Module:
        head = nn.Linear(HIDDEN, CLASSES).to(run.dtype)
        return nn.ModuleDict({"encoder": encoder, "head": head})

    first, second = with_head(), with_head()
    run.wrap(first, sgd(first.parameters()))
    run.wrap(second, sgd(second.parameters()))


@habit("one tensor as p.grad of two parameters", error="are one tensor", only=TWO)
def one_gradient(run: Run, model: Any, optimizer: Any) -> None:
    """It would get both sums before they are averaged."""
    inner = run.inner(model)
    for step in run.steps:
        inner.first.bias.grad = inner.second.bias.grad = torch.zeros_like(inner.first.bias)
        run.loss(model, step).backward()
        optimizer.step()


@habit("lazy modules without a dry run", error="forward pass", only=TWO)
def lazy(run: Run) -> None:
    """Their parameters have no shape yet."""
    net = nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    model = run.wrap(net, sgd(net.parameters()))
    model(run.whole(0)[0].float())


@habit("SyncBatchNorm without torch.distributed", error="SyncBatchNorm", only=TWO)
def sync_batch_norm(run: Run) -> None:
    """It would normalize each rank's own batch, without a word."""
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    run.wrap(net, sgd(net.parameters()))


@habit("DTensor parameters", error="DTensor", only=TWO)
def dtensor(run: Run) -> None:
    """They have ranks of their own."""
    net = made(run)
    dist.init_process_group("fake", store=FakeStore(), rank=run.rank, world_size=run.size)
    try:
        mesh = init_device_mesh("cpu", (run.size,))
        whole = distribute_tensor(net.fc.weight.detach(), mesh, [Replicate()])
        net.fc.weight = nn.Parameter(whole)
        run.models.append(net.first)
        if not run.alone:
            run.wrap(net, sgd(net.parameters()))
    finally:
        dist.destroy_process_group()


@habit("nn.Embedding with sparse=True", error="sparse")
def sparse_gradient(run: Run) -> None:
    """Only dense gradients are averaged; the error names the parameter."""
    net = made(run, lambda: nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Linear(6, 7)))
    model, optimizer = run.wrapped(net, lambda p: torch.optim.SGD(p, 0.1))
    for step in run.steps:
        words = run.part(torch.arange(6) + step) % 7
        optimizer.zero_grad()
        cross_entropy(model(words), words).backward()
        optimizer.step()


@habit("a ShardedEmbedding with a GradScaler that is not passed", error="scaler=", only=TWO)
def sharded_scaler(run: Run) -> None:
    """It would not unscale the rows. Passed to DataParallel as `scaler=`, it does."""
    torch.manual_seed(1)
    table: Any = nn.Embedding(7, 6, dtype=run.dtype, sparse=True)
    if not run.alone:
        table = ShardedEmbedding(7, 6, dtype=run.dtype, group=run.comm)
    net = nn.Sequential(table, nn.Linear(6, 7).to(run.dtype))
    optimizers = [adam(net[1].parameters()), torch.optim.SGD(table.parameters(), 0.1)]
    model = run.wrap(net, optimizers)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in run.steps:
        words = run.part(torch.arange(6) + step) % 7
        model.zero_grad()
        scaling.scale(cross_entropy(model(words), words)).backward()
        for optimizer in optimizers:
            scaling.step(optimizer)
        scaling.update()


@habit("ranks with different models", error="different models", only=TWO)
def different(run: Run) -> None:
    """All must send the same."""
    net = nn.Linear(INPUTS, CLASSES + run.rank)
    run.wrap(net, sgd(net.parameters()))


@habit("an unknown schedule", error="schedule must be", only=TWO)
def unknown(run: Run) -> None:
    """The error lists those that there are."""
    net = made(run)
    run.wrap(net, sgd(net.parameters()), schedule="fastest")


@habit("no optimizer", error="optimizer", only=TWO)
def no_optimizer(run: Run) -> None:
    """An empty list."""
    run.wrap(made(run), [])


@habit("16-bit gradients of 36,864 over a group of gloo", only=("auto", "ddp"))
def half_over_gloo(run: Run) -> None:
    """Their sum is beyond what 16 bits hold, their average is not."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    net = Scale()
    extra: dict[str, Any] = {}
    if not run.alone:
        dist.init_process_group(
            "gloo", init_method=f"file://{shared_path(run)}", rank=run.rank, world_size=run.size
        )
        extra["group"] = dist.group.WORLD
    try:
        optimizer = torch.optim.SGD(net.parameters(), 2.0**-20)
        model = run.wrap(net, optimizer, **extra)
        for step in run.steps:
            optimizer.zero_grad()
            model(torch.full((4,), 36864.0, dtype=torch.float16)).float().sum().backward()
            run.same(f"gradient {step}", net.weight.grad)
            optimizer.step()
        if not run.alone:
            model.close()
    finally:
        if not run.alone:
            dist.destroy_process_group()


def shared_path(run: Run) -> Path:
    """A new file that all ranks know."""
    path = Path(tempfile.mkdtemp()) / "group"
    told = torch.zeros(200, dtype=torch.uint8)
    told[: len(str(path))] = torch.tensor(list(str(path).encode()), dtype=torch.uint8)
    run.comm.broadcast(told)
    return Path(bytes(told.tolist()).rstrip(b"\0").decode())


@habit("a single rank's group trains as one process", only=("auto",))
def single(run: Run) -> None:
    net: Net = made(run)
    optimizer = sgd(net.parameters())
    group = run.comm.split(run.rank) if run.comm is not None else None
    model = run.wrap(net, optimizer, **({"group": group} if group is not None else {}))
    run.train(model, optimizer, batch=run.whole)
