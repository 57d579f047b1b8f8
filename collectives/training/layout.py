"""Which parameters of a module are trained, and the units that they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Gates, Unit, units_of
from linkweave.collectives.training.hooks import Hook, compiled
from linkweave.collectives.training.transport import Transport, parted

FROZEN = 8
"""Steps after which parameters that were frozen are no longer sent."""


class Layout:
    """The modules and parameters of a model, and whether they have changed.

    `without` has the identities of parameters that are no part of it.
    """

    def __init__(self, module: nn.Module, without: Collection[int]) -> None:
        self._module, self._without = module, without
        self._modules: list[nn.Module] = []
        self._stamp: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        self._hooks: dict[int, tuple[Any, list[Any]]] = {}  # (parameter, handles), by identity
        self._frozen: tuple[int, list[bool]] = (0, [])  # for how many steps
        self.compiled = False
        """Whether a part of the module is compiled, so that hooks before layers would not run."""
        self.changed()

    def changed(self) -> bool:
        """Whether modules or parameters were added, replaced, converted, frozen or thawed since the
        last call."""
        if self._modules and self._read() == self._stamp:
            return False
        if self._modules and any(
            not isinstance(p, nn.Parameter)
            for module in self._modules
            for p in dict.values(module._parameters)
            if p is not None
        ):  # torch.func.functional_call has put other tensors there for a while
            return False
        self._modules = [*self._module.modules()]
        self._stamp = self._read()
        self.compiled = compiled(self._module)
        self.parameters = [p for p in self._module.parameters() if id(p) not in self._without]
        return True

    def _read(self) -> list[Any]:
        found: list[Any] = []
        for module in self._modules:
            for parameter in dict.values(module._parameters):  # which no gate notices
                if parameter is not None:
                    found += id(parameter), parameter.requires_grad, parameter.dtype
                    found.append(parameter.stride())
            found.append(module._compiled_call_impl is not None)
            found += map(id, module._modules.values())
        return found

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those that require a gradient now."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def bare(self) -> bool:
        """Whether no parameter that is trained has a gradient."""
        trained = self.trained
        return bool(trained) and all(p.grad is None for p in trained)

    def name_of(self, parameter: Any) -> str:
        """What messages call a parameter. No gate takes this for reading it."""
        for path, part in self._module.named_modules():
            for name, p in dict.items(part._parameters):
                if p is parameter:
                    return "parameter " + ".".join(filter(None, (path, name)))
        return "a parameter that the module has lost"

    def hook(self, enter: Callable[..., None], accumulated: Callable[..., None]) -> None:
        """Call `enter` before a trained parameter's gradient is accumulated, and `accumulated` with
        the parameter after it, for those that have no such hooks."""
        parameter: Any
        for parameter in self.trained:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = (
                    parameter,
                    [
                        parameter.register_hook(Hook(enter)),
                        parameter.register_post_accumulate_grad_hook(Hook(accumulated)),
                    ],
                )

    def unhook(self) -> None:
        """Remove these hooks."""
        for _, handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks = {}

    def fits(self, units: Sequence[Unit]) -> bool:
        """Whether the units have all that is trained, as it is now, and nothing that is gone."""
        held = [
            (p, stride, unit)
            for unit in units
            for p, stride in zip(unit.parameters, unit.strides, strict=True)
        ]
        known, there = {id(p) for p, _, _ in held}, {id(p) for p in self.parameters}
        return all(id(p) in known for p in self.trained) and all(
            id(p) in there and (p.dtype, p.device) == unit.made and p.stride() == stride
            for p, stride, unit in held
        )

    def frozen_long(self, units: Sequence[Unit]) -> bool:
        """Whether parameters of the units have been frozen for FROZEN steps; called once a step."""
        count, known = self._frozen
        now = frozen(units)
        self._frozen = (count + 1 if now == known else 0), now
        return count == FROZEN and any(now)

    def units(self, recorded: Gates, transport: Transport) -> list[Unit]:
        """The units that all ranks make, by rank 0's recorded forward pass; none if nothing is
        trained. All ranks must call it. Raises CollectiveError if they train other parameters."""
        mine = json.dumps(self.gates(recorded)).encode()
        gates = json.loads(transport.share(mine)[0])
        names = {name for _, of_gate in gates for name in of_gate}
        trained = {id(p) for p in self.trained}
        here = {name for name, p in self._module.named_parameters() if id(p) in trained}
        told = [f"{name} {name in here}" for name in sorted(names | here)]
        if (other := parted(transport, "\n".join(told))) is not None:
            raise CollectiveError(
                f"ranks 0 and {other} train different parameters of their models; this rank and "
                f"rank 0 differ in {sorted(here ^ names)[:3]}"
            )
        found = units_of(self._module, gates)
        if len(devices := {unit.device for unit in found}) > 1:
            raise CollectiveError(
                f"the model is on several devices: {', '.join(map(str, devices))}"
            )
        return found

    def still_there(self, units: Sequence[Unit], kept: dict[str, Any]) -> dict[str, Any]:
        """What is kept by the names of parameters, but of those that were removed or replaced."""
        here = dict(self._module.named_parameters())
        every = (zip(unit.names, unit.parameters, strict=True) for unit in units)
        were = {name: parameter for pairs in every for name, parameter in pairs}
        residual = {
            name: x for name, x in kept["residual"].items()
            if name in here and were.get(name, here[name]) is here[name]
        }  # fmt: skip
        return {**kept, "residual": residual}

    def gates(self, recorded: Gates) -> Gates:
        """Modules in the order of a recorded forward pass, with the names of their parameters that
        are trained; those that were not recorded belong to their own module, at the end."""
        names = {
            name: None for name, p in self._module.named_parameters()
            if p.requires_grad and id(p) not in self._without
        }  # fmt: skip
        found = [(gate, [name for name in mine if name in names]) for gate, mine in recorded]
        for _, mine in found:
            for name in mine:
                names.pop(name, None)
        others: dict[str, list[str]] = {}
        for name in names:
            others.setdefault(name.rpartition(".")[0], []).append(name)
        return [(gate, mine) for gate, mine in [*found, *others.items()] if mine]


def drop_gradients(module: nn.Module) -> None:
    """Let no parameter have a gradient. No gate takes this for reading parameters."""
    for part in module.modules():
        for parameter in dict.values(part._parameters):
            if parameter is not None:
                parameter.grad = None


def frozen(units: Sequence[Unit]) -> list[bool]:
    """Whether each of their parameters is frozen now."""
    return [not parameter.requires_grad for unit in units for parameter in unit.parameters]
