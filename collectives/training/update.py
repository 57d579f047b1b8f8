"""The user's optimizer, applied to one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap.units import Unit
from linkweave.kernels import optim
from linkweave.topology.checks import shown

_STATES = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq")}
_STATES["AdamW"] = _STATES["Adam"]
_GIVEN = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "maximize"),
}
_GIVEN["AdamW"] = _GIVEN["Adam"]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups, without the wait for gradients of others who read them."""
    groups: list[dict[str, Any]] = optimizer.__dict__["param_groups"]
    return groups


class Update:
    """Steps of an optimizer that are carried out in parts, with the options of `step` time.

    This is right for optimizers that treat each parameter alone and keep their state by parameter,
    as those of torch.optim do but LBFGS. A part of SGD, Adam or AdamW runs by one kernel for all
    its tensors (`kernels.optim`): with the bits of torch's step for SGD; for Adam they may differ
    in the last place. Otherwise, and in a parameter's first step, it runs the optimizer's own
    `step` on groups that hold only the part's parameters. No part writes to gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        step = self._kind.step
        self._step: Any = getattr(step, "__wrapped__", step)  # without the hooks of each call
        self._options: list[dict[str, Any]] = []  # of each group
        self._group_of: dict[int, int] = {}
        self._tables: dict[int, tuple[tuple[int, ...], optim.Table]] = {}

    @property
    def separable(self) -> bool:
        """Whether parts of a step are known to add up to the step."""
        hooks = (
            self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        )  # fmt: skip
        hooked = any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
        return self._kind.__module__.startswith("torch.optim") and not hooked

    def snapshot(self) -> None:
        """Take the groups' options as they are now: a scheduler may change the learning rate
        before the parts run."""
        groups = groups_of(self._optimizer)
        self._options = [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items() if name != "params"
            }
            for group in groups
        ]  # fmt: skip
        for options in self._options:
            if options.get("nesterov"):  # torch's foreach form adds to gradients, which others read
                options["foreach"] = False
        self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}

    def rest(self, units: Iterable[Unit]) -> None:
        """Carry out the step for the optimizer's parameters in no unit."""
        known = {id(parameter) for unit in units for parameter in unit.parameters}
        groups = groups_of(self._optimizer)
        self.part([p for group in groups for p in group["params"] if id(p) not in known])

    def part(self, parameters: Sequence[Any], arrivals: Iterable[int] = ()) -> None:
        """Carry out the step of the last `snapshot` for these parameters.

        Their gradients are final, or become so while `arrivals` blocks and yields the addresses
        before which they are. Kernels update what has come before they wait for more.
        """
        arriving = iter(arrivals)
        parts: dict[int, list[Any]] = {}
        for parameter in parameters:
            group = self._group_of.get(id(parameter))
            if group is not None and parameter.grad is not None:
                parts.setdefault(group, []).append(parameter)
        own = {
            group: part for group, part in parts.items()
            if not self._by_kernel(part, self._options[group], arriving)
        }  # fmt: skip
        for _ in arriving:
            pass
        if own:
            self._by_its_own_step(own)

    def _by_its_own_step(self, parts: dict[int, list[Any]]) -> None:
        optimizer: Any = self._optimizer
        whole = groups_of(optimizer)
        optimizer.param_groups = [
            {"params": part, **self._options[group]} for group, part in sorted(parts.items())
        ]
        device = next(part[0].device for part in parts.values())
        try:  # as outside of a forward pass
            with (
                torch.inference_mode(False), torch.no_grad(),
                torch.autocast(device.type, enabled=False),
            ):  # fmt: skip
                self._step(optimizer)
        finally:
            optimizer.param_groups = whole

    def _by_kernel(self, part: list[Any], options: dict[str, Any], arriving: Iterator[int]) -> bool:
        """Carry out a part by a kernel; False if there is none for it."""
        name = self._kind.__name__
        if name not in _STATES or not _plain(options):
            return False
        names = _STATES[name] if options.get("momentum", 1) else ()
        states = [self._optimizer.__dict__["state"].get(p, {}) for p in part]
        columns = [[state.get(one) for state in states] for one in names]
        for state in states:  # of a checkpoint: each step would wait for the GPU to tell its number
            if "step" in state and state["step"].is_cuda:
                state["step"] = state["step"].cpu()
        steps = {float(state["step"]) for state in states if "step" in state}
        if any(x is None for column in columns for x in column) or len(steps) > 1:
            return False
        if (table := self._table(part, columns)) is None:
            return False
        given = {one: options[one] for one in _GIVEN[name]}
        if name == "SGD":
            run: Any = partial(
                optim.sgd, **given | {"nesterov": bool(given["nesterov"] and given["momentum"])}
            )
        else:
            for state in states:
                state["step"] += 1
            decoupled = name == "AdamW" or bool(options.get("decoupled_weight_decay"))
            run = partial(optim.adam, step=int(steps.pop()) + 1, decoupled=decoupled, **given)
        done = 0
        for address in arriving:
            if (there := table.blocks_before(address)) > done:
                run(table.part(done, there))
                done = there
        if done < table.blocks:
            run(table.part(done, table.blocks) if done else table)
        increment_version([*part, *(x for column in columns for x in column)])
        return True

    def _table(self, part: list[Any], columns: list[list[Any]]) -> optim.Table | None:
        """The part's table, kept as long as its parameters and states stay where they are."""
        grads = [parameter.grad for parameter in part]
        key = tuple(x.data_ptr() for column in (part, *columns) for x in column)
        key += tuple(grad.stride() for grad in grads)
        addresses = [grad.data_ptr() for grad in grads]
        known = self._tables.get(id(part[0]))
        if known is None or known[0] != key:
            try:
                table = optim.Table([p.detach() for p in part], grads, *columns)
            except (TypeError, ValueError):  # the kernels do not take these tensors
                return None
            known = self._tables[id(part[0])] = key, table.without_tensors()
        elif known[1].addresses != addresses:  # those of each step are new
            known[1].move(addresses)
        return known[1]


