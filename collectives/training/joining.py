"""Batches of unequal number: ranks whose loop is over take part in what the others still do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.stepping import Stepper
from linkweave.collectives.training.transport import Transport, send
from linkweave.collectives.training.update import groups_of

_INSIDE: ContextVar[bool] = ContextVar("inside join()", default=False)


class Joining(Protocol):
    """A model that is trained: the `Engine`."""

    module: nn.Module
    transport: Transport
    steppers: list[Stepper]
    roll: Roll
    syncs: bool

    def finish(self) -> None: ...

    def take_part(self) -> None: ...


@contextmanager
def joined(engine: Joining, buffers: bool) -> Iterator[None]:
    """Inside, ranks may make backward passes in unequal number.

    A rank that is over hears of each pass of the others, and takes part with what it has not sent
    yet, or with zeros. When all are over, parameters, `buffers` if asked for, and the optimizers'
    states of one that was among the last go to all ranks.
    """
    roll, module = engine.roll, engine.module
    for name, part in module.named_modules():
        if isinstance(part, ShardedEmbedding | nn.SyncBatchNorm):
            raise CollectiveError(
                f"join() does not go with the {type(part).__name__} {name}, whose forward passes "
                "need all ranks: give all ranks as many batches"
            )
    if _INSIDE.get() or not engine.syncs:
        raise CollectiveError(
            "join() must not be inside another join(), of whatever model, or no_sync(): ranks "
            "would wait for each other in different ones"
        )
    inside, roll.called = _INSIDE.set(True), True
    try:
        yield
        engine.finish()
        last = roll.present
        while others := roll.call(False):
            last = others
            engine.take_part()
    finally:
        roll.reset()
        _INSIDE.reset(inside)
    if len(last) < engine.transport.size:
        tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
        send(engine.transport, tensors, last[0])
        for stepper in engine.steppers:
            _copy(engine.transport, stepper.optimizer, last[0])


class Roll:
    """Whose loops go on. It is called before each backward pass that sends, inside `join`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.reset()

    def reset(self) -> None:
        """All ranks make all passes."""
        self.called = False
        self.present: Sequence[int] = range(self._transport.size)

    @property
    def complete(self) -> bool:
        return len(self.present) == self._transport.size

    def goes_on(self) -> None:
        """This rank makes a pass, unless its loop is over."""
        if self.called and self._transport.rank in self.present:
            self.call(True)

    def call(self, goes_on: bool) -> Sequence[int]:
        """Tell all ranks whether this one's loop goes on, and hear which ones' do."""
        told = self._transport.share(b"1" if goes_on else b"0")
        self.present = [rank for rank, row in enumerate(told) if row == b"1"]
        return self.present


class _Tensor(NamedTuple):
    """What is told of a tensor of an optimizer's state."""

    shape: torch.Size
    dtype: torch.dtype
    on_device: bool  # of its parameter; else on the CPU


def _copy(transport: Transport, optimizer: torch.optim.Optimizer, source: int) -> None:
    """Copy rank `source`'s options and state of the optimizer to all ranks."""
    groups, state = groups_of(optimizer), optimizer.__dict__["state"]
    parameters = [p for group in groups for p in list.__iter__(group["params"])]
    mine = b""
    if transport.rank == source:
        options = [dict(group, params=None) for group in groups]
        for group in options:
            group.update({k: v.cpu() for k, v in group.items() if isinstance(v, torch.Tensor)})
        entries = [_told(parameter, state.get(parameter)) for parameter in parameters]
        mine = pickle.dumps((options, entries))
    options, entries = pickle.loads(transport.share(mine)[source])
    for group, told in zip(groups, options, strict=True):
        for name, value in told.items():
            if isinstance(value, torch.Tensor):  # which stays on this rank's device
                group[name].copy_(value)
            elif name != "params":
                group[name] = value
    tensors = []
    for parameter, told in zip(parameters, entries, strict=True):
        known = state.pop(parameter, {})
        if told is not None:
            state[parameter] = {k: _room(parameter, v, known.get(k)) for k, v in told.items()}
            tensors += [state[parameter][k] for k, v in told.items() if isinstance(v, _Tensor)]
    send(transport, tensors, source)


def _told(parameter: torch.Tensor, state: Any) -> Any:
    """A parameter's state, with what is told of a tensor in place of it."""
    return state and {
        name: _Tensor(x.shape, x.dtype, x.device == parameter.device)
        if isinstance(x, torch.Tensor) else x
        for name, x in state.items()
    }  # fmt: skip


def _room(parameter: torch.Tensor, told: Any, known: Any) -> Any:
    """A tensor as is told, the `known` one if it is like that; of other values, the value."""
    if not isinstance(told, _Tensor):
        return told
    device = parameter.device if told.on_device else torch.device("cpu")
    if isinstance(known, torch.Tensor) and (
        (known.shape, known.dtype, known.device) == (told.shape, told.dtype, device)
    ):
        return known
    if told.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=told.dtype, device=device, requires_grad=False)
    return torch.empty(told.shape, dtype=told.dtype, device=device)
