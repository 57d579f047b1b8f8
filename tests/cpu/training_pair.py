"""What the cases of training share: a DataParallel beside a model of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import (
    Batch,
    apart,
    images,
    imported,  # noqa: F401
    on_all,
    schedule_for,
    sgd,
    share,
)

from linkweave import collectives
from linkweave.collectives import DataParallel

SIZE = 2


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three units."""
    torch.manual_seed(5)
    found = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)
    )
    return found.to(dtype)


class Pair:
    """A DataParallel, and a model of one process that trains on all batches."""

    def __init__(
        self, make: Callable[[], nn.Module] = net, optimizer: Callable[[Any], Any] = sgd,
        x: torch.Tensor | None = None, chained: bool = True, **extra: Any,
    ) -> None:  # fmt: skip
        self.comm = collectives.get_default()
        self.inner, self.alone = make(), make()
        inputs = self.batch(0)[0] if x is None else x
        schedule = schedule_for(make(), inputs, chained=chained)
        self.optimizer = optimizer(self.inner.parameters())
        self.alone_optimizer = optimizer(self.alone.parameters())
        self.model = DataParallel(self.inner, self.optimizer, schedule=schedule, **extra)
        self.model.record_steps()

    @property
    def both(self) -> Any:
        """(optimizer, part) of the DataParallel and of the one process."""
        return (self.optimizer, "mine"), (self.alone_optimizer, "all")

    def batch(self, step: int, each: int = 3) -> Batch:
        """This rank's."""
        size = self.comm.size
        return share(images(step, each * size), self.comm.rank, size)

    def loss(self, step: int, part: str = "mine") -> torch.Tensor:
        """Of this rank's batch in the model; of both ranks' in the one of one process."""
        if part == "mine":
            x, y = self.batch(step)
            return cross_entropy(self.model(x), y)
        x, y = images(step, 3 * self.comm.size)
        return cross_entropy(self.alone(x), y)

    def step(self, step: int) -> None:
        for optimizer, part in self.both:
            optimizer.zero_grad()
            self.loss(step, part).backward()
            optimizer.step()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)

    def backward(self, step: int) -> None:
        for _, part in self.both:
            self.loss(step, part).backward()

    def update(self) -> None:
        for optimizer, _ in self.both:
            optimizer.step()

    def clear(self) -> None:
        for optimizer, _ in self.both:
            optimizer.zero_grad()

    def check(self) -> None:
        """Parameters are those of one process, bit for bit the same on all ranks."""
        state = self.model.state_dict()
        assert on_all(self.comm, state)
        assert apart(state, self.alone.state_dict()) < 1e-13

    def close(self) -> None:
        self.check()
        self.model.close()


def pairs(*arguments: Any, **named: Any) -> Iterator[Pair]:
    """A chained and another pair, each checked and closed after its use."""
    for chained in (True, False):
        pair = Pair(*arguments, chained=chained, **named)
        yield pair
        pair.close()
