"""Habits that read or change gradients and parameters: clipping, hooks, penalties, weights changed
by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.cpu.habits.run import DENSE, Run, habit, made, plain_sgd

NORMS = (2.0, float("inf"))
CHANGED = r"changed|modified"
NOT_AVERAGED = r"not (been )?averaged|reached no parameter"


# ---- clipping ------------------------------------------------------------------------------------
@habit("clip_grad_norm_ of the wrapper's parameters")
def clip_norm(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_backward(model, optimizer):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, NORMS[step % 2])
        run.same(f"norm {step}", norm)


@habit("clip_grad_norm_ of the inner module's parameters")
def clip_norm_of_inner(run: Run, model: Any, optimizer: Any) -> None:
    """When chained, asking for its parameters waits for their gradients."""
    inner = run.inner(model)
    for _ in run.after_backward(model, optimizer):
        nn.utils.clip_grad_norm_(inner.parameters(), 0.1)


@habit("clip_grad_norm_ of held parameters", chained=CHANGED)
def clip_norm_of_held(run: Run, model: Any, optimizer: Any) -> None:
    """When chained, their gradients are still being averaged, which references cannot know."""
    held = [*run.inner(model).parameters()]
    for _ in run.after_backward(model, optimizer):
        nn.utils.clip_grad_norm_(held, 0.1)


@habit("model.clip_grad_norm_")
def clip_norm_method(run: Run, model: Any, optimizer: Any) -> None:
    parameters = [*model.parameters()]
    clip = partial(nn.utils.clip_grad_norm_, parameters) if run.alone else model.clip_grad_norm_
    for step in run.after_backward(model, optimizer):
        run.same(f"norm {step}", clip(0.1, NORMS[step % 2]))


@habit("clip_grad_value_")
def clip_value(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_backward(model, optimizer):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)


@habit("clipping of optimizer.param_groups")
def clip_groups(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_backward(model, optimizer):
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)


# ---- reading and changing gradients --------------------------------------------------------------
@habit("gradient norms are logged")
def norms(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_backward(model, optimizer):
        for name, p in model.named_parameters():
            run.same(f"{name} {step}", p.grad.norm())


@habit("gradients are logged from the inner module after backward")
def inner_norms(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.after_backward(model, optimizer):
        for number, p in enumerate(inner.parameters()):
            run.same(f"{number} {step}", p.grad.norm())


@habit("gradients of a held parameter are read after synchronize()")
def held_norm(run: Run, model: Any, optimizer: Any) -> None:
    held = run.inner(model).fc.weight
    for step in run.after_backward(model, optimizer):
        run.synchronize(model)
        run.same(f"norm {step}", held.grad.norm())


@habit("gradients are changed between backward and step")
def noise(run: Run, model: Any, optimizer: Any) -> None:
    """Noise that is the same on all ranks, as for differential privacy, and a mask."""
    for step in run.after_backward(model, optimizer):
        torch.manual_seed(step)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.01)
            p.grad[0].zero_()


@habit("gradients are replaced between backward and step")
def replaced(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_backward(model, optimizer):
        for p in model.parameters():
            p.grad = p.grad.sign() * 0.01


@habit("some gradients are set to None between backward and step")
def some_none(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_backward(model, optimizer):
        for name, p in model.named_parameters():
            if name.startswith("second") and step % 3 == 1:
                p.grad = None


@habit("gradients of two losses, the first ones kept over zero_grad")
def two_losses(run: Run, model: Any, optimizer: Any) -> None:
    """What was kept keeps its values, as for gradient surgery."""
    parameters = [*model.parameters()]
    for step in run.steps:
        found = []
        for loss in (run.loss(model, step), model(run.batch(step)[0]).square().mean()):
            optimizer.zero_grad()
            loss.backward()
            run.synchronize(model)
            found.append([p.grad for p in parameters])
        for p, first, second in zip(parameters, *found, strict=True):
            p.grad = first + 0.5 * second
        optimizer.step()


@habit("views of gradients that are kept over zero_grad")
def kept_views(run: Run, model: Any, optimizer: Any) -> None:
    before: list[torch.Tensor] = []
    for step in run.after_backward(model, optimizer):
        found = [p.grad.flatten() for p in model.parameters()]
        if before:
            run.same(f"cosine {step}", torch.cat(found) @ torch.cat(before))
        before = found


@habit("gradients in a flat tensor of the user's own", chained=CHANGED)
def flat(run: Run, model: Any, optimizer: Any) -> None:
    """It is cleared as a whole, which is too early as long as a step is put off."""
    parameters = [*run.inner(model).parameters()]
    whole = torch.zeros(sum(p.numel() for p in parameters), dtype=run.dtype)
    parts = whole.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p)
    for step in run.steps:
        whole.zero_()
        run.loss(model, step).backward()
        run.same(f"norm {step}", whole.norm())
        optimizer.step()


@habit("gradients by torch.autograd.grad, put into p.grad", error=NOT_AVERAGED)
def by_hand(run: Run, model: Any, optimizer: Any) -> None:
    """They are this rank's own: no backward pass has averaged them."""
    for step in run.steps:
        optimizer.zero_grad()
        parameters = [*model.parameters()]
        found = torch.autograd.grad(run.loss(model, step), parameters)
        for p, gradient in zip(parameters, found, strict=True):
            p.grad = gradient
        optimizer.step()


