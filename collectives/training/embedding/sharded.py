"""An embedding whose columns are divided among the ranks that train it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.embedding.exchange import (
    RowExchange,
    RowLane,
    RowOp,
    columns_of,
)
from linkweave.collectives.training.embedding.prefetch import has_next, next_of
from linkweave.collectives.training.embedding.schedule import RowSchedule
from linkweave.collectives.training.transport import transport_of
from linkweave.topology.checks import integer, shown

DRAWN = 1 << 16
"""Rows, at least, whose initial values are drawn at once; those of other ranks are dropped."""


class ShardedEmbedding(nn.Module):
    """`torch.nn.Embedding` of which each rank has some columns of all rows.

    num_embeddings, embedding_dim: shape of the whole table. There may be more ranks than columns.
    padding_idx: a row that is zero at first and gets no gradient.
    dtype: float32 or float64.
    device: where the table is. It may be moved later, unless the group is linkweave's.
    group: as in `DataParallel`. All ranks must construct it.

    Train it in `DataParallel`, with SGD without momentum, Adagrad or SparseAdam. A forward pass
    fetches the distinct rows of its tokens from all ranks; gradients of distinct rows go back. In
    batches of `prefetch`, the rows that the next batch needs are sent and updated first, and
    fetched before its forward pass; the others are sent beside it. Rows are updated alike, bit for
    bit, with `prefetch` and without, unless a norm that clips them is rounded otherwise. Outside
    `DataParallel` a backward pass raises CollectiveError, on a rank that is not alone.

    `weight` is this rank's part of the table, [num_embeddings, its columns]. `state_dict` has the
    whole one, and takes that of `torch.nn.Embedding`; all ranks must call it. All ranks must make
    the same forward passes, also those without gradients; a rank may have no tokens. A forward pass
    with gradients enabled whose result reaches no loss counts as one whose gradients are zeros.
    On a single rank, this is `torch.nn.Embedding` with `sparse=True`.

    Initial values are drawn as by `torch.nn.Embedding`: they are the same if all ranks have the
    same state of torch's generator.

    Raises CollectiveError for arguments and tokens out of range, and for options of
    `torch.nn.Embedding` that it does not have; CollectiveAborted or CollectiveTimeout if a rank
    fails.
    Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
    Neural Networks", section 4.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *,
        group: Any = None, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, max_norm: float | None = None,
        scale_grad_by_freq: bool = False, sparse: bool = True, _weight: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        for name, value in {**refused, "sparse=False": not sparse}.items():
            if value:
                raise CollectiveError(f"ShardedEmbedding does not have {name}: use nn.Embedding")
        self.num_embeddings = integer(num_embeddings, "num_embeddings", 1)
        self.embedding_dim = integer(embedding_dim, "embedding_dim", 1)
        self.padding_idx = padding_idx
        if padding_idx is not None:  # which may count from the end
            rows = self.num_embeddings
            self.padding_idx = integer(padding_idx, "padding_idx", -rows, rows - 1) % rows
        dtype = dtype or torch.get_default_dtype()
        if dtype not in (torch.float32, torch.float64):
            raise CollectiveError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
        where = torch.device(device or torch.get_default_device())
        self._transport = transport_of(group, where.type)
        rank, size = (self._transport.rank, self._transport.size) if self._transport else (0, 1)
        widths = columns_of(self.embedding_dim, size)
        first = sum(widths[:rank])
        self.columns = first, first + widths[rank]
        """The first column of this rank, and the one after its last."""
        made = torch.empty(self.num_embeddings, widths[rank], dtype=dtype, device=where)
        self.weight = nn.Parameter(made)
        if _weight is None:
            self.reset_parameters()
        else:
            with torch.no_grad():
                self.weight.copy_(self.mine(_weight))
        self._schedule: RowSchedule | None = None
        self.rank_and_size = rank, size
        if self._transport:
            self._transport.open(1)
            self._exchange = RowExchange(self._transport, self.weight, widths)
            lane = RowLane("embedding", self._transport, self._exchange)
            self._schedule = RowSchedule(self.weight, self.padding_idx, self._exchange, lane)

    @classmethod
    def from_pretrained(
        cls, embeddings: torch.Tensor, freeze: bool = True, padding_idx: int | None = None, *,
        group: Any = None,
    ) -> Self:  # fmt: skip
        """An embedding of this table [num_embeddings, embedding_dim], the same on all ranks."""
        if embeddings.ndim != 2:
            raise CollectiveError(
                f"embeddings must have two dimensions, not shape {tuple(embeddings.shape)}"
            )
        rows, width = embeddings.shape
        made = cls(
            rows, width, padding_idx, group=group, dtype=embeddings.dtype,
            device=embeddings.device, _weight=embeddings,
        )  # fmt: skip
        made.weight.requires_grad_(not freeze)
        return made

    def reset_parameters(self) -> None:
        """Draw new values."""
        with torch.no_grad():
            # no part is a few rows: torch draws the last 16 values of a tensor in another way
            ends = [DRAWN * part for part in range(1, self.num_embeddings // DRAWN)]
            for rows in torch.tensor_split(self.weight, ends):
                whole = torch.empty(
                    len(rows), self.embedding_dim, dtype=rows.dtype, device="cpu"
                ).normal_()  # the same on all devices
                rows.copy_(self.mine(whole))
            if self.padding_idx is not None:
                self.weight[self.padding_idx].zero_()

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Of the table on all ranks together."""
        return self.num_embeddings, self.embedding_dim

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns of a whole table that this rank has."""
        return whole[:, slice(*self.columns)]

    def whole(self, columns: torch.Tensor) -> torch.Tensor:
        """All columns, of what each rank has [num_embeddings, its columns] of. All ranks must call
        it, while nothing else is sent."""
        if self._schedule is None:
            self._check_open()
            return columns.detach().clone()
        lane = self._schedule.lane
        found: torch.Tensor = lane.wait(
            lane.submit("all columns", lambda: self._exchange.whole(columns))
        )
        lane.lend(found)
        return found

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens: [*ids.shape, embedding_dim]."""
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        if self._schedule is None:
            self._check_open()
            self._check(ids, "ids")
            return functional.embedding(ids, self.weight, self.padding_idx, sparse=True)
        upcoming = next_of(ids) if isinstance(ids, torch.Tensor) else None
        try:
            self._check(ids, "ids")
            if upcoming is not None:
                self._check(upcoming, "ids of the next batch")
        except CollectiveError as error:  # the other ranks would wait
            self._schedule.fail(str(error))
        rows = self._schedule.look_up(ids, trained)
        if trained and has_next(ids):
            self._schedule.announce(upcoming)
        return rows

    def _check_open(self) -> None:
        if self.columns != (0, self.embedding_dim):
            raise CollectiveError(
                "this ShardedEmbedding is closed: other ranks have its other columns"
            )

    def _check(self, ids: Any, name: str) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
            kind = ids.dtype if isinstance(ids, torch.Tensor) else shown(ids)
            raise CollectiveError(f"{name} must be a tensor of int32 or int64, not {kind}")
        if ids.device != self.weight.device:
            raise CollectiveError(
                f"{name} must be on {self.weight.device} as the weight, not on {ids.device}"
            )
        if self._transport and self._transport.device not in ("", ids.device.type):
            raise CollectiveError(
                f"{name} are on {ids.device}, and the embedding was made for "
                f"{self._transport.device}: over a group of linkweave, say device= to it"
            )
        if self.weight.is_cuda and self.weight.dtype != torch.float32:
            raise CollectiveError(
                f"on a GPU a ShardedEmbedding is float32, not {self.weight.dtype}"
            )
        if ids.numel() and not ids.is_cuda:  # on a GPU the ranks tell each other
            least, most = (int(end) for end in ids.aminmax())
            if least < 0 or most >= self.num_embeddings:
                wrong = least if least < 0 else most
                raise CollectiveError(
                    f"{name} must be from 0 to {self.num_embeddings - 1}; one is {wrong}"
                )

    @property
    def schedule(self) -> RowSchedule | None:
        """What `DataParallel` drives; None on a single rank."""
        return self._schedule

    @property
    def ops(self) -> list[RowOp]:
        """The last ops that this rank has carried out, in their order."""
        return list(self._schedule.lane.ops) if self._schedule else []

    # ---- state -------------------------------------------------------------------------------
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._schedule:
            self._schedule.finish()
        destination[prefix + "weight"] = self.whole(self.weight)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any
    ) -> None:
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        if self._schedule:
            self._schedule.finish()
        key = prefix + "weight"
        if key in state_dict and tuple(state_dict[key].shape) == self.whole_shape:
            state_dict = {**state_dict, key: self.mine(state_dict[key])}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __deepcopy__(self, memo: Any) -> Any:
        raise CollectiveError(
            "a ShardedEmbedding cannot be copied, as its columns are on all ranks: construct "
            "another one and load the state_dict of this"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})

    def close(self) -> None:
        """Complete what is being sent and free the lane. All ranks must call it."""
        if self._schedule and self._transport:
            schedule, self._schedule = self._schedule, None
            schedule.lane.close()
            self._transport.close()
            self._transport = None

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        first, stop = self.columns
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, columns {first} to {stop - 1}"
        )
