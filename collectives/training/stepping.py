"""The steps of a user's optimizer that takes part in training, without a change to user code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit
from linkweave.collectives.runtime.uncompiled import uncompiled
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.exchange import Exchange
from linkweave.collectives.training.hooks import Hook
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.update import LossScale, Update, groups_of
from linkweave.kernels.tensors import overlap_of


class Trained(Protocol):
    """A model that the optimizer trains: the `Engine`."""

    units: tuple[Unit, ...]
    layouts: int
    embeddings: Embeddings
    exchange: Exchange

    @property
    def roll(self) -> Any: ...

    @property
    def known(self) -> set[int]: ...

    @property
    def skips(self) -> bool: ...

    def before_step(self, stepper: Stepper) -> bool: ...

    def after_step(self) -> None: ...

    def synchronize(self) -> None: ...

    def complete(self) -> None: ...

    def finish(self) -> None: ...


class Stepper:
    """What `step` and `zero_grad` of an optimizer do while it trains the models of some engines.

    Whoever reads `param_groups` between the backward pass and `step` (GradScaler does, to divide
    gradients by the scale) first waits for the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.kind = optimizer, type(optimizer)
        self.update = Update(optimizer)
        self.engines: list[Trained] = []
        self.scale: LossScale | None = None
        self._known: tuple[Any, ...] = ()
        self._working = False
        self._others: list[torch.Tensor] = []  # parameters of no engine's model
        optimizer.__class__ = _attached(self)
        self._watch()
        if getattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched", False):
            del optimizer.step  # a scheduler's wrapper, which only sets `_opt_called`

    def leave(self, engine: Trained) -> None:
        """The engine is closed; with the last one, the optimizer is as it was."""
        self.engines.remove(engine)
        if not self.engines:
            self.optimizer.__class__ = self.kind
            for group in self.groups:
                group["params"] = list.copy(group["params"])

    def _watch(self) -> None:
        """Let whoever reads parameters from the groups wait for their update."""
        for group in self.groups:
            if not isinstance(group["params"], _Parameters):
                group["params"] = _Parameters(group["params"], self.complete)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return groups_of(self.optimizer)

    def trains_only(self, parameters: set[int]) -> bool:
        """Whether it has no others than these, by identity."""
        every = (id(p) for group in self.groups for p in list.__iter__(group["params"]))
        return parameters.issuperset(every) and bool(parameters)

    @property
    def unscaled(self) -> str:
        """What a GradScaler does not work with; empty if it does."""
        if any(engine.roll.called for engine in self.engines):
            return "join(), in which ranks that are over early keep another scale"
        if self.scale is not None:
            return ""
        if any(engine.units and engine.exchange.whole for engine in self.engines):
            return "GTopK unless DataParallel is given it as scaler=: residuals would be scaled"
        if any(engine.embeddings.named for engine in self.engines):
            return "a ShardedEmbedding unless DataParallel is given it as scaler="
        return ""

    def step(self, closure: Any = None) -> Any:
        loss = _result_of(closure)
        self._refuse_others()
        if self.unscaled and "found_inf" in self.optimizer.__dict__:
            raise CollectiveError(f"a GradScaler does not work with {self.unscaled}")
        if self.scale is not None:
            self.scale.check_step(self.optimizer)
        later = [engine.before_step(self) for engine in self.engines]
        if not any(engine.skips for engine in self.engines):
            if not any(later):
                self._whole()
            for engine in self.engines:
                engine.after_step()
        return loss

    def _whole(self) -> None:
        """Gradients are averages: carry out the step, by parts where these add up to it."""
        if not self.update.separable:
            self.kind.step(self.optimizer)
            return
        self.update.snapshot()
        units = [unit for engine in self.engines for unit in engine.units]
        with torch.no_grad():
            for engine in self.engines:
                for unit in engine.units:
                    with profiled(f"update {unit.name}"):
                        self.update.part(unit.parameters)
            self.update.rest(units)

    def _refuse_others(self) -> None:
        """Raise for a gradient that nobody averages."""
        sizes = [len(group["params"]) for group in self.groups]
        known = *sizes, *(engine.layouts for engine in self.engines)
        if known != self._known:
            self._watch()
            mine = {identity for engine in self.engines for identity in engine.known}
            every = (p for group in self.groups for p in group["params"])
            self._known, self._others = known, [p for p in every if id(p) not in mine]
        for parameter in self._others:
            if parameter.grad is not None:
                raise CollectiveError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} with a "
                    "gradient of this rank alone, as no DataParallel with this optimizer has a "
                    "module that contains it, or had at its last forward pass: wrap that module, "
                    "with this optimizer, as well"
                )

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, it is the optimizer itself that reads parameters and state."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def complete(self) -> None:
        """Before a parameter or a state is read: carry out a step that was put off."""
        if not self._working:
            for engine in self.engines:
                engine.complete()

    def synchronize(self) -> None:
        for engine in self.engines:
            engine.synchronize()

    def finish(self) -> None:
        for engine in self.engines:
            engine.finish()

    def drop(self) -> None:
        """Before `zero_grad`."""
        for engine in self.engines:
            engine.embeddings.drop(self.optimizer)


