"""Every CUDA kernel compiled ahead of time, with no GPU: sm_70 (V100), sm_80 (A100), sm_90 (H100),
sm_100 (B200), sm_120 (RTX 50).

The recorded registers say how many blocks fit a multiprocessor; after a wanted change run this file
with --update-golden and look at the difference.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvrtc import Compiled, Nvrtc

from linkweave.kernels import caches
from linkweave.kernels.dtypes import DTYPES, ops_of
from linkweave.kernels.gpu.compile import cubin
from linkweave.kernels.gpu.source import PLAIN, PLAN_THREADS, options, source

RECORD = Path(__file__).parents[1] / "golden" / "plan.cu.registers.json"
ARCHITECTURES = (70, 80, 90, 100, 120)
KERNELS = [(d, op) for d in DTYPES if d != "bool" for op in ops_of(d) if op != "avg"]
REGISTERS = 65536  # of a multiprocessor


FEW = [
    (ARCHITECTURES[(i + i // 4) % 5], *kernel)
    for i, kernel in enumerate(KERNELS) if (i + i // 4) % 2 == 0
]  # fmt: skip
"""Half of the kernels for one architecture each, every dtype and reduction: a second a kernel."""


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)],
                ids=["few", "all"])  # fmt: skip
def compiled(request: pytest.FixtureRequest) -> dict[tuple[int, str, str], Compiled]:
    compiler, text = Nvrtc(), source("plan/plan.cu")
    cases = [(a, d, o) for a in ARCHITECTURES for d, o in KERNELS] if request.param else FEW
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda c: compiler.compile(text, options(c[1], c[2]), c[0]), cases)
        return {case: found["run_plan"] for case, found in zip(cases, made, strict=True)}


def test_no_kernel_spills(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    for case, kernel in compiled.items():
        divides = case[1].startswith("float8")  # an average, in memory
        assert (kernel.spilled, kernel.stack) == (0, 128 * divides), case
        assert kernel.registers <= 80 and 3 * kernel.registers * PLAN_THREADS <= REGISTERS, case
        assert kernel.shared <= 16 << 10, case


def test_registers_are_those_recorded(
    compiled: dict[tuple[int, str, str], Compiled], update_golden: bool
) -> None:
    found = {f"sm_{a} {d} {o}": k.registers for (a, d, o), k in compiled.items()}
    recorded = json.loads(RECORD.read_text())
    if update_golden:
        RECORD.write_text(json.dumps({**recorded, **found}, indent=1) + "\n")
    else:
        assert found == {key: recorded.get(key) for key in found}


def test_memory_order_and_width(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    """Signals are acquired and released at system scope, behind a barrier; data moves 16 bytes at
    once; there is no fence, which the sanitizers could not judge."""
    for case, kernel in compiled.items():
        ptx = kernel.ptx
        assert "ld.acquire.sys.global.u32" in ptx and "st.release.sys.global.u32" in ptx, case
        assert not re.search(r"\b(membar|fence)\b", ptx), case
        assert ".ftz" not in ptx, case  # denormals are numbers
        assert ptx.count("bar.red.or.pred") >= 4, case  # at the start, twice an action, at the end
        for access in ("ld", "st"):
            assert re.search(rf"{access}\.global\.(v4\.[ubf]32|v2\.[ubf]64)", ptx), case
            assert not re.search(rf"\b{access}\.v4", ptx), case  # of an unknown address space
            assert f"{access}.relaxed.sys.global.v2.u64" in ptx, case


def in_flight(ptx: str) -> list[int]:
    """The lengths of runs of 16-byte loads, the first of which is used only behind the last; a
    word that is split into halves is not yet used."""
    runs, loaded = [0], set[str]()
    for line in ptx.splitlines():
        if found := re.search(r"\bld\.(?:global\.)?v4\.[ubf]32\s+\{([^}]*)\}", line):
            loaded |= {*found[1].split(", ")}
            runs[-1] += 1
        elif (halves := re.search(r"\bmov\.b32\s+\{(.*)\}, (%\w+)", line)) and halves[2] in loaded:
            loaded |= {*halves[1].split(", ")}
        elif loaded & {*re.findall(r"%\w+", line.partition(",")[2])}:
            loaded = set()
            runs.append(0)
    return [n for n in runs if n]


def test_loads_in_flight(compiled: dict[tuple[int, str, str], Compiled]) -> None:
    """With one, two, three and more operands: eight or more a thread of 2 and 4 bytes."""
    for (architecture, dtype, op), kernel in compiled.items():
        runs = sorted(in_flight(kernel.ptx))[-4:]
        least = {1: [3, 4, 4, 8], 8: [6, 6, 8, 8]}.get(DTYPES[dtype].size, [8, 8, 8, 9])
        assert [*map(int.__ge__, runs, least)] == [True] * 4, (architecture, dtype, op, runs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_check_of_a_queue(architecture: int) -> None:
    kernel = Nvrtc().compile(source("plan/queue.cu"), PLAIN, architecture)["check"]
    assert (kernel.spilled, kernel.stack, kernel.shared) == (0, 0, 0)
    # beside a resident block of the plan interpreter on the same multiprocessor
    assert kernel.registers <= 32
    assert "ld.acquire.sys.global.u32" in kernel.ptx and "st.release.sys.global.u32" in kernel.ptx


def test_whatever_runs_on_gpus_runs_by_one_of_these_kernels() -> None:
    """A bool is a byte, 0 or 1."""
    made = {options(*kernel) for kernel in KERNELS}
    assert {options(d, op) for d in DTYPES for op in ops_of(d)} == made
    assert options("bool", "sum") == options("bool", "or") == options("uint8", "max")
    assert options("bool", "prod") == options("bool", "and") == options("uint8", "min")
    assert options("bool", "xor") == options("uint8", "xor")


def test_a_faulty_source_is_refused() -> None:
    broken = source("plan/plan.cu").replace("move_plain<T, Op>(l", "move_on<T, Op>(l")
    with pytest.raises(ValueError, match=r"move_on"):
        Nvrtc().compile(broken, options("float32", "sum"), 90)


class FakeNvrtc:
    """CuPy's face of NVRTC."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []

    def getVersion(self) -> tuple[int, int]:
        return 12, 9

    def getSupportedArchs(self) -> list[int]:
        return [75, 80, 86, 90, 100, 120]

    def createProgram(self, text: str, name: str, headers: object, names: object) -> str:
        return text

    def compileProgram(self, program: str, words: tuple[str, ...]) -> None:
        if program == "wrong":
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")
        self.compiled.append((program, words))

    def getCUBIN(self, program: str) -> bytes:
        return f"code of {program}".encode()

    def getProgramLog(self, program: str) -> str:
        return f"error in {program}"

    def destroyProgram(self, program: str) -> None:
        pass


