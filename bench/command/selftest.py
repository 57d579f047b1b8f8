"""`linkweave selftest`: are collectives right on this machine? One table, and one verdict.

It tests what `doctor` can only look at: kernels compile and launch, ranks reach each other's
memory, collectives return the reference's bits, and a dead rank ends the others. Each test is
a process of its own with a limit, so that a crash or a hang costs that test only.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from linkweave.bench.gpu import plans as plans
from linkweave.bench.gpu import systems
from linkweave.bench.gpu.api import (
    Arrays,
    CupyArrays,
    NumpyArrays,
    TorchTensors,
    run_graph,
    run_killed,
    run_ranks,
)
from linkweave.bench.gpu.calls import NCCL_BYTES, beside_nccl
from linkweave.bench.gpu.meter import Meter
from linkweave.bench.gpu.runner import Failed, Result, Row, in_process, write
from linkweave.bench.gpu.sparse import SparseRows, sparse_ranks
from linkweave.bench.gpu.train import DDP, over_nccl, train
from linkweave.bench.gpu.triton import TritonRows
from linkweave.bench.timing import machine
from linkweave.collectives import CollectiveError
from linkweave.collectives.runtime.gpu.doctor import Check, examine
from linkweave.collectives.runtime.gpu.driver import CudaDriver, CudaError
from linkweave.kernels.gpu.device import OLDEST, CudaDevice

PASS, FAIL, EXCEPT = 0, 1, 3  # the exit status; 2 is that of a command that cannot be carried out
INTERRUPTED = 130
TOOLCHAIN = "toolchain"
SIZES = (1, 2048, 30_000)  # elements
TRITON_ELEMENTS = 1 << 17
LOOK_S = 120.0
REPORT = "run it again with --report FILE, and send us the file"
SHOWN = 300  # characters of an error in the table; the report has all


@dataclass(frozen=True, slots=True)
class Found:
    """How a test ended. `state` is "ok", "partly", "left out" or "FAIL"."""

    name: str
    state: str
    seconds: float
    detail: str
    remedy: str = ""
    about: Result = field(default_factory=dict)
    """What was measured, and what the test wrote to stderr."""

    def __str__(self) -> str:
        line = f"{self.state:9}{self.seconds:6.1f} s  {self.name}"
        line += f": {self.detail}" if self.detail else ""
        return f"{line}\n{'':19}-> {self.remedy}" if self.remedy else line


def look() -> Result:
    try:
        count = CudaDriver().count()
    except CudaError:
        count = 0
    return {"checks": [asdict(check) for check in examine()], "gpus": count}


def choose(asked: str, count: int) -> list[int]:
    """Which of `count` GPUs to test: `asked` is "all", "none", or indices such as "0,2", which
    become the only ones that this process's children see. Raises CollectiveError."""
    if asked in ("all", "none"):
        return [*range(count)] if asked == "all" else []
    words = asked.split(",")
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise CollectiveError(
            f"--gpus takes all, none, or indices such as 0,1; here are {count} GPUs, not {asked!r}"
        )
    chosen = sorted({int(word) for word in words})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if visible != [""] else list(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in chosen)
    return chosen


def tests(gpus: Sequence[int]) -> Iterator[Row]:
    """Those of the CPU, of each GPU by itself, of ranks on the first GPU, and between GPUs."""
    yield from _of_cpus()
    for i, number in enumerate(gpus):
        yield from _of_a_gpu(i, f"GPU {number}, ")
    if gpus:
        yield from _of_ranks(f"GPU {gpus[0]}, ")
    if len(gpus) > 1:
        yield from _between(len(gpus), f"{len(gpus)} GPUs, ")


def _test(
    name: str, seconds: float, remedy: str, measure: Callable[..., Result], *args: Any
) -> Row:
    return Row(name, "selftest", seconds, partial(measure, *args), remedy)


def _of_cpus() -> Iterator[Row]:
    libraries: tuple[Arrays, ...] = (NumpyArrays(), torch := TorchTensors("cpu"))
    # its limit is long, so that those of the others need not count it
    yield _test("CPU kernels compile", 180, f"if the machine was busy, run it again; or {REPORT}",
                run_ranks, libraries[find_spec("torch") is not None], 2, SIZES[:1],
                False)  # fmt: skip
    for arrays in libraries:
        for n in (2, 3):
            yield _test(f"CPU ranks, {arrays.name}, {n}", 30, REPORT,
                        run_ranks, arrays, n, SIZES, False)  # fmt: skip
    yield _test("CPU ranks, one is killed", 15, REPORT, run_killed, libraries[0])
    yield _test("CPU ranks, training, 2", 30, REPORT, train, torch, 2, "c-cube", "cpu")
    yield _test("CPU ranks, DDP, 2", 30, REPORT, train, torch, 2, DDP, "cpu")


