"""`DataParallel`: a model that trains on several ranks, by a schedule of its all-reduces."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linkweave.collectives.calls.trace import Trace
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.overlap import POLICIES, MeasuredStep, Schedule
from linkweave.collectives.runtime.uncompiled import uncompiled, uncompiled_methods
from linkweave.collectives.training.admission import (
    compare_exchanges,
    copy_from_rank_0,
    refuse,
    refuse_module,
    send_buffers,
    triton_trouble,
)
from linkweave.collectives.training.embedding.optimizer import Embeddings
from linkweave.collectives.training.engine import Engine
from linkweave.collectives.training.exchange import Dense, Exchange
from linkweave.collectives.training.gradient_buffers import GradientBuffers
from linkweave.collectives.training.gtopk.exchange import SparseExchange
from linkweave.collectives.training.gtopk.options import KEY, GTopK, check_state, keep_in, kept_in
from linkweave.collectives.training.hooks import Hook, compiling_by, nothing
from linkweave.collectives.training.joining import joined
from linkweave.collectives.training.layout import drop_gradients
from linkweave.collectives.training.program import Program, StepRecord
from linkweave.collectives.training.stepping import refuse_another_scaler, stepper_of
from linkweave.collectives.training.transport import Transport, transport_of
from linkweave.collectives.training.tuner import Tuner
from linkweave.collectives.training.update import LossScale, groups_of, loss_scale_of

log = logging.getLogger("linkweave")

_DROPS = "training without GTopK drops the gradients that it had kept in the optimizer's state"


@uncompiled_methods
class DataParallel(nn.Module):
    """Trains `module` on all ranks: each computes gradients of its own batch, which are averaged.

    module: parameters may be frozen, tied or unused, and may be added, converted, frozen or thawed
        later on. Parameters and buffers of rank 0 are copied to all ranks.
    optimizer: a torch.optim.Optimizer with parameters of `module`, except LBFGS, or a list of them.
        Their `step` and `zero_grad` take part from now on. An optimizer may train several models,
        each in a DataParallel with it.
    schedule: when which gradients are sent. "auto" measures some steps and the network, tries the
        schedule predicted to be the fastest and a few others, and keeps the fastest; the name of a
        policy measures and plans with that one; a `Schedule` is carried out from the first step on.
    chained: whether "auto" may choose schedules that chain a step with the next forward pass.
        Policies that chain by their nature, asked for by their name, do so in any case: c-cube,
        bytescheduler, us-byte, dear, optimal.
    exchange: "dense", the average of all gradients, or `GTopK`, which sends the largest ones. What
        a rank has not sent is part of the optimizer's state_dict, which then differs between ranks.
    group: a `Communicator` or a ProcessGroup of torch.distributed; by default the default
        communicator, the default process group, or the ranks started by torchrun, whichever is
        there first. A single rank trains as without this class.
    broadcast_buffers: whether each backward pass that sends also copies rank 0's buffers, such as
        running statistics of BatchNorm, to all ranks; else each rank keeps its own.
    check_divergence: whether trained parameters are compared over ranks, a part of them every 16
        steps and all in 256.
    reduce_dtype: torch.bfloat16 lets float32 gradients travel in half as many bytes; parameters and
        optimizer stay float32.
    scaler: the torch.amp.GradScaler of the loop, which `GTopK` and a `ShardedEmbedding` must know.
        Residuals are kept without its scale; each backward pass ends with the averaged rows, in
        this rank's columns, as the sparse gradients of embeddings' weights.

    The training loop stays as it is. Gradients are averages when `backward` returns, if the
    schedule is not chained. If it is (`program.chained`), they are still under way when `step`
    returns; a layer is updated just before its next use, with the learning rate of the time of
    `step`. Whoever reads a parameter through a module, or all with `parameters`, `state_dict`,
    `eval` and the like, first waits for its update. A reference to a parameter that the loop keeps
    shows the old values until then; changing them, but through `.data`, is an error.

    All ranks must make the same backward passes and steps; a forward pass alone sends nothing.
    Hooks that the loop registers on parameters see this rank's gradients. Rounding: an average is
    the sum over all ranks in the order of the all-reduce, divided once.
    Raises CollectiveError on every rank if the models differ, and later if their parameters part;
    CollectiveAborted or CollectiveTimeout in a later call if a rank fails; CollectiveError for what
    cannot be chained, if that is asked for.
    Sources: C-Cube, sections III-D and IV; ASC-WFBP; US-Byte, section 5.
    """

    def __init__(
        self, module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], *,
        schedule: str | Schedule = "auto", chained: bool = False,
        exchange: Literal["dense"] | GTopK = "dense", group: Any = None,
        broadcast_buffers: bool = True, check_divergence: bool = True,
        reduce_dtype: torch.dtype | None = None, scaler: torch.amp.GradScaler | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _keep_keys(self)
        optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        refuse(module, optimizers, schedule, chained, exchange, reduce_dtype)
        scale = loss_scale_of(scaler)
        self.module = module
        self._engine: Engine | None = None
        self._end = ""  # why it takes no part in training any more
        self._warned = False
        self._spec: GTopK | None = None
        self._first = optimizers[0]  # whose state has that of the exchange
        self._loading: dict[str, Any] = {}
        self._handles: list[Any] = []
        device = next((p.device.type for p in module.parameters()), "cpu")
        transport = transport_of(group, device)
        self._rank_and_size = (transport.rank, transport.size) if transport else (0, 1)
        if transport is None:
            self._follow_states(optimizers, self._loaded(optimizers))
            return
        try:
            self._join(transport, module, optimizers, schedule, chained, exchange,
                       broadcast_buffers, check_divergence, reduce_dtype, scale)  # fmt: skip
        except BaseException:
            transport.close()
            raise

    def _join(
        self, transport: Transport, module: nn.Module, optimizers: list[torch.optim.Optimizer],
        schedule: str | Schedule, chained: bool, exchange: Literal["dense"] | GTopK,
        broadcast_buffers: bool, check_divergence: bool, reduce_dtype: torch.dtype | None,
        scale: LossScale | None,
    ) -> None:  # fmt: skip
        refuse_module(module)
        for optimizer in optimizers:
            refuse_another_scaler(optimizer, scale)
        plan = schedule if isinstance(schedule, str) else "a Schedule"
        compare_exchanges(
            transport, exchange, schedule=plan, chained=chained,
            broadcast_buffers=broadcast_buffers, check_divergence=check_divergence,
            reduce_dtype=reduce_dtype, scaler=scale and scale.options,
            triton=(trouble := triton_trouble(module)),
        )  # fmt: skip
        if trouble:
            raise CollectiveError(trouble)
        self._transport = transport
        self._spec = spec = exchange if isinstance(exchange, GTopK) else None
        loaded = self._loaded(optimizers)
        embeddings = Embeddings()
        before: Any = Hook(self._before_state)
        embeddings.attach(module, optimizers, transport, before, self._skips, scale is not None)
        without = embeddings.weights
        copy_from_rank_0(transport, module, without)
        after = partial(send_buffers, transport, module) if broadcast_buffers else nothing
        self._shares_buffers = broadcast_buffers

        def exchange_of(gradients: GradientBuffers) -> Exchange:
            if spec is None:
                return Dense(gradients, transport, reduce_dtype)
            return SparseExchange(spec, gradients, transport, scale)

        policy = POLICIES.get(schedule) if isinstance(schedule, str) else None
        other = policy.chains if policy else getattr(schedule, "chained", False)
        ways = ["leave out chained=True"] * chained
        ways += ["take a schedule that is not chained"] * (spec is None and other)
        chaining = " and ".join(ways)
        chains = chained or schedule != "auto"
        trace = Trace(transport.rank)  # here, where a bad value of LINKWEAVE_DEBUG is an error
        self._engine = engine = Engine(
            module, transport, embeddings, flagged=spec is None, exchange_of=exchange_of,
            tuner_of=lambda engine: Tuner(schedule, engine, chains, trace), after=after,
            rebuilds=not isinstance(schedule, Schedule), compares=check_divergence,
            chaining=chaining,
        )  # fmt: skip
        for optimizer in optimizers:
            stepper = stepper_of(optimizer)
            stepper.engines.append(engine)
            stepper.scale = scale
            engine.steppers.append(stepper)
        if chaining and (why := engine.fault_of_chaining()):
            engine.close()
            self._leave()
            raise CollectiveError(why)
        registers: list[Any] = []
        for one in optimizers:
            registers += [one.register_state_dict_pre_hook, one.register_load_state_dict_pre_hook]
        for part in module.modules():
            registers += [part.register_state_dict_pre_hook, part.register_load_state_dict_pre_hook]
        self._handles += [register(before) for register in registers]
        self._handles.append(self._first.register_state_dict_post_hook(Hook(self._add_state)))
        self._follow_states(optimizers, loaded)
        if spec:
            self._mark(self._first)

    # ---- the training loop -------------------------------------------------------------------
    @partial(uncompiled, inside=True)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if not torch.is_grad_enabled():
            if self._engine:
                self._engine.rest()
            return self.module(*args, **kwargs)
        if self._end and any(p.requires_grad for p in self.module.parameters()):
            raise CollectiveError(
                f"this DataParallel {self._end}, so that gradients would not be averaged: train "
                "its module alone, or pass it to DataParallel with an optimizer again; to evaluate "
                "it, call it under torch.no_grad()"
            )
        if self._engine is None:
            return self.module(*args, **kwargs)
        if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
            raise CollectiveError(
                "this DataParallel is inside DistributedDataParallel, and both would average its "
                "gradients, to wrong values: pass it to nothing else, or let DDP have the module "
                'over init_process_group("linkweave")'
            )
        with compiling_by(None) as callback:
            return self._engine.forward(callback, args, kwargs)

    def _skips(self) -> bool:
        """Whether gradients are not finite, so that the step is to be left out."""
        return self._engine is not None and self._engine.skips

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the module's parameters."""
        if self._engine:
            self._engine.synchronize()  # a step may be left out
            if not set_to_none:  # gradients under way must not be overwritten
                self._engine.finish()
            self._engine.embeddings.drop()
            if set_to_none and type(self.module).zero_grad is nn.Module.zero_grad:
                drop_gradients(self.module)  # a step that is put off stays so
                return
        self.module.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward passes inside are added to those of this rank, and not sent."""
        engine = self._engine
        if engine is None:
            yield
            return
        engine.finish()
        before, engine.syncs = engine.syncs, False
        try:
            yield
        finally:
            engine.syncs = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may have batches in unequal number, as with the `join` of DDP.

        A rank that has left its loop waits here, and takes part in the passes of the others with
        zeros: averages are still divided by the number of all ranks. When the last one is done,
        parameters, buffers and the optimizers' states and options are those of a rank that trained
        to the end; learning-rate schedulers are not. Each pass tells all ranks that its loop goes
        on. Raises CollectiveError for a ShardedEmbedding or SyncBatchNorm inside the module, in
        join() of any model or no_sync(), and at the first step of a GradScaler inside.
        """
        engine = self._engine
        if engine is None:
            yield
            return
        with joined(engine, self._shares_buffers):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the averaged gradients by their global norm, as `torch.nn.utils.clip_grad_norm_`.

        Waits for all gradients, so nothing is sent beside the next forward pass. Returns the norm.
        """
        program = self.program
        if program and program.chained and not self._warned:
            self._warned = True
            log.warning(
                "clip_grad_norm_ waits for all gradients: a schedule that is not chained is faster"
            )
        self.synchronize()
        embeddings = self._engine.embeddings if self._engine else Embeddings()
        return embeddings.clip_grad_norm_([*self.module.parameters()], max_norm, norm_type)

    # ---- waiting -----------------------------------------------------------------------------
    def synchronize(self) -> None:
        """Between `backward` and `step`: wait until all gradients are averaged."""
        if self._engine is not None:
            self._engine.synchronize()

    def finish(self) -> None:
        """Wait until the last step is complete: all gradients averaged, all parameters updated."""
        if self._engine is not None:
            self._engine.finish()

    def _before_state(self, *_: Any) -> None:
        self.finish()

    def _add_state(self, _: Any, state: dict[str, Any]) -> None:
        """Add what the exchange has not sent to the optimizer's state: zeros before there is any,
        so that a checkpoint is asked for it."""
        if self._engine and self._spec:
            rank, size = self._rank_and_size
            kept = self._engine.exchange_state() or {"steps": 0, "residual": {
                name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
                for name, p in self.module.named_parameters()
                if p.requires_grad and id(p) not in self._engine.embeddings.weights
            }}  # fmt: skip
            keep_in(state, {**kept, "rank": rank, "size": size})

    def _mark(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's groups have the entries of its states, so that tools look for them; of
        what has been loaded none."""
        group = groups_of(optimizer)[0]
        if group.get(KEY):
            del group[KEY]
        if self._spec and self._engine and optimizer is self._first:
            group[KEY] = {}

    def _loaded(self, optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Those that have loaded what an exchange of this model had kept."""
        return [o for o in optimizers if self._check_state(o, {"param_groups": groups_of(o)})]

    def _follow_states(
        self, optimizers: list[torch.optim.Optimizer], loaded: list[torch.optim.Optimizer]
    ) -> None:
        """Take what has been loaded, and what will be."""
        for optimizer in loaded:
            self._take_state(optimizer)
        for optimizer in optimizers:
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(Hook(self._check_state)),
                optimizer.register_load_state_dict_post_hook(Hook(self._take_state)),
            ]

    def _check_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Before an optimizer loads its state: what there is of an exchange must fit. Returns
        whether there is anything of this model."""
        kept = kept_in(state, *self._rank_and_size)
        if optimizer is self._first:
            self._loading = kept
        if not kept:
            return False
        shapes = {name: p.shape for name, p in self.module.named_parameters()}
        if not self._spec:
            ours: bool = kept["residual"].keys() <= shapes.keys()
            if ours:
                log.warning(_DROPS)
            return ours
        if optimizer is not self._first:
            raise CollectiveError(
                "what GTopK has kept is in the state of another optimizer than the first one: give "
                "DataParallel the optimizers in the order of the training that saved it"
            )
        check_state(kept, *self._rank_and_size, shapes)
        return True

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """After that: go on from there."""
        self._mark(optimizer)
        if self._spec and self._engine and optimizer is self._first:
            self._engine.load_exchange(self._loading or None)

    def train(self, mode: bool = True) -> DataParallel:
        if self._engine:
            self._engine.train(mode)
        super().train(mode)
        return self

    # ---- what it looks like from outside -----------------------------------------------------
    @property
    def program(self) -> Program | None:
        """What each step sends; None before the first backward pass, and on a single rank."""
        return self._engine.program if self._engine and self._engine.units else None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule with its predictions; None while times are being measured."""
        tuner = self._engine.tuner if self._engine else None
        return tuner.schedule if tuner else None

    def record_steps(self, recording: bool = True) -> None:
        """Take down what steps do and when, for `last_step` and `save_step`, or no more.

        While "auto" or a policy measures, steps are recorded in any case.
        """
        if self._engine:
            self._engine.record_steps("user", recording)

    @property
    def last_step(self) -> StepRecord | None:
        """What the last complete step that was recorded did and when, up to the forward pass after
        it."""
        return self._engine.moments.last if self._engine else None

    def save_step(self, path: str | Path) -> None:
        """Write what `linkweave train-trace` compares and draws: the last complete step of this
        rank that was recorded, and the prediction of its schedule.

        Right after a change of the schedule they are those of the one before. Raises
        CollectiveError as long as no step of a schedule is complete.
        """
        Path(path).write_text(self._measured_step().to_json())

    def metrics(self) -> dict[str, float]:
        """The last complete step of this rank that was recorded, in numbers for a dashboard.

        step_s: its seconds: compute_s of the passes, exposed_s of communication that no pass hides,
            and other_s, the optimizer and the loop's own work.
        communication_s: in which something was on its way; hidden_s: of these, beside the passes.
        nbytes: of the gradients; algbw: these by communication_s; all_reduces: how many there were.
        predicted_s: the schedule's own step. chained: 1.0 or 0.0.

        Right after a change of the schedule it is the last step of the one before, as in
        `save_step`. Raises as that does.
        """
        step = self._measured_step()
        schedule, line = step.schedule, step.timeline
        communication, hidden = line.communication_s, line.hidden_s
        nbytes = schedule.profile.nbytes
        return {
            "step_s": line.seconds, "compute_s": line.seconds - line.exposed_s,
            "exposed_s": communication - hidden,
            "other_s": line.exposed_s - (communication - hidden),
            "communication_s": communication, "hidden_s": hidden,
            "nbytes": float(nbytes), "all_reduces": float(schedule.all_reduces),
            "algbw": nbytes / communication if communication else 0.0,
            "predicted_s": schedule.predicted_seconds, "chained": float(schedule.chained),
        }  # fmt: skip

    def _measured_step(self) -> MeasuredStep:
        tuner: Tuner | None = self._engine.tuner if self._engine else None
        step = tuner.measured if tuner else None
        if not (self._engine or self._end):
            raise CollectiveError("a single rank trains without a schedule: it records no steps")
        if step is None:
            raise CollectiveError(
                "no step of a schedule has been recorded: call record_steps(), and train a few "
                "steps more"
            )
        return step

    def __getattr__(self, name: str) -> Any:
        """What it lacks is the module's, such as its layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A layer that the module has is replaced there."""
        inner = self.__dict__.get("_modules", {}).get("module")
        mine = name in self.__dict__ or name == "module" or hasattr(type(self), name)
        if inner is not None and not mine and not name.startswith("_") and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Itself, and the module's modules by the names that they have there."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

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

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint which names go without `module.`."""
        inner = self.module
        return dict.fromkeys([*inner._modules, *inner._parameters, *inner._buffers], "module")

    # ---- copies ------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy takes no part in training; it may be evaluated, saved and loaded."""
        self.finish()
        return _copy_of(copy.deepcopy(self.module, memo), self.training, self._copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.finish()
        return _copy_of, (self.module, self.training, self._copied)

    @property
    def _copied(self) -> str:
        """Why a copy takes no part in training; on a single rank it trains as any module does."""
        return "is a copy" if self._engine else self._end

    # ---- the end -----------------------------------------------------------------------------
    def close(self) -> None:
        """Complete the last step and leave module and optimizer as they were. May be repeated.

        What GTopK has not sent is dropped, unless the optimizer's state was saved before.
        """
        if self._engine is None:
            return
        try:
            self._engine.close()
        finally:
            self._leave()
            for handle in self._handles:
                handle.remove()
            self._transport.close()

    def _leave(self) -> None:
        """No optimizer and no embedding takes part any more."""
        engine, self._engine, self._end = self._engine, None, "is closed"
        assert engine is not None
        if self._spec:
            groups_of(self._first)[0].pop(KEY, None)
        for stepper in engine.steppers:
            stepper.leave(engine)
        engine.embeddings.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            self.close()
        except CollectiveError:
            if error is None:  # else the caller's own is the one to raise
                raise


def _copy_of(module: nn.Module, training: bool, end: str) -> DataParallel:
    made = DataParallel.__new__(DataParallel)
    nn.Module.__init__(made)
    made.module, made.training = module, training
    made._engine, made._end = None, end
    made._warned = False
    _keep_keys(made)
    return made


def _keep_keys(wrapper: Any) -> None:
    """Let a module around the wrapper load what it saves."""
    wrapper.register_load_state_dict_pre_hook(_inside)


def _inside(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module around it loads its state, which has no `module.` in its keys."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)
