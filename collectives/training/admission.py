"""What may be trained, and the same model on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import POLICIES, Schedule
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.gtopk.options import GTopK
from linkweave.collectives.training.hooks import Hook
from linkweave.collectives.training.transport import Transport, parted, send
from linkweave.collectives.training.update import groups_of
from linkweave.kernels.gpu.triton_host import check_triton
from linkweave.topology.checks import shown


def refuse(
    module: Any, optimizers: Sequence[Any], schedule: Any, chained: Any, exchange: Any, dtype: Any
) -> None:
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
        if not type(optimizer).__module__.startswith("torch.") and isinstance(
            getattr(optimizer, "optimizer", None), torch.optim.Optimizer
        ):
            raise CollectiveError(
                f"{type(optimizer).__name__} wraps an optimizer: pass DataParallel the one inside"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise CollectiveError(
                "LBFGS evaluates the loss of a rank's own batch several times a step, so that "
                "ranks would part: take another optimizer"
            )
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise CollectiveError("a ScriptModule keeps its parameters to itself: pass the nn.Module")
    for kind, instead in _ELSEWHERE.items():
        for part in module.modules():
            if kind in (base.__name__ for base in type(part).__mro__):
                raise CollectiveError(f"{kind} averages gradients itself: {instead}")
    if not isinstance(schedule, Schedule) and schedule not in ("auto", *POLICIES):
        known = ", ".join(["auto", *POLICIES])
        raise CollectiveError(
            f"schedule must be a Schedule or one of {known}, not {shown(schedule)}"
        )
    if dtype not in (None, torch.bfloat16):
        raise CollectiveError(f"reduce_dtype must be torch.bfloat16 or None, not {shown(dtype)}")
    if dtype and exchange != "dense":
        raise CollectiveError(
            "reduce_dtype is of the dense exchange; GTopK sends values as they are"
        )
    if exchange != "dense" and not isinstance(exchange, GTopK):
        raise CollectiveError(f"exchange must be 'dense' or a GTopK, not {shown(exchange)}")
    if chained and exchange != "dense":
        raise CollectiveError(
            "GTopK sends after the backward pass, beside no forward pass: leave out chained=True"
        )
    mine = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        groups = groups_of(optimizer)
        if mine and not any(id(p) in mine for group in groups for p in group["params"]):
            raise CollectiveError(
                f"the optimizer {type(optimizer).__name__} has none of the module's parameters, so "
                "that it would not train it: construct it with module.parameters()"
            )


_ELSEWHERE = {
    "DataParallel": "pass the module inside it",
    "DistributedDataParallel": "pass the module inside it, or register "
    "collectives.distributed.allreduce_hook with it",
    "FSDPModule": "train it without DataParallel",
    "FullyShardedDataParallel": "train it without DataParallel",
}


def compare_exchanges(transport: Transport, exchange: Any, **options: Any) -> None:
    """Raise CollectiveError on every rank unless all have this exchange, and these options."""
    if (other := parted(transport, repr((exchange, options)))) is not None:
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise CollectiveError(
            f"ranks 0 and {other} have different exchanges or options; this rank's is {exchange!r} "
            f"with {words}"
        )


def triton_trouble(module: nn.Module) -> str:
    """Why this rank cannot launch the kernels that update the module, if it has parameters on a GPU
    for which there are some: not of float64. Empty if it can."""
    if not any(p.is_cuda and p.dtype != torch.float64 for p in module.parameters()):
        return ""
    try:
        check_triton()
    except RuntimeError as error:
        return str(error)
    return ""


def refuse_module(module: nn.Module) -> None:
    """Raise CollectiveError for a module that cannot train on several ranks."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CollectiveError(
                f"parameter {name} has no shape yet: make a forward pass before DataParallel"
            )
        if any(base.__name__ == "DTensor" for base in type(parameter.data).__mro__):
            raise CollectiveError(
                f"parameter {name} is a DTensor, which is divided between ranks already"
            )
    named = [("buffer", *one) for one in module.named_buffers()]
    named += [("parameter", *one) for one in module.named_parameters()]
    for kind, name, x in named:
        if x.layout is torch.strided and any(
            step == 0 and length > 1 for step, length in zip(x.stride(), x.shape, strict=True)
        ):
            raise CollectiveError(
                f"elements of the {kind} {name} share memory, as it is expanded, so that rank 0's "
                f"cannot be copied to it: register {kind}.contiguous()"
            )
    for name, parameter in module.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(isinstance(hook, Hook) and hook.of(Engine) for hook in hooks.values()):
            raise CollectiveError(
                f"another DataParallel trains {name}: close that one first, or wrap one module "
                "that contains both"
            )
    if not dist.is_initialized():
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise CollectiveError(
                    f"{name} is a SyncBatchNorm, which needs torch.distributed: call "
                    "torch.distributed.init_process_group('linkweave') first"
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
    send(transport, [*tensors.values()])


def send_buffers(transport: Transport, module: nn.Module, source: int) -> None:
    """Copy rank `source`'s buffers to all ranks."""
    send(transport, [*module.buffers()], source)
