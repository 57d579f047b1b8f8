"""The engine: from hooks of PyTorch to lanes, and from arrivals to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.overlap.clock import clock_of
from linkweave.collectives.overlap.units import Gates as Recorded
from linkweave.collectives.overlap.units import Recorder, Unit, tensors_in
from linkweave.collectives.training import checks as checks
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.exchange import Exchange
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.hooks import Hook, at_end, compiling_by, in_backward, throw
from linkweave.collectives.training.joining import Roll
from linkweave.collectives.training.lanes import Lanes, lanes_of
from linkweave.collectives.training.layout import Layout, drop_gradients, frozen
from linkweave.collectives.training.program import Moments, Program, after_backward
from linkweave.collectives.training.ranges import profiled
from linkweave.collectives.training.states import FINAL, TABLE, Event, State
from linkweave.collectives.training.stepping import Gates, Stepper, fault_of_chaining
from linkweave.collectives.training.transport import Transport


class Engine:
    """Averages the gradients of a module over all ranks, and lets its optimizers go on with them.

    Hooks on the parameters notice each backward pass. At the end of the first one, the module is
    divided into units; from the next one on, gradients are sent as the program says. All ranks must
    make the same backward passes that send, and the same steps. Forward passes send nothing.

    exchange_of: makes the exchange for the units' buffers. tuner_of: makes what gives the engine
    its programs (`before_step`); it may adopt one at once. after: called at the end of each
    backward pass that has sent, with a rank that has made it. chaining: if a chained training was
    asked for, how not to ask for it.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, embeddings: Embeddings, *,
        flagged: bool, exchange_of: Callable[[GradientBuffers], Exchange],
        tuner_of: Callable[[Engine], Any], after: Callable[[int], None], rebuilds: bool,
        compares: bool, chaining: str,
    ) -> None:  # fmt: skip
        self._chaining = chaining
        self.module, self.transport, self.embeddings = module, transport, embeddings
        self._flagged, self._exchange_of, self._tuner_of = flagged, exchange_of, tuner_of
        self._after, self._rebuilds, self._checks = after, rebuilds, compares
        self.steppers: list[Stepper] = []
        self.state = State.IDLE
        self.syncs = True  # whether training is outside of no_sync() now
        self._told: bool | None = None  # whether it was, at the last forward pass
        self.roll = Roll(transport)
        self.layouts = 1  # how many times the module's parameters were looked up
        self._layout = Layout(module, embeddings.weights)
        self._begun: Any = None  # when an optimizer's step was called
        self._fresh = False  # whether averages have come since the last step
        self._rows_only = 0  # the layout in which only embeddings have parameters
        self._compiled = self._layout.compiled
        self._running = 0  # forward passes that have begun and not ended
        device = next((p.device for p in self._layout.trained), torch.device("cpu"))
        self.moments = Moments(clock_of(device))
        self._kept: dict[str, Any] | None = None  # of the exchange, as long as there is none
        self.steps = 0  # backward passes that have sent
        self._unbuilt()
        self._listen()

    def _unbuilt(self) -> None:
        """There are no units yet, or no more."""
        self._recorded: Recorded = []
        self.units: tuple[Unit, ...] = ()
        self.tuner: Any = None
        self._unit_of: dict[int, tuple[int, int]] = {}  # (unit, number in it), by identity
        self._pending: dict[int, list[int]] = {}  # units to be updated: versions of parameters
        self._passed: set[int] = set()  # units that a forward pass has left pending
        self._left: list[int] = []  # parameters of each unit whose gradients are to come
        self._versions: list[int] = []  # of parameters, as long as gradients are under way

    @property
    def dense_steppers(self) -> list[Stepper]:
        """Those of optimizers that do not train sharded embeddings alone."""
        return [one for one in self.steppers if not one.trains_only(self.embeddings.weights)]

    def _listen(self) -> None:
        """Let the hooks be those of the parameters that are trained now."""
        self._layout.hook(self._enter, self._accumulated)
        self.embeddings.listen(self._begin_rows)

    @property
    def sends(self) -> bool:
        """Whether a backward pass sends gradients: as with DDP, its forward pass counts."""
        return self.syncs if self._told is None else self._told

    # ---- states ------------------------------------------------------------------------------
    def _on(self, event: Event) -> None:
        """Do what the table says, and go on to the state that follows."""
        if found := TABLE.get((self.state, event)):
            action, after = found
            if action:
                getattr(self, f"_{action}")()
            self.state = after

    def _broken(self) -> NoReturn:
        self._fail(checks.BROKEN)

    def _failed(self) -> None:
        if self.units:
            self.lanes.wait_all()  # raises what has ended the training
        raise CollectiveAborted(f"rank {self.transport.rank}: the training has failed")

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """What other ranks or lanes have to say may end the training."""
        try:
            return call()
        except CollectiveError:
            self.state = State.FAILED
            raise

    def _fail(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """End the training on all ranks. What this rank has found wins over what others say."""
        self.state = State.FAILED
        error = CollectiveAborted(f"rank {self.transport.rank}: {why}")
        if self.units:
            self.lanes.abort(error)
        else:
            self.transport.abort()
        raise cause or error

    # ---- forward -----------------------------------------------------------------------------
    def forward(self, callback: Any, args: Any, kwargs: Any) -> Any:
        """The model's forward pass; compiled by a callback of torch.compile, if there is one."""
        if self.state in (State.BACKWARD, State.COLLECTING):
            if in_backward():  # activations are computed again
                return self.module(*args, **kwargs)
            self._broken()
        if self.state is State.FAILED:
            self._failed()
        self._told = self.syncs
        self.embeddings.set_sends(self.syncs)
        self.synchronize()  # no step: gradients are accumulated, or dropped
        if self._layout.changed():
            self._changed()
        self._compiled = self._layout.compiled or callable(callback)
        if self._compiled and self._chaining:
            self._fail(self.fault_of_chaining())
        self.moments.forward_begins()
        self._running += 1
        known = self.units or self._recorded or self._compiled
        watch = nullcontext() if known else Recorder(self.module, self.embeddings.weights)
        try:
            with watch as recorder, compiling_by(callback):
                result = self.module(*args, **kwargs)
        finally:
            self._running -= 1
        if recorder:
            self._recorded = recorder.gates()
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:  # hooks on a leaf would stay
                tensor.register_hook(Hook(self._enter))
        self.moments.forward_ends()
        self._passed = {*self._pending}
        return result

    def _changed(self) -> None:
        """Parameters were added, converted or thawed since the last forward pass."""
        self.layouts += 1
        self._listen()
        if self.units and not self._layout.fits(self.units):
            self.finish()
            self._retire()

    def _retire(self) -> None:
        """Make units anew after the next backward pass. Nothing is under way."""
        self._keep()
        self.lanes.close()
        self._gates.close()
        self._unbuilt()
        self._layout.unhook()
        self._listen()

    def _before(self, index: int) -> None:
        """Before the forward pass of a module that uses a unit, which must be final."""
        if self.state in (State.BACKWARD, State.COLLECTING):  # activations are computed again
            return
        self.moments.reached(index)
        self._update_unit(index)
        self.moments.goes_on(index)

    def _reach(self, parameter: Any) -> None:
        """Before a parameter is read through its module."""
        if (found := self._unit_of.get(id(parameter))) is None:
            return
        if self.state is State.SENDING and not self._running:
            self.synchronize()  # whoever reads it may read its gradient
        if self._pending and self._running:
            self._update_unit(found[0])
        elif self._pending:  # whoever reads one may change it, and then read others
            self.finish()

    def _update_unit(self, index: int) -> None:
        """Wait for a unit that is pending and update its parameters, as its gradients arrive."""
        if index not in self._pending:
            return
        if self.gradients.written(index):
            self._fail(checks.LATE)
        unit, arrivals = self.units[index], self._arrivals(index)
        self._refuse_written(unit.parameters, self._pending[index], checks.WRITTEN)
        first = next(arrivals)  # with the flags, which tell whether there are gradients
        del self._pending[index]
        lent = self.gradients.lent(index)
        try:
            with profiled(f"update {unit.name}"), self._stepper.at_work(), lent:
                self._stepper.update.part(unit.parameters, chain([first], arrivals))
        except CollectiveError:
            raise
        except BaseException as error:  # parameters may differ from those of the other ranks
            self._fail(f"{error!r} ended the update of {unit.name}", error)
        self._passed.discard(index)
        self.moments.updated(index)
        if not self._pending:
            self.state = State.AVERAGED

    def _arrivals(self, index: int) -> Iterator[int]:
        """Wait for a unit, and yield the addresses before which its gradients can be used."""
        base, flags = self.gradients.address(index), self.units[index].flags_nbytes
        try:
            for nbytes in self.lanes.arrivals(index):
                self.moments.arrived()
                if nbytes >= flags:
                    yield base + nbytes
        except CollectiveError:
            self.state = State.FAILED
            raise

    # ---- backward ----------------------------------------------------------------------------
    def _enter(self, *_: Any) -> None:
        """Before the first gradient of a backward pass is accumulated.

        Hooks of the model's results are the first to call it, as gradients may come in a pass
        inside this one: that of a checkpoint.
        """
        before = self.state
        if (before, Event.ENTER) not in TABLE:
            return
        self.moments.backward_enters()
        try:
            self._on(Event.ENTER)
        except CollectiveError as error:  # what this rank finds wrong in the pass comes first
            at_end(partial(throw, error))
        else:
            at_end(partial(self._end, before))

    def _begin(self) -> None:
        """The first gradient has been accumulated: torch.autograd.grad accumulates none."""
        if self.sends:
            self._guarded(self.roll.goes_on)
        if self.sends and not self._flagged and any(frozen(self.units)):
            self._retire()  # without flags, what a residual has of frozen parameters would be sent
        self._left = [len(unit.parameters) for unit in self.units]
        if not (self.sends and self.units):
            return
        if self.program.chained:
            self._gates.open(guard=True)  # evaluation may have closed them
        self.moments.next_step(self.lanes.sent)
        if self.roll.complete:  # others have no records
            self.tuner.before_step()
        self.exchange.begin()
        self.lanes.begin(self.moments.on)

    def _gradient(self) -> None:
        try:
            self._guarded(partial(self._on, Event.GRADIENT))
        except CollectiveError as error:
            at_end(partial(throw, error))

    def _begin_rows(self) -> None:
        """In a backward pass that reaches rows of embeddings, and maybe no other parameter."""
        self._enter()
        self._gradient()

    def _accumulated(self, parameter: Any) -> None:
        """After the accumulation of a parameter's gradient."""
        if self.state is not State.COLLECTING:
            self._gradient()
        if self.state is State.FAILED:  # which is raised at the end of the pass
            return
        hooks = parameter._post_accumulate_grad_hooks
        if len(hooks) > 1 and not all(isinstance(hook, Hook) for hook in hooks.values()):
            self._fail(checks.HOOKED.format(self._layout.name_of(parameter)))
        if (found := self._unit_of.get(id(parameter))) is None or not self._left:
            if fault := checks.fault_of(parameter.grad, self._layout.name_of(parameter)):
                self._fail(fault)
            return
        index, i = found
        unit, left = self.units[index], self._left[index]
        when = index in self._passed, not left and self.sends
        if fault := checks.fault_of(parameter.grad, unit.names[i], unit.name, *when):
            self._fail(fault)
        self._left[index] = left - 1
        if self.sends:
            self.lanes.accumulated(index)
            if left == 1 and self.state is State.COLLECTING:
                self._collected(index)

    def _collected(self, index: int) -> None:
        self.lanes.collects(index)
        self.gradients.collect(index)
        self.moments.ready(index)
        self.lanes.ready(index)

    def _end(self, before: State) -> None:
        """At the end of a backward pass that was in state `before` when it began."""
        if self.state is State.BACKWARD:
            resting = State.AVERAGED if before in (State.SENDING, State.PENDING) else before
            if self._layout.bare:
                self._on(Event.EMPTY)
            else:  # of torch.autograd.grad, or of a part that is frozen
                self.state = resting
        elif self.state is State.COLLECTING:
            sends, self._told = self.sends, None
            if sends:
                self._guarded(self._send)
            else:
                self.embeddings.end_backward()
                self._on(Event.KEPT)

    def _send(self) -> None:
        """Send what is left, then rows, as all ranks do; wait unless the program is chained."""
        self._fresh = True
        if not self.units and self._rows_only != self.layouts:
            self._build()
        if self.units:
            self.moments.backward_ends()
        for index, left in enumerate(self._left):
            if left:
                self._collected(index)
        self.embeddings.end_backward()
        if not self.units:  # all parameters are those of embeddings
            self._rows_only, self.state = self.layouts, State.AVERAGED
            self._after(0)
            return
        if fault := self.gradients.fault():
            self._fail(fault)
        self._passed = set()
        self._on(Event.SENT)
        if self.program.chained:
            self.gradients.seal()
            self._versions = [p._version for unit in self.units for p in unit.parameters]
        else:
            self._arrive_unchanged()
            self.state = State.AVERAGED
        self.steps += 1
        if self._checks and self.roll.complete:
            self._check.step(self.steps)
        self._after(self.roll.present[0])
        if self._rebuilds and self._layout.frozen_long(self.units):
            self.finish()
            self._retire()

    def _arrive(self) -> None:
        """Wait until gradients under way are averages."""
        self._check_unchanged()
        self._arrive_unchanged()

    def _arrive_unchanged(self) -> None:
        self._guarded(self.lanes.wait_all)
        self.exchange.settle()
        self.gradients.show()

    def _check_unchanged(self) -> None:
        """Raise if gradients were changed after the backward pass, while they were being sent."""
        if self.gradients.changed():
            self._fail(checks.CHANGED)
        parameters = [p for unit in self.units for p in unit.parameters]
        self._refuse_written(parameters[: len(self._versions)], self._versions, checks.FOREIGN)
        self._versions = []

    def _refuse_written(self, parameters: Any, versions: list[int], words: str) -> None:
        """Raise if a parameter was changed in place since it had its version."""
        for parameter, version in zip(parameters, versions, strict=True):
            if parameter._version != version:
                self._fail(words.format(self._layout.name_of(parameter)))

    def take_part(self) -> None:
        """Take part in a backward pass of other ranks, with what has not been sent, or zeros."""
        if self.state is not State.LOCAL:
            drop_gradients(self.module)
        self._told = None  # of a forward pass in no_sync() that nothing has followed
        self._on(Event.ENTER)
        self._on(Event.GRADIENT)
        self._guarded(self._send)
        self.synchronize()
        drop_gradients(self.module)
        self.state, self._told, self._fresh = State.IDLE, None, False

    # ---- building ----------------------------------------------------------------------------
    def _build(self) -> None:
        """Divide the module into units, and send the gradients of this pass at once. All ranks must
        call it; rank 0's forward pass counts."""
        self._layout.changed()
        if not (units := self._layout.units(self._recorded, self.transport)):
            return
        self.gradients = GradientBuffers(units, self.transport.empty, flagged=self._flagged)
        self.exchange = self._exchange_of(self.gradients)
        self.moments.clock = clock_of(units[0].device)  # the model may have been moved
        self.transport.open(1)
        self.program = after_backward(self.gradients.slots, [unit.name for unit in units])
        self.lanes = self._lanes()
        self.units = tuple(units)
        for index, unit in enumerate(units):
            for i, parameter in enumerate(unit.parameters):
                self._unit_of[id(parameter)] = index, i
        self._left = [len(unit.parameters) for unit in units]
        self._gates = Gates(self.module, units, self._before, Hook(self._reach))
        self._check = checks.DivergenceCheck(units, self.transport)
        self.tuner = self._tuner_of(self)
        self.exchange.load(self._kept)
        self.exchange.begin()
        self.lanes.begin(self.moments.on)
        if self._chaining and (why := self.fault_of_chaining()):
            self._fail(why)

    def adopt(self, program: Program) -> None:
        """Carry out another program from the next step on. All ranks must call it."""
        if program.chained and (why := self.fault_of_chaining()):
            raise CollectiveError(why)
        self.complete()
        self.transport.open(program.lanes)
        self.lanes.close()
        self.program = program
        self.lanes = self._lanes()
        self._set_gates()
        self.moments.forget()

    def fault_of_chaining(self) -> str:
        """Why the training cannot be chained, and how not to ask for it; empty if it can."""
        words = "the training cannot be chained with the next forward pass"
        why = fault_of_chaining(self._compiled, self.dense_steppers, self.units)
        return f"{words}: {why}; {self._chaining}" if why else ""

    def _lanes(self) -> Lanes:
        return lanes_of(
            self.transport, self.gradients, self.program, self.exchange, self.embeddings
        )

    def record_steps(self, who: str, recording: bool) -> None:
        """Take down the moments of the next steps for the user or the tuner, or no more."""
        self.moments.asking[who] = recording
        if self.units:
            self._set_gates()

    def _set_gates(self) -> None:
        """Wait before layers, if they may be pending; or note when they are reached."""
        self._gates.close()
        if self.program.chained or (self.moments.on and not self._compiled):
            self._gates.open(guard=self.program.chained)

    def train(self, mode: bool) -> None:
        """Training or evaluation begins."""
        self.finish()
        if self.units and mode:
            self._set_gates()
        elif not mode:
            self.rest()

    def rest(self) -> None:
        """Before a forward pass without gradients: if all is final, nothing need wait any more."""
        if self.units and self.state in FINAL and not self.moments.on:
            self._gates.close()

    # ---- step --------------------------------------------------------------------------------
    def before_step(self, stepper: Stepper) -> bool:
        """An optimizer's `step` is called. Returns whether it is put off: each unit is updated
        before its next use."""
        if stepper not in self.dense_steppers:
            self.embeddings.step(stepper.optimizer)
            return True
        if self.state is State.SENDING and not stepper.update.separable:
            self.synchronize()
        self._stepper = stepper
        if self._told and not self._fresh:  # no backward pass has come of the last forward pass
            self._refuse()
        self._told, self._fresh = None, False
        if self.units and self.state in (State.AVERAGED, State.SENDING):
            why = "came before a forward pass of DataParallel with it"
            self._refuse_local(why, lambda p: id(p) not in self._unit_of)
        self._begun = self.moments.step_begins() if self.units else None
        self._on(Event.STEP)
        later = self.state is State.PENDING
        self.embeddings.step(stepper.optimizer)
        return later

    def after_step(self) -> None:
        self.moments.step_ends(self._begun)

    @property
    def known(self) -> set[int]:
        """All parameters of the module, by identity."""
        return {id(parameter) for parameter in self._layout.parameters} | self.embeddings.weights

    @property
    def skips(self) -> bool:
        """Whether the step is to be left out, as gradients are not finite."""
        return bool(self.units) and self.exchange.skips

    def _defer(self) -> None:
        """Put the step off: updates take what the optimizer's options are now."""
        self._check_unchanged()
        update = self._stepper.update
        update.snapshot()
        self._pending = {
            index: [parameter._version for parameter in unit.parameters]
            for index, unit in enumerate(self.units)
        }
        with torch.no_grad():
            update.rest(self.units)

    def _compare(self) -> None:
        """Raise for a step whose gradients were not averaged."""
        local = self.state is State.LOCAL
        why = "are those of a pass in no_sync()" if local else "were not made by a backward pass"
        self._refuse_local(why, lambda p: bool(p.grad.any()))

    def _refuse_local(self, why: str, wrong: Callable[[Any], bool]) -> None:
        for parameter in self._layout.trained:
            if parameter.grad is not None and wrong(parameter):
                self._fail(checks.LOCAL.format(self._layout.name_of(parameter), why))

    def _refuse(self) -> NoReturn:
        self._fail(checks.unreached())

    # ---- waiting -----------------------------------------------------------------------------
    def synchronize(self) -> None:
        """Wait until gradients under way are averages, as after a backward pass of DDP."""
        if self.state is State.SENDING:
            self._on(Event.SYNCHRONIZE)

    def complete(self) -> None:
        """Carry out a step that was put off."""
        if self.state is State.PENDING:
            self.finish()

    def finish(self) -> None:
        """Wait until all parameters are final and nothing is under way."""
        if self.state is not State.CLOSED:
            self._on(Event.FINISH)
            self.embeddings.finish()

    def _update(self) -> None:
        """Update all units that are pending; the buffers may be written to then."""
        for index in sorted(self._pending):
            self._update_unit(index)
        self._drain()

    def _drain(self) -> None:
        if self.units:  # of a queue, others may still read our part
            self._guarded(self.lanes.wait_all)

    def exchange_state(self) -> dict[str, Any] | None:
        """What the exchange must keep to go on."""
        if self.units:
            self._keep()
        return self._kept

    def _keep(self) -> None:
        """Take over what the exchange has of parameters that the module still has."""
        kept = self.exchange.state_dict(self._kept)
        self._kept = kept and self._layout.still_there(self.units, kept)

    def load_exchange(self, state: dict[str, Any] | None) -> None:
        """Go on from such a state."""
        self._kept = state
        if self.units:
            self.exchange.load(state)

    def close(self) -> None:
        """Carry out what is pending, remove all hooks and end the lanes."""
        try:
            if self.state in (State.BACKWARD, State.COLLECTING):
                self._fail("training was closed in a backward pass")
            if self.state is not State.FAILED:
                self.finish()
        finally:
            self.state = State.CLOSED
            self._layout.unhook()
            if self.units:
                self._gates.close()
                self.lanes.close()
