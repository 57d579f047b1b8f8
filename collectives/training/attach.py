"""The methods of a user's optimizer that take part in training, without a change to user code."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """What the methods call."""

    def step(self, closure: Any = None) -> Any: ...

    def synchronize(self) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...


def attach(optimizer: torch.optim.Optimizer, watcher: Watcher) -> type:
    """Let `step` and `zero_grad` of the optimizer call the watcher. Returns the optimizer's class.

    Whoever reads `param_groups` between the backward pass and `step` (GradScaler does, to divide
    gradients by the scale) first waits for the gradients: `synchronize`.
    """
    kind = type(optimizer)

    class Attached(kind):  # type: ignore[misc,valid-type]
        def step(self, closure: Any = None) -> Any:
            self._opt_called = True  # what learning-rate schedulers look at
            return watcher.step(closure)

        def __reduce_ex__(self, protocol: Any) -> Any:  # copies are optimizers like any other
            watcher.finish()
            return _bare, (kind,), self.__getstate__()

        step.hooked = True  # type: ignore[attr-defined]  # so that torch does not wrap it again
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        def zero_grad(self, set_to_none: bool = True) -> None:
            if not set_to_none:  # gradients under way must not be overwritten
                watcher.finish()
            watcher.drop()
            super().zero_grad(set_to_none)

        @property
        def param_groups(self) -> Any:
            watcher.synchronize()
            return self.__dict__["param_groups"]

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.__dict__["param_groups"] = groups

    Attached.watcher = watcher
    Attached.__name__, Attached.__qualname__ = kind.__name__, kind.__qualname__
    Attached.__module__ = kind.__module__
    if getattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", False):
        del optimizer.step  # a scheduler's wrapper, which only sets `_opt_called`
    optimizer.__class__ = Attached
    return kind


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups, without the wait for gradients of others who read them."""
    groups: list[dict[str, Any]] = optimizer.__dict__["param_groups"]
    return groups


def nesterov(group: dict[str, Any]) -> bool:
    """Whether a group of torch.optim.SGD has Nesterov's momentum, which 0 is not."""
    return bool(group["nesterov"] and group["momentum"])


def result_of(closure: Any) -> Any:
    """The loss that the closure of an optimizer's step computes; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _bare(kind: Any) -> Any:
    """An optimizer of the class, whose state is yet to be set."""
    return kind.__new__(kind)


def detach(optimizer: torch.optim.Optimizer, kind: type) -> None:
    """Undo `attach`."""
    optimizer.__class__ = kind