def _of_a_gpu(gpu: int, on: str) -> Iterator[Row]:
    yield _test(f"{on}{TOOLCHAIN}", 15, "install one pairing, in the folder of the sources: pip "
                "install '.[cuda12]' or '.[cuda13]', as the driver and torch have it",
                toolchain, gpu)  # fmt: skip
    meter = Meter(gpu=gpu)
    yield _test(f"{on}all kernels compile", plans.COMPILE_S, REPORT, plans.compiled, meter)
    for name, seconds, measure in (
        ("algorithms", 30, plans.algorithms), ("dtypes and ops", 15, plans.dtypes),
        ("abort", 10, plans.abort),
    ):  # fmt: skip
        yield _test(f"{on}{name}", seconds, REPORT, measure, meter)
    yield _test(f"{on}two launches at once", 10, REPORT, plans.side_by_side, meter)
    yield _test(f"{on}Triton's kernels", 30, "install gcc and python3-dev if there is no C "
                f"compiler; otherwise {REPORT}",
                TritonRows(None, f"cuda:{gpu}", TRITON_ELEMENTS).correct)  # fmt: skip


def _of_ranks(on: str) -> Iterator[Row]:
    """Ranks on one GPU: threads, processes by IPC, and processes without IPC."""
    cupy, torch = CupyArrays(), TorchTensors()
    libraries: tuple[Arrays, ...] = (cupy, torch)
    meter = Meter()
    shared = (
        "if processes cannot open each other's GPU memory, run them as one user in one PID "
        f"namespace (containers: --pid=host --ipc=host), not in MIG slices; or {REPORT}"
    )
    for arrays in libraries:
        yield _test(f"{on}threads, {arrays.name}, 3", 30, REPORT, run_ranks, arrays, 3, SIZES, True)
        yield _test(f"{on}processes by IPC, {arrays.name}, 2", 30, shared,
                    run_ranks, arrays, 2, SIZES, False, "require")  # fmt: skip
    yield _test(f"{on}processes without IPC, 2", 30, REPORT, without_ipc, cupy)
    yield _test(f"{on}a process is killed", 15, REPORT, run_killed, cupy)
    yield _test(f"{on}sparse kernels", 20, REPORT, SparseRows(meter, cupy).correct)
    yield _test(f"{on}sparse all-reduces, 2 processes", 15, REPORT,
                sparse_ranks, meter, cupy, 2, False, 0)  # fmt: skip
    yield _test(f"{on}a CUDA graph, 2 processes", 15, REPORT, run_graph, torch)
    yield _test(f"{on}training, 2 processes", 30, REPORT, train, torch, 2, "c-cube")
    yield _test(f"{on}DDP, 2 processes", 30, REPORT, train, torch, 2, DDP)
    yield _test(f"{on}torch.distributed, 1 process", 20, REPORT, over_nccl, torch, 1)
    yield _test(f"{on}gTop-k, 3 processes", 20, REPORT, systems.gtopk, torch, 3, "gtopk", 100_000)
    yield _test(
        f"{on}an embedding, 3 processes", 20, REPORT, systems.embedding, torch, 3, "Adagrad"
    )


def _between(n: int, on: str) -> Iterator[Row]:
    remedy = ("check how GPUs reach each other: the IOMMU and PCIe ACS (`linkweave doctor`), which "
              f"may also corrupt data, and NVLink (nvidia-smi topo -m); or {REPORT}")  # fmt: skip
    for arrays in (CupyArrays("cuda"), TorchTensors("cuda")):
        for virtual in (False, True):
            kind = "threads" if virtual else "processes"
            yield _test(f"{on}{kind}, {arrays.name}", 60, remedy,
                        run_ranks, arrays, n, SIZES, virtual)  # fmt: skip
    cupy, torch = CupyArrays("cuda"), TorchTensors("cuda")
    yield _test(f"{on}a process is killed", 15, remedy, run_killed, cupy)
    yield _test(f"{on}sparse all-reduces", 30, remedy, sparse_ranks, Meter(), cupy, n, False, 0)
    yield _test(f"{on}CUDA graphs", 15, remedy, run_graph, torch, n)
    yield _test(f"{on}training", 60, remedy, train, torch, n, "c-cube")
    yield _test(f"{on}DDP", 60, remedy, train, torch, n, DDP)
    yield _test(f"{on}gTop-k", 30, remedy, systems.gtopk, torch, n, "gtopk", 100_000)
    yield _test(f"{on}an embedding", 30, remedy, systems.embedding, torch, n, "Adagrad")
    yield _test(f"{on}beside NCCL", 60, remedy, beside_nccl, torch, n, NCCL_BYTES[:3])
    yield _test(f"{on}torch.distributed", 30, remedy, over_nccl, torch, n)


