"""What a rank asks for, as ranks on several machines compare it, and what goes along with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from zlib import crc32

import torch

from linkweave.collectives.cluster.gloo import combined, undivided

_LONG = 200  # characters


@dataclass
class Along:
    """A message that goes along while the first ranks of the machines compare their calls.

    given: this rank's, flat, of as many bytes on all ranks.
    lengths: the bytes that come from each machine; with an op, as many from each.
    finish: what to do with the bytes of each machine, or with the combined values.
    part: what a machine gets, in bytes, of the rows of this machine's ranks, or of their combined
        values; None: all.
    op: with which values are combined; empty: only moved.
    shares: the bytes of each machine's share, if each combines one, and then sends it on.
    to: the machine that alone gets these; None: all do.
    """

    given: Any
    lengths: Sequence[int]
    finish: Callable[[Any], Any]
    part: Callable[[Any, int], Any] | None = None
    op: str = ""
    shares: Sequence[int] = ()
    to: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that each rank gets."""
        return sum(self.shares or (self.lengths[:1] if self.op else self.lengths))

    def parts(self, rows: Any) -> list[Any]:
        """What each machine gets of `rows` of bytes, one of each local rank."""
        of, machines = self._combined(rows) if self.op else rows, range(len(self.lengths))
        if self.part is None:
            return [of.view(-1)] * len(machines)
        return [self.part(of, m).view(-1) for m in machines]

    def merged(self, came: Sequence[Any], size: int) -> Any:
        """The bytes of what `came` from each machine, combined for `size` ranks if there is an
        op."""
        if not self.op:
            return torch.cat([*came])
        total = self._combined(came).view(self.given.dtype)
        return (total.div_(size) if self.op == "avg" else total).view(torch.uint8)

    def _combined(self, rows: Any) -> Any:
        values = [row.view(self.given.dtype) for row in rows]
        return combined(values, undivided(self.op)).view(torch.uint8)

    def end(self, merged: Any) -> Any:
        """Finish the call, of whose merged bytes a rank has a copy."""
        if self.op:
            return self.finish(merged.view(self.given.dtype))
        return self.finish(merged.split([*self.lengths]))


@dataclass
class ClusterCall:
    """One rank's side of a call.

    asked: what it asks for, as text that all ranks compare; a long one ends with its checksum.
    body: carries it out, once all ranks have compared it; where something goes `along`, that ends
        the call instead.
    source: the machine from which alone the others hear what goes along; None: from all.
    target: the machine that alone hears from the others; None: all do.
    """

    asked: str
    body: Any
    along: Along | None = None
    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        if self.along is None:  # nobody may begin `body` before all have compared the call
            self.source = self.target = None
        if len(self.asked) > _LONG:
            self.asked = f"{self.asked[:_LONG]}... {crc32(self.asked.encode()):08x})"

    @property
    def one_way(self) -> bool:
        """Whether some machines do not hear from the others."""
        return self.source is not None or self.target is not None

    @cached_property
    def word(self) -> int:
        """A checksum of what is asked for."""
        return int.from_bytes(blake2b(self.asked.encode(), digest_size=7).digest(), "little")
