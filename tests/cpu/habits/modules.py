"""Habits of models: frozen and converted parameters, buffers, shared weights, wrappers inside
other modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.cpu.habits.run import (
    CLASSES,
    DENSE,
    HIDDEN,
    INPUTS,
    Net,
    Run,
    habit,
    made,
    plain_sgd,
    sgd,
)


# ---- frozen and thawed ---------------------------------------------------------------------------
@habit("frozen layers")
def frozen(run: Run) -> None:
    net = made(run)
    net.first.requires_grad_(False)
    net.second.bias.requires_grad_(False)
    model = run.wrap(net, optimizer := sgd([p for p in net.parameters() if p.requires_grad]))
    run.train(model, optimizer)


@habit("frozen parameters that the optimizer holds")
def frozen_in_optimizer(run: Run) -> None:
    net = made(run)
    net.first.requires_grad_(False)
    net.second.bias.requires_grad_(False)
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)
    assert net.first.weight.grad is None


@habit("a layer is frozen, and thawed later")
def frozen_for_a_while(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        if step in (6, 11):
            run.inner(model).second.requires_grad_(step == 11)
        run.train(model, optimizer, [step])


@habit("requires_grad_ changes in each step")
def toggled(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        run.inner(model).fc.requires_grad_(step % 2 == 0)
        run.train(model, optimizer, [step])


@habit("parameters are frozen between the forward and the backward pass")
def frozen_late(run: Run, model: Any, optimizer: Any) -> None:
    """They get no gradients then."""
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        for p in run.inner(model).second.parameters():
            p.requires_grad_(step % 4 < 2)
        loss.backward()
        optimizer.step()
        for p in run.inner(model).second.parameters():
            p.requires_grad_()


@habit("two parameters over one memory", chained="share memory")
def one_memory(run: Run) -> None:
    """Each has its own update, and both change it: before one layer, the other must wait too."""
    net = made(run)
    net.fc = nn.Linear(HIDDEN, HIDDEN).to(run.dtype)
    net.fc.weight.data = net.second.weight.data
    model, optimizer = run.wrapped(net)
    for step in run.steps:
        optimizer.zero_grad()
        model(run.batch(step)[0]).square().mean().backward()
        optimizer.step()


@habit("a forward pass of the wholly frozen model, with gradients enabled")
def wholly_frozen(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        if step % 4 == 3:
            model.requires_grad_(False)
            x = run.batch(step)[0].requires_grad_()
            model(x).sum().backward()
            assert x.grad is not None
            model.requires_grad_(True)
        run.train(model, optimizer, [step])


@habit("the model is wholly frozen when it is wrapped, and thawed later")
def frozen_at_first(run: Run) -> None:
    net = made(run).requires_grad_(False)
    model, optimizer = run.wrapped(net)
    run.mean("loss", run.loss(model, 0))
    model.requires_grad_(True)
    run.train(model, optimizer)


# ---- converted -----------------------------------------------------------------------------------
def convert(run: Run, how: Any) -> None:
    """From float32, in which nothing is learned, to float64 in mid-training."""
    model, optimizer = run.wrapped(made(run).float(), plain_sgd)
    dtype = torch.float32
    optimizer.param_groups[0]["lr"] = 0.0
    for step in run.steps:
        if step == run.middle:
            how(run, model)
            dtype = torch.float64
            optimizer.param_groups[0]["lr"] = 0.1
        x, y = run.batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()


@habit("model.double() in mid-training", only=DENSE)
def double(run: Run) -> None:
    convert(run, lambda run, model: model.double())


@habit("double() of the inner module in mid-training", only=DENSE)
def inner_double(run: Run) -> None:
    convert(run, lambda run, model: run.inner(model).double())


@habit("model.to(torch.float64) in mid-training", only=DENSE)
def to_dtype(run: Run) -> None:
    convert(run, lambda run, model: model.to(torch.float64))


@habit("model.double() before the first step", only=DENSE)
def double_early(run: Run) -> None:
    model, optimizer = run.wrapped(made(run).float(), plain_sgd)
    model.double()
    run.train(model, optimizer, loss=lambda x, y: cross_entropy(model(x.double()), y))


@habit("model.to(memory_format=torch.channels_last) in mid-training")
def channels_last(run: Run) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, CLASSES))

    model, optimizer = run.wrapped(made(run, make))
    for step in run.steps:
        if step == run.middle:
            model.to(memory_format=torch.channels_last)
        x, y = run.batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x.view(-1, 2, 2, 2)), y).backward()
        optimizer.step()


@habit("a parameter is replaced by a new one, which the optimizer gets")
def parameter_replaced(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    inner = run.inner(model)
    inner.fc.weight = nn.Parameter(torch.zeros(CLASSES, 6, dtype=run.dtype))
    optimizer.add_param_group({"params": [inner.fc.weight]})
    run.train(model, optimizer, range(run.middle, 24))


@habit("load_state_dict(assign=True) before the optimizer is made")
def assigned(run: Run) -> None:
    net = made(run)
    net.load_state_dict({key: 0.5 * x for key, x in net.state_dict().items()}, assign=True)
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)


@habit("load_state_dict in mid-training")
def loaded(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(4))
    kept = copy.deepcopy(model.state_dict())
    run.train(model, optimizer, range(4, 10))
    model.load_state_dict(kept)
    run.train(model, optimizer, range(10, 20))


@habit("load_state_dict of the inner module and of a layer in mid-training")
def inner_loaded(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(4))
    inner = run.inner(model)
    kept = copy.deepcopy(inner.state_dict())
    run.train(model, optimizer, range(4, 10))
    inner.load_state_dict(kept)
    run.train(model, optimizer, range(10, 14))
    layer = copy.deepcopy(inner.second.state_dict())
    run.train(model, optimizer, range(14, 16))
    inner.second.load_state_dict(layer)
    run.train(model, optimizer, range(16, 20))


@habit("weights are set anew by model.apply")
def applied(run: Run, model: Any, optimizer: Any) -> None:

    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    for step in run.after_step(model, optimizer):
        if step == run.middle:
            model.apply(reset)


@habit("weights go through one vector: vector_to_parameters")
def vectors(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        if step % 4 == 2:
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(0.9 * vector.detach(), model.parameters())


# ---- buffers -------------------------------------------------------------------------------------
BUFFERS = (
    torch.complex64, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16,
    torch.float16, torch.int64,
)  # fmt: skip


@habit("buffers of many dtypes")
def buffers(run: Run) -> None:
    """Those of rank 0 are copied to all."""
    net = made(run)
    for number, dtype in enumerate(BUFFERS):
        value = torch.full((3,), 1 + run.rank, dtype=torch.float32).to(dtype)
        net.register_buffer(f"buffer{number}", value, persistent=number % 2 == 0)
    model, optimizer = run.wrapped(net)
    for number in range(len(BUFFERS)):
        run.same(f"buffer{number}", net.get_buffer(f"buffer{number}"))
    run.train(model, optimizer)


@habit("a sparse buffer")
def sparse_buffer(run: Run) -> None:
    net = made(run)
    net.register_buffer("table", torch.eye(3).to_sparse())
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


def apart_loss(run: Run, model: Any, step: int) -> torch.Tensor:
    """The loss of ranks that normalize their own parts, and go on with the buffers of rank 0."""
    x, y = run.whole(step, 24)
    if not run.alone:
        return cross_entropy(model(run.part(x)), run.part(y))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = torch.zeros((), dtype=run.dtype)
    for rank, (its_x, its_y) in enumerate(zip(x.chunk(run.ranks), y.chunk(run.ranks), strict=True)):
        own = {name: buffer.clone() for name, buffer in kept.items()} if rank else {}
        loss = loss + cross_entropy(torch.func.functional_call(model, own, (its_x,)), its_y)
    return loss / run.ranks


@habit("BatchNorm: all ranks have the same batch")
def batch_norm(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, normed))
    run.train(model, optimizer, batch=run.whole)
    run.same("mean", run.inner(model)[1].running_mean)


@habit("BatchNorm: running statistics are those of rank 0")
def batch_norm_buffers(run: Run) -> None:
    net = made(run, normed)
    for value in net.state_dict().values():
        value += run.rank  # all begin with what rank 0 has
    model, optimizer = run.wrapped(net)
    for step in run.steps:
        optimizer.zero_grad()
        apart_loss(run, model, step).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        run.same("evaluated", model(run.whole(99)[0]))
    for name, buffer in model.named_buffers():
        run.same(name, buffer)


@habit("BatchNorm with broadcast_buffers=False")
def batch_norm_own_buffers(run: Run) -> None:
    """Each rank keeps its own running statistics, which training does not use."""
    model, optimizer = run.wrapped(made(run, normed), broadcast_buffers=False)
    for step in run.steps:
        optimizer.zero_grad()
        apart_loss(run, model, step).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        mine = model(run.whole(99)[0])
    assert run.differs(mine)
    run.mean("evaluated on rank 0", mine * (run.size if run.rank == 0 else 0))


@habit("frozen BatchNorm: eval() of a layer in training")
def frozen_norm(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, normed))
    for step in run.steps:
        model.train()
        run.inner(model)[1].eval()
        run.train(model, optimizer, [step])


@habit("a buffer that the forward pass counts up")
def counter(run: Run) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x) / self.count

    model, optimizer = run.wrapped(made(run, Counts))
    run.train(model, optimizer)
    run.same("count", run.inner(model).count)


# ---- shared and unused ---------------------------------------------------------------------------
class Tied(nn.Module):
    """The decoder's weight is the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 7, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.middle(self.embedding(words)).tanh())


