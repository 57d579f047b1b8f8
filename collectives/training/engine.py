"""The engine: from hooks of PyTorch to lanes, and from arrivals to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.overlap.clock import clock_of
from linkweave.collectives.overlap.units import Unit, tensors_in
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.embeddings import Embeddings
from linkweave.collectives.training.gradient_checks import fault_of
from linkweave.collectives.training.gtopk import GTopK
from linkweave.collectives.training.hooks import Hook
from linkweave.collectives.training.lanes import Lanes, lanes_of
from linkweave.collectives.training.program import Program, at_once
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.sparse_exchange import SparseExchange
from linkweave.collectives.training.state import State
from linkweave.collectives.training.step_record import StepRecord
from linkweave.collectives.training.transport import Transport
from linkweave.collectives.training.update import Update


class Engine:
    """Carries out a program for the units of a model, at first one all-reduce after the backward
    pass. All ranks must have the same units, and make the same passes and steps."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], transport: Transport, update: Update,
        exchange: GTopK | None = None, embeddings: Embeddings | None = None,
    ) -> None:  # fmt: skip
        self.units, self.transport, self.update = tuple(units), transport, update
        self.embeddings = embeddings or Embeddings()
        self.arena = Arena(units, transport.empty, flagged=exchange is None)
        self.sparse: SparseExchange | None = None
        if exchange:
            self.sparse = SparseExchange(exchange, self.arena, transport, update.momentum)
        self.program = self.first_program = at_once(self.arena.slots, [unit.name for unit in units])
        device = units[0].device
        self.clock = clock_of(device)
        transport.open(1)
        self.lanes = self._lanes()
        self.record = StepRecord()
        self.last_step: StepRecord | None = None
        self.sends = True  # whether backward passes send gradients
        self.state = State.IDLE
        self._begun = False  # whether this backward pass has accumulated a gradient
        self._pending: set[int] = set()
        self._passed: set[int] = set()  # units that a forward pass has left pending
        self._left: list[int] = []  # parameters of each unit whose gradients are to come
        self._version = 0
        self._ends = False  # whether `_end_backward` will be called
        self._arrived: Any = None  # when the last bytes of the unit last awaited arrived
        self._gates: dict[nn.Module, list[int]] = {}
        self._handles: list[Any] = []
        self._install(model)
        self.embeddings.listen(self._begin_rows)

    def _install(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for index, unit in enumerate(self.units):
            gates = {unit.gate, *(name.rpartition(".")[0] for name in unit.names)}
            for gate in gates:
                self._gates.setdefault(modules[gate], []).append(index)
            parameter: Any
            for i, parameter in enumerate(unit.parameters):
                hook = self._hook(index, i)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        parameters = [parameter for unit in self.units for parameter in unit.parameters]
        self._handles.append(
            torch.autograd.graph.register_multi_grad_hook(
                parameters, lambda _: self._begin_backward(), mode="any"
            )
        )
        for module in self._gates:
            self._handles.append(module.register_forward_pre_hook(Hook(self._before)))

    def adopt(self, program: Program) -> None:
        """Carry out another program from the next step on. All ranks must call it."""
        self.finish()
        self.transport.open(program.lanes)
        self.lanes.close()
        self.program = program
        if self.sparse:
            self.sparse.forget_layouts()
        self.lanes = self._lanes()
        self.record, self.last_step = StepRecord(), None  # those of the other program

    def _lanes(self) -> Lanes:
        return lanes_of(self.transport, self.arena, self.program, self.sparse, self.embeddings)

    # ---- forward -----------------------------------------------------------------------------
    def begin_forward(self) -> None:
        """Before the model's forward pass."""
        self._check()
        self._ends = False
        if self.state is State.SENDING:  # no step: gradients are accumulated, or dropped
            self.synchronize()

    def end_forward(self, result: Any) -> None:
        """After the model's forward pass, with what it returned."""
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:  # hooks on a leaf would stay
                tensor.register_hook(lambda _: self._enter_backward())
        self.record.forward_end = self.clock.now()
        self._passed = self._pending.copy()

    def _before(self, module: nn.Module, _: Any) -> None:
        """Before the forward pass of a module: its parameters must be final."""
        if self.state is State.BACKWARD:  # activations are being computed again
            return
        record = self.record
        for index in self._gates[module]:
            record.reached.setdefault(index, self.clock.now())
            if index in self._pending:
                self._apply(index)
                self._passed.discard(index)
            record.forward.setdefault(index, self.clock.now())

    def _apply(self, index: int) -> None:
        """Wait for a unit and update its parameters, as its gradients arrive."""
        if self.arena.version != self._version:
            self._abort("a gradient was changed after optimizer.step(), while it was being sent")
        unit, arrivals = self.units[index], self._arrivals(index)
        next(arrivals)  # with the flags, which tell whether there are gradients
        self._pending.discard(index)
        kept = [parameter.grad is not None for parameter in unit.parameters]
        try:
            with profiled(f"update {unit.name}"):
                self.arena.show(index)
                self.update.part(unit.parameters, arrivals)
        except CollectiveError:
            raise
        except BaseException as error:  # parameters may differ from those of the other ranks
            self._abort(f"{error!r} ended the update of {unit.name}", error)
        for parameter, keep in zip(unit.parameters, kept, strict=True):
            if not keep:  # zero_grad has been called since
                parameter.grad = None
        self.record.updates[index] = self._arrived, self.clock.now()
        if not self._pending:
            self.state = State.IDLE

    def _arrivals(self, index: int) -> Iterator[int]:
        """Wait for a unit, and yield the addresses before which its gradients have arrived."""
        base, flags = self.arena.address(index), self.units[index].flags_nbytes
        try:
            for nbytes in self.lanes.arrivals(index):
                self._arrived = self.clock.now()
                if nbytes >= flags:
                    yield base + nbytes
        except CollectiveError:
            self.state = State.ABORTED
            raise

    # ---- backward ----------------------------------------------------------------------------
    def _enter_backward(self) -> None:
        """Make sure that `_end_backward` is called at the end of this pass of autograd.

        Hooks of the model's results do so, as the first gradient may come in a pass inside this
        one: that of a checkpoint.
        """
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _begin_backward(self) -> None:
        """Before the first gradient of a backward pass is accumulated."""
        if self.state is State.BACKWARD:  # of a checkpoint, inside another one
            return
        self.synchronize()
        self.finish()
        self._left = [len(unit.parameters) for unit in self.units]
        self._begun = False
        self.state = State.BACKWARD
        self._enter_backward()

    def _begin_step(self) -> None:
        """Before the first gradient in the arena: torch.autograd.grad accumulates none."""
        if self._begun:
            return
        self._begun = True
        if self.sends:
            last = self.record
            last.sent = self.lanes.sent
            self.record = StepRecord(last.forward_end or last.begun)
            if last.ready:
                self.last_step = last
            if self.sparse:
                self.sparse.begin()
            self.lanes.begin()

    def _begin_rows(self) -> None:
        """In a backward pass that reaches rows of embeddings, and maybe no other parameter."""
        self._begin_backward()
        self._begin_step()

    def _hook(self, index: int, i: int) -> Callable[[Any], None]:
        """What follows the accumulation of a parameter's gradient."""

        def accumulated(_: Any) -> None:
            self._begin_step()
            self._check_gradient(index, i)
            self._left[index] -= 1
            if not self._left[index] and self.sends:
                self._collected(index)

        return accumulated

    def _check_gradient(self, index: int, i: int) -> None:
        """Raise for a gradient that cannot be averaged, or comes after its unit was sent."""
        unit = self.units[index]
        gradient: Any = unit.parameters[i].grad
        sent = not self._left[index] and self.sends
        stale = index in self._passed
        if fault := fault_of(gradient, unit.names[i], unit.name, stale, sent):
            self._abort(fault)

    def _collected(self, index: int) -> None:
        self.arena.collect(index)
        if self.sparse:
            self.sparse.collected(index)
        self.record.ready[index] = self.clock.now()
        self.lanes.ready(index)

    def _end_backward(self) -> None:
        self._ends = False
        if self.state is not State.BACKWARD:  # it has reached no parameter
            return
        if self._begun:
            self.embeddings.end_backward()
        if not (self.sends and self._begun):
            self.state = State.IDLE
            return
        self.record.backward_end = self.clock.now()
        for index, left in enumerate(self._left):
            if left:
                self._collected(index)
        self._version = self.arena.version
        self._passed = set()
        self.state = State.SENDING
        if not self.program.chained:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until gradients under way are averaged, as they are after a backward pass of DDP."""
        if self.state is State.SENDING:
            self._check_unchanged()
            self._await(self.lanes.wait_all)
            if self.sparse:
                self.sparse.settle()
            for index in range(len(self.units)):
                self.arena.show(index)
            self.state = State.IDLE

    def _unchanged(self) -> bool:
        return self.arena.version == self._version and self.arena.holds_all()

    def _check_unchanged(self) -> None:
        """Raise if gradients were changed after the backward pass, while they were being sent."""
        if not self._unchanged():
            self._abort(
                "gradients were changed between backward() and step(), while they were being "
                "averaged: call clip_grad_norm_ of DataParallel in place of torch's, or its "
                "synchronize() before you change gradients"
            )

    # ---- step --------------------------------------------------------------------------------
    def step(self, plain: Callable[[], Any]) -> Any:
        """The optimizer's step, or its beginning; `plain` is the optimizer's own."""
        self._check()
        begun = self.clock.now()
        if self.sparse and self.sparse.bad:  # some rank had a gradient that is not finite
            self.sparse.bad = ()
        elif not self.update.separable:
            self.synchronize()
            self.finish()
            plain()
        elif self.state is State.SENDING:
            self._check_unchanged()
            self.update.snapshot()
            self.state = State.PENDING
            self._pending = set(range(len(self.units)))
            self._passed = set()
            with torch.no_grad():
                self.update.rest(self.units)
        else:
            self.finish()
            self.update.snapshot()
            with torch.no_grad():
                for unit in () if self._by_entries() else self.units:
                    with profiled(f"update {unit.name}"):
                        self.update.part(unit.parameters)
                self.update.rest(self.units)
        self.record.step = begun, self.clock.now()

    def _by_entries(self) -> bool:
        """Update by the entries that have arrived, if they are all that gradients hold."""
        return self.sparse is not None and self._unchanged() and self.sparse.apply(self.update)

    def finish(self) -> None:
        """Update all parameters whose update is pending; the arena may be written to then."""
        self._check()
        for index in sorted(self._pending):
            self._apply(index)
        self._await(self.lanes.wait_all)  # of a gradient queue, others may still read our part

    # ---- errors and the end ------------------------------------------------------------------
    def _check(self) -> None:
        if self.state is State.BACKWARD:
            self._abort("a backward pass ended with an error, so its gradients were not all sent")
        if self.state is State.ABORTED:
            self.lanes.wait_all()  # raises what has ended the training

    def _await(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except CollectiveError:
            self.state = State.ABORTED
            raise

    def _abort(self, why: str, cause: BaseException | None = None) -> NoReturn:
        self.state = State.ABORTED
        error = CollectiveAborted(f"rank {self.transport.rank}: {why}")
        self.lanes.abort(error)
        raise cause or error

    def close(self) -> None:
        """Carry out what is pending, remove all hooks and end the lanes."""
        try:
            if self.state is State.BACKWARD:
                self._abort("training was closed in a backward pass")
            if self.state is not State.ABORTED:
                self.synchronize()
                self.finish()
                self.embeddings.finish()
        finally:
            for handle in self._handles:
                handle.remove()
            self.lanes.close()
