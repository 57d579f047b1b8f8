"""A habit: a few lines of a training loop that run alike in one process and on ranks.

In one process the model is what the habit made and its batches are whole; on ranks it is a
`DataParallel` and each rank has its part of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from linkweave import GTopK
from linkweave.collectives import DataParallel

STEPS = 16
"""Of a loop, so that each mode has settled before the last ones."""
BATCH = 6
"""Samples of all ranks together: 2 or 3 of them have equal parts."""
INPUTS, HIDDEN, CLASSES = 8, 6, 4
Batch = tuple[torch.Tensor, torch.Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


# ---- modes ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mode:
    """How a habit is run on ranks."""

    name: str
    options: dict[str, Any]
    chains: str = "no"  # or "maybe" or "yes": whether its schedules are chained
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10


MODES = {
    mode.name: mode for mode in (
        Mode("auto", {}),
        Mode("auto chained", {"chained": True}, "maybe"),
        Mode("ddp", {"schedule": "ddp"}),
        Mode("bytescheduler", {"schedule": "bytescheduler"}, "yes"),
        Mode("c-cube", {"schedule": "c-cube"}, "yes"),
        Mode("dear", {"schedule": "dear"}, "yes"),
        Mode(
            "gtopk", {"exchange": GTopK(density=1), "schedule": "ddp"},
            dtype=torch.float32, tolerance=1e-5,
        ),
    )
}  # fmt: skip


# ---- the table -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Habit:
    """A row of the table.

    `error` and `chained_error` are regular expressions of what must be raised in every mode, and
    where the schedule is chained. `by` is the rank that must raise it, if only one makes the
    mistake. In modes that are not `quick` it is a slow test.
    """

    name: str
    body: Callable[[Run], None]
    theme: str
    error: str = ""
    chained_error: str = ""
    by: int | None = None
    modes: tuple[str, ...] = tuple(MODES)
    quick: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """What it is about, from the docstring."""
        return " ".join((self.body.__doc__ or "").split())


HABITS: dict[str, Habit] = {}
DENSE = tuple(name for name in MODES if name != "gtopk")
QUICK = tuple(name for name in MODES if name != "dear")
"""Modes in which a row is run by `make test`, unless it says otherwise."""
FEW = ("auto", "c-cube")
"""Those of variants of other rows, and of themes that are not about the loop."""
LATER = ("optimizers", "modules", "layers", "tools")
TWO = ("auto", "bytescheduler")
"""Modes of what ends before a schedule matters, and of what takes long."""


def habit(
    name: str, *, error: str = "", chained: str = "", by: int | None = None,
    only: Sequence[str] = (), quick: Sequence[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:  # fmt: skip
    """Adds a function to the table; `only` names the modes in which it makes sense.

    One that takes a model and an optimizer is given those of a `Net`.
    """

    def add(body: Callable[..., None]) -> Callable[..., None]:
        assert name not in HABITS, name
        theme = body.__module__.rpartition(".")[2]
        re.compile(error), re.compile(chained)
        modes = tuple(only) or tuple(MODES)
        fast = tuple(quick) or (FEW if theme in LATER else QUICK)
        HABITS[name] = Habit(name, of_a_net(body), theme, error, chained, by, modes, fast)
        return body

    return add


def of_a_net(body: Callable[..., None]) -> Callable[[Run], None]:
    if len(signature(body).parameters) == 1:
        return body

    @wraps(body)
    def carried_out(run: Run) -> None:
        body(run, *run.wrapped(made(run)))

    return carried_out


# ---- one run of a habit --------------------------------------------------------------------------
@dataclass
class Run:
    """What a habit is given."""

    mode: Mode
    rank: int = 0
    size: int = 1
    ranks: int = 1  # whose number one process is compared with
    comm: Any = None  # of the ranks, for this habit; None in one process
    models: list[Any] = field(default_factory=list)
    chained: bool = False  # whether a schedule has been chained so far
    same_everywhere: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.comm is None

    @property
    def dtype(self) -> torch.dtype:
        return self.mode.dtype

    # ---- models ----
    def wrap(self, module: nn.Module, optimizers: Optimizers, **extra: Any) -> Any:
        """The module in one process, a `DataParallel` on ranks."""
        model: Any = module
        if not self.alone:
            options = {"group": self.comm, **self.mode.options, **extra}
            model = DataParallel(module, optimizers, **options)
        self.models.append(model)
        return model

    def wrapped(
        self, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer] | None = None,
        **extra: Any,
    ) -> tuple[Any, torch.optim.Optimizer]:  # fmt: skip
        """The model, and its optimizer of all parameters."""
        optimizer = (make or sgd)(module.parameters())
        return self.wrap(module, optimizer, **extra), optimizer

    def inner(self, model: Any) -> Any:
        """The user's module."""
        return model.module if isinstance(model, DataParallel) else model

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DataParallel) else nullcontext()

    def join(self, model: Any) -> AbstractContextManager[None]:
        return model.join() if isinstance(model, DataParallel) else nullcontext()

    def synchronize(self, model: Any) -> None:
        """The wait before gradients are read through references."""
        if isinstance(model, DataParallel):
            model.synchronize()

    # ---- steps and batches ----
    @property
    def steps(self) -> Iterator[int]:
        for step in range(STEPS):
            self.look()
            yield step
        self.look()

    middle = STEPS // 2

    def look(self) -> None:
        """Notes whether a model's schedule is chained."""
        for model in self.models:
            program = getattr(model, "program", None)
            self.chained |= bool(program is not None and getattr(program, "chained", False))

    def whole(self, step: int, size: int = BATCH) -> Batch:
        """The batch of all ranks together."""
        generator = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64).to(self.dtype)
        return x, torch.randint(CLASSES, (size,), generator=generator)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of something that has a row for each sample."""
        return x.chunk(self.size)[self.rank]

    def batch(self, step: int, size: int = BATCH) -> Batch:
        x, y = self.whole(step, size)
        return self.part(x), self.part(y)

    def loss(self, model: Any, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return cross_entropy(model(x), y)

    def train(
        self, model: Any, optimizer: Any, steps: Sequence[int] = range(STEPS),
        batch: Callable[[int], Batch] | None = None, loss: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Ordinary steps. On ranks each has its part of the batch, unless it is `run.whole`."""
        loss = loss or (lambda x, y: cross_entropy(model(x), y))
        for step in steps:
            optimizer.zero_grad()
            loss(*(batch or self.batch)(step)).backward()
            optimizer.step()
            self.look()

    def after_backward(self, model: Any, optimizer: Any) -> Iterator[int]:
        """All steps, each between its backward pass and the update."""
        for step in self.steps:
            optimizer.zero_grad()
            self.loss(model, step).backward()
            yield step
            optimizer.step()

    def after_step(self, model: Any, optimizer: Any, **options: Any) -> Iterator[int]:
        """All steps, each after its update; options: those of `train`."""
        for step in self.steps:
            self.train(model, optimizer, [step], **options)
            yield step

    def differs(self, value: torch.Tensor) -> bool:
        """Whether the first two ranks have different values; True in one process."""
        if self.alone:
            return True
        rows = self.comm.allgather(value.detach().flatten()).view(self.size, -1)
        return not torch.equal(rows[0], rows[1])

    # ---- what is compared ----
    def same(self, name: str, value: Any) -> None:
        """Must be the same on all ranks and in one process."""
        self.same_everywhere[name] = torch.as_tensor(value).detach().clone()

    def mean(self, name: str, value: Any) -> None:
        """Its mean over the ranks must be that of one process."""
        self.averages[name] = torch.as_tensor(value).detach().double().clone()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Those of all models at the end."""
        found = {}
        for model in self.models:
            if isinstance(model, DataParallel):
                model.finish()
        for number, model in enumerate(self.models):
            for name, parameter in self.inner(model).named_parameters():
                name = name.replace("_orig_mod.", "")  # of a compiled module
                found[f"model {number}: {name}"] = parameter.detach().clone()
        return found

    def close(self) -> None:
        for model in reversed(self.models):
            if isinstance(model, DataParallel):
                model.close()


# ---- what many habits use ------------------------------------------------------------------------
class Net(nn.Module):
    """Three layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.fc = nn.Linear(HIDDEN, CLASSES)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.encode(x))


def made(run: Run, make: Callable[[], nn.Module] = Net) -> Any:
    """A module with the same parameters in every process."""
    torch.manual_seed(5)
    return make().to(run.dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, eps=1e-4)
