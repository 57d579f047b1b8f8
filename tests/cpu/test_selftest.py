"""`linkweave selftest`: its verdicts, on CPU ranks, on GPUs made of threads, and with planted
faults."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_ranks import Choosy, gpus
from gpu_vectors import sparse_gpus
from host_gpu import HostDevice, needs_compiler
from test_gpu_suite import HostArrays, Wrong
from typer.testing import CliRunner

from linkweave.bench.command import selftest
from linkweave.bench.command.cli import app
from linkweave.bench.command.selftest import Found, choose, ended, verdict
from linkweave.bench.gpu import runner
from linkweave.bench.gpu.api import Arrays, run_ranks
from linkweave.bench.gpu.plans import algorithms
from linkweave.bench.gpu.runner import Failed, LeftOut, Result, Row
from linkweave.collectives import CollectiveError


def named(words: str, gpus: int = 1) -> Row:
    (found,) = [test for test in selftest.tests(range(gpus)) if words in test.name]
    return found


@pytest.mark.timeout(1800)  # it takes most of a minute where nothing else runs
def test_cpu_ranks_pass(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["selftest", "--gpus", "none", "--report", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.rstrip().endswith(" s. PASS")
    told = json.loads(path.read_text())
    assert told["verdict"] == "PASS" and told["gpus"] == []
    assert "Tests of CPU ranks; GPUs are left out." in done.output
    assert all(row["about"] for row in told["tests"])
    assert [row["state"] for row in told["tests"]] == ["ok"] * len(told["tests"])
    assert all(f"  {row['name']}" in done.output for row in told["tests"])
    assert {check["name"] for check in told["checks"]} >= {"system", "libraries"}


def test_every_verdict_has_its_exit_status() -> None:
    fine = Found("a", "ok", 1.0, "3 results")
    out = Found("b", "left out", 0.1, "torch is not installed")
    some = Found("d", "partly", 1.0, "84 results; left out: packed_trees")
    wrong = Found("c", "FAIL", 2.0, "1 wrong bytes", "send us the file")
    assert verdict([], [fine]) == ("PASS", 0)
    assert verdict([], [fine, out]) == ("PASS except b (torch is not installed)", 3)
    assert verdict([], [fine, some]) == ("PASS except d (84 results; left out: packed_trees)", 3)
    assert verdict([], [fine, out, wrong]) == ("FAIL: c: 1 wrong bytes; send us the file", 1)
    assert verdict(["memfd: refused; allow it"], [fine]) == ("FAIL: memfd: refused; allow it", 1)
    assert str(wrong).split() == ["FAIL", "2.0", "s", "c:", "1", "wrong", "bytes", "->", "send",
                                  "us", "the", "file"]  # fmt: skip


def test_which_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (choose("all", 3), choose("none", 8)) == ([0, 1, 2], [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose("2,0", 3) == [0, 2]
    names = [test.name for test in selftest.tests([0, 2])]
    assert {"GPU 2, toolchain", "GPU 0, threads, cupy, 3", "2 GPUs, training"} <= {*names}
    assert selftest.os.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert choose("1", 2) == [1]
    assert selftest.os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    for asked in ("2", "x", "", "-1", "\N{SUPERSCRIPT TWO}"):
        with pytest.raises(CollectiveError, match="here are 2 GPUs, not "):
            choose(asked, 2)


# ---- planted faults ------------------------------------------------------------------------------
def hung() -> Result:
    time.sleep(60)
    return {}


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_S", 0.3)
    found = ended(Row("stuck", "selftest", 0.1, hung, "look there"))
    assert (found.state, found.remedy) == ("FAIL", "look there")
    assert found.detail == "no result after 1 s"


def cupy_of(driver: int, runtime: int, capability: str = "90") -> dict[str, Any]:
    """Modules as if CuPy were installed."""
    cuda = SimpleNamespace(
        Device=lambda gpu: SimpleNamespace(compute_capability=capability),
        runtime=SimpleNamespace(driverGetVersion=lambda: driver, runtimeGetVersion=lambda: runtime),
    )
    nvrtc = SimpleNamespace(getVersion=lambda: (runtime // 1000, 0))
    libs = SimpleNamespace(nvrtc=nvrtc)
    return {"cupy": SimpleNamespace(cuda=cuda, __version__="14.2.0"),
            "cupy_backends": SimpleNamespace(), "cupy_backends.cuda": SimpleNamespace(),
            "cupy_backends.cuda.libs": libs, "cupy_backends.cuda.libs.nvrtc": nvrtc}  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "torch", "words"),
    [
        ({"cupy": None}, None, "ModuleNotFoundError: import of cupy halted"),
        ({**cupy_of(13000, 13020), "cupy_backends.cuda.libs": SimpleNamespace()}, None,
         "ImportError: cannot import name 'nvrtc'"),
        (cupy_of(12040, 13020), None, "Failed: CuPy has CUDA 13, the driver 12"),
        (cupy_of(13000, 13020, "60"), None, "Failed: its compute capability is 6.0; kernels need"),
        (cupy_of(13000, 13020), ("12.9", "sm_90"), "Failed: torch is built for CUDA 12.9, CuPy"),
        (cupy_of(13000, 13020, "70"), ("13.0", "sm_80 sm_90a"), "Failed: this torch has code for"),
    ],
)  # fmt: skip
def test_a_toolchain_that_does_not_fit(
    modules: dict[str, Any], torch: tuple[str, str] | None, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if torch:
        monkeypatch.setattr("torch.version.cuda", torch[0])
        monkeypatch.setattr("torch._C._cuda_getArchFlags", lambda: torch[1], raising=False)
    found = ended(named("toolchain"))
    assert found.state == "FAIL" and found.detail.startswith(words), found
    assert "pip install '.[cuda12]' or '.[cuda13]'" in found.remedy


def test_a_toolchain_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in cupy_of(13000, 13020, "89").items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch._C._cuda_getArchFlags", lambda: "sm_80 sm_90", raising=False)
    assert ended(named("toolchain")).state == "ok"


class Flipped(Arrays):
    """Sees the last bit of each result wrong."""

    def bytes_of(self, x: Any) -> Any:
        found = super().bytes_of(x).copy()
        found[-1] ^= 1
        return found


def test_a_wrong_result_is_named_in_one_line() -> None:
    measure = partial(run_ranks, Flipped("numpy", "cpu"), 2, (1,), False)
    found = ended(Row("two ranks", "selftest", 10, measure, "look at the cables"))
    assert (found.state, found.remedy) == ("FAIL", "look at the cables")
    assert "allreduce sum of float32, numpy, rank " in found.detail
    assert "1 of 4036 elements are wrong" in found.detail and "\n" not in str(found.detail)
    assert "Traceback" in found.about["stderr"]


def test_without_a_toolchain_nothing_else_of_gpus_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(gpu: int) -> Result:
        raise Failed("CuPy has CUDA 13, the driver 12")

    monkeypatch.setattr(selftest, "look", lambda: {"checks": [], "gpus": 2})
    monkeypatch.setattr(selftest, "_of_cpus", lambda: iter(()))
    monkeypatch.setattr(selftest, "toolchain", broken)
    out, report = io.StringIO(), tmp_path / "report.json"
    assert selftest.run("all", out, report) == selftest.FAIL
    told = json.loads(report.read_text())
    states = {row["name"]: row["state"] for row in told["tests"]}
    assert states.pop("GPU 0, toolchain") == states.pop("GPU 1, toolchain") == "FAIL"
    assert {*states.values()} == {"left out"}
    assert told["verdict"].startswith("FAIL: GPU 0, toolchain: Failed: CuPy has CUDA 13")


def test_an_interrupt_writes_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(test: Row) -> Found:
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "ended", interrupted)
    out, report = io.StringIO(), tmp_path / "report.json"
    assert selftest.run("none", out, report) == selftest.INTERRUPTED
    assert json.loads(report.read_text())["verdict"] == "interrupted after 0 of 8 tests"


def test_a_run_that_is_killed_leaves_what_it_has_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, report = io.StringIO(), tmp_path / "report.json"
    done: list[str] = []

    def dies(test: Row) -> Found:
        if done:
            told = json.loads(report.read_text())
            assert [row["name"] for row in told["tests"]] == done
            assert told["verdict"] == f"killed after {len(done)} of 8 tests"
        done.append(test.name)
        return Found(test.name, "ok", 1.0, "")

    monkeypatch.setattr(selftest, "ended", dies)
    assert selftest.run("none", out, report) == selftest.PASS
    assert len(done) == 8 and json.loads(report.read_text())["verdict"] == "PASS"


def test_a_report_goes_where_its_path_leads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A link stays one, a device is written to, and so is a file that cannot be replaced."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    runner.write(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text()) == {"a": 1}
    reader, writer = os.openpty()
    runner.write(Path(os.ttyname(writer)), {"b": 2})
    assert b'"b": 2' in os.read(reader, 100)

    def busy(*_: Any) -> None:
        raise OSError(errno.EBUSY, "device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    runner.write(tmp_path / "file", {"c": 3})
    assert json.loads((tmp_path / "file").read_text()) == {"c": 3}
    assert {each.name for each in tmp_path.iterdir()} == {"link", "file"}


@needs_compiler
def test_refused_ipc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "CupyArrays", HostArrays)
    with gpus(monkeypatch, Choosy):
        found = ended(named("processes by IPC, threads"))
    assert found.state == "FAIL" and "mapping of buffer object failed" in found.detail
    assert "--pid=host --ipc=host" in found.remedy


@needs_compiler
def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = partial(algorithms, machines=("mesh-3",), sizes=(4036,))
    monkeypatch.setattr(selftest.plans, "algorithms", one)
    with gpus(monkeypatch, lambda index: Wrong(index=index)):
        found = ended(named("algorithms"))
    assert found.state == "FAIL" and found.detail.endswith("1 wrong bytes")
    assert found.remedy == selftest.REPORT


@needs_compiler
def test_plans_that_do_not_fit_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is too small for 8 ranks; a planner that fails is a failure."""
    one = partial(algorithms, machines=("dgx1-v100",), sizes=(4,))
    monkeypatch.setattr(selftest.plans, "algorithms", one)
    with gpus(monkeypatch, lambda index: HostDevice(index=index, multiprocessors=42)):
        found = ended(named("algorithms"))
        assert found.state == "partly" and " results; left out: " in found.detail, found
        assert "packed_trees on dgx1-v100: packed_trees needs " in found.detail
        monkeypatch.setattr("linkweave.bench.gpu.plans.plan_allreduce", broken)
        assert ended(named("algorithms")).state == "FAIL"


