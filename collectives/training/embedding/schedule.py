"""The order in which the rows of an embedding are looked up, sent and updated.

A step of training carries out these ops, on a lane of its own, beside the dense gradients:

    tokens     beside the forward pass: which rows each rank needs in the next step
    prior      after the backward pass: gradients of rows that any rank needs next
    lookup     after `step`: prior rows are updated, and the next step's rows fetched
    delayed    the other gradients, beside the next forward pass

Without the next step's tokens, all rows are prior ones, and the forward pass looks up its own.

On a GPU lengths ride ahead: how many tokens each rank has is copied to the host beside the forward
pass that announces them, and how many rows are prior ones beside the end of the backward pass; the
next op reads them. Only a forward pass whose tokens nobody has announced waits for its own.

Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
Neural Networks", section 4.2.2 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.nn import functional

from linkweave.collectives.errors import CollectiveAborted, CollectiveError
from linkweave.collectives.training.embedding.exchange import (
    NONE,
    OUTSIDE,
    Lengths,
    RowExchange,
    RowLane,
)
from linkweave.collectives.training.hooks import nothing
from linkweave.kernels import embedding

Rows = tuple[torch.Tensor, torch.Tensor]
"""Some rows of the table, ascending and distinct, and their gradients."""

Apply = Callable[[torch.Tensor, torch.Tensor], None]
"""Updates rows of the table by their gradients."""


class Batch:
    """The tokens of one call of an embedding, on all ranks, and their rows."""

    def __init__(self, ids: torch.Tensor, num_rows: int) -> None:
        self.ids, self.version, self._num_rows = ids, version_of(ids), num_rows
        self.positions = ids  # of each token among the distinct ones
        self.tokens: list[torch.Tensor] | None = None
        self.known: Future[Any]
        self.fetched: Future[Any] | None = None
        self.table_version = 0
        self.leaf = torch.empty(0)
        self.passed = False  # whether a backward pass has ended since

    def tell(self, exchange: RowExchange, known: bool) -> Lengths:
        """Find the distinct tokens and where each token is among them, and tell them to all ranks;
        unless they are `known`, tell that."""
        flat = self.ids.flatten().long()
        own, positions, count = embedding.unique(flat, self._num_rows)
        self.positions = positions.view(self.ids.shape)
        if flat.is_cuda and len(flat):  # on CPUs they have been checked
            fine = (own[0] >= 0) & (flat.max() < self._num_rows)
            count = torch.where(fine, count, OUTSIDE)
        if not known:
            count = torch.full_like(count, NONE)
        self.tokens = yield from exchange.tokens(own if known else None, count)


class Gradients:
    """The gradients of a step: what this rank adds, and what has arrived from all ranks."""

    def __init__(self, announced: Sequence[Batch]) -> None:
        self.announced = announced
        self.tokens: list[torch.Tensor] = []
        self.prior: list[torch.Tensor] = []  # for each rank, whether each of its rows is one
        self.counts: list[int] = []  # of these
        self.own = torch.empty(0)
        self.parts: dict[str, Rows] = {}
        self.shown: tuple[torch.Tensor, ...] = ()  # of the current stream, in place of the parts

    def part(self, name: str, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The rows of each rank that are prior ones, or are not, and the gradients of this rank's,
        without asking a GPU for their number."""
        masks, counts = self.prior, self.counts
        if name != "prior":
            masks = [~mask for mask in masks]
            counts = [len(mask) - n for mask, n in zip(masks, counts, strict=True)]
        every = zip(masks, counts, strict=True)
        at = [torch.nonzero_static(mask, size=n).flatten() for mask, n in every]
        return [x[where] for x, where in zip(self.tokens, at, strict=True)], self.own[at[rank]]


