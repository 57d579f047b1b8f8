"""The optimizer of sharded embeddings: its steps on rows, and its state with all columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.row_schedule import Apply
from linkweave.collectives.training.sharded_embedding import ShardedEmbedding
from linkweave.collectives.training.update import groups_of
from linkweave.kernels import embedding as rows
from linkweave.topology.checks import shown

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
        for embedding in self.embeddings:
            assert embedding.schedule is not None
            if embedding.schedule.pending:
                embedding.schedule.step(self._apply(embedding.weight))

    def _apply(self, weight: Any) -> Apply:
        """The step on some rows of a table, by its options and its count from now on."""
        options = _group_of(self._optimizer, weight)
        assert options is not None
        lr, state = float(options["lr"]), self._optimizer.state[weight]
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
        for number, embedding in self._numbered():
            shape = embedding.num_embeddings, embedding.embedding_dim
            found[number] = {
                name: embedding.mine(x).clone() if _is_like(x, shape) else x
                for name, x in found.get(number, {}).items()
            }
        return {**state, "state": {n: x for n, x in found.items() if x or n in state["state"]}}

    def _numbered(self) -> list[tuple[int, ShardedEmbedding]]:
        """The embeddings, each with its parameter's number in a state_dict."""
        every = [id(p) for group in groups_of(self._optimizer) for p in group["params"]]
        return [(every.index(id(one.weight)), one) for one in self.embeddings]


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
        if any(p is parameter for p in group["params"]):
            return group
    return None
