"""Batches that know the tokens of the next one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import torch

from linkweave.collectives.overlap.units import tensors_in
from linkweave.collectives.training.hooks import nothing

_NEXT = "_linkweave_next"
_INTEGERS = (torch.int32, torch.int64)


class prefetch:
    """The batches of a loader, each read before the one before it is trained with.

    loader: an iterable of batches: tensors, or lists, tuples and dictionaries with tensors.

    A `ShardedEmbedding` that is called with a tensor of integers of a batch, that very object, then
    knows the tensor in its position in the next batch, and what is to be sent first. A tensor that
    is made of it, by slicing or moving, does not know: prepare batches before this,
    `prefetch(map(prepare, loader))`. May be iterated again if the loader may.
    Source: Li et al., "EmbRace: Accelerating Sparse Communication for Distributed Training of Deep
    Neural Networks", section 4.2.2.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch, following in pairwise(chain(self._loader, [None])):
            with_next = _marked(batch, following)
            yield batch
            _unmark(with_next)


def _marked(batch: Any, following: Any) -> list[torch.Tensor]:
    """Let the integers of a batch know those of the next one. Returns them."""
    mine, others = list(tensors_in(batch)), list(tensors_in(following))
    alike = len(mine) == len(others)
    found = []
    for i, tensor in enumerate(mine):
        if tensor.dtype in _INTEGERS:
            other = others[i] if alike and others[i].dtype in _INTEGERS else None
            setattr(tensor, _NEXT, nothing if other is None else weakref.ref(other))
            found.append(tensor)
    return found


def _unmark(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if has_next(tensor):
            delattr(tensor, _NEXT)


def has_next(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a batch of `prefetch`."""
    return hasattr(tensor, _NEXT)


def next_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor in this one's position in the next batch; None if there is none."""
    found: torch.Tensor | None = getattr(tensor, _NEXT, nothing)()
    return found