def toolchain(gpu: int) -> Result:
    """Whether the GPU, its driver, CuPy, NVRTC and torch fit each other."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    device = cupy.cuda.Device(gpu)
    capability, driver = int(device.compute_capability), cupy.cuda.runtime.driverGetVersion()
    if capability < OLDEST:
        raise Failed(f"its compute capability is {capability / 10}; kernels need {OLDEST / 10}")
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    if driver // 1000 < runtime // 1000:
        raise Failed(f"CuPy has CUDA {runtime // 1000}, the driver {driver // 1000}")
    found = {"compute_capability": capability, "driver": driver, "cupy": cupy.__version__,
             "runtime": runtime, "nvrtc": ".".join(map(str, nvrtc.getVersion()))}  # fmt: skip
    if find_spec("torch"):
        import torch

        found["torch"] = torch.__version__
        if (built := torch.version.cuda) and int(built.split(".")[0]) != runtime // 1000:
            raise Failed(f"torch is built for CUDA {built}, CuPy for CUDA {runtime // 1000}")
        words = torch._C._cuda_getArchFlags().split() if built else []
        codes = [int(code) for word in words for code in re.findall(r"sm_(\d+)", word)]
        ptx = [int(code) for word in words for code in re.findall(r"compute_(\d+)", word)]
        same = [code for code in codes if code // 10 == capability // 10]
        if built and min([*same, *ptx, capability + 1]) > capability:
            raise Failed(f"this torch has code for {', '.join(words)}, not for sm_{capability}")
    return found


def without_ipc(arrays: Arrays) -> Result:
    """Ranks whose GPU refuses to open each other's memory go through the host's."""

    def refused(self: Any, handle: bytes) -> int:
        raise RuntimeError("refused by the self-test")

    with mock.patch.object(CudaDevice, "ipc_open", refused):  # ranks are forked, and inherit it
        return run_ranks(arrays, 2, SIZES, False)


def ended(test: Row) -> Found:
    row = in_process(test, test.limit)
    state, took = row.pop("state"), row.pop("took_s")
    if state == "ok":
        words = [f"{row['checked']} results"] if row.get("checked") else []
        if "is in host memory" in row.get("stderr", ""):
            words.append("some GPUs share host memory")
        if skipped := [*dict.fromkeys(row.get("skipped", []))]:
            words.append(f"left out: {'; '.join(skipped)}")
        state = "partly" if skipped else "ok"
        return Found(test.name, state, took, "; ".join(words), about=row)
    kind, _, why = state.partition(": ")
    if kind == "left out":
        return Found(test.name, kind, took, why, about=row)
    line = " ".join(why.split())
    shown = line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
    return Found(test.name, "FAIL", took, shown, test.remedy, row | {"state": state})


def verdict(problems: Sequence[str], found: Sequence[Found]) -> tuple[str, int]:
    failed = [f"{row.name}: {row.detail}; {row.remedy}" for row in found if row.state == "FAIL"]
    if problems or failed:
        return f"FAIL: {[*problems, *failed][0]}", FAIL
    if left := [f"{row.name} ({row.detail})" for row in found if row.state != "ok"]:
        return f"PASS except {'; '.join(left)}", EXCEPT
    return "PASS", PASS


def run(asked: str, out: TextIO, report: Path | None = None) -> int:
    """Examine and test this machine, and print as it goes. Returns the exit status.

    Raises CollectiveError for GPUs that are not there.
    """
    seen = in_process(Row("look", "selftest", LOOK_S, look), LOOK_S)  # here CUDA must not start
    if seen["state"] != "ok":
        seen = {"checks": [asdict(Check("machine", "problem", seen["state"], REPORT))], "gpus": 0}
        asked = "none"
    gpus = choose(asked, seen["gpus"])
    where = f"CPU ranks and of {'GPU' if len(gpus) == 1 else 'GPUs'} " + ", ".join(map(str, gpus))
    if not gpus:
        where = f"CPU ranks; {'no GPU is here' if asked == 'all' else 'GPUs are left out'}"
    checks = [Check(**check) for check in seen["checks"]]
    for check in checks:
        print(check, file=out)
    problems = [f"{c.name}: {c.detail}; {c.remedy}" for c in checks if c.state == "problem"]
    print(f"\nTests of {where}. The first compiles kernels, once:", file=out, flush=True)
    found, start, all_tests = list[Found](), time.monotonic(), [*tests(gpus)]

    about = {"machine": machine(), "arguments": sys.argv[1:], "gpus": gpus} if report else {}

    def save(words: str) -> None:
        if report:
            rest = {"checks": seen["checks"], "tests": [asdict(row) for row in found]}
            write(report, {**about, "verdict": words, **rest})

    without = False  # a toolchain, on which all that needs a GPU depends
    try:
        for test in all_tests:
            if without and "GPU" in test.name and not test.name.endswith(TOOLCHAIN):
                found.append(Found(test.name, "left out", 0.0, "a toolchain has failed"))
            else:
                found.append(ended(test))
            without |= test.name.endswith(TOOLCHAIN) and found[-1].state == "FAIL"
            print(found[-1], file=out, flush=True)
            save(f"killed after {len(found)} of {len(all_tests)} tests")  # if it is
        words, status = verdict(problems, found)
    except KeyboardInterrupt:
        words, status = f"interrupted after {len(found)} of {len(all_tests)} tests", INTERRUPTED
    print(f"\n{time.monotonic() - start:.0f} s. {words}", file=out, flush=True)
    save(words)
    return status
