"""Habits of optimizers: kinds, groups, several of them, schedulers, saved states."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from tests.cpu.habits.run import CLASSES, DENSE, FEW, HIDDEN, TWO, Net, Run, adam, habit, made, sgd

UNCHAINED = "chained with the next forward pass"
"""What training that cannot be chained is told."""
KINDS: dict[str, Any] = {
    "SGD with Nesterov's momentum": lambda p: torch.optim.SGD(
        p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD, foreach=True": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "SGD, fused=True": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "Adam": adam,
    "Adam, fused=True": lambda p: torch.optim.Adam(p, 1e-3, eps=1e-4, fused=True),
    "Adam, amsgrad and maximize": lambda p: torch.optim.Adam(
        p, 1e-3, eps=1e-4, amsgrad=True, maximize=True
    ),
    "AdamW, the learning rate is a tensor": lambda p: torch.optim.AdamW(
        p, torch.tensor(1e-3), eps=1e-4
    ),
    "AdamW, foreach=True": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-4, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-4, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-4),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3, eps=1e-4),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1, eps=1e-4),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}


def add_kind(name: str, make: Any) -> None:
    only = DENSE if name == "Rprop" else ()  # by signs, which rounding may turn

    @habit(name, only=only, quick=FEW)
    def kind(run: Run) -> None:
        model, optimizer = run.wrapped(made(run), make)
        run.train(model, optimizer)


for its_name, its_make in KINDS.items():
    add_kind(its_name, its_make)


class SignSgd(torch.optim.Optimizer):
    """A user's own, with a norm over all parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1 + sum(p.grad.square().sum() for p in every).sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / scale, alpha=-group["lr"])


@habit("a user's own optimizer class", chained=UNCHAINED)
def own_class(run: Run) -> None:
    """Its step may be more than the sum of its parts, which chaining takes for granted."""
    model, optimizer = run.wrapped(made(run), lambda p: SignSgd(p, 0.1))
    run.train(model, optimizer)


# ---- groups --------------------------------------------------------------------------------------
@habit("groups with learning rates and weight decay of their own")
def groups(run: Run) -> None:
    net = made(run)
    biases = [p for name, p in net.named_parameters() if "bias" in name]
    weights = [p for name, p in net.named_parameters() if "bias" not in name]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}], 0.05
    )
    model = run.wrap(net, optimizer)
    run.train(model, optimizer)


@habit("a layer is added with add_param_group")
def layer_added(run: Run) -> None:
    """In mid-training, to the inner module."""
    model, optimizer = run.wrapped(
        made(run, lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)))
    )
    run.train(model, optimizer, range(run.middle))
    torch.manual_seed(9)
    layer = nn.Linear(4, 4).to(run.dtype)
    run.inner(model).append(layer)
    optimizer.add_param_group({"params": layer.parameters(), "lr": 0.1})
    run.train(model, optimizer, range(run.middle, 24))


@habit("a frozen backbone is thawed with add_param_group")
def thawed(run: Run) -> None:
    net = made(run)
    net.first.requires_grad_(False)
    optimizer = sgd([*net.second.parameters(), *net.fc.parameters()])
    model = run.wrap(net, optimizer)
    run.train(model, optimizer, range(run.middle))
    net.first.requires_grad_(True)
    optimizer.add_param_group({"params": net.first.parameters(), "lr": 0.01})
    run.train(model, optimizer, range(run.middle, 24))


@habit("a layer is replaced, with a new optimizer", chained=r"optimizer|fc\.(weight|bias)")
def layer_replaced(run: Run) -> None:
    """As for fine-tuning. The first optimizer is not used any more."""
    model, optimizer = run.wrapped(made(run))
    run.train(model, optimizer, range(run.middle))
    torch.manual_seed(9)
    run.inner(model).fc = nn.Linear(HIDDEN, CLASSES).to(run.dtype)
    optimizer = sgd(model.parameters())
    run.train(model, optimizer, range(run.middle, 24))


