"""What a rank asks for, as ranks on several machines compare it, and what goes along with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from linkweave.collectives.cluster.gloo import combined, undivided

Bytes = NDArray[np.uint8]
NOTHING: Bytes = np.empty(0, np.uint8)

_LONG = 200  # characters


@dataclass
class Along:
    """A message that goes along while the first ranks of the machines compare their calls.

    given: this rank's, flat, of as many bytes on all ranks.
    lengths: the bytes that come from each machine; with an op, as many from each.
    finish: what to do with the bytes of each machine, or with the combined values.
    part: what a machine gets, flat, of the rows of this machine's ranks, or of their combined
        values; None: all.
    op: with which values of `kind` are combined; empty: only moved.
    shares: the bytes of each machine's share, if each combines one, and then sends it on.
    to: the machine that alone gets these; None: all do.
    """

    given: Bytes
    lengths: Sequence[int]
    finish: Callable[[Any], Any]
    part: Callable[[Any, int], Bytes] | None = None
    op: str = ""
    kind: Any = None
    shares: Sequence[int] = ()
    to: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that each rank gets."""
        return sum(self.shares or (self.lengths[:1] if self.op else self.lengths))

    def parts(self, rows: NDArray[np.uint8]) -> list[Bytes]:
        """What each machine gets of `rows` of bytes, one of each local rank."""
        of, machines = self._combined(rows) if self.op else rows, range(len(self.lengths))
        if self.part is None:
            return [of.reshape(-1)] * len(machines)
        return [self.part(of, m) for m in machines]

    def merged(self, came: Sequence[Bytes], size: int) -> Sequence[Bytes]:
        """What `came` from each machine, or if there is an op, that combined for `size` ranks."""
        if not self.op:
            return came
        total = self._combined(came)
        if self.op == "avg":
            torch.from_numpy(total).view(self.kind).div_(size)
        return (total,)

    def _combined(self, rows: Any) -> Bytes:
        values = [torch.from_numpy(row).view(self.kind) for row in rows]
        total: Bytes = combined(values, undivided(self.op)).view(torch.uint8).numpy()
        return total

    def split(self, merged: Bytes) -> Sequence[Bytes]:
        """What is `merged`, which a rank has in one copy."""
        if self.op:
            return (merged,)
        return [merged[a:b] for a, b in pairwise((0, *accumulate(self.lengths)))]

    def end(self, merged: Sequence[Bytes]) -> Any:
        """Finish the call; without anything merged, that of a rank which only sends."""
        if not merged:
            return None
        if self.op:
            return self.finish(torch.from_numpy(merged[0]).view(self.kind))
        return self.finish(merged)


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
