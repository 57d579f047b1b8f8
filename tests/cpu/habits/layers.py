"""Habits of kinds of layers, and of what a forward pass takes and returns."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from linkweave import GTopK
from tests.cpu.habits.run import CLASSES, DENSE, FEW, HIDDEN, INPUTS, Net, Run, habit, made


# ---- recurrent and attention ---------------------------------------------------------------------
class OfSequences(nn.Module):
    """Of 4 vectors of 2 numbers."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.body(x.view(-1, 4, 2))
        found = found[0] if isinstance(found, tuple) else found
        return self.fc(found.mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 2, batch_first=True)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.attention(x, x, x, need_weights=False)[0]
        return self.attention.out_proj(found) if self.again else found


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: OfSequences(nn.LSTM(2, 5, 2, batch_first=True), 5),
    "GRU, both directions": lambda: OfSequences(
        nn.GRU(2, 3, batch_first=True, bidirectional=True), 6
    ),
    "MultiheadAttention": lambda: OfSequences(Attention(), 2),
    "TransformerEncoderLayer": lambda: OfSequences(
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), 2
    ),
}


def add_sequences(name: str, make: Callable[[], nn.Module]) -> None:
    @habit(name, quick=FEW)
    def of_sequences(run: Run) -> None:
        model, optimizer = run.wrapped(made(run, make))
        for step in run.steps:
            run.train(model, optimizer, [step])
            model.eval()  # the encoder layer has another way then
            with torch.no_grad():
                run.mean(f"loss {step}", run.loss(model, 99))
            model.train()


for its_name, its_make in SEQUENCES.items():
    add_sequences(its_name, its_make)


@habit("MultiheadAttention whose out_proj is called as well")
def out_proj(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, lambda: OfSequences(Attention(), 2)))
    run.inner(model).body.again = True
    run.train(model, optimizer)


# ---- norms and pruning of weights ----------------------------------------------------------------
def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found: nn.Module = nn.utils.weight_norm(layer)
    return found


def pruned(layer: nn.Module) -> nn.Module:
    found: nn.Module = prune.l1_unstructured(layer, "weight", 0.3)
    return found


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "old weight_norm": old_weight_norm,
    "weight_norm of parametrizations": parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "spectral_norm of parametrizations": parametrizations.spectral_norm,
    "prune.l1_unstructured": pruned,
}


def add_way(name: str, way: Callable[[nn.Module], nn.Module]) -> None:
    @habit(f"{name} of layers", quick=FEW)
    def of_layers(run: Run) -> None:
        net = made(run)
        torch.manual_seed(1)
        way(net.first)
        way(net.second)
        model, optimizer = run.wrapped(net)
        run.train(model, optimizer)

    @habit(f"{name} of the whole model", quick=FEW)
    def of_the_whole(run: Run) -> None:
        """The wrapped module is one layer, whose hooks run before all others."""
        net = made(run, lambda: nn.Linear(INPUTS, CLASSES))
        torch.manual_seed(1)
        model, optimizer = run.wrapped(way(net))
        run.train(model, optimizer)


for its_way, its_function in WAYS.items():
    add_way(its_way, its_function)


@habit("orthogonal of parametrizations")
def orthogonal(run: Run) -> None:
    net = made(run)
    parametrizations.orthogonal(net.second)
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)


@habit("the inner module is pruned in mid-training")
def pruned_late(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    run.train(model, optimizer, range(run.middle))
    pruned(inner.first)
    prune.global_unstructured(
        [(inner.second, "weight"), (inner.fc, "weight")], prune.L1Unstructured, amount=0.2
    )
    run.train(model, optimizer, range(run.middle, 20))
    prune.remove(inner.first, "weight")
    optimizer.add_param_group(
        {"params": [p for p in inner.first.parameters() if p not in optimizer.state]}
    )
    run.train(model, optimizer, range(20, 24))


@habit("the wrapped layer is pruned in mid-training")
def whole_pruned_late(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, lambda: nn.Linear(INPUTS, CLASSES)))
    run.train(model, optimizer, range(run.middle))
    pruned(run.inner(model))
    run.train(model, optimizer, range(run.middle, 24))


# ---- checkpoints ---------------------------------------------------------------------------------
class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = checkpoint(lambda x: self.second(x).tanh(), x, use_reentrant=self.reentrant)
        return checkpoint(self.fc, x, use_reentrant=self.reentrant)


