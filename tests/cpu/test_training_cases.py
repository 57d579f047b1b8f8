"""Models of all kinds in a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from training_models import (
    adamw,
    apart,
    copied,
    error_of,
    images,
    imported,  # noqa: F401
    made,
    on_all,
    same,
    schedule_for,
    sgd,
    train,
)
from training_pair import Cases, Pair, model_comm, net, pairs

from linkweave.collectives import DataParallel
from linkweave.kernels import nvtx_ranges

pytestmark = pytest.mark.usefixtures("imported")
case = Cases()


@case
def a_frozen_parameter_stays_as_it_is(rank: int) -> None:
    def make() -> nn.Module:
        found = net()
        found[1].requires_grad_(False)
        found[3].bias.requires_grad_(False)
        return found

    pair = Pair(make)
    pair.steps(0, 1, 2)
    assert pair.inner[1].weight.grad is None
    pair.close()


@case
def requires_grad_changes_between_steps(rank: int) -> None:
    pair = Pair()
    model = DataParallel(pair.inner, pair.optimizer) if pair.model.close() else None
    assert model is None  # closed: the optimizer is as before
    pair.model = DataParallel(pair.inner, pair.optimizer)
    pair.steps(0, 1)
    for frozen in (True, False):
        for one in (pair.inner, pair.alone):
            one[3].requires_grad_(not frozen)
        pair.steps(2, 3)
        assert len(pair.model.program.names) == 3  # none is made for a few steps
    for one in (pair.inner, pair.alone):
        one[3].requires_grad_(False)
    pair.steps(*range(4, 15))
    assert len(pair.model.program.names) == 2
    for one in (pair.inner, pair.alone):
        one[3].requires_grad_(True)
    pair.steps(2, 3)
    assert len(pair.model.program.names) == 3
    pair.close()


@case
def requires_grad_changes_under_a_given_schedule(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    for one in (pair.inner, pair.alone):
        one[3].requires_grad_(False)
    pair.steps(*range(2, 14))  # zeros are sent
    pair.close()


@case
def channels_last(rank: int) -> None:
    def make() -> nn.Module:
        return made("cnn").to(memory_format=torch.channels_last)

    for pair in pairs(make):
        pair.steps(0, 1, 2)
        pair.model.finish()
        assert pair.inner.second.weight.is_contiguous(memory_format=torch.channels_last)


@case
def mixed_dtypes(rank: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(64, 12, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(12)
            self.last = nn.Linear(12, 10)
            self.last.bias = nn.Parameter(self.last.bias.detach().bfloat16())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x.flatten(1).bfloat16()).float())
            return nn.functional.linear(x, self.last.weight) + self.last.bias

    states = []
    for chained in (True, False):
        inner = Mixed()
        optimizer = adamw(inner.parameters())
        schedule = schedule_for(inner, images(0, 2)[0], chained=chained)
        model = DataParallel(inner, optimizer, schedule=schedule)
        train("cnn", model, optimizer, range(4), rank, 2)
        assert len({op.buffer for op in model.program.ops}) == 2
        states.append(copied(model.state_dict()))
        assert on_all(model_comm(), states[-1])
        model.close()
    assert same(*states)


@case
def buffers_of_batch_norm(rank: int) -> None:
    torch.manual_seed(rank)  # rank 0's parameters and buffers are those of all
    inner = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    ).double()
    inner[2].running_mean += rank + 1
    inner[2].num_batches_tracked += 7 * rank
    optimizer = sgd(inner.parameters())
    schedule = schedule_for(copy.deepcopy(inner), images(0, 4)[0])
    model = DataParallel(inner, optimizer, schedule=schedule)
    assert on_all(model_comm(), inner.state_dict())
    assert int(inner[2].num_batches_tracked) == 0
    assert float(inner[2].running_mean[0]) == 1.0
    train("cnn", model, optimizer, range(3), rank, 2, each=4)
    state = model.state_dict()
    assert int(state["2.num_batches_tracked"]) == 3
    assert on_all(model_comm(), state)
    model.close()
    again = DataParallel(inner, optimizer, schedule=schedule, broadcast_buffers=False)
    train("cnn", again, optimizer, range(3), rank, 2, each=4)
    state = again.state_dict()
    assert on_all(model_comm(), {k: v for k, v in state.items() if "running" not in k})
    assert not on_all(model_comm(), {"mean": state["2.running_mean"]})
    again.close()


@case
def another_module_uses_a_parameter_first(rank: int) -> None:
    """The first forward pass used it in one module, and a later pass uses it in another."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, bank: nn.Linear) -> torch.Tensor:
            return x + bank.bias

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bank, self.last = net()[:3], net()[3], net()[5]
            self.adds = nn.ModuleList([Adds(), Adds()])
            self.which = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.adds[self.which](self.body(x), self.bank).tanh())

    pair = Pair(Bank)
    pair.steps(0, 1)
    pair.inner.which = pair.alone.which = 1
    pair.steps(2, 3)
    pair.close()


@case
def parameters_of_no_or_one_element(rank: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale + self.empty.sum()

    for pair in pairs(Odd):
        pair.steps(0, 1, 2)
        pair.model.finish()
        assert pair.inner.empty.grad.shape == (0, 3)


@case
def compiled_modules(rank: int) -> None:
    """By a backend without a compiler; hooks before layers do not run in what is compiled."""
    whole, inside = torch.compile(net(), backend="eager"), net()
    inside.compile(backend="eager")
    for inner in (whole, inside):
        said = error_of(lambda inner=inner: Pair(lambda: inner))
        assert "cannot be chained with the next forward pass: the module is compiled" in said
        pair = Pair(lambda inner=inner: inner, chained=False)
        pair.alone = net()
        pair.alone_optimizer = sgd(pair.alone.parameters())
        pair.steps(0, 1, 2, 3)
        assert not pair.model.program.chained
        state = {k.removeprefix("_orig_mod."): v for k, v in pair.model.state_dict().items()}
        assert apart(state, pair.alone.state_dict()) < 1e-13
        pair.model.close()


@case
def ranges_of_a_step(rank: int) -> None:
    """Units, all-reduces and lanes have ranges of NVTX and of torch.profiler."""
    seen: list[str] = []

    def annotate(name: str, domain: str) -> Any:
        seen.append(name)
        return nullcontext()

    sys.modules["nvtx"] = SimpleNamespace(annotate=annotate)
    nvtx_ranges._nvtx.cache_clear()
    every = _ExperimentalConfig(profile_all_threads=True)
    for pair in pairs():
        pair.steps(0, 1)
        pair.model.finish()
        seen.clear()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as found:
            pair.step(2)
            pair.model.finish()
        program = pair.model.program
        wanted = [f"lane {op.lane}: {program.label(n)}" for n, op in enumerate(program.ops)]
        wanted += [f"update {name}" for name in program.names]
        ours = [name for name in seen if name.startswith(("lane ", "update "))]
        assert sorted(ours) == sorted(wanted)
        names = [event.name for event in found.events() if event.name.startswith("linkweave: ")]
        assert sorted(names) == sorted(f"linkweave: {name}" for name in wanted)


@pytest.mark.parametrize("body", case, ids=lambda body: body.__name__)
def test_case(body: Callable[[int], None]) -> None:
    case.run(body)
