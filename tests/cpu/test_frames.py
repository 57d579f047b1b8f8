"""How many Python frames lie between a call and the kernel that carries it out."""

from __future__ import annotations

import sys
from types import FrameType

import numpy as np
import pytest
from gpu_ranks import MODES, Machine, tensor
from host_gpu import needs_compiler

import linkweave

MOST_CPU, MOST_GPU = 9, 12


def frames(rank: int, gpu: bool) -> list[str]:
    """The deepest chain of our own frames below `linkweave.allreduce`, once the call is known; on
    a GPU, of those that end with the launch."""
    ones = np.ones(256, np.float32)
    x = tensor(ones) if gpu else ones
    for _ in range(2):
        linkweave.allreduce(x)
    deepest: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal deepest
        if event != "call":
            return
        chain: list[str] = []
        at: FrameType | None = frame
        while at is not None and at.f_code is not frames.__code__:
            if "/linkweave/" in at.f_code.co_filename or "HostDevice" in at.f_code.co_qualname:
                chain.append(at.f_code.co_qualname)
            at = at.f_back
        device = next((i for i, name in enumerate(chain[::-1]) if "HostDevice" in name), None)
        chain = chain[::-1][: None if device is None else device + 1]
        if gpu and chain[-1:] != ["HostDevice.launch"]:
            return
        if at is not None and len(chain) >= len(deepest):
            deepest = chain

    sys.setprofile(watch)
    try:
        linkweave.allreduce(x)
    finally:
        sys.setprofile(None)
    return deepest


@pytest.mark.parametrize("size", [1, 2])
def test_a_known_call_on_the_cpu_passes_few_frames(size: int) -> None:
    for chain in linkweave.spawn(frames, size, args=(False,)):
        assert chain[1] == "Methods.allreduce" and len(chain) <= MOST_CPU, "\n".join(chain)
        assert any(name.startswith("HostCalls") for name in chain)


@needs_compiler
def test_a_known_call_on_a_gpu_passes_few_frames(machine: Machine) -> None:
    modes = MODES["processes on one GPU"]
    for chain in linkweave.spawn(frames, 2, "mesh-2", args=(True,), **modes):
        assert chain[1] == "Methods.allreduce" and len(chain) <= MOST_GPU, "\n".join(chain)
        assert chain[-1] == "HostDevice.launch"