@habit("activation checkpointing, reentrant")
def reentrant(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, lambda: Checkpointed(True)))
    run.train(model, optimizer)


@habit("activation checkpointing, not reentrant")
def not_reentrant(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, lambda: Checkpointed(False)))
    run.train(model, optimizer)


@habit("the whole wrapper in a checkpoint")
def whole_checkpoint(run: Run, model: Any, optimizer: Any) -> None:
    run.train(
        model,
        optimizer,
        loss=lambda x, y: cross_entropy(checkpoint(model, x, use_reentrant=False), y),
    )


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Dataclasses(Checkpointed):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return Output(out, out.detach())


@habit("reentrant checkpoints, weight decay and an output in a dataclass")
def checkpoints_and_dataclass(run: Run) -> None:
    extra = {"exchange": GTopK(density=1)} if run.mode.name == "gtopk" else {}
    net = made(run, lambda: Dataclasses(True))
    model, optimizer = run.wrapped(
        net, lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1), **extra
    )
    run.train(model, optimizer, loss=lambda x, y: cross_entropy(model(x).logits, y))


# ---- what a forward pass takes and returns -------------------------------------------------------
Pair = namedtuple("Pair", "logits hidden")
OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a dataclass": Output,
    "a named tuple": Pair,
    "an object": lambda logits, hidden: SimpleNamespace(logits=logits, hidden=hidden),
    "lists in a dictionary": lambda logits, hidden: {"all": [logits, {"hidden": hidden}]},
}


def add_output(name: str, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    @habit(f"the model returns {name}", quick=FEW)
    def output(run: Run) -> None:
        class Returns(Net):
            def forward(self, x: torch.Tensor) -> Any:
                hidden = self.encode(x)
                return make(self.fc(hidden), hidden)

        model, optimizer = run.wrapped(made(run, Returns))

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = model(x)
            return cross_entropy(out["all"][0] if isinstance(out, dict) else out.logits, y)

        run.train(model, optimizer, loss=loss)


for its_output, its_maker in OUTPUTS.items():
    add_output(its_output, its_maker)


@habit("the model takes names and returns its loss")
def returns_loss(run: Run) -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor, labels: Any = None, scale: float = 1.0) -> Any:
            out = super().forward(x)
            loss = None if labels is None else scale * cross_entropy(out, labels)
            return {"logits": out, "loss": loss}

    model, optimizer = run.wrapped(made(run, WithLoss))
    loss = lambda x, y: model(x, labels=y, scale=0.5)["loss"]  # noqa: E731
    for step in run.after_step(model, optimizer, loss=loss):
        with torch.no_grad():
            assert model(x=run.batch(step)[0])["loss"] is None


@habit("inputs get gradients: adversarial examples")
def adversarial(run: Run, model: Any, optimizer: Any) -> None:
    """A backward pass for inputs reaches parameters too, whose gradients are then dropped."""
    for step in run.steps:
        x, y = run.batch(step)
        x = x.requires_grad_()
        cross_entropy(model(x), y, reduction="sum").backward()
        moved = (x + 0.1 * x.grad).detach()
        optimizer.zero_grad()
        cross_entropy(model(moved), y).backward()
        optimizer.step()


@habit("a teacher that is not wrapped: distillation")
def distillation(run: Run, model: Any, optimizer: Any) -> None:
    torch.manual_seed(2)
    teacher = Net().to(run.dtype).eval()
    for step in run.steps:
        x, _ = run.batch(step)
        optimizer.zero_grad()
        with torch.no_grad():
            want = teacher(x)
        mse_loss(model(x), want).backward()
        optimizer.step()


@habit("autocast to bfloat16")
def autocast(run: Run) -> None:
    """All ranks have the same batch, as sums in bfloat16 depend on its size."""
    model, optimizer = run.wrapped(made(run).float())
    for step in run.steps:
        x, y = run.whole(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()


@habit("parameters of several dtypes", only=DENSE)
def dtypes(run: Run) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.second(self.first(x).tanh().double()).tanh().to(x.dtype))

    net = made(run, Mixed)
    net.second.double()
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)


@habit("layers that are made in the first forward pass, after a dry run")
def lazy_dry(run: Run) -> None:
    net = nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.LazyLinear(CLASSES)).to(run.dtype)
    torch.manual_seed(5)
    net(run.whole(0)[0])
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)
