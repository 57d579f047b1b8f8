"""Why a training cannot go on: what gradients and parameters are not allowed to be."""

from __future__ import annotations

import torch

BROKEN = "a backward pass ended with an error, so its gradients were not all sent"
LATE = "a gradient was changed after optimizer.step(), while it was being sent"
CHANGED = (
    "gradients were changed between backward() and step(), while they were being averaged: call "
    "clip_grad_norm_ of DataParallel in place of torch's, or its synchronize() before you change "
    "gradients; and step with the optimizer that DataParallel was given"
)
WRITTEN = (
    "{} was changed after optimizer.step(), before its update, which the schedule chains with the "
    "next forward pass: call finish() of DataParallel before you change parameters, or take a "
    "schedule that is not chained"
)
FOREIGN = (
    "{} was changed between backward() and step(), while its gradient was being averaged: a "
    "chained schedule needs one optimizer for all parameters, the one that DataParallel was given"
)
LOCAL = (
    "step() was called, but gradients of {} {}, so that they are this rank's alone: make a "
    "backward pass outside of no_sync() before each step"
)
UNREACHED = (
    "step() was called, but the backward pass before it has reached no parameter on this rank, "
    "while the other ranks wait for its gradients: add 0 * output.sum() to a loss that may not "
    "depend on the model"
)
HOOKED = (
    "{} has a post-accumulate hook beside DataParallel's, which would see the gradient of this "
    "rank before it is averaged, or while it is: do its work after backward()"
)


def fault_of(
    gradient: torch.Tensor, name: str, unit: str = "", stale: bool = False, sent: bool = False
) -> str:  # fmt: skip
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
