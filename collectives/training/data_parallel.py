"""`DataParallel`: a model that trains on several ranks, by a schedule of its all-reduces."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import MeasuredStep, Schedule
from linkweave.collectives.overlap.units import Recorder, units_of
from linkweave.collectives.training.admission import (
    compare_exchanges,
    compiled,
    copy_from_rank_0,
    refuse,
)
from linkweave.collectives.training.attach import attach, detach, result_of
from linkweave.collectives.training.embeddings import Embeddings
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.gtopk import KEY, GTopK, check_state
from linkweave.collectives.training.hooks import Hook
from linkweave.collectives.training.momentum import Momentum
from linkweave.collectives.training.planner import Planner
from linkweave.collectives.training.program import Program
from linkweave.collectives.training.state import State
from linkweave.collectives.training.step_record import StepRecord, timeline_of
from linkweave.collectives.training.transport import Transport, transport_of
from linkweave.collectives.training.update import Update

log = logging.getLogger("linkweave")


class DataParallel(nn.Module):
    """Trains `module` on all ranks: each computes gradients of its own batch, which are averaged.

    module: parameters may be frozen, tied or unused. Parameters and buffers of rank 0 are copied to
        all ranks; afterwards each rank keeps its own buffers (running statistics of BatchNorm).
    optimizer: a torch.optim.Optimizer with parameters of `module`, except LBFGS. Its `step` and
        `zero_grad` take part from now on. A list of optimizers, if those after the first train
        the `ShardedEmbedding`s of `module` only.
    schedule: when which gradients are sent. "auto" measures some steps and the network, tries the
        schedule predicted to be the fastest and a few others, and keeps the fastest; the name of a
        policy measures and plans with that one; a `Schedule` is carried out from the first step on.
    chained: whether "auto" may choose schedules that chain a step with the next forward pass. What
        it takes for granted is below. Policies that chain by their nature, asked for by their name,
        do so in any case: c-cube, bytescheduler, us-byte, carlier, optimal.
    exchange: "dense", the average of all gradients, or `GTopK`, which sends the largest ones. What
        a rank has not sent is part of the optimizer's state_dict, which then differs between ranks.
    group: a `Communicator` or a ProcessGroup of torch.distributed; by default the default
        communicator, the default process group, or the ranks started by torchrun, whichever is
        there first. A single rank trains as without this class.

    The training loop stays as it is. With a chained schedule (`program.chained`), gradients are
    still under way when `step` returns; a layer is updated just before its next forward pass, with
    the learning rate of the time of `step`. `state_dict`, `eval`, `parameters` and the like first
    wait for the update of all layers. After `backward`, gradients are averaged once
    `synchronize` has returned, or at once if the schedule is not chained.

    All ranks must make the same passes and steps. Rounding: an average is the sum over all ranks in
    the order of the all-reduce, divided once.
    Raises CollectiveError on every rank if the models differ; CollectiveAborted or
    CollectiveTimeout in a later call if a rank fails.
    Sources: C-Cube, sections III-D and IV; ASC-WFBP; US-Byte, section 5.
    """

    def __init__(
        self, module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], *,
        schedule: str | Schedule = "auto", chained: bool = False,
        exchange: Literal["dense"] | GTopK = "dense", group: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        refuse(module, optimizers, schedule, exchange)
        optimizer = optimizers[0]
        self.module, self.optimizer = module, optimizer
        self._schedule, self._sends, self._warned = schedule, True, False
        self._chained = chained or schedule != "auto"
        self._transport: Transport | None = transport_of(group)
        self._engine: Engine | None = None
        self._planner: Planner | None = None
        self._all: list[nn.Parameter] = []
        self._trained: list[bool] = []  # which of them the engine knows
        self._sparse = exchange if isinstance(exchange, GTopK) else None
        self._state: dict[str, Any] | None = None  # of the exchange, as long as no engine has it
        self._loading: dict[str, Any] | None = None
        self._embeddings = Embeddings()
        if self._transport is None:
            self._update = Update(optimizer)
            return
        compare_exchanges(self._transport, exchange)
        momentum = None
        if self._sparse and self._sparse.momentum == "correction":
            momentum = Momentum(optimizer)
        self._update = Update(optimizer, momentum)
        before: Any = Hook(self._before_state)
        self._embeddings.attach(module, optimizers, self._transport, before, self._skips)
        copy_from_rank_0(self._transport, module, self._embeddings.weights)
        self._kind = attach(optimizer, self)
        registers: list[Any] = [
            optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook
        ]  # fmt: skip
        for part in module.modules():
            registers += [part.register_state_dict_pre_hook, part.register_load_state_dict_pre_hook]
        self._handles: list[Any] = [register(before) for register in registers]
        self._handles += [
            optimizer.register_state_dict_post_hook(Hook(self._add_state)),
            optimizer.register_load_state_dict_pre_hook(Hook(self._check_state)),
            optimizer.register_load_state_dict_post_hook(Hook(self._take_state)),
        ]

    # ---- the training loop -------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if self._transport is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._engine is not None and self._trained != [p.requires_grad for p in self._all]:
            self._end_engine()  # and another one for what is trained now
        if self._engine is None:
            return self._first_forward(args, kwargs)
        assert self._planner is not None
        if self._sends:
            self._planner.before_pass()
        self._engine.begin_forward()
        result = self.module(*args, **kwargs)
        self._engine.end_forward(result)
        return result

    def _first_forward(self, args: Any, kwargs: Any) -> Any:
        """Record which module uses which parameters, and make an engine for them."""
        assert self._transport is not None
        with Recorder(self.module, self._embeddings.weights) as recorder:
            result = self.module(*args, **kwargs)
        mine = json.dumps(recorder.gates()).encode()
        gates = json.loads(self._transport.share(mine)[0])
        units = units_of(self.module, gates)
        if not units:
            raise CollectiveError("the model has no dense parameter that requires a gradient")
        if len(devices := {unit.device for unit in units}) > 1:
            raise CollectiveError(
                f"the model is on several devices: {', '.join(map(str, devices))}"
            )
        chains = self._chained and self._update.separable and not compiled(self.module)
        engine = Engine(
            self.module, units, self._transport, self._update, self._sparse, self._embeddings
        )
        engine.sends = self._sends
        self._all = [*self.module.parameters()]
        self._trained = [p.requires_grad for p in self._all]
        try:
            self._planner = Planner(self._schedule, engine, chains)
            if engine.sparse:
                engine.sparse.load(self._state)
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        engine.end_forward(result)
        return result

    def step(self, closure: Any = None) -> Any:
        """What `optimizer.step` does."""
        loss = result_of(closure)

        def plain() -> None:
            self._kind.step(self.optimizer)  # type: ignore[attr-defined]

        if self._engine is None:
            plain()
        else:
            self._embeddings.step()
            self._engine.step(plain)
        return loss

    def _skips(self) -> bool:
        """Whether gradients are not finite, so that the step is to be left out."""
        return bool(self._engine and self._engine.sparse and self._engine.sparse.bad)

    def drop(self) -> None:
        """Before `zero_grad` of the optimizer."""
        self._embeddings.drop(0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module's parameters."""
        self.synchronize()  # a step may be left out
        if not set_to_none:  # gradients under way must not be overwritten
            self.finish()
        self._embeddings.drop()
        self.module.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank, and send nothing."""
        self.finish()
        sent = self._sends
        self._set_sends(False)
        try:
            yield
        finally:
            self._set_sends(sent)

    def _set_sends(self, sends: bool) -> None:
        self._sends = sends
        self._embeddings.set_sends(sends)
        if self._engine is not None:
            self._engine.sends = sends

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the averaged gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`.

        Waits for all gradients, so nothing is sent beside the next forward pass. Returns the norm.
        """
        if self._engine and self._engine.program.chained and not self._warned:
            self._warned = True
            log.warning(
                "clip_grad_norm_ waits for all gradients: a schedule that is not chained is faster"
            )
        self.synchronize()
        parameters = [*self.module.parameters()]
        return self._embeddings.clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- waiting -----------------------------------------------------------------------------
    def synchronize(self) -> None:
        """Between `backward` and `step`: wait until all gradients are averaged."""
        if self._engine is not None:
            self._engine.synchronize()

    def finish(self) -> None:
        """Wait until the last step is complete: all gradients averaged, all parameters updated."""
        if self._engine is not None:
            self._engine.synchronize()
            self._engine.finish()
        self._embeddings.finish()

    def _before_state(self, *_: Any) -> None:
        self.finish()

    def _add_state(self, _: Any, state: dict[str, Any]) -> None:
        """Add what the exchange has not sent to the optimizer's state."""
        if self._engine and self._engine.sparse:
            self._state = self._engine.sparse.state_dict(self._state)
        if self._state:
            state[KEY] = self._state

    def _check_state(self, _: Any, state: dict[str, Any]) -> None:
        """Before the optimizer loads its state: what there is of an exchange must fit."""
        assert self._transport is not None
        self._loading = state.get(KEY)
        if self._loading and self._sparse:
            shapes = {name: p.shape for name, p in self.module.named_parameters()}
            check_state(self._loading, self._transport.rank, self._transport.size, shapes)
        elif self._loading:
            log.warning("exchange='dense' drops the gradients that GTopK had not sent")

    def _take_state(self, _: Any) -> None:
        """After that: go on from there; what there is of momentum in the optimizer counts."""
        if self._sparse:
            self._state = self._loading
            if self._engine and self._engine.sparse:
                self._engine.sparse.load(self._state)

    def train(self, mode: bool = True) -> DataParallel:
        self.finish()
        super().train(mode)
        return self

    # ---- what it looks like from outside -----------------------------------------------------
    @property
    def program(self) -> Program | None:
        """What each step sends; None before the first forward pass, and on a single rank."""
        return self._engine.program if self._engine else None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule with its predictions; None while times are being measured."""
        return self._planner.schedule if self._planner else None

    @property
    def last_step(self) -> StepRecord | None:
        """What the last complete step did and when, up to the forward pass after it."""
        return self._engine.last_step if self._engine else None

    def save_step(self, path: str | Path) -> None:
        """Write what `linkweave train-trace` compares and draws: the last complete step of this
        rank, and the prediction of its schedule.

        Raises CollectiveError as long as no step of the schedule is complete.
        """
        record, schedule, engine = self.last_step, self.schedule, self._engine
        if record is None or record.forward_end is None or schedule is None or engine is None:
            raise CollectiveError("no step of a schedule is complete: train a few steps more")
        line = timeline_of(record, engine.program, engine.clock)
        Path(path).write_text(MeasuredStep(schedule, line).to_json())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters, with its names; first `finish`."""
        self.finish()
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, with its names; first `finish`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state. The same on all ranks."""
        return self.module.load_state_dict(*args, **kwargs)

    # ---- the end -----------------------------------------------------------------------------
    def _end_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine, self._planner = self._engine, None, None
            engine.close()
            if engine.sparse:
                self._state = engine.sparse.state_dict(self._state)

    def close(self) -> None:
        """Complete the last step and leave module and optimizer as they were. May be repeated.

        What GTopK has not sent is dropped, unless the optimizer's state was saved before; the
        optimizer gets back its momentum.
        """
        self._close(gives_back=True)

    def _close(self, gives_back: bool) -> None:
        if self._transport is None:
            return
        engine = self._engine
        try:
            self._end_engine()
            if gives_back and engine and engine.sparse and engine.state is not State.ABORTED:
                engine.sparse.give_back()
        finally:
            for handle in self._handles:
                handle.remove()
            detach(self.optimizer, self._kind)
            self._embeddings.close()
            transport, self._transport = self._transport, None
            transport.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._close(gives_back=error is None)  # other ranks may have had no error