def _plain(options: dict[str, Any]) -> bool:
    """Whether nothing is asked for that the kernels do not have, nor one of torch's own forms."""
    asked = ("amsgrad", "foreach", "fused", "differentiable", "capturable")
    return isinstance(options["lr"], float) and not any(options.get(name) for name in asked)


UNSCALED = torch.amp.grad_scaler.OptState.UNSCALED


class LossScale:
    """The scale of a GradScaler, for what outlives a step or is applied outside the optimizer."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler: Any = scaler

    @property
    def options(self) -> dict[str, Any]:
        """What all ranks' scalers must have in common. The host waits."""
        options: dict[str, Any] = self.scaler.state_dict()
        return options

    def check(self) -> None:
        """Raise CollectiveError if no loss has been scaled."""
        if self.scaler._scale is None:
            raise CollectiveError(
                "the GradScaler given as scaler= has scaled no loss: call "
                "scaler.scale(loss).backward()"
            )

    def on(self, device: torch.device) -> torch.Tensor:
        """The scale of this step, a scalar; the host does not wait."""
        self.check()
        scale: torch.Tensor = self.scaler._scale.to(device, non_blocking=True)
        return scale

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise CollectiveError unless it is the scaler that lets the optimizer step."""
        stage = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
        if stage is not UNSCALED and "found_inf" not in optimizer.__dict__:
            raise CollectiveError(
                f"{type(optimizer).__name__} steps outside of the GradScaler given as scaler=: "
                "call scaler.step(optimizer), once before scaler.update()"
            )


def loss_scale_of(scaler: Any) -> LossScale | None:
    """None without a GradScaler, or with one that is not enabled."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise CollectiveError(f"scaler must be a torch.amp.GradScaler or None, not {shown(scaler)}")
    return LossScale(scaler) if scaler.is_enabled() else None
