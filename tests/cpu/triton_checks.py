"""Triton kernels with no GPU: in the interpreter, and as machine code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (70, 80, 90, 100)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda:0"))  # type: ignore[assignment]


def same_bits_in_the_interpreter(module: str) -> None:
    """Run a module of these tests in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cpu.{module}"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits\n"


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], aligned: Sequence[int],
    architecture: int, **options: Any,
) -> Any:  # fmt: skip
    """The kernel, whose arguments of these numbers are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constants, "constexpr")
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", architecture, 32), options=options,
    )  # fmt: skip


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What the machine code needs of a multiprocessor, as the cuobjdump in Triton's wheel says."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "cubin").write_bytes(cubin)
    told = subprocess.run([tool, "-res-usage", folder / "cubin"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
