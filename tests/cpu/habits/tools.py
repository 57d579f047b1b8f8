"""Habits of tools around training: copies and averages of models, saved ones, compiled ones,
torch.func, torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.cpu.habits.run import TWO, Net, Run, adam, habit, made, plain_sgd

COPIED = r"cop(y|ied)"
COMPILED = "compile"


def evaluated(run: Run, name: str, model: Any) -> None:
    """All ranks give the model the same batch."""
    model.eval()
    with torch.no_grad():
        run.same(name, model(run.whole(99)[0]))


# ---- copies --------------------------------------------------------------------------------------
@habit("deepcopy of the wrapper, evaluated")
def copy_evaluated(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(10))
    best = copy.deepcopy(model)
    run.train(model, optimizer, range(10, 16))
    evaluated(run, "copy", best)
    evaluated(run, "model", model)


@habit("deepcopy of the wrapper, before the first step")
def copy_early(run: Run, model: Any, optimizer: Any) -> None:
    first = copy.deepcopy(model)
    run.train(model, optimizer)
    evaluated(run, "copy", first)


@habit("deepcopy of the wrapper, trained", error=COPIED)
def copy_trained(run: Run, model: Any, optimizer: Any) -> None:
    """It has no ranks of its own."""
    run.train(model, optimizer, range(10))
    other = copy.deepcopy(model)
    run.train(other, plain_sgd(other.parameters()), range(10, 14))


@habit("deepcopy of the inner module, evaluated and trained alone")
def inner_copied(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(10))
    other = copy.deepcopy(run.inner(model))
    evaluated(run, "copy", other)
    its_optimizer = plain_sgd(other.parameters())
    run.train(other, its_optimizer, range(4), batch=run.whole)  # each rank alone
    evaluated(run, "trained alone", other)
    run.train(model, optimizer, range(10, 16))


@habit("deepcopy of model and optimizer together")
def both_copied(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), adam)
    run.train(model, optimizer, range(10))
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    inner, other = copy.deepcopy((run.inner(model), optimizer))
    run.train(model, optimizer, range(10, 14))
    for name, value in kept["model"].items():
        run.same(name, value)
    assert type(other) is torch.optim.Adam
    for p, q in zip(inner.parameters(), other.param_groups[0]["params"], strict=True):
        assert p is q
        run.same(f"moment {len(run.same_everywhere)}", other.state[q]["exp_avg"])


# ---- averages ------------------------------------------------------------------------------------
@habit("AveragedModel of the wrapper")
def averaged(run: Run, model: Any, optimizer: Any) -> None:
    average = AveragedModel(model)
    for _ in run.after_step(model, optimizer):
        average.update_parameters(model)
    evaluated(run, "average", average)


@habit("AveragedModel of the inner module")
def inner_averaged(run: Run, model: Any, optimizer: Any) -> None:
    average = AveragedModel(run.inner(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in run.after_step(model, optimizer):
        average.update_parameters(run.inner(model))
    evaluated(run, "average", average)


@habit("AveragedModel of the wrapper, made in mid-training")
def averaged_late(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(run.middle))
    average = AveragedModel(model)
    for step in range(run.middle, 16):
        run.train(model, optimizer, [step])
        average.update_parameters(model)
    evaluated(run, "average", average)


@habit("an average by hand over the wrapper's parameters")
def average_by_hand(run: Run, model: Any, optimizer: Any) -> None:
    average = copy.deepcopy(run.inner(model))
    for _ in run.after_step(model, optimizer):
        with torch.no_grad():
            for mine, p in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.1)
    evaluated(run, "average", average)


@habit("an average by hand over the inner module's parameters and state")
def inner_average_by_hand(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    average = copy.deepcopy(inner)
    for step in run.after_step(model, optimizer):
        with torch.no_grad():
            if step % 2:
                for mine, p in zip(average.parameters(), inner.parameters(), strict=True):
                    mine.lerp_(p, 0.1)
            else:
                for name, value in inner.state_dict().items():
                    average.state_dict()[name].lerp_(value, 0.1)
    evaluated(run, "average", average)


@habit("a target network that is loaded now and then")
def target(run: Run, model: Any, optimizer: Any) -> None:
    other = made(run)
    for step in run.steps:
        x, y = run.batch(step)
        optimizer.zero_grad()
        with torch.no_grad():
            want = other(x)
        (cross_entropy(model(x), y) + (model(x) - want).square().mean()).backward()
        optimizer.step()
        if step % 4 == 3:
            other.load_state_dict(model.state_dict())


# ---- saved ---------------------------------------------------------------------------------------
@habit("torch.save of the wrapper, loaded and evaluated")
def saved(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(10))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    run.train(model, optimizer, range(10, 16))
    evaluated(run, "loaded", torch.load(file, weights_only=False))


@habit("torch.save of the wrapper, loaded and trained", error=COPIED)
def saved_and_trained(run: Run, model: Any, optimizer: Any) -> None:
    """It has no ranks of its own."""
    run.train(model, optimizer, range(10))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    run.train(other, plain_sgd(other.parameters()), range(4))


@habit("pickles of the inner module and of the optimizer")
def pickled(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        if step % 5 == 4:
            inner, other = pickle.loads(pickle.dumps((run.inner(model), optimizer)))
            assert len(other.state) == len([*inner.parameters()])
            evaluated(run, f"pickled {step}", inner)
            inner(run.whole(step)[0]).sum().backward()
            other.step()


# ---- torch.func and names ------------------------------------------------------------------------
@habit("functional_call of the wrapper")
def functional(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        with torch.no_grad():
            halves = {name: 0.5 * p for name, p in model.named_parameters()}
            x = run.whole(99)[0]
            run.same(f"out {step}", torch.func.functional_call(model, halves, (x,)))


@habit("functional_call of the inner module, trained")
def inner_functional(run: Run, model: Any, optimizer: Any) -> None:
    """Its gradients reach the parameters through other tensors."""
    inner = run.inner(model)
    for step in run.steps:
        x, y = run.batch(step)
        optimizer.zero_grad()
        if step % 3 == 1:
            halves = {name: 0.5 * p for name, p in inner.named_parameters()}
            cross_entropy(torch.func.functional_call(inner, halves, (x,)), y).backward()
        else:
            cross_entropy(model(x), y).backward()
        optimizer.step()


@habit("get_parameter, get_submodule and named_modules of the wrapper")
def names(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        run.same(f"sum {step}", model.get_parameter("fc.weight").detach().sum())
        assert model.get_submodule("fc") is run.inner(model).fc
        for name, _ in model.named_parameters():
            assert model.get_parameter(name) is not None
    run.same("parameters", len([*model.named_parameters()]))
    assert run.inner(model).second in [*model.modules()]


@habit("per-sample gradients of the inner module by torch.func")
def per_sample(run: Run, model: Any, optimizer: Any) -> None:
    inner = run.inner(model)
    for step in run.after_step(model, optimizer):
        values = {name: p.detach() for name, p in inner.named_parameters()}

        def loss(values: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(torch.func.functional_call(inner, values, (x[None],)), y[None])

        x, y = run.whole(99)
        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(values, x, y)
        run.same(f"norms {step}", found["fc.weight"].flatten(1).norm(dim=1))


# ---- torch.distributed.checkpoint ----------------------------------------------------------------
@habit("get_model_state_dict and set_model_state_dict of torch.distributed.checkpoint")
def dcp_model(run: Run, model: Any, optimizer: Any) -> None:
    run.train(model, optimizer, range(6))
    kept = copy.deepcopy(dcp.get_model_state_dict(model))
    assert set(kept) == set(made(run).state_dict())
    run.train(model, optimizer, range(6, 10))
    dcp.set_model_state_dict(model, kept)
    run.train(model, optimizer, range(10, 16))


@habit("get_optimizer_state_dict and set_optimizer_state_dict of torch.distributed.checkpoint")
def dcp_optimizer(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), adam)
    run.train(model, optimizer, range(6))
    kept = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    run.train(model, optimizer, range(6, 10))
    dcp.set_optimizer_state_dict(model, optimizer, kept)
    run.train(model, optimizer, range(10, 16))


@habit("get_state_dict of torch.distributed.checkpoint")
def dcp_both(run: Run) -> None:
    model, optimizer = run.wrapped(made(run), adam)
    run.train(model, optimizer, range(6))
    weights, states = dcp.get_state_dict(model, optimizer)
    for name, value in weights.items():
        run.same(name, value)
    for name in made(run).state_dict():
        run.same(f"moment of {name}", states["state"][name]["exp_avg"])
    run.train(model, optimizer, range(6, 16))


# ---- compiled ------------------------------------------------------------------------------------
@habit("torch.compile of the module that is wrapped", chained=COMPILED, only=TWO)
def compiled_inside(run: Run) -> None:
    """When chained, updates come before layers, whose hooks compiled code leaves out."""
    torch._dynamo.reset()
    model, optimizer = run.wrapped(torch.compile(made(run), backend="eager"))
    run.train(model, optimizer)


@habit("torch.compile of the wrapper", chained=COMPILED, only=TWO)
def compiled_outside(run: Run) -> None:
    """When chained, updates come before layers, whose hooks compiled code leaves out."""
    torch._dynamo.reset()
    model, optimizer = run.wrapped(made(run))
    run.train(torch.compile(model, backend="eager"), optimizer)


@habit("model.compile() of the wrapper in mid-training", chained=COMPILED, only=TWO)
def compiled_late(run: Run) -> None:
    """When chained, updates come before layers, whose hooks compiled code leaves out."""
    torch._dynamo.reset()
    model, optimizer = run.wrapped(made(run))
    run.train(model, optimizer, range(run.middle))
    model.compile(backend="eager")
    run.train(model, optimizer, range(run.middle, 16))


@habit("compile() of the inner module in mid-training", chained=COMPILED, only=TWO)
def inner_compiled_late(run: Run) -> None:
    """When chained, updates come before layers, whose hooks compiled code leaves out."""
    torch._dynamo.reset()
    model, optimizer = run.wrapped(made(run))
    run.train(model, optimizer, range(run.middle))
    run.inner(model).compile(backend="eager")
    run.train(model, optimizer, range(run.middle, 16))


@habit("compile() of a layer before the model is wrapped", chained=COMPILED, only=TWO)
def layer_compiled(run: Run) -> None:
    """When chained, updates come before layers, whose hooks compiled code leaves out."""
    torch._dynamo.reset()
    net: Net = made(run)
    net.second.compile(backend="eager")
    model, optimizer = run.wrapped(net)
    run.train(model, optimizer)


@habit("torch.compile of a function that makes the whole step", chained=COMPILED, only=TWO)
def compiled_step(run: Run, model: Any, optimizer: Any) -> None:
    """What calls other ranks is left alone, and the module is compiled."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for number in run.steps:
        run.mean(f"loss {number}", step(*run.batch(number)))


@habit("torch.jit.trace of the inner module, evaluated")
def traced(run: Run, model: Any, optimizer: Any) -> None:
    for step in run.after_step(model, optimizer):
        if step == 10:
            inner: nn.Module = run.inner(model)
            with torch.no_grad():
                found = torch.jit.trace(inner.eval(), run.whole(99)[0], check_trace=False)
                run.same("traced", found(run.whole(99)[0]))
            inner.train()