@habit("tied weights")
def tied(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, Tied))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(step))
        return run.part(words[0]), run.part(words[1])

    run.train(model, optimizer, batch=batch)


@habit("a layer that is used several times")
def reused(run: Run) -> None:
    class Recurrent(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            for _ in range(3):
                x = self.second(x).tanh()
            return x

    model, optimizer = run.wrapped(made(run, Recurrent))
    run.train(model, optimizer)


@habit("weights are tied in mid-training")
def tied_late(run: Run) -> None:
    model, optimizer = run.wrapped(
        made(run, lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    )
    run.train(model, optimizer, range(run.middle))
    run.inner(model)[2].weight = run.inner(model)[1].weight
    run.train(model, optimizer, range(run.middle, 24))


@habit("ParameterList and ParameterDict")
def containers(run: Run) -> None:
    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList(nn.Parameter(torch.randn(INPUTS, 6)) for _ in range(3))
            self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(6, CLASSES))})
            self.scale = nn.Parameter(torch.tensor(0.1))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = sum(x @ weight for weight in self.many).tanh()  # type: ignore[union-attr]
            return self.scale * x @ self.named["out"] + self.empty.sum()

    model, optimizer = run.wrapped(made(run, Containers))
    run.train(model, optimizer)
    assert model.empty.grad.shape == (0, 3)