@habit("torch.autograd.grad beside the backward pass")
def grad_beside(run: Run, model: Any, optimizer: Any) -> None:
    """For saliency, of inputs and of parameters."""
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        x = run.batch(99)[0].requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        loss.backward()
        optimizer.step()


@habit("backward(inputs=...) for a part of the parameters")
def inputs_of_backward(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        run.loss(model, step).backward(inputs=[*run.inner(model).fc.parameters()])
        optimizer.step()


@habit("backward(create_graph=True)", error="create_graph")
def create_graph(run: Run, model: Any, optimizer: Any) -> None:
    """Averages would lose the graph of gradients."""
    for step in run.steps:
        optimizer.zero_grad()
        run.loss(model, step).backward(create_graph=True)
        optimizer.step()


@habit("a penalty on the gradients of parameters")
def parameter_penalty(run: Run) -> None:
    """All ranks have the whole batch, as it is no mean over samples."""
    model, optimizer = run.wrapped(made(run), plain_sgd)
    for step in run.steps:
        x, y = run.whole(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        (loss + 0.1 * sum(slope.square().sum() for slope in slopes)).backward()
        optimizer.step()


@habit("a penalty on weights in the loss")
def weight_penalty(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        (run.loss(model, step) + 1e-3 * penalty).backward()
        optimizer.step()


@habit("a penalty on held weights, after the forward pass")
def held_penalty(run: Run, model: Any, optimizer: Any) -> None:
    held = [*run.inner(model).parameters()]
    for step in run.steps:
        optimizer.zero_grad()
        loss = run.loss(model, step)
        (loss + 1e-3 * sum(p.abs().sum() for p in held)).backward()
        optimizer.step()


@habit("a loss of weights only, without a forward pass")
def weights_only(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.steps:
        optimizer.zero_grad()
        if step % 4 == 3:
            sum(p.square().sum() for p in model.parameters()).backward()
        else:
            run.loss(model, step).backward()
        optimizer.step()


# ---- hooks of users ------------------------------------------------------------------------------
@habit("a linear hook on a parameter's gradient")
def masked(run: Run, model: Any, optimizer: Any) -> None:
    mask = torch.ones(6, 6, dtype=run.dtype).tril()
    run.inner(model).second.weight.register_hook(lambda gradient: gradient * mask)
    run.inner(model).fc.weight.register_hook(lambda gradient: 0.5 * gradient)
    run.train(model, optimizer)


@habit("a hook on a parameter's gradient, registered in mid-training")
def masked_late(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    run.inner(model).fc.weight.register_hook(lambda gradient: 0.5 * gradient)
    run.train(model, optimizer, range(run.middle, 16))


@habit("a post-accumulate hook on a parameter, before the first step", error=r"fc\.weight")
def early_hook(run: Run, model: Any, optimizer: Any) -> None:
    """It would change gradients on each rank, or before they are averaged."""
    run.inner(model).fc.weight.register_post_accumulate_grad_hook(clamp)
    run.train(model, optimizer)


@habit("a post-accumulate hook on a parameter, in mid-training", error=r"fc\.weight")
def late_hook(run: Run, model: Any, optimizer: Any) -> None:
    """It would change gradients while they are being sent."""
    run.train(model, optimizer, range(run.middle))
    run.inner(model).fc.weight.register_post_accumulate_grad_hook(clamp)
    run.train(model, optimizer, range(run.middle, 16))


def clamp(p: torch.Tensor) -> None:
    p.grad.clamp_(-1e-5, 1e-5)  # type: ignore[union-attr]


@habit("an optimizer step in the backward pass, by post-accumulate hooks", error=r"\.weight|\.bias")
def step_in_backward(run: Run) -> None:
    """It would use gradients of this rank, before they are averaged."""
    model, _ = run.wrapped(made(run))
    own = {p: plain_sgd([p]) for p in run.inner(model).parameters()}

    def update(p: torch.Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(update)
    for step in run.steps:
        run.loss(model, step).backward()


@habit("hooks on modules: of forward and of backward passes")
def module_hooks(run: Run, model: Any, optimizer: Any) -> None:
    inner, seen = run.inner(model), []
    inner.first.register_forward_hook(lambda _, given, out: seen.append(out.detach()))
    inner.second.register_full_backward_hook(lambda _, given, out: (2 * given[0],))
    inner.fc.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
    run.train(model, optimizer)
    run.same("passes", len(seen))


@habit("a hook before the forward pass reads the weights of all layers")
def root_hook(run: Run, model: Any, optimizer: Any) -> None:
    """Registered on the whole module, as those of pruning and of weight norms are."""
    inner = run.inner(model)
    seen: list[torch.Tensor] = []
    hook = inner.register_forward_pre_hook(
        lambda module, _: seen.append(module.fc.weight.detach().sum())
    )
    run.train(model, optimizer)
    hook.remove()
    for step, value in enumerate(seen):
        run.same(f"sum {step}", value)


# ---- weights changed by hand ---------------------------------------------------------------------
@habit("weights are clamped after step")
def clamped(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)


@habit("weights of the inner module are clamped after step")
def inner_clamped(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            for p in run.inner(model).parameters():
                p.clamp_(-0.2, 0.2)


@habit("held weights are clamped after step", chained=CHANGED)
def held_clamped(run: Run, model: Any, optimizer: Any) -> None:
    """When chained, an update of theirs may be under way."""
    held = [*run.inner(model).parameters()]
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            for p in held:
                p.clamp_(-0.2, 0.2)


@habit("one layer's weight is normalized after step")
def layer_normalized(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            weight = run.inner(model).fc.weight
            weight.div_(weight.norm(dim=1, keepdim=True))


@habit("weights decay by hand before step")
def decay(run: Run, model: Any, optimizer: Any) -> None:
    for _ in run.after_backward(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)


@habit("SGD by hand on the wrapper's parameters")
def sgd_by_hand(run: Run) -> None:
    model, _ = run.wrapped(made(run))
    for step in run.steps:
        model.zero_grad()
        run.loss(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


@habit("SGD by hand on held parameters", chained=CHANGED)
def sgd_on_held(run: Run) -> None:
    """When chained, their gradients may be under way."""
    model, _ = run.wrapped(made(run))
    held = [*run.inner(model).parameters()]
    for step in run.steps:
        run.loss(model, step).backward()
        with torch.no_grad():
            for p in held:
                p -= 0.1 * p.grad
                p.grad = None


@habit("SGD by hand through p.data")
def sgd_on_data(run: Run) -> None:
    model, _ = run.wrapped(made(run))
    for step in run.steps:
        model.zero_grad()
        run.loss(model, step).backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad


@habit("parameters are read right after step")
def read_after_step(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        run.same(f"sum {step}", sum(p.detach().sum() for p in model.parameters()))


@habit("parameters of the inner module are read right after step")
def inner_read_after_step(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.after_step(model, optimizer):
        ways = (
            inner.parameters,
            inner.state_dict().values,
            lambda: dict(inner.named_parameters()).values(),
        )
        for way in ways[step % 3 :]:
            run.same(f"sum {step}", sum(p.detach().sum() for p in way()))


@habit("weights are perturbed and restored: SAM", only=DENSE)
def sharpness(run: Run, model: Any, optimizer: Any) -> None:
    """Two passes a step. The perturbation is made of averaged gradients."""
    for step in run.after_backward(model, optimizer):
        with torch.no_grad():
            moved = [0.05 * p.grad for p in model.parameters()]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        run.loss(model, step).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
