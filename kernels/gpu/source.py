"""The CUDA sources with their headers inlined, so that the compiler cache sees every change."""

from __future__ import annotations

import re
from pathlib import Path

from linkweave.kernels.dtypes import DTYPES, REDUCTIONS, step_of

THREADS = 512
"""Threads per block of all kernels but the plan interpreter."""

PLAN_THREADS = 256
"""Threads per block of the plan interpreter: fewer, so that more tracks are resident at once."""

_FOLDER = Path(__file__).parents[1]
_INCLUDE = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)


def source(name: str) -> str:
    """The text of `kernels/NAME`, with each header inserted where it is first included."""
    seen: set[str] = set()

    def text(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda found: "" if found[1] in seen else text(found[1]),
            (_FOLDER / name).read_text().replace("#pragma once\n", ""),
        )

    return text(name)


PLAIN = ("--std=c++17", "--fmad=false")
"""NVRTC options of all kernels: IEEE arithmetic, no contraction to fused multiply-add."""


def options(dtype: str, op: str) -> tuple[str, ...]:
    """NVRTC options of the plan interpreter for a dtype and op."""
    element, reduction = DTYPES[dtype].element, REDUCTIONS[step_of(op, dtype)]
    return (*PLAIN, f"-DELEMENT={element}", f"-DOP={reduction}", f"-DTHREADS={PLAN_THREADS}")
