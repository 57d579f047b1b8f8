"""What `doctor` says of machines made up for it: containers, drivers, GPUs that cannot meet."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linkweave.collectives.runtime.gpu import doctor
from linkweave.collectives.runtime.gpu.doctor import Check, System, examine
from linkweave.collectives.runtime.gpu.driver import CudaDriver, CudaError
from linkweave.topology import load
from tests.null.fixtures import Driver


def nvml(gpus: int) -> Driver:
    """NVML of so many GPUs without NVLinks; without any, it does not find its library."""
    return Driver(load(f"pcie-{gpus}")) if gpus else Driver(load("mesh-1"), nvmlInit=12)


class Cuda:
    """As much of libcuda as is asked, with C's calling convention."""

    def __init__(self, gpus: int, closed: tuple[tuple[int, int], ...] = (), **lacking: Any) -> None:
        self.gpus, self.closed, self.lacking = gpus, closed, lacking

    @staticmethod
    def _put(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    def cuInit(self, flags: int) -> int:
        return int(self.lacking.get("init", 0))

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_MADE_UP"
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        return self._put(out, 12080)

    def cuDeviceGetCount(self, out: Any) -> int:
        return self._put(out, self.gpus)

    def cuDeviceGet(self, out: Any, i: int) -> int:
        return self._put(out, i)

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        names = {20: "compute_mode", 41: "unified", 102: "vmm", 103: "handles", 125: "events"}
        default = 0 if attribute == 20 else 1
        return self._put(out, self.lacking.get(names[attribute], {}).get(device, default))

    def cuDeviceCanAccessPeer(self, out: Any, a: int, b: int) -> int:
        return self._put(out, (a, b) not in self.closed)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    yield tmp_path


def found(root: Path, nvml: Any, cuda: Any = None, **environ: str) -> dict[str, Check]:
    system = System(root, environ, nvml, lambda: CudaDriver(cuda))
    return {check.name: check for check in examine(system)}


def test_without_gpus_all_is_well(root: Path) -> None:
    checks = found(root, nvml(0))
    assert checks["GPU driver"] == Check("GPU driver", "ok", "no GPU here; ranks run on the CPU")
    assert {c.state for c in checks.values()} <= {"ok", "warning"}


def test_gpus_that_meet(root: Path) -> None:
    driver = root / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    words = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (driver / "version").write_text(words)
    checks = found(root, nvml(3), Cuda(3))
    assert checks["GPU driver"].detail == "570.86.15"
    assert checks["GPUs"].detail == "3 x Tesla V100-SXM2-16GB"
    assert checks["CUDA"].detail == "driver for CUDA 12.8, 3 GPUs"
    assert checks["peer access"].detail == "all 6 pairs (0: x x x; 1: x x x; 2: x x x)"
    assert checks["peer access"].state == checks["IPC (VMM)"].state == "ok"
    assert "problem" not in {c.state for c in checks.values()}


def test_closed_ways_are_shown(root: Path) -> None:
    check = found(root, nvml(3), Cuda(3, closed=((0, 2), (2, 0))))["peer access"]
    assert check.state == "warning" and "ACS" in check.remedy
    assert check.detail == "2 of 6 pairs have none (0: x x -; 1: x x x; 2: - x x)"


def test_ipc_and_compute_mode(root: Path) -> None:
    cuda = Cuda(2, unified={1: 0}, handles={0: 0, 1: 0}, compute_mode={0: 3, 1: 2})
    system = System(root, {}, nvml(2), lambda: CudaDriver(cuda))
    checks = examine(system)
    modes = [c.detail for c in checks if c.name == "compute mode"]
    assert modes == ["GPU 0 admits one process", "GPU 1 admits no process"]
    by_name = {c.name: c for c in checks}
    assert by_name["IPC (legacy)"].detail == "not on GPU 1"
    assert by_name["IPC (VMM)"].detail == "not on GPU 0, 1"
    assert by_name["IPC (events)"].state == "ok"


def test_a_container_without_the_drivers_library(root: Path) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text("")
    check = found(root, nvml(0))["GPU driver"]
    assert check.state == "problem" and "CUDA_VISIBLE_DEVICES" in check.remedy


def test_a_driver_that_does_not_answer(root: Path) -> None:
    check = found(root, Driver(load("mesh-1"), nvmlInit=999))["GPU driver"]
    assert check.state == "problem" and "error 999" in check.detail and check.remedy


def test_hidden_by_the_environment(root: Path) -> None:
    (root / "dev/nvidia0").touch()
    check = found(root, nvml(2), Cuda(2), CUDA_VISIBLE_DEVICES="")["GPU driver"]
    assert check.state == "problem" and "CUDA_VISIBLE_DEVICES" in check.detail + check.remedy


def test_cuda_that_fails_or_disagrees(root: Path) -> None:
    failed = found(root, nvml(2), Cuda(2, init=804))["CUDA"]
    assert failed.detail == "cuInit: CUDA_ERROR_MADE_UP (804)" and failed.state == "problem"
    fewer = found(root, nvml(2), Cuda(1))["CUDA"]
    assert fewer.detail == "shows 1 GPUs, the driver 2" and fewer.state == "problem"
    driver = nvml(2)
    driver.mig = dict.fromkeys(range(2), (1, 1))
    sliced = found(root, driver, Cuda(1))
    assert sliced["CUDA"].state == "ok" and "problem" not in {c.state for c in sliced.values()}


def test_no_libcuda_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaError, match=r"libcuda\.so\.1 cannot be loaded"):
        CudaDriver()


