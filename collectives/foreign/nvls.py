"""All-reduce by switches that reduce and multicast (NVLS), for MSCCL++, which has ops for that.

Each rank lets the switch add up its share of all ranks' messages, and multicast the sums: a read of
N bytes from every GPU, of which N/P sums come back, and a store of N/P bytes, of which N arrive. So
each GPU sends and receives N (1 + 1/P) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign.mscclpp import (
    MOST_AT_ONCE,
    MOST_BYTES,
    ExecutionPlan,
    Gpu,
    Op,
    Region,
)
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.collectives.foreign.mscclpp_rules import reducing_switch
from linkweave.collectives.planning.layout import ALIGN
from linkweave.topology import Topology, speeds

BLOCKS = 16  # thread blocks of a rank: they divide its share
MOST_RANKS = MOST_AT_ONCE + 1
EFFICIENCY = {90: 0.85, 100: 0.74}
"""What NVLS reaches of that, by the compute capability from which on it holds: NCCL's
`nvlsEfficiency` (`src/graph/tuning.cc`)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """An all-reduce by the switches, and what the figure rests on, in words."""

    seconds: float
    payload: float  # the share of what links carry that is payload
    inputs: str


def possible(topology: Topology) -> bool:
    size = len(topology.gpus)
    return 1 < size <= MOST_RANKS and bool(reducing_switch(topology, range(size)))


def nvls(topology: Topology) -> ExecutionPlan:
    """The plan, verified. Raises PlanError where no switch reduces for all GPUs, or for more peers
    than an op of MSCCL++ has room for."""
    _ports(topology)
    size = len(topology.gpus)
    if size > MOST_RANKS:
        raise PlanError(
            f"MSCCL++ takes at most {MOST_AT_ONCE} channels in an op; each of {size} ranks would "
            f"signal {size - 1} peers"
        )
    everyone = tuple(range(size))
    gpus, whole = [], size * BLOCKS
    for rank in everyone:
        blocks = []
        for block in range(BLOCKS):
            mine = Region(everyone, "i", rank * BLOCKS + block, 1)
            peers = tuple(range(block * (size - 1), (block + 1) * (size - 1)))
            before = [Op(name, channel_type="memory", channels=peers) for name in
                      ("rlxsignal", "rlxwait")]  # fmt: skip
            after = [Op(name, channel_type="memory", channels=peers) for name in
                     ("signal", "wait")]  # fmt: skip
            nop, reduce = Op("nop"), Op("glres", (mine,), (mine,), "switch")
            blocks.append((*before, nop, reduce, nop, *after, nop))
        others = tuple(r for r in everyone if r != rank)
        chunks = {"i": whole, "o": whole, "s": 0}
        gpus.append(Gpu(chunks, tuple(blocks), others * BLOCKS))
    made = ExecutionPlan(
        f"linkweave_nvls_{size}", "allreduce", True, tuple(gpus), least=ALIGN * whole,
        most=MOST_BYTES // (ALIGN * whole) * ALIGN * whole,
    )  # fmt: skip
    verify(made, topology)
    return made


def predict(topology: Topology, nbytes: int) -> Prediction:
    """What it takes by the links of a GPU, their payload, and NCCL's efficiency. Raises PlanError
    where no switch reduces for all GPUs."""
    rate, latency_us, sm, each = _ports(topology)
    payload = speeds.payload(sm)
    size = len(topology.gpus)
    share = next(value for since, value in sorted(EFFICIENCY.items(), reverse=True) if sm >= since)
    seconds = 2 * latency_us * 1e-6 + nbytes * (1 + 1 / size) / (rate * payload * share)
    return Prediction(
        seconds, payload,
        f"{rate / 1e9:g} GB/s a GPU, of which {payload * each / 1e9:.4g} of {each / 1e9:g} GB/s a "
        f"link are payload and NVLS reaches {share:.0%} (NCCL's figures), for 1 + 1/{size} times "
        "the bytes",
    )  # fmt: skip


def _ports(topology: Topology) -> tuple[float, float, int, int]:
    """Of the GPU with the fewest links into the switch that reduces: bytes/s, latency in us,
    compute capability, and bytes/s of a link."""
    switch = reducing_switch(topology, range(len(topology.gpus)))
    if not switch or len(topology.gpus) < 2:
        raise PlanError(f"{topology.name} has no switch that reduces for all GPUs (NVLS)")
    found = []
    for gpu in topology.gpus:
        link = topology.by_ends[gpu, switch]
        sm = max(speeds.generation(link.bandwidth), min(EFFICIENCY))
        rate = float(link.bandwidth * link.count)
        found.append((rate, link.latency_us, sm, link.bandwidth))
    return min(found)
