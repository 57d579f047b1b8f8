"""The sharded embeddings of a model in training, and their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.embedding.schedule import Apply, RowSchedule
from linkweave.collectives.training.embedding.sharded import ShardedEmbedding
from linkweave.collectives.training.hooks import Hook, nothing
from linkweave.collectives.training.transport import Transport, parted
from linkweave.collectives.training.update import groups_of
from linkweave.kernels import embedding as rows
from linkweave.topology.checks import shown


class Embeddings:
    """What `DataParallel` drives: the steps of its embeddings follow those of its model.

    Without `attach`, and for a model without any, there are none.
    """

    def __init__(self) -> None:
        self.named: dict[str, ShardedEmbedding] = {}
        self._rows: dict[int, RowOptimizer] = {}  # by the identity of the optimizer
        self._shown: set[str] = set()  # those whose weights have gradients for a scaler
        self._handles: list[Any] = []

    def attach(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], transport: Transport,
        before: Any, skips: Callable[[], bool], scaled: bool = False,
    ) -> None:  # fmt: skip
        """Take part in the steps of the optimizers.

        `before` is called before their states are read or loaded; `skips` tells whether this step
        is to be left out. Are gradients `scaled`, each backward pass leaves their averages in the
        weights, where a GradScaler divides them.
        """
        self._transport, self._skips, self._scaled = transport, skips, scaled
        self.named = embeddings_of(module)
        _compare(transport, self.named)
        self._rows = {id(one): RowOptimizer(one, [*self.named.values()]) for one in optimizers}
        for name, embedding in self.named.items():
            if embedding.schedule is None:
                raise CollectiveError(f"ShardedEmbedding {name} is of one rank, or closed")
            trained = embedding.weight.requires_grad
            if scaled and trained and embedding.embedding_dim < transport.size:
                raise CollectiveError(
                    f"ShardedEmbedding {name} has {embedding.embedding_dim} columns for "
                    f"{transport.size} ranks: a GradScaler needs one on each to see its gradients"
                )
            embedding.schedule.lane.name = name
            holders = sum(embedding in rows.embeddings for rows in self._rows.values())
            if holders > 1 or (embedding.weight.requires_grad and not holders):
                raise CollectiveError(
                    f"one optimizer must have the weight of ShardedEmbedding {name}, not {holders}"
                )
        for optimizer in optimizers:
            if (rows := self._rows[id(optimizer)]).embeddings:
                rows.divide_state()
                self._handles += [
                    optimizer.register_state_dict_pre_hook(before),
                    optimizer.register_state_dict_post_hook(Hook(rows.add_state)),
                    optimizer.register_load_state_dict_pre_hook(before),
                    optimizer.register_load_state_dict_pre_hook(rows.take_state),
                ]

    @property
    def _schedules(self) -> list[RowSchedule]:
        return [e.schedule for e in self.named.values() if e.schedule is not None]

    @property
    def weights(self) -> set[int]:
        """Their parameters, by identity."""
        return {id(embedding.weight) for embedding in self.named.values()}

    def join(self, abort: Callable[[CollectiveError], None]) -> None:
        """Let an error of theirs end what else is sent."""
        for schedule in self._schedules:
            schedule.lane.on_abort = abort

    def listen(self, on_gradient: Callable[[], None]) -> None:
        """Call this in each backward pass that reaches rows."""
        for schedule in self._schedules:
            schedule.on_gradient = on_gradient

    def abort(self, error: CollectiveError) -> None:
        """End them, here and on the other ranks, because of this error."""
        for schedule in self._schedules:
            schedule.lane.abort(error)

    def set_sends(self, sends: bool) -> None:
        for schedule in self._schedules:
            schedule.sends = sends

    def end_backward(self) -> None:
        for name, embedding in self.named.items():
            if name in self._shown and embedding.weight.grad is None:  # dropped by the loop itself
                self._shown.remove(name)
                if embedding.schedule is not None:
                    embedding.schedule.drop()
            held = any(embedding in rows.embeddings for rows in self._rows.values())
            if embedding.schedule is not None and (held or not embedding.weight.requires_grad):
                embedding.schedule.end_backward()
            elif embedding.schedule is not None:
                embedding.schedule.fail(f"no optimizer has the weight of ShardedEmbedding {name}")
        if self._scaled:
            self._show()

    def _show(self) -> None:
        """Let each weight have the average gradient of its rows, in this rank's columns. If it is
        not finite on one rank, it is infinite on all, or NaN."""
        values = []
        for name, embedding in self.named.items():
            if (schedule := embedding.schedule) is not None and schedule.sends:
                embedding.weight.grad = schedule.as_gradient()
                if embedding.weight.grad is not None:
                    values.append(embedding.weight.grad._values())
                    self._shown.add(name)
        if not values:
            return
        found = [[~x.isfinite().all(), x.isnan().any()] for x in values]
        bad = torch.stack([flag for flags in found for flag in flags]).float()
        self._transport.total(bad)
        infinite, none = (bad > 0).view(-1, 2).unbind(1)
        marks = torch.where(none, torch.nan, torch.inf)
        for x, is_bad, mark in zip(values, infinite, marks, strict=True):
            x.copy_(torch.where(is_bad, mark.to(x.dtype), x))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """With the step of an optimizer. The optimizers step in any order."""
        if self._rows and self._skips():
            self.drop()
        if rows := self._rows.get(id(optimizer)):
            rows.step()

    def drop(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop gradients that no step has applied: those of an optimizer, or all."""
        for identity, of in self._rows.items():
            if optimizer is None or identity == id(optimizer):
                of.drop()

    def finish(self) -> None:
        for schedule in self._schedules:
            schedule.finish()

    def close(self) -> None:
        self.join(nothing)
        self.listen(nothing)
        for handle in self._handles:
            handle.remove()

    # ---- clipping ----------------------------------------------------------------------------
    def clip_grad_norm_(
        self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the rows of embeddings: what has arrived of them is
        scaled as the other gradients are."""
        if not self.named:
            return _clip(parameters, max_norm, norm_type)
        arrived = [part for schedule in self._schedules for part in schedule.averaged()]
        rows = [part for part in arrived if part.numel()]  # nothing has no largest norm
        parameters = [p for p in parameters if id(p) not in self.weights]
        dense = [p.grad for p in parameters if p.grad is not None]
        first = nn.utils.get_total_norm(dense, norm_type)
        mine = float(nn.utils.get_total_norm(rows, norm_type))
        norms = [float(text) for text in self._transport.share(repr(mine).encode())]
        every = torch.tensor([float(first), *norms], dtype=torch.float64)
        total: torch.Tensor = torch.linalg.vector_norm(every, norm_type).to(first)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        _scale(rows, max_norm, total)
        return total


def _clip(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_`, which does not take sparse gradients."""
    held = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    if not held:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    for parameter in held:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.coalesce()
    found = [p.grad for p in parameters if p.grad is not None]
    values = [grad._values() if grad.is_sparse else grad for grad in found]
    total = nn.utils.get_total_norm(values, norm_type)
    _scale(values, max_norm, total)
    return total


def _scale(tensors: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
    """`torch.nn.utils.clip_grads_with_norm_` for tensors that are no parameters' gradients."""
    factor = float((max_norm / (total + 1e-6)).clamp(max=1.0))
    for x in tensors:
        x.mul_(factor)


def embeddings_of(module: nn.Module) -> dict[str, ShardedEmbedding]:
    """The sharded embeddings of a model, by name. Raises CollectiveError if one is tied."""
    found = {
        name: part for name, part in module.named_modules() if isinstance(part, ShardedEmbedding)
    }
    owners = {id(part.weight): name for name, part in found.items()}
    every = module.named_modules(remove_duplicate=False)  # an embedding may have several names
    own = {
        f"{name}.weight".removeprefix(".")  # the name of the model itself is empty
        for name, part in every if isinstance(part, ShardedEmbedding)
    }  # fmt: skip
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.get(id(parameter))
        if owner is not None and name not in own:
            raise CollectiveError(
                f"{name} is the weight of ShardedEmbedding {owner}, of which this rank has only "
                "some columns: a tied decoder needs nn.Embedding"
            )
    return found


def _compare(transport: Transport, named: dict[str, ShardedEmbedding]) -> None:
    """Raise CollectiveError on every rank unless all have these embeddings."""
    told = [
        f"{name} {e.num_embeddings} {e.embedding_dim} {e.padding_idx} {e.weight.dtype} "
        f"{e.weight.requires_grad}" for name, e in named.items()
    ]  # fmt: skip
    if (other := parted(transport, "\n".join(told))) is not None:
        raise CollectiveError(
            f"ranks 0 and {other} have different ShardedEmbeddings; this rank's: {told}"
        )
    mine = transport.rank, transport.size
    strange = [name for name, e in named.items() if e.schedule and e.rank_and_size != mine]
    found = transport.share(f"{strange[0]}".encode() if strange else b"") if named else []
    if bad := next((name.decode() for name in found if name), ""):
        raise CollectiveError(
            f"ShardedEmbedding {bad} is of other ranks than this DataParallel: pass both one group"
        )


KINDS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
_ZERO = ("momentum", "weight_decay", "maximize", "nesterov")
"""Options that no step on rows has."""


class RowOptimizer:
    """Steps of SGD, Adagrad or SparseAdam on the rows that have gradients (`kernels.embedding`).

    A step comes in two parts, of prior rows and of delayed rows, which share the options and the
    count of the call of `step` (the paper counts at delayed rows, section 5.7: then prior rows of
    the first step would be rows of step 0).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, embeddings: Sequence[ShardedEmbedding]
    ) -> None:
        self.embeddings = [e for e in embeddings if _group_of(optimizer, e.weight) is not None]
        self._optimizer, self._kind = optimizer, type(optimizer)
        if self.embeddings:
            self._check()

    def _check(self) -> None:
        if self._kind not in KINDS:
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise CollectiveError(
                f"a ShardedEmbedding is trained by one of {known}, not by {self._kind.__name__}: "
                "pass DataParallel a list of optimizers, one of them for embeddings"
            )
        for embedding in self.embeddings:
            group = _group_of(self._optimizer, embedding.weight)
            assert group is not None
            for name in _ZERO:
                if group.get(name):
                    raise CollectiveError(
                        f"{name} of a ShardedEmbedding must be 0, not {shown(group[name])}: give "
                        "it a parameter group of its own"
                    )

    def step(self) -> None:
        """Begin a step, with the options as they are now."""
        if self.embeddings:
            self._check()
            if "found_inf" in self._optimizer.__dict__:
                raise CollectiveError(
                    f"{self._kind.__name__} with fused=True leaves it to its own step to divide by "
                    "the scale of a GradScaler and to skip, which a ShardedEmbedding does not do: "
                    "leave fused out"
                )
        for embedding in self.embeddings:
            assert embedding.schedule is not None
            embedding.weight.grad = None
            if embedding.schedule.pending:
                apply = self._apply(embedding.weight)
                state = self._states[embedding.weight].values()
                shape = embedding.weight.shape
                on_gpu = [x for x in state if _is_like(x, shape) and x.is_cuda]
                embedding.schedule.step(apply, on_gpu)

    @property
    def _states(self) -> Any:
        """The optimizer's states. Nobody's update need be complete to read those of a table."""
        return self._optimizer.__dict__["state"]

    def _apply(self, weight: Any) -> Apply:
        """The step on some rows of a table, by its options and its count from now on."""
        options = _group_of(self._optimizer, weight)
        assert options is not None
        lr, state = float(options["lr"]), self._states[weight]
        table = weight.detach()
        if self._kind is torch.optim.SGD:
            return partial(_on_rows, partial(rows.sgd_rows, lr=lr), [table])
        if self._kind is torch.optim.Adagrad:
            state["step"] += 1
            lr /= 1 + (float(state["step"]) - 1) * options["lr_decay"]
            update = partial(rows.adagrad_rows, lr=lr, eps=options["eps"])
            return partial(_on_rows, update, [table, state["sum"]])
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(table), exp_avg_sq=torch.zeros_like(table)
            )
        state["step"] += 1
        update = partial(
            rows.adam_rows, step=int(state["step"]), lr=lr, betas=options["betas"],
            eps=options["eps"],
        )  # fmt: skip
        return partial(_on_rows, update, [table, state["exp_avg"], state["exp_avg_sq"]])

    def drop(self) -> None:
        """Drop gradients that no step has applied."""
        for embedding in self.embeddings:
            if embedding.schedule is not None:
                embedding.schedule.drop()
                embedding.weight.grad = None

    # ---- state -------------------------------------------------------------------------------
    def add_state(self, _: Any, state: dict[str, Any]) -> None:
        """After `state_dict`: let states of a table have all columns. All ranks must call it."""
        for number, embedding in self._numbered():
            known = state["state"].get(number, {})
            state["state"][number] = {
                name: embedding.whole(x) if _is_like(x, embedding.weight.shape) else x
                for name, x in known.items()
            }

    def take_state(self, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Before `load_state_dict`: what there is for this rank's columns."""
        found = dict(state["state"])
        keys = [key for group in state["param_groups"] for key in group["params"]]
        for number, embedding in self._numbered():
            if number >= len(keys) or keys[number] not in found:  # by number, or by name
                continue
            of_weight, shape = found[keys[number]], embedding.whole_shape
            for name, x in of_weight.items():
                if isinstance(x, torch.Tensor) and x.dim() and tuple(x.shape) != shape:
                    raise CollectiveError(
                        f"state {name} of parameter {keys[number]} has shape {tuple(x.shape)}, and "
                        f"its ShardedEmbedding shape {shape}: load what state_dict returned while "
                        "DataParallel had the optimizer"
                    )
            found[keys[number]] = _own_columns(embedding, of_weight)
        return {**state, "state": found}

    def divide_state(self) -> None:
        """What the optimizer has loaded before it came here has all columns."""
        for embedding in self.embeddings:
            if known := self._optimizer.state.get(embedding.weight):
                known.update(_own_columns(embedding, known))

    def _numbered(self) -> list[tuple[int, ShardedEmbedding]]:
        """The embeddings, each with its parameter's number in a state_dict."""
        every = [id(p) for group in groups_of(self._optimizer) for p in group["params"]]
        return [(every.index(id(one.weight)), one) for one in self.embeddings]


def _own_columns(embedding: ShardedEmbedding, states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: embedding.mine(x).clone() if _is_like(x, embedding.whole_shape) else x
        for name, x in states.items()
    }


def _on_rows(
    update: Any, tables: list[torch.Tensor], indices: torch.Tensor, gradient: torch.Tensor
) -> None:
    if gradient.numel():
        update(*tables, indices, gradient)


def _is_like(x: Any, shape: Sequence[int]) -> bool:
    return isinstance(x, torch.Tensor) and tuple(x.shape) == tuple(shape)


def _group_of(optimizer: torch.optim.Optimizer, parameter: Any) -> dict[str, Any] | None:
    """The group that has the parameter."""
    for group in groups_of(optimizer):
        if any(p is parameter for p in list.__iter__(group["params"])):
            return group
    return None