def test_a_small_dev_shm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(root)
    fields = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
    small = type("Stat", (), {**fields, "f_blocks": 16384, "f_bavail": 16000, "f_frsize": 4096})
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: small)
    check = found(root, nvml(0))["/dev/shm"]
    assert check.state == "warning" and check.detail.startswith("0.0625 GiB")
    assert "--shm-size" in check.remedy


def test_container_limits(root: Path) -> None:
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text("1073741824\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    (root / ".dockerenv").touch()
    checks = found(root, nvml(0))
    assert checks["memory limit"].state == "warning"
    assert "for 1.5 cores' time" in checks["cores"].detail
    assert "in a container (Docker)" in checks["system"].detail


@pytest.mark.parametrize(
    ("command", "kind", "state"),
    [("quiet", "DMA", "warning"), ("quiet iommu=pt", "DMA", "ok"), ("quiet", "identity", "ok")],
)
def test_an_iommu_that_translates(root: Path, command: str, kind: str, state: str) -> None:
    (root / "sys/class/iommu/dmar0").mkdir(parents=True)
    (root / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    (root / "sys/kernel/iommu_groups/0/type").write_text(kind + "\n")
    (root / "proc/cmdline").write_text(command)
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text("Kernel Module  550.1")
    check = found(root, nvml(2), Cuda(2))["IOMMU"]
    assert check.state == state
    assert ("iommu=pt" in check.remedy) == (state == "warning")


def test_peers_that_cannot_open_each_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OPEN", "raise PermissionError('no way')")
    check = found(root, nvml(0))["peer processes"]
    assert check.state == "problem" and "no way" in check.detail and "hidepid" in check.remedy


def test_a_check_that_breaks_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Any) -> Any:
        raise RuntimeError("made up")

    monkeypatch.setattr(doctor.os, "sched_getaffinity", broken)
    checks = found(root, nvml(2), Cuda(2))
    assert checks["cores"].state == "problem" and "made up" in checks["cores"].detail
    assert checks["libraries"].state == "ok" and checks["CUDA"].state == "ok"


def test_a_line_says_state_name_detail_and_remedy() -> None:
    assert str(Check("IPC", "ok", "fine")) == "ok       IPC              fine"
    assert str(Check("IPC", "problem", "none", "do this")).splitlines()[1].strip() == "-> do this"
