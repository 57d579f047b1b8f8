"""What may be trained, and the same model on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import POLICIES, Schedule
from linkweave.collectives.training.gtopk import GTopK
from linkweave.collectives.training.transport import Transport, parted
from linkweave.topology.checks import shown


def compiled(module: nn.Module) -> bool:
    """Whether a part is compiled, so that hooks before its layers would not run."""
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for part in module.modules()
    )


def refuse(module: Any, optimizers: Sequence[Any], schedule: Any, exchange: Any) -> None:
    """Raise CollectiveError for what cannot be trained."""
    if not isinstance(module, nn.Module):
        raise CollectiveError(f"module must be a torch.nn.Module, not {shown(module)}")
    if not optimizers:
        raise CollectiveError("optimizer must be a torch.optim.Optimizer, not an empty list")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CollectiveError(
                f"optimizer must be a torch.optim.Optimizer, not {shown(optimizer)}"
            )
        if hasattr(type(optimizer), "watcher"):
            raise CollectiveError("another DataParallel uses this optimizer: close that one first")
    for kind, instead in _ELSEWHERE.items():
        for part in module.modules():
            if kind in (base.__name__ for base in type(part).__mro__):
                raise CollectiveError(f"{kind} averages gradients itself: {instead}")
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise CollectiveError(
            "LBFGS evaluates the loss of a rank's own batch several times a step, so that ranks "
            "would part: take another optimizer"
        )
    if not isinstance(schedule, Schedule) and schedule not in ("auto", *POLICIES):
        known = ", ".join(["auto", *POLICIES])
        raise CollectiveError(
            f"schedule must be a Schedule or one of {known}, not {shown(schedule)}"
        )
    if exchange != "dense" and not isinstance(exchange, GTopK):
        raise CollectiveError(f"exchange must be 'dense' or a GTopK, not {shown(exchange)}")


_ELSEWHERE = {
    "DataParallel": "pass the module inside it",
    "DistributedDataParallel": "pass the module inside it, or register "
    "collectives.distributed.allreduce_hook with it",
    "FSDPModule": "train it without DataParallel",
    "FullyShardedDataParallel": "train it without DataParallel",
}


def compare_exchanges(transport: Transport, exchange: Any) -> None:
    """Raise CollectiveError on every rank unless all have this exchange."""
    if (other := parted(transport, repr(exchange))) is not None:
        raise CollectiveError(
            f"ranks 0 and {other} have different exchanges; this rank's is {exchange!r}"
        )


def copy_from_rank_0(transport: Transport, module: nn.Module, without: set[int]) -> None:
    """Copy rank 0's parameters, but those `without`, and buffers. Raises CollectiveError unless all
    ranks have them."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in tensors.items() if id(tensor) not in without}
    names = [f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in tensors.items()]
    if (other := parted(transport, "\n".join(names))) is not None:
        raise CollectiveError(
            f"ranks 0 and {other} have different models: this rank's has {len(names)} "
            f"parameters and buffers, the first {names[:1]}, the last {names[-1:]}"
        )
    with torch.no_grad():
        for tensor in tensors.values():
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            transport.broadcast(copied)
            tensor.copy_(copied)
