"""Models of all kinds in a `DataParallel`. Each case runs on two ranks, with a chained
schedule if not said otherwise, beside one process that trains on the batches of both."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
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
    imported,
    made,
    on_all,
    same,
    sgd,
)
from training_pair import Pair, net, pairs

import linkweave
from linkweave.collectives import DataParallel
from linkweave.kernels import nvtx_ranges
from tests.cpu.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures(imported.__name__)


@on_ranks(2)
def test_requires_grad_changes_between_steps(rank: int) -> None:
    pair = Pair()
    pair.model.close()
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


@on_ranks(2)
def test_requires_grad_changes_under_a_given_schedule(rank: int) -> None:
    pair = Pair()
    pair.steps(0, 1)
    for one in (pair.inner, pair.alone):
        one[3].requires_grad_(False)
    pair.steps(*range(2, 14))  # zeros are sent
    pair.close()


@on_ranks(2)
def test_channels_last(rank: int) -> None:
    def make() -> nn.Module:
        return made("cnn").to(memory_format=torch.channels_last)

    for pair in pairs(make):
        pair.steps(0, 1, 2)
        pair.model.finish()
        assert pair.inner.second.weight.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
def test_mixed_dtypes(rank: int) -> None:
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
        pair = Pair(Mixed, adamw, chained=chained)
        pair.steps(0, 1, 2, 3)
        assert len({op.buffer for op in pair.model.program.ops}) == 2
        states.append(copied(pair.model.state_dict()))
        assert on_all(pair.comm, states[-1])
        pair.model.close()
    assert same(*states)


@on_ranks(2)
def test_another_module_uses_a_parameter_first(rank: int) -> None:
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


@on_ranks(2)
def test_an_optimizer_made_by_the_class_of_one_that_is_wrapped(rank: int) -> None:
    for chained in (True, False):
        pair = Pair(chained=chained)
        pair.steps(0, 1)
        alone = net()
        kind = partial(type(pair.optimizer), lr=0.1)
        optimizer = kind(alone.parameters())
        before = copied(alone.state_dict())
        alone(images(0, 2)[0]).square().sum().backward()
        optimizer.step()
        assert apart(alone.state_dict(), before) > 0
        other = Pair(optimizer=kind, chained=chained)
        other.steps(0, 1, 2)
        other.close()
        pair.steps(2, 3)
        pair.close()


@on_ranks(2)
def test_chaining_is_asked_for_without_all_parameters(rank: int) -> None:
    """It is told in the first step, not once a chained schedule is carried out."""
    inner = net()
    *most, _ = inner.parameters()
    model = DataParallel(inner, sgd(most), chained=True)
    said = error_of(lambda: model(images(0, 2)[0]).square().sum().backward())
    assert "its optimizer lacks the parameter" in said and "leave out chained=True" in said
    model.close()


@on_ranks(2)
def test_a_model_compiled_after_chaining_was_asked_for(rank: int) -> None:
    """It is told at the first pass, not once a chained schedule is carried out."""
    asked = {
        "leave out chained=True": {"chained": True},
        "take a schedule that is not chained": {"schedule": "us-byte"},
        "leave out chained=True and take a schedule": {"schedule": "us-byte", "chained": True},
    }
    for words, how in asked.items():
        inner = net()
        model = DataParallel(inner, sgd(inner.parameters()), **how)
        fast = torch.compile(model, backend="eager")
        said = error_of(lambda fast=fast: fast(images(0, 2)[0]))
        assert f"nothing can wait before its layers; {words}" in said
        model.close()


@on_ranks(2)
def test_compiled_modules(rank: int) -> None:
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


@on_ranks(2)
def test_calls_in_compiled_functions(rank: int) -> None:
    @torch.compile(backend="eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        linkweave.allreduce(x)
        return 2 * linkweave.allgather(x)

    for n in (10, 10, 33):
        assert call(torch.full((n,), rank + 1.0)).tolist() == [[6.0] * n] * 2


@on_ranks(2)
def test_compiled_autograd_calls_no_hooks(rank: int) -> None:
    inner = net()
    optimizer = sgd(inner.parameters())
    model = DataParallel(inner, optimizer)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    with torch._dynamo.config.patch(compiled_autograd=True):
        fast = torch.compile(step, backend="eager")
        said = error_of(lambda: fast(images(0, 2)[0]))
    assert "compiled autograd, which calls no hooks" in said
    model.close()


@on_ranks(2)
def test_buffers_of_any_kind(rank: int) -> None:
    """Conjugate and negative views are those of rank 0; an expanded one has no place for its."""
    inner = net()
    value = torch.tensor([1 + 2j, 3 - 1j]) * (1 if rank == 0 else 9)
    inner.register_buffer("conjugate", value.conj())
    inner.register_buffer("negative", value.conj().imag)
    model = DataParallel(inner, sgd(inner.parameters()))
    assert inner.conjugate.tolist() == [1 - 2j, 3 + 1j]
    assert inner.negative.tolist() == [-2, 1]
    model.close()
    inner.register_buffer("wide", torch.zeros(1).expand(4))
    said = error_of(lambda: DataParallel(inner, sgd(inner.parameters())))
    assert "elements of the buffer wide share memory, as it is expanded" in said
    del inner.wide
    inner.wide = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)
    said = error_of(lambda: DataParallel(inner, sgd([*inner.parameters()][:2])))
    assert "elements of the parameter wide share memory, as it is expanded" in said


@on_ranks(2)
def test_ranges_of_a_step(rank: int) -> None:
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
