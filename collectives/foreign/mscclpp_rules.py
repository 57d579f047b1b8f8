"""What MSCCL++'s executor does not carry out as a plan has it, or in no fixed order: all refused.

By `execution_plan.cc`, `executor.cc` and `execution_kernel.hpp` of MSCCL++ at 1f5f065, August 2026.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign.mscclpp import (
    FORMS,
    MOST_BYTES,
    MOST_ITERATIONS,
    NAMES,
    SIGNALS,
    WAITS,
    ExecutionPlan,
    Op,
    Region,
    letter,
)
from linkweave.topology import Topology
from linkweave.topology.text import ranks

PUTS = ("put", "pws", "pwsf")
"""The ops that a port channel's proxy carries out, if they are over one."""
REUSED_SCRATCH = 1 << 26  # bytes of scratch memory that all plans share if resources are reused
MOST_REUSED = 64  # the most iterations after which reused scratch memory is
MOST_CHUNKS = 1 << 14  # of all ranks together
MOST_FIRST = 64  # the largest first value of a semaphore
MOST_THREADS = 1024
_INT4 = 16


def check_rules(plan: ExecutionPlan, topology: Topology | None = None) -> None:
    """Raise PlanError for the first thing that would not go as it is written."""
    _check_chunks(plan)
    if plan.alignment % _INT4:
        raise PlanError(f"the executor reads {_INT4} bytes at once; alignment is {plan.alignment}")
    for rank, gpu in enumerate(plan.gpus):
        for block, ops in enumerate(gpu.blocks):
            for op in ops:
                for one, inside in [(op, False), *((inner, True) for inner in op.body)]:
                    if quirk := _quirk(plan, one, inside):
                        where = f"rank {rank}, thread block {block}, {one}"
                        raise PlanError(f"{where}: the executor {quirk}")
    _check_users(plan)
    _check_barriers(plan)
    _check_packets(plan)
    reused_after(plan)
    if topology is not None:
        _check_links(plan, topology)


def _check_chunks(plan: ExecutionPlan) -> None:
    if plan.collective not in NAMES.values():
        raise PlanError(
            f"verify knows the results of {', '.join(NAMES.values())}, not of {plan.collective!r}"
        )
    size = len(plan.gpus)
    counts = {(gpu.chunks["i"], gpu.chunks["o"]) for gpu in plan.gpus}
    if len(counts) != 1:
        raise PlanError("all ranks need as many input and output chunks, so that chunks are equal")
    ((given, result),) = counts
    whole = {"allgather": size * given, "reducescatter": given / size}.get(plan.collective, given)
    if not given or result != whole or (plan.collective == "alltoall" and given % size):
        raise PlanError(
            f"{given} input and {result} output chunks are not those of an {plan.collective} over "
            f"{size} ranks"
        )
    if (total := sum(sum(gpu.chunks.values()) for gpu in plan.gpus)) > MOST_CHUNKS:
        raise PlanError(f"verify takes at most {MOST_CHUNKS} chunks on all ranks, not {total}")
    firsts = [value for gpu in plan.gpus for value in gpu.semaphores]
    if firsts and max(firsts) > MOST_FIRST:
        raise PlanError(f"verify takes semaphores up to {MOST_FIRST}, not {max(firsts)}")
    if plan.threads > MOST_THREADS:
        raise PlanError(f"the executor has at most {MOST_THREADS} threads, not {plan.threads}")
    for rank, gpu in enumerate(plan.gpus):
        if not gpu.blocks:
            raise PlanError(f"rank {rank} has no thread blocks: the executor cannot launch none")


def regions(op: Op) -> Iterator[tuple[Region, str]]:
    """The regions of an op, each with what it is."""
    if op.name in FORMS:
        form = FORMS[op.name]
        for side, letters in ((op.src, form.src), (op.dst, form.dst)):
            yield from ((region, letter(letters, k)) for k, region in enumerate(side))


def _quirk(plan: ExecutionPlan, op: Op, inside: bool) -> str:
    """What the executor does that is not as it is written; `inside` of a pipeline."""
    kinds = [what for _, what in regions(op)]
    port = op.channel_type == "port"
    packets = any(what in "pqn" for what in kinds)
    if op.name == "get" and any(a.index != b.index for a, b in zip(op.src, op.dst, strict=True)):
        return "exchanges the offsets of the two sides of a get"
    if op.name == "get" and plan.reuses and len({r.buffer for r, _ in regions(op)}) > 1:
        return "exchanges the two sides of a get where it reuses scratch memory"
    several = len({region.buffer for region in op.src}) > 1
    if op.name in (*PUTS, "ppkt") and not port and several:
        return "takes all sources from the buffer of the first one"
    if op.name in ("pws", "pwsf", "flush") and not port:
        return "has this op for port channels only"
    if port and packets:
        return "does not wait for each channel's packets"
    if port and kinds and "r" in kinds and op.name not in PUTS:
        return "has this op for memory channels only"
    if port and op.name in PUTS and len(op.channels) != len(op.dst):
        return "needs a channel for each target"
    if packets and plan.protocol != "LL":
        return "has room for packets in plans of protocol LL only"
    if packets and inside:
        return "moves all packets of a chunk in each iteration"
    if op.body and (op.unit % plan.alignment):
        return f"takes iterations of whole {plan.alignment} bytes"
    if max(len(op.channels), len(op.semaphores)) > plan.threads:
        return f"has {plan.threads} threads, one for each channel or semaphore"
    far = [r for r, what in regions(op) if what in "rm" or (port and what == "l")]
    moved = {"allgather": "i", "reducescatter": "o"}.get(plan.collective)
    if plan.inplace and any(region.buffer == moved for region in far):
        return "adds its own offset in place of that rank's"
    if plan.reuses and any(region.buffer != "s" for region in far):
        return "keeps the buffers of the first call, where it reuses resources"
    if plan.double_scratch and any(region.buffer == "s" for region in far):
        return "has this op use one half of double scratch buffers always"
    scratch = any(region.buffer == "s" for region in op.src[1:])
    if plan.reuses and inside and (op.name == "res" or (op.name == "re" and scratch)):
        return "reads reused scratch memory behind its chunk"
    chunk = min(plan.most, MOST_BYTES) // plan.gpus[0].chunks["i"]
    if op.body and op.chunks * chunk > op.unit * MOST_ITERATIONS:
        return (
            f"counts {MOST_ITERATIONS} iterations at most: give max_message_size, or larger units"
        )
    return ""