def given_to_cupy(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    libs = SimpleNamespace(nvrtc=nvrtc)
    names = {"cupy_backends": SimpleNamespace(), "cupy_backends.cuda": SimpleNamespace(),
             "cupy_backends.cuda.libs": libs, "cupy_backends.cuda.libs.nvrtc": nvrtc}  # fmt: skip
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    return nvrtc


def test_on_a_gpu_it_is_compiled_with_these_options_alone_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvrtc = given_to_cupy(FakeNvrtc(), monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = options("float32", "sum")
    for _ in range(2):
        assert cubin("source", words, 90) == b"code of source"
    assert nvrtc.compiled == [("source", (*words, "-arch=sm_90"))]
    assert cubin("source", words, 80) == b"code of source"
    assert len(nvrtc.compiled) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no folder can be made
    monkeypatch.setattr(caches, "temporary", lambda: tmp_path / "temporary")
    for _ in range(2):
        assert cubin("source", words, 80) == b"code of source"
    assert len(nvrtc.compiled) == 3
    with pytest.raises(RuntimeError, match=r"NVRTC_ERROR_COMPILATION \(6\): error in wrong"):
        cubin("wrong", words, 80)


@pytest.mark.parametrize(("gpu", "made"), [(103, 100), (121, 120), (86, 86), (70, 70), (110, 110)])
def test_a_gpu_that_nvrtc_does_not_know_gets_code_of_its_generation(
    gpu: int, made: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If there is none, NVRTC's own error says so."""
    nvrtc = given_to_cupy(FakeNvrtc(), monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin("source", (), gpu)
    assert nvrtc.compiled == [("source", (f"-arch=sm_{made}",))]
