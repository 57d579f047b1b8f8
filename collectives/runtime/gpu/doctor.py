"""`linkweave doctor`: whether this machine can run collectives, and what prevents it.

Every check is independent and queries the system directly; a check that fails to run is itself
reported as a problem.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from linkweave.collectives.runtime.gpu.driver import CudaDriver, CudaError
from linkweave.kernels import TEMPORARY
from linkweave.kernels.caches import temporary
from linkweave.topology import TopologyError, load
from linkweave.topology.readers.detect import detect

GIB = 1 << 30
_LARGE = 1 << 60  # bytes; larger limits mean "unlimited"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. `state` is "ok", "warning" or "problem" (collectives cannot run)."""

    name: str
    state: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:8} {self.name:16} {self.detail}"
        return f"{line}\n{'':26}-> {self.remedy}" if self.remedy else line


@dataclass(frozen=True, slots=True)
class System:
    """What the checks query; tests replace it."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    nvml: Any = None
    open_cuda: Callable[[], CudaDriver] = CudaDriver

    def text(self, path: str) -> str:
        """The content of a file; empty if it does not exist or cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""


def examine(system: System | None = None) -> list[Check]:
    """Run all checks, the most fundamental ones first."""
    here = system or System()
    found: list[Check] = []
    for check in (_kernel, _shared_memory, _handles, _limits, _cores, _gpus, _iommu, _libraries):
        try:
            found += check(here)
        except Exception as error:  # the other checks must still run
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Check(name, "problem", f"could not be checked: {error!r}"))
    return found


def _kernel(here: System) -> Iterator[Check]:
    name = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        yield Check("system", "problem", name, "linkweave needs Linux")
        return
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        yield Check("system", "problem", f"{name}: no memfd or pidfd", "use Linux 5.3 or later")
        return
    container = next((what for what, there in (
        ("Docker", (here.root / ".dockerenv").exists()),
        ("Podman", (here.root / "run/.containerenv").exists()),
        ("Kubernetes", "KUBERNETES_SERVICE_HOST" in here.environ),
    ) if there), "")  # fmt: skip
    yield Check("system", "ok", name + (f", in a container ({container})" if container else ""))


