"""CPU tensors of any library as flat torch tensors, in rows or in pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.tensors import as_buffer


def flat(x: Any, written: bool = True) -> tuple[Any, Callable[[], None]]:
    """`x` as a flat torch tensor over the same memory, and a function to call once that has been
    written to."""
    buffer, done = as_buffer(x, written)
    return flat_over(buffer), done


def flat_over(buffer: Buffer) -> Any:
    """A flat torch tensor over a buffer, which it keeps."""
    kind = getattr(torch, buffer.dtype)
    if not buffer.nbytes:
        return torch.empty(0, dtype=kind)
    memory: Any = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.owner = buffer
    return torch.frombuffer(memory, dtype=kind)


def in_rows(x: Any, count: int) -> Any:
    """A flat tensor as so many rows of one length; a copy, if it must be padded."""
    width = -(-x.numel() // count)
    if x.numel() == count * width:
        return x.view(count, width)
    whole = x.new_zeros(count * width)
    whole[: x.numel()] = x
    return whole.view(count, width)


def put_back(rows: Any, x: Any) -> None:
    """Copy rows to the flat tensor that they are of, if they are a copy."""
    if rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view(-1)[: x.numel()])
