"""Every CUDA kernel compiled ahead of time, with no GPU: sm_70 (V100), sm_80 (A100), sm_90 (H100).

The recorded registers say how many blocks fit a multiprocessor; after a wanted change run this file
with LINKWEAVE_RECORD=1 and look at the difference.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from nvrtc import Compiled, Nvrtc

from kernels.source import ELEMENTS, OPS, THREADS, options, source

RECORD = Path(__file__).parents[1] / "golden" / "plan.cu.registers.json"
ARCHITECTURES = (70, 80, 90)
KERNELS = [(d, o) for d, o in product(ELEMENTS, OPS) if o != "avg"]  # which is a sum
REGISTERS = 65536  # of a multiprocessor


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str, str], Compiled]:
    compiler, text = Nvrtc(), source("plan.cu")
    cases = [(a, d, o) for a in ARCHITECTURES for d, o in KERNELS]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda c: compiler.compile(text, options(c[1], c[2]), c[0]), cases)
        return dict(zip(cases, made, strict=True))


def test_sources_are_one_text() -> None:
    text = source("plan.cu")
    assert "#include" not in text and "#pragma once" not in text
    assert text.count("struct Launch {") == 1  # though two headers include it


def test_no_kernel_spills(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    for case, kernel in compiled.items():
        assert (kernel.spilled, kernel.stack) == (0, 0), case
        assert kernel.registers * THREADS <= REGISTERS, case
        assert kernel.shared <= 16 << 10, case


def test_registers_are_those_recorded(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    found = {f"sm_{a} {d} {o}": k.registers for (a, d, o), k in compiled.items()}
    if os.environ.get("LINKWEAVE_RECORD"):
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(RECORD.read_text())


def test_memory_order_and_width(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    """Signals are acquired and released at system scope, behind a barrier; data moves 16 bytes at
    once; there is no fence, which the sanitizers could not judge."""
    for case, kernel in compiled.items():
        ptx = kernel.ptx
        assert "ld.acquire.sys.global.u32" in ptx and "st.release.sys.global.u32" in ptx, case
        assert not re.search(r"\b(membar|fence)\b", ptx), case
        assert ptx.count("bar.sync") >= 3, case
        for access in ("ld", "st"):
            assert re.search(rf"{access}(\.global)?\.(v4\.[ubf]32|v2\.[ubf]64)", ptx), case
            assert f"{access}.relaxed.sys.global.u64" in ptx, case


def test_a_faulty_source_is_refused() -> None:
    broken = source("plan.cu").replace("carry_out<T, Op>", "carry_on<T, Op>")
    with pytest.raises(ValueError, match=r"carry_on"):
        Nvrtc().compile(broken, options("float32", "sum"), 90)
