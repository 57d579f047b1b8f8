"""What the tests of training with `GTopK` share: a small model on this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gtopk_reference import batch
from torch import nn
from torch.nn.functional import cross_entropy
from training_models import copied, on_all, schedule_for
from training_pair import net

from linkweave import GTopK, collectives
from linkweave.collectives import DataParallel

SGD = torch.optim.SGD
ALL = GTopK(1.0)
"""By which everything is sent, densely."""


def small() -> nn.Sequential:
    return net(torch.float32)


def schedule(policy: str = "wfbp", make: Callable[[], nn.Module] = small) -> Any:
    return schedule_for(make(), batch(0, 0, 1)[0], policy=policy, chained=False)


class Training:
    """A small model on this rank."""

    def __init__(
        self, exchange: Any, optimizer: Callable[..., Any] = SGD, policy: str = "wfbp",
        make: Callable[[], nn.Module] = small, measured: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.comm, self.make = collectives.get_default(), make
        self.inner = make()
        self.optimizer = optimizer(self.inner.parameters(), **options)
        self.wrap(exchange, policy, measured)

    def wrap(self, exchange: Any, policy: str = "wfbp", measured: bool = False) -> None:
        """Unless the policy plans for what it measures, it is given a schedule."""
        plan = policy if measured else schedule(policy, self.make)
        self.model = DataParallel(self.inner, self.optimizer, schedule=plan, exchange=exchange)

    @property
    def sparse(self) -> Any:
        """What this rank has not sent, and more."""
        return self.model._engine.exchange

    def backward(self, step: int) -> None:
        self.loss(step).backward()

    def loss(self, step: int) -> torch.Tensor:
        x, y = batch(step, self.comm.rank, self.comm.size)
        return cross_entropy(self.model(x), y)

    def steps(self, *numbers: int, before: Callable[[], Any] = lambda: None) -> Training:
        for number in numbers:
            self.optimizer.zero_grad()
            self.backward(number)
            before()
            self.optimizer.step()
        return self

    def close(self) -> dict[str, torch.Tensor]:
        """The parameters, which all ranks share."""
        state = copied(self.model.state_dict())
        assert on_all(self.comm, state)
        self.model.close()
        return state
