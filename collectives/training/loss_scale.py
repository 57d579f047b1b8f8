"""The scale by which a GradScaler multiplies a loss, and so the gradients of a step."""

from __future__ import annotations

from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.topology.checks import shown

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