def broken(*_: Any) -> Any:
    raise CollectiveError("no plan today")


def from_end_to_end(monkeypatch: pytest.MonkeyPatch, *tests: Row) -> tuple[int, str]:
    """The exit status of the whole command with these tests, and its last line."""
    out = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(selftest, "look", lambda: {"checks": [], "gpus": 0})
        patch.setattr(selftest, "tests", lambda gpus: iter(tests))
        status = selftest.run("all", out)
    return status, out.getvalue().splitlines()[-1].split(" s. ")[1]


@needs_compiler
def test_faults_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its exit status, and a last line that names the test and what to do."""
    one = partial(algorithms, machines=("mesh-3",), sizes=(4036,))
    monkeypatch.setattr(selftest.plans, "algorithms", one)
    monkeypatch.setattr(selftest, "CupyArrays", HostArrays)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "START_S", 0.3)
        stuck = Row("stuck", "selftest", 0.1, hung, "look there")
        status, last = from_end_to_end(monkeypatch, stuck)
    assert (status, last) == (selftest.FAIL, "FAIL: stuck: no result after 1 s; look there")
    with gpus(monkeypatch, Choosy):
        status, last = from_end_to_end(monkeypatch, named("processes by IPC, threads"))
    assert status == selftest.FAIL
    assert last.startswith("FAIL: GPU 0, processes by IPC, threads, 2: ") and "--ipc=host" in last
    with gpus(monkeypatch, lambda index: Wrong(index=index)):
        status, last = from_end_to_end(monkeypatch, named("algorithms"))
    assert status == selftest.FAIL
    assert last.startswith("FAIL: GPU 0, algorithms: Failed: two_shot 4036 bytes float32 sum, rank")
    assert last.endswith(f": 1 wrong bytes; {selftest.REPORT}")


# ---- from end to end -----------------------------------------------------------------------------
def left_out(*_: Any) -> Result:
    raise LeftOut("no torch on GPUs of threads")


@needs_compiler
@pytest.mark.timeout(1800)
def test_gpus_made_of_threads_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, but for what needs torch or Triton on a GPU."""
    monkeypatch.setattr(selftest, "look", lambda: {"checks": [], "gpus": 3})
    for name in ("toolchain", "run_graph", "train", "beside_nccl"):
        monkeypatch.setattr(selftest, name, left_out)
    monkeypatch.setattr(selftest.TritonRows, "correct", left_out)
    monkeypatch.setattr(selftest, "CudaDevice", HostDevice)
    monkeypatch.setattr(selftest, "CupyArrays", HostArrays)
    monkeypatch.setattr(selftest, "TorchTensors", lambda device="cuda:0": (
        NoTorch(device) if device != "cpu" else HostNumpyTorch()))  # fmt: skip
    for name in ("compiled", "algorithms", "dtypes"):
        monkeypatch.setattr(selftest.plans, name, left_out)
    monkeypatch.setattr(selftest.SparseRows, "correct", left_out)
    out = io.StringIO()
    with sparse_gpus(monkeypatch):
        status = selftest.run("all", out)
    lines = out.getvalue().splitlines()
    states = {line.split(" s  ")[1].split(":")[0]: line[:8].strip()
              for line in lines if " s  " in line}  # fmt: skip
    assert status == selftest.EXCEPT, out.getvalue()
    assert lines[-1].split(" s. ")[1].startswith("PASS except CPU ranks, training, 2 (no torch on")
    ran = {name for name, state in states.items() if state == "ok"}
    assert ran >= {
        "GPU 0, abort", "GPU 2, abort", "GPU 1, two launches at once", "GPU 0, threads, threads, 3",
        "GPU 0, processes by IPC, threads, 2", "GPU 0, processes without IPC, 2",
        "GPU 0, a process is killed", "GPU 0, sparse all-reduces, 2 processes",
        "3 GPUs, processes, threads", "3 GPUs, threads, threads", "3 GPUs, a process is killed",
        "3 GPUs, sparse all-reduces",
    }, states  # fmt: skip


class NoTorch(HostArrays):
    name = "torch"

    def load(self) -> None:
        raise LeftOut("torch has no tensors on GPUs of threads")


def HostNumpyTorch() -> Any:
    return selftest.NumpyArrays()
