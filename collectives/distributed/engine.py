"""Which engine carries out the CUDA calls of a process group: NCCL, or linkweave's kernels."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

import torch

VARIABLE = "LINKWEAVE_CUDA"


def model() -> str:
    """The name of this process's GPU."""
    return str(torch.cuda.get_device_name())


@dataclass(frozen=True)
class CudaEngine:
    """`takes` tells whether linkweave carries a call out; `why` says it in words.

    every: whether it takes all calls, or none; None: those that are as fast as NCCL's by `figures`,
        which hold (bytes, seconds of linkweave / seconds of NCCL) of each collective, by size.
    """

    every: bool | None
    why: str
    figures: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)

    def takes(self, kind: str, nbytes: int) -> bool:
        """Whether a call of a message of `nbytes` is linkweave's: by the nearest size that has been
        measured, and never beyond these."""
        if self.every is not None:
            return self.every
        rows = self.figures.get(kind, [])
        if not rows or not rows[0][0] <= nbytes <= rows[-1][0]:
            return False
        return min(rows, key=lambda row: abs(math.log(row[0] / nbytes)))[1] <= 1

    @property
    def checksum(self) -> int:
        """By which ranks detect different engines."""
        return crc32(repr((self.every, sorted(self.figures.items()))).encode())

    @staticmethod
    def choose(size: int, nccl: bool) -> CudaEngine:
        """The engine of `size` ranks on GPUs, as LINKWEAVE_CUDA has it: "nccl", "linkweave", or a
        file that `linkweave bench collectives --device cuda` wrote. Without it, and for figures of
        another machine, NCCL, if this torch has it (`nccl`).

        Raises ValueError for a file that has no such figures.
        """
        asked = os.environ.get(VARIABLE, "")
        if not nccl:
            return CudaEngine(True, "this torch has no NCCL")
        if asked == "linkweave":
            return CudaEngine(True, f"{VARIABLE}=linkweave")
        if asked in ("", "nccl"):
            return CudaEngine(False, f"{VARIABLE}=nccl" if asked else f"{VARIABLE} is not set")
        try:
            with open(asked) as file:
                told = json.load(file)
            where = int(told["ranks"]), str(told["gpu"])
            times = {
                library: {(row["collective"], int(row["size"])): float(row["time_us"])
                          for row in told["rows"]
                          if row["library"] == library and not row["wrong"]}
                for library in ("linkweave", "nccl")
            }  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{VARIABLE}={asked!r} must be "nccl", "linkweave" or a file of figures that '
                f"linkweave bench collectives --device cuda wrote: {error!r}"
            ) from None
        gpu = model()
        if where != (size, gpu):
            here = f"these are {size} x {gpu}"
            return CudaEngine(False, f"{asked} is of {where[0]} x {where[1]}, and {here}")
        figures: dict[str, list[tuple[int, float]]] = {}
        for (kind, nbytes), ours in sorted(times["linkweave"].items()):
            if (theirs := times["nccl"].get((kind, nbytes))) and nbytes > 0:
                figures.setdefault(kind, []).append((nbytes, ours / theirs))
        return CudaEngine(None, f"whichever is faster by {asked}", figures)
