"""What profilers and readers are told: NVTX ranges, `LINKWEAVE_DEBUG`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_ranks import gpus, tensor
from host_gpu import needs_compiler
from on_ranks import on_ranks

from linkweave import collectives
from linkweave.collectives import CollectiveError, plan_allreduce
from linkweave.collectives.calls.trace import Trace, flags
from linkweave.collectives.planning.plan import Op
from linkweave.collectives.runtime.encoded import encode
from linkweave.kernels import nvtx_ranges
from linkweave.topology import load

RANGES: list[str] = []


class annotate:
    """Keeps `inside [` and `]` for a range."""

    def __init__(self, name: str, domain: str) -> None:
        assert domain == "linkweave"
        self.name = name

    def __enter__(self) -> None:
        RANGES.append(f"{self.name} [")

    def __exit__(self, *_: object) -> None:
        RANGES.append("]")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    RANGES.clear()
    nvtx_ranges._nvtx.cache_clear()
    yield
    nvtx_ranges._nvtx.cache_clear()


def calls(rank: int, gpu: bool) -> list[str]:
    make: Any = tensor if gpu else (lambda values: np.array(values, np.float32))
    RANGES.clear()
    for _ in range(2):
        collectives.allreduce(make([1.0] * (16 << 10)))
    collectives.broadcast(make([1.0, 2.0]))
    collectives.get_default().synchronize()
    return [name for name in RANGES if "barrier" not in name]


def test_each_call_is_a_range() -> None:
    (found, other) = collectives.spawn(calls, 2, "mesh-2", (False,))
    big = "allreduce/one_shot/64KiB ["
    assert found == other
    assert found[:4] == [big, "]", big, "]"]
    assert found[4].startswith("broadcast/") and found[4].endswith("/8bytes [")


@on_ranks(2)
def test_a_sparse_all_reduce_is_a_range_round_its_broadcast(rank: int) -> None:
    RANGES.clear()
    pair = np.ones(3, np.float32), np.arange(3, dtype=np.int32)
    collectives.sparse_allreduce(*pair, 40, 2, conserve=False, mode="gtopk")
    start = RANGES.index("sparse_allreduce/gtopk/2 [")
    assert any(name.startswith("broadcast/") for name in RANGES[start:]) and RANGES[-1] == "]"


def test_phases_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKWEAVE_NVTX", "phases")
    found = collectives.spawn(calls, 2, "mesh-2", (False,))[0]
    one = ["allreduce/one_shot/64KiB [", "run [", "]", "]"]
    assert found[: 2 + 2 * len(one)] == ["plan [", "]", *one, *one]


@needs_compiler
def test_ranges_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKWEAVE_NVTX", "phases")
    with gpus(monkeypatch):
        found = collectives.spawn(calls, 2, "mesh-2", (True,), device="cuda")[0]
    launch = ["allreduce/one_shot/64KiB [", "launch [", "]", "]"]
    start = found.index(launch[0])
    assert "kernel [" in found[:start] and "agree [" in found[:start]
    assert found[start : start + 8] == launch + launch


def said(
    level: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setenv("LINKWEAVE_DEBUG", str(level))
    collectives.spawn(one_call, 2, "mesh-2")
    return [line for line in capfd.readouterr().err.splitlines() if "linkweave[0] " in line]


def one_call(rank: int) -> None:
    for _ in range(2):
        collectives.allreduce(np.ones(4, np.float32))


def test_each_level_says_one_layer_more(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [said(level, monkeypatch, capfd) for level in range(6)]
    assert lines[0] == []
    (choice,) = lines[1]
    assert choice.startswith("linkweave[0] allreduce/one_shot/16bytes on mesh-2: 1 chunks. ")
    assert [line.split(",")[0] for line in lines[2][1:]] == [
        f"linkweave[0] call {n}: allreduce/one_shot/16bytes float32 sum" for n in (4, 5)
    ]
    plan = str(plan_allreduce(load("mesh-2"), 16)).splitlines()
    assert set(lines[3]) >= {f"linkweave[0] {line}" for line in plan}
    assert any("combiners by Numba" in line for line in lines[4])
    assert not any(" awaits data of " in line for line in lines[4])
    assert sum(" awaits data of chunk 0, rank 1" in line for line in lines[5]) == 2
    assert all(len(a) < len(b) for a, b in zip(lines, lines[1:], strict=False))


@pytest.mark.parametrize("algorithm", ["tree", "overlapped_double_tree", "ring"])
def test_every_flag_that_is_raised_is_awaited(algorithm: str) -> None:
    plan = plan_allreduce(load("dgx1-v100"), 1 << 20, algorithm)
    encoded = encode(plan)
    raised: dict[str, int] = {}
    for rank in range(8):
        for line in flags(encoded, rank, plan.num_chunks):
            what, other = line.split(": ")[1].split(", rank ")
            verb, kind = what.split(" ", 1)
            ends = (rank, int(other)) if verb == "raises" else (int(other), rank)
            if "slot free" in kind:  # waits for slots that were free at first raise nothing
                continue
            raised[f"{kind} {ends}"] = raised.get(f"{kind} {ends}", 0) + (verb == "raises") * 2 - 1
    assert raised and not any(raised.values())
    waits = sum(step.op is Op.WAIT for s in plan.tracks for _, _, step in plan.steps(s))
    assert (
        sum("awaits" in line for r in range(8) for line in flags(encoded, r, plan.num_chunks))
        >= waits
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("LINKWEAVE_DEBUG", "6", "0, 1, 2, 3, 4, 5"), ("LINKWEAVE_NVTX", "", "calls, phases")],
)
def test_values_that_are_no_sense(name: str, value: str, allowed: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        Trace(0, {name: value})
    assert str(caught.value) == f"{name} must be one of {allowed}, not {value!r}"


def test_without_nvtx_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with Trace(0, {"LINKWEAVE_NVTX": "phases"}).call("x"):
        pass
