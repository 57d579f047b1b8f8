"""Chaining: each unit is updated just before its next use. What notices a use, and what a training
must be for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.training.hooks import Hook
from linkweave.collectives.training.stepping import Stepper


class _Gated(dict[str, Any]):
    """The parameters of a module, which are brought up to date before they are read: by a forward
    pass, by a hook before it, by a parametrization, or through the inner module."""

    def __init__(self, parameters: Mapping[str, Any], reach: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self._reach = reach

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self._reach(found)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def values(self) -> Any:
        return self._plain().values()

    def items(self) -> Any:
        return self._plain().items()

    def copy(self) -> Any:
        return self._plain()

    def _plain(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy of a module is one like any other
        return dict, (self._plain(),)


class Gates:
    """While they are open, `before` is called with a unit ahead of the forward pass of each module
    that uses it; and if they guard parameters, `reach` with a parameter before it is read through
    its module."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], before: Callable[[int], None],
        reach: Callable[[Any], None],
    ) -> None:  # fmt: skip
        self._model, self._before, self._reach = model, before, reach
        modules = dict(model.named_modules())
        self._units: dict[nn.Module, list[int]] = {}
        for index, unit in enumerate(units):
            using = {unit.gate, *(name.rpartition(".")[0] for name in unit.names)}
            for name in using & modules.keys():
                self._units.setdefault(modules[name], []).append(index)
        self._handles: list[Any] = []
        self._guarded: list[nn.Module] = []

    def open(self, guard: bool) -> None:
        """Open those that are closed; `guard` parameters as well."""
        if not self._handles:
            self._handles = [  # ahead of hooks that read parameters
                module.register_forward_pre_hook(Hook(self._reached), prepend=True)
                for module in self._units
            ]
        if guard and not self._guarded:
            self._guarded = [*self._model.modules()]
            for module in self._guarded:
                module.__dict__["_parameters"] = _Gated(module._parameters, self._reach)

    def _reached(self, module: nn.Module, *_: Any) -> None:
        for index in self._units[module]:
            self._before(index)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._guarded:
            module.__dict__["_parameters"] = dict.copy(module._parameters)
        self._handles, self._guarded = [], []


def fault_of_chaining(is_compiled: bool, steppers: Sequence[Stepper], units: Sequence[Unit]) -> str:
    """Why a training by these optimizers cannot be chained; empty if it can."""
    if is_compiled:
        return "the module is compiled, so that nothing can wait before its layers"
    if len(steppers) > 1:
        return f"it has {len(steppers)} optimizers, and all parameters need one"
    if not steppers:  # embeddings alone have nothing to chain
        return ""
    (stepper,) = steppers
    if len(stepper.engines) > 1:
        return "its optimizer trains another model as well"
    if not stepper.update.separable:
        return (
            f"parts of a step are not known to add up to the step of {stepper.kind.__name__}, "
            "which is not of torch.optim or has step hooks"
        )
    held = {id(p) for group in stepper.groups for p in group["params"]}
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if id(parameter) not in held:
                return f"its optimizer lacks the parameter {name}"
    return ""
