"""The user's optimizer, applied to one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from linkweave.collectives.overlap.units import Unit


class Update:
    """Steps of an optimizer that are carried out in parts, with the values of `step` time.

    A part runs the optimizer's own `step` on groups that hold only the part's parameters, so state
    and rounding are those of one step over all of them. This is right for optimizers that treat
    each parameter alone and keep their state by parameter, as those of torch.optim do but LBFGS.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        self._step: Any = getattr(step, "__wrapped__", step)  # without the hooks of each call
        self._options: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}

    @property
    def separable(self) -> bool:
        """Whether parts of a step are known to add up to the step."""
        hooks = (
            self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        )  # fmt: skip
        return type(self._optimizer).__module__.startswith("torch.optim") and not any(hooks)

    def snapshot(self) -> None:
        """Take the groups' options as they are now: a scheduler may change the learning rate
        before the parts run."""
        groups = _groups(self._optimizer)
        self._options = [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items() if name != "params"
            }
            for group in groups
        ]  # fmt: skip
        self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}

    def others(self, units: Iterable[Unit]) -> list[Any]:
        """The optimizer's parameters that belong to no unit."""
        known = {id(parameter) for unit in units for parameter in unit.parameters}
        groups = _groups(self._optimizer)
        return [p for group in groups for p in group["params"] if id(p) not in known]

    def part(self, parameters: Sequence[Any]) -> None:
        """Carry out the step of the last `snapshot` for these parameters."""
        parts: dict[int, list[Any]] = {}
        for parameter in parameters:
            if (group := self._group_of.get(id(parameter))) is not None:
                parts.setdefault(group, []).append(parameter)
        if not parts:
            return
        optimizer: Any = self._optimizer
        whole = _groups(optimizer)
        optimizer.param_groups = [
            {"params": parts[group], **self._options[group]} for group in sorted(parts)
        ]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = whole


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups, without the check that `Attached` makes when others read them."""
    groups: list[dict[str, Any]] = optimizer.__dict__["param_groups"]
    return groups