class _Parameters(list[Any]):
    """The parameters of a group."""

    def __init__(self, parameters: Iterable[Any], complete: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._complete = complete

    def __iter__(self) -> Iterator[Any]:
        self._complete()
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        self._complete()
        return super().__getitem__(at)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list.copy(self),)


def stepper_of(optimizer: torch.optim.Optimizer) -> Stepper:
    """The optimizer's stepper, which it may have already."""
    return _known(optimizer) or Stepper(optimizer)


def _known(optimizer: torch.optim.Optimizer) -> Stepper | None:
    found = getattr(type(optimizer), "stepper", None)
    return found if isinstance(found, Stepper) else None


def refuse_another_scaler(optimizer: torch.optim.Optimizer, scale: LossScale | None) -> None:
    """All models that an optimizer trains have one scaler."""
    known = _known(optimizer)
    if known and (scale and scale.scaler) is not (known.scale and known.scale.scaler):
        raise CollectiveError(
            f"another DataParallel with this {type(optimizer).__name__} has another scaler=, or "
            "none: give all the same"
        )


def _attached(stepper: Stepper) -> type:
    """The class of an optimizer as long as it takes part."""
    kind = stepper.kind

    class Attached(kind):  # type: ignore[misc,valid-type]
        def __new__(cls, *args: Any, **named: Any) -> Any:
            """`type(optimizer)(...)` is another optimizer, which this stepper knows nothing of."""
            return kind(*args, **named)

        @uncompiled
        def step(self, closure: Any = None) -> Any:
            self._opt_called = True  # what learning-rate schedulers look at
            return self.stepper.step(closure)

        def __reduce_ex__(self, protocol: Any) -> Any:  # copies are optimizers like any other
            self.stepper.finish()
            return _bare, (kind,), self.__getstate__()

        step.hooked = True  # type: ignore[attr-defined]  # so that torch does not wrap it again
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

        @uncompiled
        def zero_grad(self, set_to_none: bool = True) -> None:
            if not set_to_none:  # gradients under way must not be overwritten
                self.stepper.finish()
            self.stepper.drop()
            with self.stepper.at_work():  # only gradients are dropped: no update need be complete
                super().zero_grad(set_to_none)

        @property
        def _step_supports_amp_scaling(self) -> Any:
            """A GradScaler that sees it tells `step` that it is there."""
            own = self.__dict__.get("_step_supports_amp_scaling", False)
            return own or self.stepper.unscaled != ""

        state = _awaited("state", Stepper.complete)
        param_groups = _awaited("param_groups", Stepper.synchronize)

    Attached.stepper = stepper
    Attached.__name__, Attached.__qualname__ = kind.__name__, kind.__qualname__
    Attached.__module__ = kind.__module__
    return Attached


def _awaited(name: str, wait: Callable[[Stepper], None]) -> Any:
    """An attribute of the optimizer, for which whoever reads it waits."""

    def read(optimizer: Any) -> Any:
        wait(optimizer.stepper)
        return optimizer.__dict__[name]

    def write(optimizer: Any, value: Any) -> None:
        optimizer.__dict__[name] = value

    return property(read, write)


def _result_of(closure: Any) -> Any:
    """The loss that the closure of an optimizer's step computes; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _bare(kind: Any) -> Any:
    """An optimizer of the class, whose state is yet to be set."""
    return kind.__new__(kind)


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
    every = (zip(unit.names, unit.parameters, strict=True) for unit in units)
    if pair := overlap_of(dict(chain.from_iterable(every))):
        one, other = pair
        return f"the parameters {one} and {other} share memory, so that one update changes both"
    return ""
