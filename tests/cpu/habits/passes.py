"""Habits of passes: evaluation and generation, the inner module, ranks that differ, exceptions."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.cpu.habits.run import CLASSES, INPUTS, Net, Run, habit, made, plain_sgd


# ---- passes that do not train --------------------------------------------------------------------
@habit("evaluation between steps: eval, no_grad, train")
def evaluation(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        model.train()
        run.train(model, optimizer, [step])
        model.eval()
        with torch.no_grad():
            run.mean(f"loss {step}", run.loss(model, 99))


@habit("evaluation by inference_mode, without eval")
def inference(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        with torch.inference_mode():
            if step % 2:
                run.inner(model).encode(run.batch(99)[0])  # a part
            run.mean(f"loss {step}", run.loss(model, 99))


@habit("evaluation of the inner module between steps")
def inner_evaluation(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.after_step(model, optimizer):
        with torch.no_grad():
            run.mean(f"loss {step}", run.loss(inner, 99))


@habit("evaluation on rank 0 only")
def evaluation_on_one(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        if run.rank == 0:
            model.eval()
            with torch.no_grad():
                model(run.whole(99)[0])
            model.train()


@habit("a forward pass with gradients on rank 0 only, before a barrier")
def forward_on_one(run: Run, model: Any, optimizer: Any) -> None:
    """It must not wait for the other ranks: it is unused."""
    for _ in run.after_step(model, optimizer):
        if run.rank == 0:
            model(run.whole(99)[0])
        if run.comm is not None:
            run.comm.barrier()


@habit("the first forward pass of all on rank 0 only")
def first_forward_on_one(run: Run, model: Any, optimizer: Any) -> None:
    """To print shapes, say."""
    if run.rank == 0:
        model(run.whole(99)[0])
    if run.comm is not None:
        run.comm.barrier()
    run.train(model, optimizer)


@habit("generation between steps, one token after another")
def generation(run: Run) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell = nn.Embedding(7, 6), nn.GRUCell(6, 6)
            self.head = nn.Linear(6, 7)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            state, out = None, []
            for vector in self.embedding(words).unbind(1):
                state = self.cell(vector, state)
                out.append(self.head(state))
            return torch.stack(out, 1)

    model, optimizer = run.wrapped(made(run, Words))
    for step in run.steps:
        words = torch.randint(7, (6, 4), generator=torch.Generator().manual_seed(step))
        words = run.part(words)
        optimizer.zero_grad()
        cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
        model.eval()
        said = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            for _ in range(4):
                said = torch.cat([said, model(said)[:, -1:].argmax(-1)], 1)
        run.same(f"said {step}", said)
        model.train()


@habit("a pass in no_grad of a deep model between steps")
def deep(run: Run) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(INPUTS, INPUTS) for _ in range(30)])

    model, optimizer = run.wrapped(made(run, make), lambda p: torch.optim.SGD(p, 0.01))
    for step in run.after_step(model, optimizer, loss=lambda x, _: mse_loss(model(x), x)):
        with torch.no_grad():
            for again in range(3):
                run.mean(f"sum {step}", model(run.batch(step)[0] + again).sum() * run.size)


@habit("the inner module is trained directly")
def inner_trained(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.steps:
        run.train(model if step % 3 else inner, optimizer, [step])


@habit("the inner module only is called, from the first step on")
def inner_only(run: Run, model: Any, optimizer: Any) -> None:
    run.train(run.inner(model), optimizer)


@habit("methods and layers are called through the wrapper")
def through_the_wrapper(run: Run, model: Any, optimizer: Any) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.fc(model.encode(x)), y)

    for _ in run.after_step(model, optimizer, loss=loss):
        assert model.fc.weight.shape == (CLASSES, 6)


@habit("training a part: a layer of the inner module is called directly")
def part_trained(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.steps:
        x, y = run.batch(step)
        optimizer.zero_grad()
        if step % 4 == 3:
            with torch.no_grad():
                x = inner.encode(x)
            cross_entropy(inner.fc(x), y).backward()
        else:
            cross_entropy(model(x), y).backward()
        optimizer.step()


# ---- ranks that differ ---------------------------------------------------------------------------
@habit("a layer that only the samples of one rank use")
def branch(run: Run) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = Net(), nn.Linear(CLASSES, CLASSES)

        def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            x = self.net(x)
            parts = [x[~which], self.extra(x[which]) if which.any() else x[which]]
            return torch.cat(parts)

    model, optimizer = run.wrapped(made(run, Branches))
    which = run.part(torch.tensor([False] * 4 + [True] * 2))
    run.train(model, optimizer, loss=lambda x, _: model(x, which).square().mean())


@habit("a layer that no rank uses in some steps")
def conditional(run: Run) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = Net(), nn.Linear(CLASSES, CLASSES)

        def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
            return self.extra(self.net(x)) if more else self.net(x)

    model, optimizer = run.wrapped(made(run, Sometimes))
    for step in run.steps:
        x, y = run.batch(step)
        optimizer.zero_grad()
        cross_entropy(model(x, step % 3 == 1), y).backward()
        optimizer.step()


@habit(
    "a backward pass that reaches no parameter on one rank",
    error=r"rank 1.*(no parameter|no gradient|not averaged)", by=1,
)  # fmt: skip
def reaches_nothing(run: Run, model: Any, optimizer: Any) -> None:
    """Its loss is made of its inputs only, so that the others wait for its gradients."""
    for step in run.steps:
        optimizer.zero_grad()
        x, y = run.batch(step)
        if run.rank == 1 and step == run.middle:
            model(x)
            x.clone().requires_grad_().sum().backward()
        else:
            cross_entropy(model(x), y).backward()
        optimizer.step()


class Scaled(Net):
    """With a buffer that its forward pass multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((CLASSES,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@habit("two forward passes, then two backward passes, with a buffer")
def buffers_in_two_graphs(run: Run) -> None:
    """A backward pass sends rank 0's buffers, which the other graph has saved."""
    model, optimizer = run.wrapped(made(run, Scaled))
    for step in run.steps:
        optimizer.zero_grad()
        losses = [run.loss(model, number) for number in (step, step + 1)]
        for loss in losses:
            loss.backward()
        optimizer.step()


@habit("a frozen copy of the wrapper is called with gradients enabled")
def frozen_copy(run: Run, model: Any, optimizer: Any) -> None:
    """As the target of a student."""
    target = copy.deepcopy(model).requires_grad_(False)
    run.train(model, optimizer, loss=lambda x, _: (model(x) - target(x) - 1).square().mean())


@habit("the wrapper is dropped without close(), and the module wrapped again")
def wrapped_again(run: Run) -> None:
    module = made(run)
    for _ in range(2):
        model, optimizer = run.wrapped(module, plain_sgd)
        run.train(model, optimizer, range(4))
        run.models.remove(model)
        if not run.alone:
            model.finish()
        del model, optimizer
        gc.collect()
    model, optimizer = run.wrapped(module, plain_sgd)
    run.train(model, optimizer, range(4))


@habit("record_steps() on one rank")
def recorded_on_one_rank(run: Run, model: Any, optimizer: Any) -> None:
    """While the others go on measuring."""
    for step in run.steps:
        if run.rank == 1 and step == run.middle:
            model.record_steps()
        run.train(model, optimizer, [step])


@habit("a layer is thawed, and trained by a method of the inner module", error="parameter first")
def thawed_unseen(run: Run, model: Any, optimizer: Any) -> None:
    """Whose forward pass the wrapper does not see."""
    inner = run.inner(model)
    inner.first.requires_grad_(False)
    run.train(model, optimizer, range(12))
    inner.first.requires_grad_(True)
    for step in range(12, 16):
        optimizer.zero_grad()
        run.loss(inner, step).backward()
        optimizer.step()


# ---- exceptions ----------------------------------------------------------------------------------
class Fails(Net):
    """Raises when it is told so."""

    when = ""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.when == "forward":
            raise KeyboardInterrupt
        if self.when == "backward":
            x.register_hook(self.refuse)
        return self.second(x).tanh()

    def refuse(self, _: torch.Tensor) -> None:
        raise KeyboardInterrupt


@habit("an exception in the forward pass is caught")
def forward_fails(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, Fails))
    for step in run.steps:
        optimizer.zero_grad()
        run.inner(model).when = "forward" if step % 4 == 2 else ""
        try:
            run.loss(model, step).backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()


@habit("an exception in one rank's forward pass, which it repeats")
def forward_fails_on_one(run: Run) -> None:
    model, optimizer = run.wrapped(made(run, Fails))
    for step in run.steps:
        optimizer.zero_grad()
        run.inner(model).when = "forward" if step % 4 == 2 and run.rank == 1 else ""
        try:
            loss = run.loss(model, step)
        except KeyboardInterrupt:
            run.inner(model).when = ""
            loss = run.loss(model, step)
        loss.backward()
        optimizer.step()


@habit("an exception between forward and backward")
def loss_fails(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        try:
            loss = run.loss(model, step)
            if step % 4 == 2:
                raise KeyboardInterrupt
            loss.backward()
            optimizer.step()
        except KeyboardInterrupt:
            pass


@habit("an exception in the backward pass is caught", error="backward pass ended with an error")
def backward_fails(run: Run) -> None:
    """Its gradients were sent in part, so training cannot go on."""
    model, optimizer = run.wrapped(made(run, Fails))
    for step in run.steps:
        optimizer.zero_grad()
        run.inner(model).when = "backward" if step == run.middle else ""
        try:
            run.loss(model, step).backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()
