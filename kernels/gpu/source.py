"""The CUDA sources as one text, so that a compiler's cache sees every change in them."""

from __future__ import annotations

import re
from pathlib import Path

from linkweave.kernels.dtypes import DTYPES, REDUCTIONS, step_of

THREADS = 512
"""Of a block; of the plan interpreter fewer, so that more streams are resident at once."""

PLAN_THREADS = 256

_FOLDER = Path(__file__).parents[1]
_INCLUDE = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)


def source(name: str) -> str:
    """`kernels/NAME` with each header in the place where it is first included."""
    seen: set[str] = set()

    def text(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda found: "" if found[1] in seen else text(found[1]),
            (_FOLDER / name).read_text().replace("#pragma once\n", ""),
        )

    return text(name)


PLAIN = ("--std=c++17", "--fmad=false")
"""NVRTC's options for all kernels: IEEE arithmetic throughout, nothing contracted."""


def options(dtype: str, op: str) -> tuple[str, ...]:
    """Those of the plan interpreter for one (dtype, op)."""
    element, reduction = DTYPES[dtype].element, REDUCTIONS[step_of(op, dtype)]
    return (*PLAIN, f"-DELEMENT={element}", f"-DOP={reduction}", f"-DTHREADS={PLAN_THREADS}")
