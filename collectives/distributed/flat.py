"""CPU tensors of any library as flat torch tensors, and messages of them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from linkweave.collectives.distributed.across import Across
from linkweave.collectives.distributed.gloo import timed_out
from linkweave.collectives.errors import CollectiveAborted, CollectiveTimeout
from linkweave.collectives.tensors import as_buffer


class Flat:
    """A CPU tensor of any library as a flat torch tensor over the same memory.

    `done` must be called once it has been written to.
    """

    def __init__(self, x: Any, written: bool = True) -> None:
        self._buffer, self.done = as_buffer(x, written)
        self.dtype, self.nbytes = self._buffer.dtype, self._buffer.nbytes
        kind = getattr(torch, self.dtype)
        self.tensor = torch.empty(0, dtype=kind)
        if self.nbytes:
            memory: Any = (ctypes.c_char * self.nbytes).from_address(self._buffer.address)
            memory.owner = self._buffer  # which the tensor so keeps
            self.tensor = torch.frombuffer(memory, dtype=kind)

    @property
    def bytes(self) -> Any:
        """The same memory as bytes."""
        return self.tensor.view(torch.uint8)

    def padded(self, nbytes: int) -> Any:
        """The bytes, followed by undefined ones up to so many."""
        if nbytes == self.nbytes:
            return self.bytes
        whole = torch.empty(nbytes, dtype=torch.uint8)
        whole[: self.nbytes] = self.bytes
        return whole

    def __str__(self) -> str:
        return f"{self.tensor.numel()} x {self.dtype}"


def move(across: Across, flat: Flat, peer: int, sends: bool, words: str) -> None:
    """Send a tensor to a rank or receive one. `words` say who waits for whom."""
    try:
        (across.send if sends else across.recv)(flat.tensor, peer).wait()
    except RuntimeError as error:
        kind = CollectiveTimeout if timed_out(error) else CollectiveAborted
        raise kind(f"{words}: {error}", peer=peer) from error
    if not sends:
        flat.done()
