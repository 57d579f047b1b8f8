"""Detect this machine's GPUs and links through NVML, or its CPU cores without GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Vertex
from linkweave.topology.machines import machine
from linkweave.topology.readers.assemble import NODE, PHB, PIX, PXB, SYS, Told, assemble
from linkweave.topology.topology import Topology

# nvmlGpuTopologyLevel_t; INTERNAL is two GPUs on one board, behind one bridge
_LEVELS = {0: PIX, 10: PIX, 20: PXB, 30: PHB, 40: NODE, 50: SYS}


def detect(environ: Mapping[str, str] = os.environ, nvml: Any = None) -> Topology:
    """Return the GPUs that CUDA shows to this process, or `cpu-N` for N cores without GPUs.

    GPUs are numbered as by CUDA: `CUDA_VISIBLE_DEVICES` selects and orders them by index or by the
    start of a UUID, or names one MIG instance. `assumptions` lists what a container or virtual
    machine hides. `nvml` replaces the module pynvml. Raises TopologyError if there is a driver that
    does not answer.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return _cpus("nvidia-ml-py is not installed, so GPUs were not looked for")
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        hidden = _hidden_devices()
        if not hidden and _absent(nvml, error):
            return _cpus("")
        raise TopologyError(
            f"the GPU driver does not answer: {error}"
            + (f"; yet there is {hidden}: is the driver's library missing from this container?"
               if hidden else "")
        ) from None  # fmt: skip
    try:
        found = _devices(nvml)
        shown, notes = _visible(nvml, found, environ)
        if not shown:
            return _cpus("; ".join(notes) or "the driver has no GPU")
        return _machine(nvml, shown, notes)
    except nvml.NVMLError as error:
        raise TopologyError(
            f"the GPU driver failed while its links were asked for: {error}"
        ) from None
    finally:
        nvml.nvmlShutdown()


def _cpus(why: str) -> Topology:
    cores = len(os.sched_getaffinity(0))
    found = machine(f"cpu-{cores}")
    assert found is not None
    return replace(found, assumptions=(*found.assumptions, why)) if why else found


def _absent(nvml: Any, error: Exception) -> bool:
    """Whether the error says that there is no driver."""
    absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
    return getattr(error, "value", None) in absent


def _hidden_devices() -> str:
    return next((f"/dev/{n}" for n in ("nvidia0", "nvidiactl") if os.path.exists(f"/dev/{n}")), "")


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def bus_id(pci: Any) -> str:
    """Convert NVML's "00000000:06:00.0" to Linux's "0000:06:00.0"; "" for a hidden device."""
    whole = _text(pci.busId).strip("\0 ").lower()
    domain, _, rest = whole.partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest and rest.isprintable() else ""


def _devices(nvml: Any) -> list[tuple[Any, GpuId]]:
    found = []
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        device = GpuId(
            i, bus_id(nvml.nvmlDeviceGetPciInfo(handle)), _text(nvml.nvmlDeviceGetUUID(handle)),
            _text(nvml.nvmlDeviceGetName(handle)), 10 * major + minor,
        )  # fmt: skip
        found.append((handle, device))
    return found


def _visible(
    nvml: Any, found: list[tuple[Any, GpuId]], environ: Mapping[str, str]
) -> tuple[list[tuple[Any, GpuId]], list[str]]:
    """The devices that CUDA shows, renumbered in its order, and notes about the others."""
    notes: list[str] = []
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({d.model for _, d in found}) > 1:
        notes.append(
            "GPUs of several models: CUDA numbers them fastest first unless "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID; here they are in the order of their bus ids"
        )
    chosen = list(found)
    if listed is not None:
        chosen = []
        for word in filter(None, (w.strip() for w in listed.split(","))):
            instance = word.startswith("MIG-")
            start = _told(nvml, "", (), _gpu_of_instance, nvml, word) if instance else word
            match = [
                pair for i, pair in enumerate(found)
                if (start == str(i) if start.isdigit() else
                    start.startswith("GPU-") and pair[1].uuid.startswith(start))
            ]  # fmt: skip
            if len(match) != 1 or match[0] in chosen:
                notes.append(
                    f"CUDA_VISIBLE_DEVICES={listed}: {word!r} is no (further) GPU of the "
                    f"{len(found)} here, so CUDA hides it and all after it"
                )
                break
            chosen += match
            if instance:
                break  # CUDA shows no other
        if len(chosen) < len(found):
            notes.append(f"CUDA_VISIBLE_DEVICES={listed} shows {len(chosen)} of {len(found)} GPUs")
    return [
        (h, GpuId(i, d.bus_id, d.uuid, d.model, d.sm)) for i, (h, d) in enumerate(chosen)
    ], notes