class RowSchedule:
    """Carries out the steps of one embedding. All ranks make the same calls.

    table: the parameter, [rows, columns of this rank].
    padding: a row that gets no gradient, or None.
    """

    def __init__(
        self, table: torch.Tensor, padding: int | None, exchange: RowExchange, lane: RowLane
    ) -> None:
        self._table, self._padding = table, padding
        self._exchange, self.lane = exchange, lane
        self.sends = True
        """Whether backward passes send gradients."""
        self.on_gradient: Callable[[], None] = nothing
        """Called in a backward pass that reaches the rows."""
        self._announced: list[Batch] = []  # not used yet
        self._used: list[Batch] = []  # since the last step, their gradients to be applied
        self._gradients: Gradients | None = None  # on their way

    # ---- forward -----------------------------------------------------------------------------
    def look_up(self, ids: torch.Tensor, trained: bool) -> torch.Tensor:
        """The rows of these tokens, [*ids.shape, width]; `trained` if they are to get gradients."""
        batch = self._take(ids)
        if batch is None:
            batch = self._batch(ids)
            self._tell(batch, "tokens")
        current = batch.table_version == self._table._version
        if batch.fetched is None or not current:
            batch.fetched = self._fetch(batch)
        rows: torch.Tensor = self.lane.wait(batch.fetched)
        self.lane.lend(rows, batch.positions)
        if trained:
            leaf: Any = rows.requires_grad_()
            batch.leaf = leaf
            self._used.append(batch)
            known = ref(batch)  # which holds the leaf, and so its hooks
            leaf.register_post_accumulate_grad_hook(lambda _: self._collected(known()))
        return functional.embedding(batch.positions, rows)

    def _take(self, ids: torch.Tensor) -> Batch | None:
        """The batch that was announced for this very tensor, if all ranks have announced theirs."""
        for batch in self._announced:
            if batch.ids is ids and batch.version == version_of(ids):
                self._announced.remove(batch)
                self.lane.wait(batch.known)
                return batch if batch.tokens is not None else None
        return None

    def announce(self, ids: torch.Tensor | None) -> None:
        """Tell all ranks the tokens of a call in the next step; None at the end of the data."""
        none = torch.empty(0, dtype=torch.int64, device=self._table.device)
        batch = self._batch(none if ids is None else ids)
        self._tell(batch, "no tokens" if ids is None else "tokens", ids is not None)
        self._announced.append(batch)

    def _batch(self, ids: torch.Tensor) -> Batch:
        return Batch(ids, len(self._table))

    def _tell(self, batch: Batch, name: str, known: bool = True) -> None:
        told = partial(batch.tell, self._exchange, known)
        batch.known = self.lane.submit(name, told, [batch.ids])

    def _fetch(self, batch: Batch) -> Future[Any]:
        batch.table_version = self._table._version

        def fetch() -> torch.Tensor | None:
            return None if batch.tokens is None else self._exchange.fetch(batch.tokens)

        return self.lane.submit("lookup", fetch)

    # ---- backward ----------------------------------------------------------------------------
    def _collected(self, batch: Batch | None) -> None:
        """After a batch's gradients have been accumulated."""
        if batch not in self._used:
            self.fail(
                "an embedding got gradients of a call from before the last step or zero_grad, "
                "which would be lost: call the model again"
            )
        if self.on_gradient is nothing:
            raise CollectiveError(
                "a ShardedEmbedding has got gradients that nobody sends: wrap the model that holds "
                "it, and its optimizer, in linkweave.DataParallel (which takes the place of "
                "DistributedDataParallel)"
            )
        self.on_gradient()

    def end_backward(self) -> None:
        """At the end of a backward pass: send the gradients of prior rows. What has got no
        gradients on this rank counts as zeros."""
        for batch in self._used:
            batch.passed = True
        if not (self.sends and self._used):
            return
        used = list(self._used)
        grads = [torch.zeros_like(b.leaf) if b.leaf.grad is None else b.leaf.grad for b in used]
        gradients = self._gradients = Gradients(tuple(self._announced))
        send = partial(self._send, gradients, used, grads)
        self.lane.submit("prior", send, grads, follows=False)

    def _send(
        self, gradients: Gradients, used: Sequence[Batch], grads: Sequence[torch.Tensor]
    ) -> Lengths:
        """Divide the gradients of batches, and exchange those of prior rows. Lengths do not depend
        on gradients, so that they are known while the backward pass runs."""
        mine, num_rows = self._exchange.rank, len(self._table)
        every = [batch.tokens or [] for batch in used]
        tokens = yield from merged(every, num_rows)
        prior = prior_rows(tokens, [batch.tokens for batch in gradients.announced])
        counts = yield torch.stack([mask.sum() for mask in prior])
        self.lane.follow()
        own = added([rows[mine] for rows in every], grads, len(tokens[mine]), num_rows)
        if self._padding is not None:
            own = torch.where((tokens[mine] == self._padding)[:, None], 0, own)
        gradients.tokens, gradients.prior = tokens, prior
        gradients.counts, gradients.own = counts, own
        self._add(gradients, "prior")

    def _add(self, gradients: Gradients, part: str) -> None:
        """Exchange a part of the gradients, unless that is done."""
        if part not in gradients.parts:
            mine = gradients.part(part, self._exchange.rank)
            gradients.parts[part] = self._exchange.add(*mine)

    # ---- step --------------------------------------------------------------------------------
    @property
    def pending(self) -> bool:
        """Whether there are gradients for a step to apply."""
        return self._gradients is not None

    def step(self, apply: Apply, states: Sequence[torch.Tensor] = ()) -> None:
        """Update the rows that have gradients, and fetch those that the next step needs; `states`
        are those of the optimizer that are on a GPU."""
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        self._used = [batch for batch in self._used if not batch.passed]
        # announced for a step that did not use them
        self._announced = [batch for batch in self._announced if batch.fetched is None]

        def update(part: str) -> None:
            self._add(gradients, part)
            apply(*gradients.parts.pop(part))

        uses = [*states, *gradients.shown]
        self.lane.submit("update prior", partial(update, "prior"), uses)
        for batch in self._announced:
            if batch in gradients.announced:  # whose rows are prior ones
                batch.fetched = self._fetch(batch)
        self.lane.submit("delayed", partial(update, "delayed"), uses)

    def drop(self) -> None:
        """Drop gradients that no step has applied. A call whose backward pass is to come stays."""
        self._gradients = None
        # not by leaf.grad, which ranks need not all have
        self._used = [batch for batch in self._used if not batch.passed]

    def averaged(self) -> list[torch.Tensor]:
        """The gradients that the next step applies, in this rank's columns, once they have arrived;
        they may be written to."""
        gradients = self._gradients
        if gradients is None:
            return []
        self.lane.wait(self.lane.submit("delayed", partial(self._add, gradients, "delayed")))
        found = [part for _, part in gradients.parts.values()]
        self.lane.lend(*found)
        return found

    def as_gradient(self) -> torch.Tensor | None:
        """What `averaged` returns, as a sparse tensor like the table."""
        found, gradients = self.averaged(), self._gradients
        if gradients is None:
            return None
        rows = [rows for rows, _ in gradients.parts.values()]
        self.lane.lend(*rows)
        values = torch.cat(found)
        gradients.shown = (values,)
        views = torch.split(values, [*map(len, found)])
        for (name, (some, _)), view in zip([*gradients.parts.items()], views, strict=True):
            gradients.parts[name] = some, view
        at = torch.cat(rows).clamp(max=len(self._table) - 1)[None]  # that of no row has zeros
        return torch.sparse_coo_tensor(at, values, self._table.shape, check_invariants=False)

    def finish(self) -> None:
        """Wait until the last step is complete."""
        self.lane.wait_all()

    def fail(self, why: str) -> None:
        """End the training on all ranks."""
        self.lane.fail(CollectiveAborted(f"rank {self._exchange.rank}: {why}"))


