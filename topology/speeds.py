"""Nominal speeds of links in bytes/s each way, by the kind of GPU, CPU or NIC.

NVLink speeds are from NVIDIA's data sheets. Those of PCIe, CPUs and networks are from NCCL
(src/graph/topo.h and topo.cc, June 2026): PCIe 3 x16 moves 12 GB/s, and each later generation twice
as much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from linkweave.topology.checks import TopologyError

GB = 10**9

_NVLINK = {
    60: 20 * GB,  # P100, NVLink 1
    70: 25 * GB,  # V100, NVLink 2
    80: 25 * GB,  # A100, A30, NVLink 3
    86: 14_062_500_000,  # A40, A6000, RTX 3090: NVLink 3 at 14.0625 GB/s a link
    90: 25 * GB,  # H100, H200, GH200, NVLink 4
    100: 50 * GB,  # B200, GB200, NVLink 5
}
_MODELS = (  # of nvidia-smi -L and NVML; the first that fits
    (r"\bP100\b", 60), (r"\bV100S?\b|Titan V\b", 70),
    (r"\bT4\b|\b(RTX ?)?20[6-8]0\b|Quadro RTX", 75), (r"\b(A100|A800|A30)\b", 80),
    (r"\b(A40|A10G?|(RTX )?A\d000|(RTX ?)?30[5-9]0)\b", 86),
    (r"\b(L40S?|L4|L20|(RTX ?)?40[5-9]0|RTX \d000 Ada)\b", 89),
    (r"\bG?(H100|H800|H200|H20)\b", 90), (r"\bG?(B100|B200|B300)\b", 100),
    (r"\b(RTX PRO|(RTX ?)?50[5-9]0)\b", 120),
)  # fmt: skip
_PCIE_OF = {60: 3, 80: 4, 90: 5}  # PCIe generation of GPUs of this compute capability and later
MOST_NVLINKS = 18  # of any GPU so far

NVLINK = 25 * GB  # where the GPU is not known: NVLink 2, 3 and 4 have the same
PCIE = 12 * GB
NETWORK = 12 * GB  # 100 Gbit/s, as NCCL reckons it
QPI = 6 * GB  # between two Broadwell CPUs
SOCKETS = 10 * GB  # between two CPUs that are not known: Skylake's

_GTS = {"2.5": 15, "5": 30, "8": 60, "16": 120, "32": 240, "64": 480}  # NCCL: 100 Mbit/s a lane


_PAYLOAD = {60: 18 * GB, 70: 20 * GB, 80: 20 * GB, 86: 12 * GB, 90: 20_600_000_000,
            100: 40_100_000_000}  # fmt: skip


def payload(sm: int) -> float:
    """What NCCL reckons of an NVLink of such a GPU, as a share (`src/graph/topo.h`)."""
    return _since(_PAYLOAD, sm, _PAYLOAD[70]) / nvlink(sm)


def nvlink(sm: int) -> int:
    """Speed of one NVLink of a GPU with this compute capability (times ten)."""
    return _since(_NVLINK, sm, NVLINK)


NVLS = 90  # the compute capability from which NVSwitches reduce and multicast for NCCL
NVLS_PORTS = 18  # NVLinks of such a GPU; those before had up to 12


def generation(bandwidth: int) -> int:
    """The compute capability whose NVLinks have the nearest bandwidth."""
    return min(_NVLINK, key=lambda sm: (abs(_NVLINK[sm] - bandwidth), sm))


def compute_capability(model: str) -> int:
    """The compute capability times ten, such as 70 for "Tesla V100-SXM2-16GB"; 0 if unknown."""
    return next((sm for pattern, sm in _MODELS if re.search(pattern, model, re.IGNORECASE)), 0)


PEERS = "GPUs reach each other's memory, which GeForce RTX 40 and 50 do not"
"""What is assumed of cards `without_peers`."""


def without_peers(model: str) -> bool:
    """Whether NVIDIA's driver lets such cards not access each other's memory."""
    return re.search(r"\b(RTX ?)?[45]0[5-9]0\b", model, re.IGNORECASE) is not None


def capability_of_model(model: str) -> int:
    """`compute_capability` of a text that begins with a model, if not with its maker; 0 for others,
    such as a machine's name."""
    plain = re.sub(r"^((NVIDIA|GeForce|Tesla)\b[ -]?)+", "", model.strip(), flags=re.IGNORECASE)
    found = (sm for pattern, sm in _MODELS if re.match(pattern, plain, re.IGNORECASE))
    return next(found, 0)


def known_model(model: str) -> int:
    """`capability_of_model`, but TopologyError for a model that is not known."""
    if not (sm := capability_of_model(model)):
        raise TopologyError(
            f"unknown GPU model {model[:80]!r}: give a name as nvidia-smi -L prints it, such as "
            "v100, a10, a100, h100, h200, b200, b300, l40s, rtx a6000, rtx 4090 or rtx 5090; for a "
            "GPU that is not known, give one of its generation"
        )
    return sm


def pcie_port(sm: int) -> int:
    """Speed of the PCIe x16 port of such a GPU; that of generation 3 if `sm` is unknown."""
    return PCIE << (_since(_PCIE_OF, sm, 3) - 3)


def _since(table: Mapping[int, int], sm: int, unknown: int) -> int:
    """The entry of the newest generation up to `sm`."""
    return table[max(g for g in table if g <= sm)] if sm >= min(table) else unknown


def pcie(link_speed: str, width: int) -> int | None:
    """Bandwidth of a PCIe link whose speed Linux and NCCL write as "8 GT/s" or "16.0 GT/s PCIe".

    Returns None for any other text. `width` is the number of PCIe lanes; 0 means 16.
    """
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", link_speed)
    each = _GTS.get(found[1].removesuffix(".0")) if found else None
    return None if each is None else each * (width or 16) * GB // 80


def pcie_as_written(bandwidth: int) -> tuple[str, int]:
    """The (link_speed, link_width) with the nearest bandwidth."""
    every = [(f"{gts} GT/s", width) for gts in _GTS for width in (16, 8, 4, 2, 1)]
    return min(every, key=lambda link: abs((pcie(*link) or 0) - bandwidth))


_CPUS = (  # vendor, least model of family 6, bandwidth between two of them
    ("GenuineIntel", 0xCF, 40 * GB), ("GenuineIntel", 0x8F, 22 * GB),
    ("GenuineIntel", 0x55, SOCKETS), ("GenuineIntel", 0, QPI),
    ("AuthenticAMD", 0, 16 * GB),
)  # fmt: skip


def sockets(arch: str, vendor: str, family: int, model: int) -> int | None:
    """Bandwidth between two such CPUs (attributes of NCCL's XML); None if unknown."""
    if arch == "ppc64":
        return 32 * GB
    if arch == "arm64":
        return 6 * GB
    if vendor == "GenuineIntel" and family != 6:
        model = 0
    return next((b for v, least, b in _CPUS if v == vendor and model >= least), None)


def cpu_as_written(bandwidth: int) -> tuple[str, int, int]:
    """The CPU (vendor, family, model) with the nearest bandwidth between two of them."""
    vendor, model, _ = min(_CPUS, key=lambda cpu: abs(cpu[2] - bandwidth))
    return vendor, 6 if vendor == "GenuineIntel" else 25, model or 0x4F
