"""The units of a model: the parameters that a module uses first, in the forward pass's order.

A unit is what a schedule calls a layer. Its gradients become ready together, near the end of its
module's backward pass, and its parameters must be final before its module's forward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from linkweave.collectives.errors import CollectiveError

if TYPE_CHECKING:
    import torch
    from torch import nn

Gates = list[tuple[str, list[str]]]
"""Modules by name, each with the names of its parameters."""

WHOLE = "the model"
"""The name of the unit whose parameters no module inside the model has."""

ALIGN = 16
"""Bytes: where parameters begin in a unit, so that vector instructions can load them."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters of one dtype on one device, by name; `gate` names the module that uses them."""

    gate: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    def __post_init__(self) -> None:
        _ = self.made, self.strides  # as they are now, whatever becomes of the parameters

    @property
    def name(self) -> str:
        return self.gate or WHOLE

    @cached_property
    def made(self) -> tuple[torch.dtype, torch.device]:
        """Of the parameters, when the unit was made."""
        return self.parameters[0].dtype, self.parameters[0].device

    @cached_property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        """Of the parameters, likewise."""
        return tuple(parameter.stride() for parameter in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        return self.made[0]

    @property
    def device(self) -> torch.device:
        return self.made[1]

    def offsets(self) -> tuple[int, ...]:
        """The element at which each parameter begins in the unit, and where the unit ends.

        The unit begins with an element for each parameter, its flag (`training.gradient_buffers`).
        """
        step = ALIGN // self.dtype.itemsize
        upto = [_up(len(self.parameters), step)]
        for parameter in self.parameters:
            upto.append(_up(upto[-1] + parameter.numel(), step))
        return tuple(upto)

    @cached_property
    def flags_nbytes(self) -> int:
        return self.offsets()[0] * self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        return self.offsets()[-1] * self.dtype.itemsize


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class Recorder:
    """Records one forward pass, to find which module uses each parameter first.

    A context manager around the pass. A parameter belongs to the module that is running when a
    function of torch first takes it: for a decoder tied to an embedding that is the embedding; for
    the output projection of `MultiheadAttention`, whose own module is never called, the attention.
    Parameters whose identities are in `without` are in no unit.
    """

    def __init__(self, model: nn.Module, without: Collection[int] = ()) -> None:
        self._model = model
        self._names = {
            id(p): name for name, p in model.named_parameters()
            if p.requires_grad and id(p) not in without
        }  # fmt: skip
        self._running = [""]
        self._entered: dict[str, None] = {"": None}
        self._gates: dict[str, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        from torch.overrides import TorchFunctionMode

        recorder = self

        class Watch(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                if next(tensors_in(result), None) is not None:  # not a shape or dtype
                    recorder._used([args, kwargs])
                return result

        for name, module in self._model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            )
            self._handles.append(
                module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            )
        self._watch: Any = Watch()
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> None:
        self._running.append(name)
        self._entered.setdefault(name)

    def _leave(self) -> None:
        self._running.pop()

    def _used(self, values: Any) -> None:
        for tensor in tensors_in(values):
            if (name := self._names.get(id(tensor))) is not None:
                self._gates.setdefault(name, self._running[-1])

    def gates(self) -> Gates:
        """Modules in the order of the forward pass, each with the names of its parameters.

        Parameters that no function of torch took are those of their own module, if it was called.
        The others may become ready last, so they come first, as parameters of the model.
        """
        found: dict[str, list[str]] = {name: [] for name in self._entered}
        unused: list[str] = []
        for name in self._names.values():
            own = name.rpartition(".")[0]
            gate = self._gates.get(name, own if own in self._entered and own else None)
            (unused if gate is None else found[gate]).append(name)
        return [(gate, names) for gate, names in [("", unused), *found.items()] if names]


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def units_of(model: nn.Module, gates: Gates) -> list[Unit]:
    """The units of `Recorder.gates`; a module whose parameters differ in dtype or device has
    several. Raises CollectiveError for sparse or complex parameters."""
    parameters = dict(model.named_parameters())
    units = []
    for gate, names in gates:
        alike: dict[Any, list[str]] = {}
        for name in names:
            p = parameters[name]
            if p.is_complex() or p.is_sparse:
                raise CollectiveError(
                    f"parameter {name} is {'complex' if p.is_complex() else 'sparse'}, which "
                    "data-parallel training does not take"
                )
            alike.setdefault((p.dtype, p.device), []).append(name)
        for same in alike.values():
            units.append(Unit(gate, tuple(same), tuple(parameters[name] for name in same)))
    return units