def _check_users(plan: ExecutionPlan) -> None:
    """One thread block alone sends over a channel, waits on it, acquires a semaphore."""
    users: dict[tuple[int, str, str, int], int] = {}
    for rank, block, op in plan.ops():
        port = op.channel_type == "port"
        verb = "sends over" if op.name in SIGNALS or (port and op.name in PUTS) else ""
        verb = "waits on" if op.name in WAITS else "acquires" if op.name == "sem_acquire" else verb
        kind = "semaphore" if op.semaphores else f"{op.channel_type} channel"
        for number in (op.channels or op.semaphores) if verb else ():
            first = users.setdefault((rank, verb, kind, number), block)
            if first != block:
                raise PlanError(
                    f"rank {rank} {verb} {kind} {number} in thread blocks {first} and {block}: "
                    "which of them comes first is not fixed"
                )


def _check_barriers(plan: ExecutionPlan) -> None:
    """As many thread blocks have a barrier as it waits for."""
    met: dict[tuple[int, int], set[int]] = defaultdict(set)
    wanted: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, block, op in plan.ops():
        if op.name == "barrier" and op.blocks > 1:
            met[rank, op.barrier].add(block)
            wanted[rank, op.barrier].add(op.blocks)
    for (rank, number), blocks in met.items():
        if wanted[rank, number] != {len(blocks)}:
            numbers = " or ".join(map(str, sorted(wanted[rank, number])))
            raise PlanError(
                f"barrier {number} of rank {rank} waits for {numbers} thread blocks, but "
                f"{len(blocks)} have it: which of them meet is not fixed"
            )


def _check_packets(plan: ExecutionPlan) -> None:
    """Packets take twice their room, in the scratch memory that plain data lies in."""
    held: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for _, _, op in plan.ops():
        for region, what in regions(op):
            chunks = range(region.index, region.index + region.size)
            if region.buffer == "s":
                for rank in region.ranks:
                    held[rank][what in "pqn"].update(chunks)
    for rank, (plain, packets) in held.items():
        for chunk in sorted(packets):
            if plain & {2 * chunk, 2 * chunk + 1}:
                raise PlanError(
                    f"packets of scratch chunk {chunk} of rank {rank} lie where its chunks "
                    f"{2 * chunk} and {2 * chunk + 1} are, which hold plain data"
                )


def reused_after(plan: ExecutionPlan) -> int:
    """After how many iterations pipelines use scratch memory again; 0 if they do not."""
    scratch = {gpu.chunks["s"] for gpu in plan.gpus}
    if not plan.reuses or scratch == {0}:
        return 0
    if len(scratch) > 1 or plan.double_scratch:
        raise PlanError(
            "in reused scratch memory, ranks need as many chunks, and buffers cannot be double"
        )
    chunk = ceil(ceil(REUSED_SCRATCH / max(scratch)) / plan.alignment) * plan.alignment
    outer = [op for gpu in plan.gpus for ops in gpu.blocks for op in ops]
    if any(region.buffer == "s" for op in outer for region, _ in regions(op)):
        most = chunk * plan.chunks
        if plan.most > most:
            raise PlanError(
                f"outside of pipelines, chunks above {chunk} bytes overlap in reused scratch "
                f"memory: max_message_size must be at most {most}, not {plan.most}"
            )
    units = {op.unit for op in outer if op.body}
    if any(chunk % unit or chunk // unit > MOST_REUSED for unit in units):
        raise PlanError(
            f"reused scratch memory has {chunk} bytes for a chunk, of which pipelines take "
            f"{max(units)} at once: verify takes whole iterations, at most {MOST_REUSED}"
        )
    return max((chunk // unit for unit in units), default=0)


def reducing_switch(topology: Topology, ranks: Sequence[int]) -> str:
    """A switch that reduces and multicasts for all these ranks; empty if there is none."""
    for switch in topology.reducing:
        if all((topology.gpus[rank], switch) in topology.by_ends for rank in ranks):
            return switch
    return ""


def _check_links(plan: ExecutionPlan, topology: Topology) -> None:
    if len(plan.gpus) != len(topology.gpus):
        raise PlanError(
            f"the plan is for {len(plan.gpus)} ranks; {topology.name} has {ranks(topology)}"
        )
    for rank, block, op in plan.ops():
        where = f"rank {rank}, thread block {block}, {op}"
        peers = {peer for region, _ in regions(op) for peer in region.ranks}
        if op.channel_type in ("memory", "port"):
            peers |= {plan.gpus[rank].peers(op.channel_type)[number] for number in op.channels}
        for region, what in regions(op):
            if what in "mn" and not reducing_switch(topology, region.ranks):
                raise PlanError(f"{where}: {topology.name} has no switch of theirs that multicasts")
        for peer in sorted(peers - {rank}):
            a, b = topology.gpus[rank], topology.gpus[peer]
            if not topology.hops.get((a, b)):
                raise PlanError(f"{where}: {topology.name} has no link from GPU {a} to GPU {b}")
