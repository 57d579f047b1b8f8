"""The momentum and the weight decay of torch.optim.SGD, applied before gradients are sent."""

from __future__ import annotations

from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError

REPLACED = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
"""The options of SGD for gradients that have been corrected."""


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups, without the wait for gradients of others who read them."""
    groups: list[dict[str, Any]] = optimizer.__dict__["param_groups"]
    return groups


def nesterov(group: dict[str, Any]) -> bool:
    """Whether a group of torch.optim.SGD has Nesterov's momentum, which 0 is not."""
    return bool(group["nesterov"] and group["momentum"])


class Momentum:
    """Momentum correction in place of an optimizer's momentum.

    With g the gradient of this rank plus weight_decay times the parameter, and v its velocity,

        v = momentum v + g      and what is added to the residual is v, or with Nesterov's momentum
                                g + momentum v,

    as `torch.optim.SGD` has it for one process. Raises CollectiveError for other optimizers, with
    dampening, and if groups of parameters differ in momentum.
    Source: Lin et al., "Deep Gradient Compression", equations 4 to 7.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        mine = [base.__name__ for base in type(optimizer).__mro__]
        if "SGD" not in mine or not type(optimizer).__module__.startswith("torch.optim"):
            raise CollectiveError(
                "momentum='correction' takes over the momentum of torch.optim.SGD; for "
                f"{type(optimizer).__name__} pass momentum='none'"
            )
        self.factors = (0.0, False)
        """(momentum, whether it is Nesterov's)"""
        self._signs: dict[int, int] = {}
        self._decays: dict[int, float] = {}
        self.read()

    def read(self) -> None:
        """Take the optimizer's options as they are now. Raises CollectiveError."""
        groups = groups_of(self._optimizer)
        found = {(float(group["momentum"]), nesterov(group)) for group in groups}
        if len(found) > 1 or any(group["dampening"] for group in groups):
            raise CollectiveError(
                "momentum='correction' needs the same momentum in all groups of parameters, and no "
                f"dampening; groups have (momentum, nesterov) {sorted(found)} and dampening "
                f"{[group['dampening'] for group in groups]}"
            )
        self.factors = found.pop()
        self._signs = {
            id(parameter): -1 if group["maximize"] else 1
            for group in groups for parameter in group["params"]
        }  # fmt: skip
        self._decays = {
            id(parameter): group["weight_decay"] * self._signs[id(parameter)]
            for group in groups for parameter in group["params"] if group["weight_decay"]
        }  # fmt: skip

    def decay(self, parameter: Any, gradient: torch.Tensor) -> None:
        """Add weight decay to the parameter's gradient."""
        if (decay := self._decays.get(id(parameter))) is not None:
            gradient.add_(parameter.detach(), alpha=decay)

    def take_over(self, parameter: Any, velocity: torch.Tensor) -> None:
        """Move the momentum that the optimizer has of a parameter to its velocity.

        An optimizer that maximizes has the momentum of negative gradients.
        """
        state = self._optimizer.state.get(parameter, {})
        if (buffer := state.pop("momentum_buffer", None)) is not None:
            velocity.copy_(buffer).mul_(self._signs[id(parameter)])

    def give_back(self, parameter: Any, velocity: torch.Tensor) -> None:
        """Let the optimizer go on with a velocity, if it has momentum and the parameter."""
        if self.factors[0] and (sign := self._signs.get(id(parameter))):
            buffer = (sign * velocity).to(parameter.dtype)
            self._optimizer.state[parameter]["momentum_buffer"] = buffer