@habit("a layer is replaced, with add_param_group")
def layer_replaced_in_groups(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    torch.manual_seed(9)
    run.inner(model).fc = nn.Linear(HIDDEN, CLASSES).to(run.dtype)
    optimizer.add_param_group({"params": run.inner(model).fc.parameters()})
    run.train(model, optimizer, range(run.middle, 24))


@habit("a layer is replaced through the wrapper: model.fc = ...")
def layer_replaced_through_wrapper(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    torch.manual_seed(9)
    model.fc = nn.Linear(HIDDEN, CLASSES).to(run.dtype)
    optimizer.add_param_group({"params": model.fc.parameters()})
    run.train(model, optimizer, range(run.middle, 24))


@habit("a trained layer that is in no optimizer", chained=r"second\.(weight|bias)")
def in_no_optimizer(run: Run) -> None:
    """Its weights stay, as in one process. When chained, it might be another optimizer's."""
    net = made(run)
    optimizer = sgd([*net.first.parameters(), *net.fc.parameters()])
    model = run.wrap(net, optimizer)
    run.train(model, optimizer)
    optimizer.add_param_group({"params": net.second.parameters(), "lr": 0.2})
    run.train(model, optimizer, range(16, 24))


# ---- several of them -----------------------------------------------------------------------------
def two_of(net: Net) -> list[torch.optim.Optimizer]:
    return [sgd([*net.first.parameters(), *net.second.parameters()]), adam(net.fc.parameters())]


@habit("two optimizers in a list", chained=UNCHAINED)
def in_a_list(run: Run) -> None:
    """Chaining takes one step for all parameters for granted."""
    net = made(run)
    optimizers = two_of(net)
    model = run.wrap(net, optimizers)
    for step in run.steps:
        for one in optimizers:
            one.zero_grad()
        run.loss(model, step).backward()
        for one in optimizers:
            one.step()


@habit("two optimizers in a tuple that step in turns", chained=UNCHAINED)
def in_turns(run: Run) -> None:
    """Chaining takes one step for all parameters for granted."""
    net = made(run)
    optimizers = two_of(net)
    model = run.wrap(net, tuple(optimizers))
    for step in run.steps:
        model.zero_grad()
        run.loss(model, step).backward()
        optimizers[step % 2].step()


@habit("two optimizers of which one is given", chained=r"fc\.(weight|bias)")
def one_is_given(run: Run) -> None:
    """When chained, the engine would not know of the other's updates."""
    net = made(run)
    first, second = two_of(net)
    model = run.wrap(net, first)
    for step in run.steps:
        first.zero_grad()
        second.zero_grad()
        run.loss(model, step).backward()
        first.step()
        second.step()


@habit("one optimizer of two wrapped models", chained="optimizer")
def one_of_two_models(run: Run) -> None:
    """When chained, one step would have to wait for both."""
    encoder = made(run, lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh()))
    decoder = made(run, lambda: nn.Linear(6, 4))
    optimizer = sgd([*encoder.parameters(), *decoder.parameters()])
    encoder = run.wrap(encoder, optimizer)
    decoder = run.wrap(decoder, optimizer)
    run.train(lambda x: decoder(encoder(x)), optimizer)


@habit("another optimizer from mid-training on", chained="optimizer")
def another(run: Run) -> None:
    """When chained, updates are those of the optimizer that was given."""
    model, optimizer = run.wrapped(made(run))
    run.train(model, optimizer, range(run.middle))
    optimizer = adam(model.parameters())
    run.train(model, optimizer, range(run.middle, 24))


class Wrapping(torch.optim.Optimizer):
    """An optimizer around the user's, as Accelerate makes it."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optimizer = inside

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@habit("an optimizer around the one that is given")
def wrapped_later(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, Wrapping(optimizer))


@habit("an optimizer around another is given", error=r"Wrapping|wraps|inside|around")
def wrapped_before(run: Run) -> None:
    """The error says which one to pass."""
    net = made(run)
    optimizer = Wrapping(sgd(net.parameters()))
    model = run.wrap(net, optimizer)
    run.train(model, optimizer)


# ---- hooks, scalers, schedulers ------------------------------------------------------------------
@habit("hooks before and after the optimizer's step", chained=UNCHAINED)
def step_hooks(run: Run, model: Any, optimizer: Any) -> None:
    """Each part of a chained step would call them."""
    inner = run.inner(model)

    def scale(*_: Any) -> None:
        for p in inner.parameters():
            p.grad.mul_(0.5)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in inner.parameters():
                p.clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(clamp)
    run.train(model, optimizer)


@habit("a hook after the optimizer's step, registered in mid-training")
def late_step_hook(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)

    calls = []

    def clamp(*_: Any) -> None:
        calls.append("after")
        with torch.no_grad():
            for p in inner.parameters():
                p.clamp_(-0.3, 0.3)

    run.train(model, optimizer, range(run.middle))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(clamp)
    run.train(model, optimizer, range(run.middle, 24))
    assert calls == ["before", "after"] * (24 - run.middle)


@habit("GradScaler on CPU", only=DENSE)
def scaler(run: Run, model: Any, optimizer: Any) -> None:
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    for step in run.steps:
        optimizer.zero_grad()
        scaling.scale(run.loss(model, step)).backward()
        scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaling.step(optimizer)
        scaling.update()


@habit("GradScaler skips a step after an overflow on one rank", only=DENSE)
def scaler_skips(run: Run, model: Any, optimizer: Any) -> None:
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        if step % 5 == 2:
            loss = loss * (float("inf") if run.rank == run.size - 1 else 1.0)
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
    run.same("scale", scaling.get_scale())


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "CosineAnnealingLR after LinearLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20)], [4]
    ),
}


def add_scheduler(name: str, make: Any) -> None:
    @habit(f"{name}, made before and after the wrapper", quick=FEW)
    def scheduled(run: Run) -> None:
        for late in (False, True):
            net = made(run)
            optimizer = sgd(net.parameters())
            scheduler = None if late else make(optimizer)
            model = run.wrap(net, optimizer)
            scheduler = scheduler or make(optimizer)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*optimizer.step")  # not called, or replaced
                for step in run.after_step(model, optimizer):
                    scheduler.step()
                    run.same(f"rate {step}", scheduler.get_last_lr()[0])


for its_name, its_make in SCHEDULERS.items():
    add_scheduler(its_name, its_make)


@habit("ReduceLROnPlateau by the loss of a validation batch")
def plateau(run: Run, model: Any, optimizer: Any) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.05)
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            x, y = run.whole(99)
            scheduler.step(cross_entropy(model(x), y))
    run.same("rate", optimizer.param_groups[0]["lr"])


# ---- states --------------------------------------------------------------------------------------
@habit("optimizer.load_state_dict in mid-training")
def state_loaded(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), adam)
    run.train(model, optimizer, range(4))
    kept = copy.deepcopy(optimizer.state_dict())
    run.train(model, optimizer, range(4, 10))
    optimizer.load_state_dict(kept)
    run.train(model, optimizer, range(10, 20))


@habit("a checkpoint is saved, and loaded into a new model")
def checkpoint(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), adam)
    run.train(model, optimizer, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file)
    net = Net().to(run.dtype)
    net.load_state_dict(kept["model"])
    other, its_optimizer = run.wrapped(net, adam)
    its_optimizer.load_state_dict(kept["optimizer"])
    run.train(other, its_optimizer, range(10, 24))


@habit("states are saved on rank 0 only, in each step")
def saved_on_one(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        if run.rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], io.BytesIO())


@habit("weights are clamped through the optimizer's groups, by .data")
def clamped_by_groups(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)


@habit("the optimizer's state is changed by hand")
def state_changed(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        if step % 5 == 4:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()


@habit("the optimizer's state is reset", only=DENSE)
def state_cleared(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    optimizer.state.clear()
    run.train(model, optimizer, range(run.middle, 16))


@habit("LBFGS", error="LBFGS", only=TWO)
def lbfgs(run: Run) -> None:
    """Its steps evaluate a rank's own loss, so that ranks would part."""
    model, optimizer = run.wrapped(made(run), lambda p: torch.optim.LBFGS(p, max_iter=2))
    for step in run.steps:
        optimizer.step(lambda step=step: run.loss(model, step))


@habit("the optimizer of another model", error="optimizer", only=TWO)
def of_another(run: Run) -> None:
    """Nothing would train."""
    run.wrap(made(run), sgd(made(run).parameters()))


@habit("no step after the first ones: the optimizer is dropped", only=DENSE)
def optimizer_dropped(run: Run) -> None:
    """The model is evaluated only, at the end."""
    model, optimizer = run.wrapped(made(run))
    run.train(model, optimizer)
    del optimizer
    model.eval()
    for step in range(3):
        run.mean(f"loss {step}", run.loss(model, step))