def version_of(ids: torch.Tensor) -> int:
    """Rises with each operation of torch that writes to the tensor, unless it is one of inference
    mode."""
    return 0 if ids.is_inference() else ids._version


def merged(tokens: Sequence[list[torch.Tensor]], num_rows: int) -> Lengths:
    """Returns the distinct rows of each rank in all batches."""
    if len(tokens) == 1:
        return tokens[0]
    found = [embedding.unique(torch.cat(rows), num_rows) for rows in zip(*tokens, strict=True)]
    counts = yield torch.cat([count for _, _, count in found])
    return [rows[:count] for (rows, _, _), count in zip(found, counts, strict=True)]


def added(
    rows: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], distinct: int, num_rows: int
) -> torch.Tensor:
    """The gradients of this rank's rows in all batches, of which so many are distinct, added in the
    order of the batches."""
    if len(rows) == 1 or not distinct:
        return grads[0]
    lengths = [len(one) for one in rows]
    mine, every = torch.cat(list(rows)), torch.cat(list(grads))
    own: torch.Tensor = embedding.sum_rows(mine, lengths, every, num_rows)[1][:distinct]
    return own


def prior_rows(
    tokens: Sequence[torch.Tensor], needed: Sequence[Sequence[torch.Tensor] | None]
) -> list[torch.Tensor]:
    """For the rows of each rank, whether any rank needs them next (algorithm 1, lines 4 and 5).

    All of them if nobody knows what is needed.
    """
    known = [row for rows in needed if rows is not None for row in rows]
    if not known:
        return [torch.ones_like(rows, dtype=torch.bool) for rows in tokens]
    every = torch.cat(known).sort().values
    if not len(every):
        return [torch.zeros_like(rows, dtype=torch.bool) for rows in tokens]
    # not torch.isin, for which the host waits on a GPU
    return [
        every[torch.searchsorted(every, rows).clamp(max=len(every) - 1)] == rows for rows in tokens
    ]
