"""CPU tensors of any library as flat torch tensors, and messages of them."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch

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
            memory = (ctypes.c_char * self.nbytes).from_address(self._buffer.address)
            self.tensor = torch.frombuffer(memory, dtype=kind)

    def __str__(self) -> str:
        return f"{self.tensor.numel()} x {self.dtype}"


class Message:
    """`Work` of a message to or from a rank of another machine."""

    def __init__(self, gloo: Any, flat: Flat, peer: int, sends: bool, words: str) -> None:
        self._flat, self._sends, self._words, self._peer = flat, sends, words, peer
        self._work = (gloo.send if sends else gloo.recv)([flat.tensor], peer, 0)

    def wait(self, timeout: float | None = None) -> None:
        try:
            if timeout is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            kind = CollectiveTimeout if late else CollectiveAborted
            raise kind(f"{self._words}: {error}", peer=self._peer) from error
        if not self._sends:
            self._flat.done()

    def done(self) -> bool:
        return bool(self._work.is_completed())
