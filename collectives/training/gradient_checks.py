"""Why a gradient cannot be averaged."""

from __future__ import annotations

import torch


def fault_of(gradient: torch.Tensor, name: str, unit: str, stale: bool, sent: bool) -> str:
    """What is wrong with the gradient of the parameter `name` of a unit; empty if nothing is.

    stale: the forward pass has used the parameter before it was updated. sent: the unit's gradients
    are under way.
    """
    if gradient.layout is not torch.strided:
        return f"the gradient of {name} is sparse; only dense ones are averaged"
    if gradient.requires_grad:
        return (
            f"the gradient of {name} has a graph of its own, which averages lose: call "
            "torch.autograd.grad in place of backward(create_graph=True)"
        )
    if stale:
        return (
            f"{name} was used before it was updated, by another module than in the first forward "
            "pass: pass a schedule that is not chained"
        )
    if sent:
        return (
            f"{unit} got gradients twice in a backward pass: pass use_reentrant=False to checkpoint"
        )
    return ""