def _machine(nvml: Any, shown: list[tuple[Any, GpuId]], notes: list[str]) -> Topology:
    nvlinks: dict[tuple[int, int], int] = {}
    ports: dict[int, int] = {}
    level: dict[tuple[Vertex, Vertex], int] = {}
    numa: dict[int, str] = {}
    untold = False
    by_bus = {d.bus_id: d.gpu for _, d in shown if d.bus_id}
    try:
        remotes = [_remotes(nvml, handle) for handle, _ in shown]
    except nvml.NVMLError as error:
        notes.append(f"the driver does not tell of NVLinks ({error}); taken as none")
        remotes = [[] for _ in shown]
    for (handle, device), ends_of in zip(shown, remotes, strict=True):
        lost: dict[str, int] = {}
        for remote in ends_of:
            if remote in by_bus:
                ends = (device.gpu, by_bus[remote])
                nvlinks[ends] = nvlinks.get(ends, 0) + 1
            elif remote == "switch":
                ports[device.gpu] = ports.get(device.gpu, 0) + 1
            else:
                lost[remote] = lost.get(remote, 0) + 1
        for remote, n in lost.items():
            where = remote or "what the driver does not tell"
            notes.append(
                f"{n} NVLinks of GPU {device.gpu} lead to {where}, which is hidden from this "
                "process"
            )
        if _in_mig_mode(nvml, handle):
            notes.append(f"GPU {device.gpu} is in MIG mode: no peer access, no NVLink")
        if node := _numa(device.bus_id):
            numa[device.gpu] = node
    for a, b in nvlinks:
        if nvlinks[a, b] != nvlinks.get((b, a)):
            raise TopologyError(
                f"the driver tells of {nvlinks[a, b]} NVLinks from GPU {a} to GPU {b}, and of "
                f"{nvlinks.get((b, a), 0)} back: is a link down? (nvidia-smi nvlink -s)"
            )
    for i, (one, here) in enumerate(shown):
        for two, there in shown[:i]:
            distance = _level(nvml, one, two)
            level[there.gpu, here.gpu] = SYS if distance is None else distance
            untold = untold or distance is None
    if untold:
        notes.append("the driver does not tell how far apart GPUs are on PCIe; taken as the most")
    pairs = {p: n for p, n in nvlinks.items() if p[0] < p[1]}
    told = Told(
        "auto", [d for _, d in shown], nvlinks=pairs, level=level, numa=numa, ports=ports,
        assumptions=notes,
    )  # fmt: skip
    return assemble(told)


def _told(
    nvml: Any, default: Any, names: tuple[str, ...], ask: Callable[..., Any], *of: Any
) -> Any:
    """What the driver answers; the default for errors of these names, or for any without names."""
    try:
        return ask(*of)
    except nvml.NVMLError as error:
        if names and error.value not in [getattr(nvml, f"NVML_ERROR_{name}") for name in names]:
            raise
        return default


def _level(nvml: Any, one: Any, two: Any) -> int | None:
    """How far apart two GPUs are on PCIe; None if the driver does not tell (WSL 2, vGPU)."""
    found = _told(nvml, None, (), nvml.nvmlDeviceGetTopologyCommonAncestor, one, two)
    return None if found is None else _LEVELS.get(found, SYS)


def _remotes(nvml: Any, handle: Any) -> list[str]:
    """The far end of each active NVLink: a bus id, "switch", or "" if it is hidden."""
    remotes = []
    lacking = ("NOT_SUPPORTED", "INVALID_ARGUMENT")  # this GPU has fewer links
    for link in range(speeds.MOST_NVLINKS):
        up = _told(nvml, None, lacking, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if up == nvml.NVML_FEATURE_ENABLED:
            remotes.append(_told(nvml, "", lacking, _remote, nvml, handle, link))
    return remotes


def _remote(nvml: Any, handle: Any, link: int) -> str:
    ask = nvml.nvmlDeviceGetNvLinkRemoteDeviceType
    kind = _told(nvml, None, ("FUNCTION_NOT_FOUND",), ask, handle, link)  # None: before NVSwitch
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return "switch"
    return bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))


def _gpu_of_instance(nvml: Any, name: str) -> str:
    """The UUID of the GPU that a MIG instance is part of."""
    instance = nvml.nvmlDeviceGetHandleByUUID(name)
    gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
    return _text(nvml.nvmlDeviceGetUUID(gpu))


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    """Whether it is; some GPUs know no MIG."""
    return bool(_told(nvml, (0, 0), (), nvml.nvmlDeviceGetMigMode, handle)[0])


def _numa(bus: str) -> str:
    """The NUMA node of a PCI device, or "" if Linux does not know it."""
    try:
        with open(f"/sys/bus/pci/devices/{bus}/numa_node") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return ""
    return str(node) if node >= 0 else ""
