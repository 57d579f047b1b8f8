"""What the tests of `DataParallel` share: small models, their batches, schedules and loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave.collectives import CollectiveError, DataParallel, overlap
from linkweave.collectives.overlap import Layer, Network, Profile, Schedule
from linkweave.collectives.overlap.units import Recorder, Unit, units_of

Batch = tuple[torch.Tensor, torch.Tensor]
WORDS, LENGTH = 11, 5
SLOW = Network(2e-4, 1e-6, 1.5, 2)
"""On which an all-reduce of a layer takes about as long as the layer's backward pass."""


class Cnn(nn.Module):
    """For 8 by 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3)
        self.second = nn.Conv2d(3, 4, 3, stride=2)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.last(x.flatten(1))


class Transformer(nn.Module):
    """One block; the decoder's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.decoder = nn.Linear(8, WORDS)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.decoder(x).flatten(0, 1)


class Partial(nn.Module):
    """With a frozen layer, one that no forward pass visits, and a parameter outside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 12).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(12))
        self.last = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.frozen(x.flatten(1)) * self.scale).tanh())


@cache
def digits() -> Batch:
    found = load_digits()
    return torch.tensor(found.images / 16).unsqueeze(1), torch.tensor(found.target)


def images(step: int, size: int) -> Batch:
    """The batch of a step, for all ranks together."""
    x, y = digits()
    chosen = torch.arange(step * size, (step + 1) * size) % len(y)
    return x[chosen], y[chosen]


def sentences(step: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (size, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "cnn": (Cnn, images), "transformer": (Transformer, sentences), "partial": (Partial, images),
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with the parameters that all tests begin with."""
    torch.manual_seed(3)
    return MODELS[name][0]().to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


# ---- schedules -----------------------------------------------------------------------------------
def units(model: nn.Module, *inputs: Any) -> list[Unit]:
    with Recorder(model) as recorder:
        model(*inputs)
    return units_of(model, recorder.gates())


def profile(model: nn.Module, *inputs: Any) -> Profile:
    """The model's units, each with a forward pass of 0.2 ms and a backward pass of 0.4 ms."""
    layers = (Layer(unit.name, unit.nbytes, 2e-4, 4e-4) for unit in units(model, *inputs))
    return Profile(tuple(layers))


def schedule_for(
    model: nn.Module, *inputs: Any, policy: str = "bytescheduler", **extra: Any
) -> Any:
    """A policy's schedule, in small pieces, so that tiny models have several all-reduces."""
    options: dict[str, dict[str, Any]] = {
        "bytescheduler": {"partition": 256, "credit": 2}, "us-byte": {"partition": 256},
        "optimal": {"limit_s": 0.1},
    }  # fmt: skip
    found = overlap.plan(profile(model, *inputs), SLOW, policy, **options.get(policy, {}))
    return replace(found, **extra)


def schedules(name: str) -> dict[str, Schedule]:
    """Each policy's schedule for one of `MODELS`."""
    inputs = MODELS[name][1](0, 2)[0]
    model = made(name)
    return {policy: schedule_for(model, inputs, policy=policy) for policy in overlap.POLICIES}


@pytest.fixture(scope="session")
def imported() -> None:
    """Ranks are forked with what a first step imports, which takes seconds."""
    model = made("transformer")
    train("transformer", model, adamw(model.parameters()), range(1))


# ---- loops ---------------------------------------------------------------------------------------
def share(batch: Batch, rank: int, size: int) -> Batch:
    """A rank's part of a batch."""
    x, y = batch
    return x.chunk(size)[rank], y.chunk(size)[rank]


def train(
    name: str, model: Any, optimizer: Any, steps: range, rank: int = 0, size: int = 1, each: int = 2
) -> None:
    """Steps on batches of `each` samples a rank."""
    batch = MODELS[name][1]
    for step in steps:
        x, y = share(batch(step, each * size), rank, size)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether they are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference."""
    return max(float((a[key] - b[key]).detach().abs().max()) for key in b if b[key].numel())


def on_all(comm: Any, state: dict[str, torch.Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    flat = torch.cat([value.detach().double().flatten() for value in state.values()])
    rows = comm.allgather(flat).view(comm.size, -1)
    return all(torch.equal(row, rows[0]) for row in rows)


def error_of(call: Callable[[], Any], kind: type = CollectiveError) -> str:
    """The words of what the call raises; empty if it raises nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def wrong_order(model: DataParallel) -> list[str]:
    """Where the last step did not carry out the program."""
    program, record = model.program, model.last_step
    assert program is not None
    assert record is not None
    return [*_wrong(program.ops, record.sent)]


def _wrong(ops: Any, sent: list[tuple[int, float, float]]) -> Iterator[str]:
    times = {number: (start, end) for number, start, end in sent}
    if sorted(number for number, _, _ in sent) != list(range(len(ops))):
        yield f"sent {[number for number, _, _ in sent]}"
        return
    last: dict[int, int] = {}
    for number, op in enumerate(ops):
        before = {*op.after, *([last[op.lane]] if op.lane in last else [])}
        yield from (
            f"{number} before {other}" for other in before if times[number][0] < times[other][1]
        )
        last[op.lane] = number


def labels(model: DataParallel) -> list[str]:
    """What the program's ops send, without the numbers."""
    assert model.program is not None
    ops = range(len(model.program.ops))
    return [re.sub(r" \(\d+\)", "", model.program.label(number)) for number in ops]
