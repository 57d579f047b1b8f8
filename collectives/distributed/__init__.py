"""linkweave in torch.distributed: the backend "linkweave", hooks for DDP, several machines."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from linkweave.collectives.distributed.hooks import allreduce_hook, bf16_hook, fp16_hook

__all__ = ["GTopKState", "allreduce_hook", "bf16_hook", "fp16_hook", "gtopk_hook"]


def __getattr__(name: str) -> Any:
    if name not in ("GTopKState", "gtopk_hook"):
        raise AttributeError(
            f"module 'linkweave.collectives.distributed' has no attribute {name!r}"
        )
    # `training` imports this package, so its names are looked up when they are used
    return getattr(import_module("linkweave.collectives.training.gtopk.hook"), name)