def _shared_memory(here: System) -> Iterator[Check]:
    try:
        fd = os.memfd_create("linkweave-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 1 << 20)
            with mmap.mmap(fd, 1 << 20) as memory:
                memory[-1] = 1
        finally:
            os.close(fd)
        yield Check("shared memory", "ok", "nameless files (memfd) can be made and mapped")
    except OSError as error:
        yield Check("shared memory", "problem", f"memfd: {error.strerror}",
                    "the container's seccomp profile must allow memfd_create")  # fmt: skip
    try:
        stat = os.statvfs(here.root / "dev/shm")
    except OSError:
        yield Check("/dev/shm", "warning", "not there",
                    "only NCCL and torch's data loaders need it, not linkweave")  # fmt: skip
        return
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    detail = f"{size / GIB:.3g} GiB, {free / GIB:.3g} free"
    if size < GIB:
        yield Check("/dev/shm", "warning", detail,
                    "linkweave does not use it; for NCCL and torch's data loaders start the "
                    "container with --shm-size=8g or --ipc=host")  # fmt: skip
    else:
        yield Check("/dev/shm", "ok", detail)


_OPEN = "import os,sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def _handles(here: System) -> Iterator[Check]:
    """Open /proc/PID/fd/FD from another process, as ranks do with each other's memory."""
    fd = os.memfd_create("linkweave-doctor", os.MFD_CLOEXEC)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _OPEN, f"/proc/{os.getpid()}/fd/{fd}"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    finally:
        os.close(fd)
    if done.returncode == 0:
        yield Check("peer processes", "ok", "can open each other's memory through /proc")
    else:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Check("peer processes", "problem", f"cannot open each other's memory: {why}",
                    "run all ranks as one user in one PID namespace; mount /proc without "
                    "hidepid")  # fmt: skip


def _limits(here: System) -> Iterator[Check]:
    paths = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
    told = [here.text(path) for path in paths]
    limits = [int(word) for word in told if word.isdigit() and int(word) < _LARGE]
    if limits:
        state = "ok" if limits[0] >= 2 * GIB else "warning"
        yield Check("memory limit", state, f"{limits[0] / GIB:.3g} GiB for this container",
                    "" if state == "ok" else "give it 2 GiB or more")  # fmt: skip
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield Check("address space", "problem", f"limited to {soft / GIB:.3g} GiB (ulimit -v)",
                    "ulimit -v unlimited: ranks map hundreds of GiB of sparse memory")  # fmt: skip
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        yield Check("open files", "warning", f"at most {files} (ulimit -n)", "ulimit -n 4096")


def _cores(here: System) -> Iterator[Check]:
    mine, every = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = here.text("sys/fs/cgroup/cpu.max").split()
    detail = f"{mine} of {every} cores"
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        detail += f", for {int(quota[0]) / int(quota[1]):.3g} cores' time (cgroup)"
    yield Check("cores", "ok", detail)


def _gpus(here: System) -> Iterator[Check]:
    devices = sorted(p.name for p in (here.root / "dev").glob("nvidia[0-9]*"))
    loaded = (here.root / "proc/driver/nvidia/version").exists()
    try:
        machine = detect(here.environ, here.nvml)
    except TopologyError as error:
        yield Check("GPU driver", "problem", str(error),
                    "start the container with --gpus all (NVIDIA container toolkit), with the "
                    "capabilities compute and utility")  # fmt: skip
        return
    if not machine.devices:
        plain = load(f"cpu-{len(machine.gpus)}").assumptions
        why = "; ".join(a for a in machine.assumptions if a not in plain)
        if devices or loaded:
            yield Check("GPU driver", "problem", f"{', '.join(devices) or 'a driver is loaded'}, "
                        f"but no GPU is visible{': ' + why if why else ''}",
                        "check CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES")  # fmt: skip
        else:
            yield Check("GPU driver", "ok", f"no GPU here{': ' + why if why else ''}; "
                        "ranks run on the CPU")  # fmt: skip
        return
    told = here.text("proc/driver/nvidia/version")
    if driver := re.search(r"Kernel Module.*?\s(\d[\d.]*)(?:\s|$)", told):
        yield Check("GPU driver", "ok", driver[1])
    models = {d.model for d in machine.devices}
    yield Check("GPUs", "ok", f"{len(machine.devices)} x {', '.join(sorted(models))}")
    for told in machine.assumptions:
        yield Check("topology", "warning" if "hidden" in told or "MIG" in told else "ok", told)
    instances = any("MIG" in told for told in machine.assumptions)
    yield from _cuda(here, len(machine.devices), instances)


def _cuda(here: System, gpus: int, instances: bool) -> Iterator[Check]:
    try:
        driver = here.open_cuda()
        count = driver.count()
    except CudaError as error:
        yield Check("CUDA", "problem", str(error),
                    "the container must be given libcuda (capability compute)")  # fmt: skip
        return
    major, minor = driver.version()
    if count != gpus and instances:
        yield Check("CUDA", "warning", f"shows {count} GPUs, the driver {gpus}, some in MIG mode",
                    "CUDA shows one MIG instance to a process")  # fmt: skip
    elif count != gpus:
        yield Check("CUDA", "problem", f"shows {count} GPUs, the driver {gpus}",
                    "check CUDA_VISIBLE_DEVICES and MIG")  # fmt: skip
        return
    yield Check("CUDA", "ok", f"driver for CUDA {major}.{minor}, {count} GPUs")
    modes = {i: driver.attribute("compute_mode", i) for i in range(count)}
    for i, mode in modes.items():
        if mode:
            yield Check("compute mode", "problem", f"GPU {i} admits {'no' if mode == 2 else 'one'} "
                        "process", "nvidia-smi -c DEFAULT")  # fmt: skip
    yield from _peers(driver, count)
    for name, attribute, remedy in (
        ("IPC (legacy)", "unified_addressing", "CUDA IPC needs a 64-bit Linux driver with UVA"),
        ("IPC (events)", "ipc_events", "GPUs of compute capability 3.0 or more have it"),
        ("IPC (VMM)", "vmm_posix_handles", "update the driver: memory cannot be shared by handle"),
    ):
        lacking = [i for i in range(count) if not driver.attribute(attribute, i)]
        if lacking:
            yield Check(name, "warning", f"not on GPU {', '.join(map(str, lacking))}", remedy)
        else:
            yield Check(name, "ok", "supported by all GPUs, not tried; processes must share one "
                        "PID namespace" if name == "IPC (legacy)" else
                        "supported by all GPUs, not tried")  # fmt: skip


def _peers(driver: CudaDriver, count: int) -> Iterator[Check]:
    if count < 2:
        return
    matrix = [[a == b or driver.can_access_peer(a, b) for b in range(count)] for a in range(count)]
    lacking = [(a, b) for a in range(count) for b in range(count) if not matrix[a][b]]
    rows = "; ".join(
        f"{a}: {' '.join('x' if ok else '-' for ok in row)}" for a, row in enumerate(matrix)
    )
    if lacking:
        yield Check("peer access", "warning",
                    f"{len(lacking)} of {count * (count - 1)} pairs have none ({rows})",
                    "they share host memory, which is slow; GPUs of different CPUs may have none; "
                    "otherwise check the IOMMU, PCIe ACS (lspci -vvv | grep ACSCtl) and the "
                    "virtual machine")  # fmt: skip
    else:
        yield Check("peer access", "ok", f"all {count * (count - 1)} pairs ({rows})")


def _iommu(here: System) -> Iterator[Check]:
    units = here.root / "sys/class/iommu"
    active = units.is_dir() and any(units.iterdir())
    gpus = (here.root / "proc/driver/nvidia/version").exists()
    if not active:
        yield Check("IOMMU", "ok", "off, or not shown here")
        return
    types = {p.read_text().strip() for p in
             sorted((here.root / "sys/kernel/iommu_groups").glob("*/type"))[:4096]}  # fmt: skip
    command = here.text("proc/cmdline").split()
    if "iommu=pt" in command or types == {"identity"}:
        yield Check("IOMMU", "ok", "on, in passthrough")
    else:
        yield Check("IOMMU", "warning" if gpus else "ok", "on, and translating",
                    "copies between GPUs over PCIe may hang or crawl: boot with iommu=pt, or turn "
                    "it off" if gpus else "")  # fmt: skip


def _libraries(here: System) -> Iterator[Check]:
    found = []
    for name in ("numpy", "numba", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x",
                 "nvidia-ml-py"):  # fmt: skip
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    yield Check("libraries", "ok", ", ".join(found))
    if TEMPORARY:
        yield Check("compiled kernels", "warning",
                    f"are kept in {temporary()}: neither the package's folder nor a home can be "
                    "written", f"set {', '.join(TEMPORARY)} to folders that last")  # fmt: skip