@habit("a layer that is never used")
def unused(run: Run) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model, optimizer = run.wrapped(made(run, Unused))
    run.train(model, optimizer)


@habit("an early exit: a part of the layers in some steps")
def early_exit(run: Run) -> None:
    class Exits(Net):
        last = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            return self.fc(self.second(x).tanh() if self.last else x)

    model, optimizer = run.wrapped(made(run, Exits), plain_sgd)
    for step in run.steps:
        run.inner(model).last = step % 3 != 1
        run.train(model, optimizer, [step])


@habit("layers in an order of their own in each step")
def shuffled(run: Run) -> None:
    class Shuffled(nn.Module):
        turn = 0

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(INPUTS, INPUTS) for _ in range(3)])
            self.fc = nn.Linear(INPUTS, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(3):
                x = self.layers[(number + self.turn) % 3](x).tanh()
            return self.fc(x)

    model, optimizer = run.wrapped(made(run, Shuffled))
    for step in run.steps:
        run.inner(model).turn = step % 3
        run.train(model, optimizer, [step])


# ---- the wrapper inside other modules ------------------------------------------------------------
@habit("the wrapper in an nn.Sequential")
def in_sequential(run: Run, model: Any, optimizer: Any) -> None:
    whole = nn.Sequential(nn.Flatten(), model, nn.Identity())
    for step in run.after_step(whole, optimizer):
        whole.eval()
        with torch.no_grad():
            run.mean(f"loss {step}", run.loss(whole, 99))
        whole.train()
        whole.zero_grad()


@habit("the state of a module around the wrapper, saved and loaded")
def in_parent(run: Run, model: Any, optimizer: Any) -> None:
    parent = nn.ModuleDict({"net": model})
    run.train(model, optimizer, range(10))
    kept = copy.deepcopy(parent.state_dict())
    run.train(model, optimizer, range(10, 14))
    found = parent.load_state_dict(kept, strict=False)
    run.same("missing or unexpected", len(found.missing_keys) + len(found.unexpected_keys))
    run.train(model, optimizer, range(14, 20))


@habit("a plain module's state, loaded into one around the wrapper")
def into_parent(run: Run, model: Any, optimizer: Any) -> None:
    """Names are those of the module without the wrapper, as in the wrapper's own state."""
    parent = nn.ModuleDict({"net": model})
    run.train(model, optimizer, range(6))
    plain = nn.ModuleDict({"net": made(run)})
    found = parent.load_state_dict(plain.state_dict(), strict=False)
    run.same("missing or unexpected", len(found.missing_keys) + len(found.unexpected_keys))
    run.train(model, optimizer, range(6, 12))


@habit("the optimizer of a module around the wrapper")
def optimizer_of_parent(run: Run) -> None:
    """It holds parameters of a frozen part as well."""
    net = made(run)
    features = nn.Linear(INPUTS, INPUTS).to(run.dtype).requires_grad_(False)
    nn.init.eye_(features.weight)
    optimizer = sgd([*features.parameters(), *net.parameters()])
    model = run.wrap(net, optimizer)
    run.train(nn.Sequential(features, model), optimizer)


@habit(
    "parameters of a loss, beside the wrapper, in its optimizer",
    error="gradient of this rank alone",
)
def parameters_beside(run: Run) -> None:
    """Their gradients are not averaged, so that ranks would part."""
    net, scale = made(run), nn.Parameter(torch.ones((), dtype=run.dtype))
    optimizer = sgd([*net.parameters(), scale])
    model = run.wrap(net, optimizer)
    for step in run.steps:
        optimizer.zero_grad()
        (run.loss(model, step) + (scale - 2).square()).backward()
        optimizer.step()
