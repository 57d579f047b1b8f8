"""Execution plans of MSCCL++'s executor: their form, read from JSON and written to it.

There is no written schema; the form is what the loader takes (`src/core/executor/execution_plan.cc`
of MSCCL++ at 1f5f065, August 2026), and the limits are those of `execution_common.hpp`.

A message is divided into equal chunks. Each rank has buffers "i" (input), "o" (output) and "s"
(scratch). A thread block carries out its ops one after another, but its threads do not wait for one
another: only a "nop" does that. Here all numbers that the file has indirectly, by way of tables of
channels and remote buffers, are resolved.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linkweave.collectives.errors import PlanError
from linkweave.topology.checks import integer, parse_json, shown

MOST_OPS, MOST_CHANNELS, MOST_AT_ONCE = 64, 16, 8
"""Limits of a thread block's ops and channels, and of an op's channels."""
MOST_REGIONS = 2 + MOST_AT_ONCE
MOST_SEMAPHORES, MOST_BARRIERS = 16, 16  # of an op, and of a rank
MOST_SHARES = 64
MOST_BYTES = (1 << 32) - 1  # of a buffer: offsets have 32 bits
MOST_ITERATIONS = (1 << 16) - 1


NAMES = {
    "allreduce": "allreduce", "allgather": "allgather", "reduce_scatter": "reducescatter",
    "alltoall": "alltoall",
}  # fmt: skip
"""Its names of the collectives that plans are read and written for, by ours."""

Channel = tuple[int, str, int]  # a channel of a rank: rank, "memory" or "port", number


@dataclass(frozen=True, slots=True)
class Form:
    """What the sources and targets of a kind of op are: of the first ones, and of all others.

    l and p are local memory, r and q that of a peer, m and n that of all ranks behind a switch;
    the second of each holds packets, which bring a flag along. `pairs`: the k-th source is copied
    to the k-th target; else all sources are added up, and every target gets the sum.
    """

    src: str
    dst: str
    pairs: bool = False


FORMS = {
    "put": Form("l*", "r*", True), "pws": Form("l*", "r*", True), "pwsf": Form("l*", "r*", True),
    "get": Form("r*", "l*", True), "copy": Form("l", "l"),
    "re": Form("ll*", "l"), "res": Form("ll*", "lr*"), "rre": Form("lr*", "l"),
    "rres": Form("lr*", "lr*"), "ppkt": Form("l*", "q*", True), "rppkt": Form("p", "q*"),
    "repkt": Form("lp*", "l"), "respkt": Form("lp*", "lq*"), "recpkt": Form("lp*", "lp"),
    "recspkt": Form("lp*", "lpq*"), "cpkt": Form("l", "p"), "upkt": Form("p", "l"),
    "glres": Form("m", "m"), "gstore": Form("l", "m"), "gstorepkt": Form("p", "n"),
}  # fmt: skip
"""The ops that move data."""
_COPY = FORMS["copy"]
SIGNALS, WAITS = ("signal", "rlxsignal"), ("wait", "rlxwait")
SEMAPHORES = ("sem_acquire", "sem_release")
CONTROL = ("nop", "barrier", "pipeline", "flush", *SIGNALS, *WAITS, *SEMAPHORES)


@dataclass(frozen=True, slots=True)
class Region:
    """`size` chunks of a buffer from `index` on, of one rank, or of all `ranks` of a switch."""

    ranks: tuple[int, ...]
    buffer: str
    index: int
    size: int

    def __str__(self) -> str:
        last = f" to {self.index + self.size - 1}" if self.size > 1 else ""
        whose = ", ".join(map(str, self.ranks))
        return f"{_WORDS[self.buffer]} {self.index}{last} of rank {whose}"


_WORDS = {"i": "input", "o": "output", "s": "scratch"}


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `channels` are numbers of the rank's channels of `channel_type`.

    share: (k, n) if the thread block carries out the k-th of n slices.
    unit, chunks, body: of a pipeline, which repeats its body for each `unit` bytes of so many
        chunks.
    """

    name: str
    src: tuple[Region, ...] = ()
    dst: tuple[Region, ...] = ()
    channel_type: str = ""
    channels: tuple[int, ...] = ()
    share: tuple[int, int] = (0, 1)
    semaphores: tuple[int, ...] = ()
    barrier: int = 0
    blocks: int = 0
    unit: int = 0
    chunks: int = 0
    body: tuple[Op, ...] = ()

    def __str__(self) -> str:
        if self.name in FORMS:
            src, dst = (" and ".join(map(str, side)) for side in (self.src, self.dst))
            return f"{self.name} of {src} to {dst}"
        numbers = ", ".join(map(str, self.channels or self.semaphores))
        what = " semaphore" if self.semaphores else f" {self.channel_type} channel"
        return f"{self.name}{what if numbers else ''} {numbers}".rstrip()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A rank: the chunks of its buffers, the peers of its channels, first values of semaphores."""

    chunks: Mapping[str, int]
    blocks: tuple[tuple[Op, ...], ...]
    memory: tuple[int, ...] = ()
    port: tuple[int, ...] = ()
    semaphores: tuple[int, ...] = ()

    def peers(self, channel_type: str) -> tuple[int, ...]:
        return self.port if channel_type == "port" else self.memory


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A plan of MSCCL++. `least` and `most` are bytes of a message."""

    name: str
    collective: str
    inplace: bool
    gpus: tuple[Gpu, ...]
    protocol: str = "Simple"
    reuses: bool = False
    double_scratch: bool = False
    threads: int = 1024
    alignment: int = 16
    least: int = 0
    most: int = (1 << 64) - 1

    @property
    def chunks(self) -> int:
        """The chunks of a message: of a rank's input, or what an all-gather puts out."""
        return self.gpus[0].chunks["o" if self.collective == "allgather" else "i"]

    def partners(self) -> dict[Channel, Channel | None]:
        """The other end of each channel: a rank's k-th one to a peer meets the k-th of that peer,
        if it has as many."""
        ends: dict[tuple[int, int, str], list[Channel]] = defaultdict(list)
        for rank, gpu in enumerate(self.gpus):
            for kind in ("memory", "port"):
                for number, peer in enumerate(gpu.peers(kind)):
                    ends[rank, peer, kind].append((rank, kind, number))
        found: dict[Channel, Channel | None] = {}
        for (rank, peer, kind), mine in ends.items():
            others = ends.get((peer, rank, kind), [])
            found |= {one: others[k] if k < len(others) else None for k, one in enumerate(mine)}
        return found

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        for rank, gpu in enumerate(self.gpus):
            for number, ops in enumerate(gpu.blocks):
                for op in ops:
                    yield rank, number, op
                    yield from ((rank, number, inner) for inner in op.body)

    def to_json(self) -> str:
        """The text that MSCCL++ loads. Raises PlanError for what its executor does not carry."""
        check(self)
        return json.dumps(_plan_out(self))


def check(plan: ExecutionPlan) -> None:
    for rank, gpu in enumerate(plan.gpus):
        for number, ops in enumerate(gpu.blocks):
            where = f"rank {rank}, thread block {number},"
            count = sum(1 + len(op.body) for op in ops)
            _most(count, MOST_OPS, "ops in a thread block, nops counted", where)
            inner = [op for outer in ops for op in (outer, *outer.body)]
            for kind in ("memory", "port"):
                used = {c for op in inner if op.channel_type == kind for c in op.channels}
                _most(len(used), MOST_CHANNELS, f"{kind} channels in a thread block", where)
    for rank, number, op in plan.ops():
        where = f"{op.name} of rank {rank}, thread block {number}"
        _most(len(op.channels), MOST_AT_ONCE, "channels in an op", where)
        _most(max(len(op.src), len(op.dst)), MOST_REGIONS, "regions in an op", where)
        if op.name == "barrier":
            _most(op.barrier + 1, MOST_BARRIERS, "barriers", where)
        for region in (*op.src, *op.dst):
            for owner in region.ranks:
                has = plan.gpus[owner].chunks[region.buffer]
                if region.index + region.size > has:
                    raise PlanError(f"{where} uses {region}, which has {has} chunks")
        _most(len(op.semaphores), MOST_SEMAPHORES, "semaphores in an op", where)


def _most(number: int, most: int, what: str, where: str) -> None:
    if number > most:
        raise PlanError(f"MSCCL++ takes at most {most} {what}; {where} has {number}")


def read(text: str) -> ExecutionPlan:
    """The plan of a JSON text. Raises PlanError where it is no plan, or exceeds a limit."""
    data = parse_json(text, "an MSCCL++ plan", PlanError)
    try:
        plan = _plan_in(data)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanError(f"an MSCCL++ plan that its loader would refuse: {error!r}") from None
    check(plan)
    return plan


def is_plan(text: str) -> bool:
    """Whether a text looks like one of these plans."""
    return text.lstrip().startswith("{") and '"threadblocks"' in text and '"gpus"' in text


# ---- reading -------------------------------------------------------------------------------------
def _plan_in(data: Any) -> ExecutionPlan:
    gpus = data["gpus"]
    size = len(gpus)
    if not size or [gpu["id"] for gpu in gpus] != list(range(size)):
        raise PlanError("the GPUs of an MSCCL++ plan must be numbered from 0")
    readers = [_Reader(rank, size, gpu) for rank, gpu in enumerate(gpus)]
    for one in readers:
        for other in readers:
            mine = [group for group in one.groups if other.rank in group[1]]
            if mine != [group for group in other.groups if one.rank in group[1]]:
                raise PlanError(
                    f"ranks {one.rank} and {other.rank} must have the same groups of switches, "
                    "with the same buffers, in the same order"
                )
        if any(len({*ranks}) != len(ranks) for _, ranks in one.groups):
            raise PlanError(f"a switch's group of rank {one.rank} has a rank twice")
    return ExecutionPlan(
        name=str(data["name"]), collective=str(data["collective"]), inplace=data["inplace"] is True,
        gpus=tuple(reader.gpu() for reader in readers),
        protocol=str(data["protocol"]), reuses=data.get("reuse_resources") is True,
        double_scratch=data.get("use_double_scratch_buffer") is True,
        threads=_number(data.get("num_threads_per_block", 1024), "num_threads_per_block", 1),
        alignment=_number(data.get("buffer_alignment", 16), "buffer_alignment", 1),
        least=_number(data.get("min_message_size", 0), "min_message_size"),
        most=_number(data.get("max_message_size", (1 << 64) - 1), "max_message_size", 0, 1 << 64),
    )  # fmt: skip


_FIELDS = {
    "barrier_id": ("barrier",), "num_threadblocks": ("barrier",), "semaphore_ids": SEMAPHORES,
    "iter_context": ("pipeline",), "ops": ("pipeline",),
}  # fmt: skip
"""Fields that the loader stores where those of other ops are."""


class _Reader:
    def __init__(self, rank: int, size: int, data: Any) -> None:
        self.rank, self.size, self.data = rank, size, data
        self.peers: dict[str, list[int]] = {"memory": [], "port": []}
        self.groups: list[tuple[str, tuple[int, ...]]] = []  # of switches
        for one in data["channels"]:
            kind = one["channel_type"]
            if kind == "switch":
                for group in one["rank_groups"]:
                    ranks = tuple(self._rank(r) for r in group["ranks"])
                    self.groups.append((_buffer(one["buffer_type"]), ranks))
            else:
                self._kind(kind)
                self.peers[kind] += [self._rank(peer) for peer in one["connected_to"]]
        self.remote = [
            (self._rank(one["rank"]), _buffer(one["type"]), tuple(one["access_channel_types"]))
            for one in data["remote_buffers"]
        ]
        self.semaphores = tuple(
            _number(one["init_value"], "a semaphore's init_value")
            for one in data.get("semaphores", [])
        )

    def gpu(self) -> Gpu:
        names = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
        chunks = {key: _number(self.data[name], name) for key, name in names.items()}
        blocks = []
        for number, block in enumerate(self.data["threadblocks"]):
            if block["id"] != number:
                raise PlanError(f"thread blocks of rank {self.rank} must be numbered from 0")
            blocks.append(self._block(block))
        return Gpu(chunks, tuple(blocks), tuple(self.peers["memory"]), tuple(self.peers["port"]),
                   self.semaphores)  # fmt: skip

    def _block(self, block: Any) -> tuple[Op, ...]:
        channels: dict[str, list[int]] = {"memory": [], "port": [], "switch": []}
        for one in block["channels"]:
            of = one["channel_type"]
            count = len(self.groups) if of == "switch" else len(self.peers[of])
            ids = [_number(n, f"a {of} channel's number", 0, count - 1) for n in one["channel_ids"]]
            channels[of] += ids
        remote: dict[str, list[int]] = {"memory": [], "port": []}
        for one in block.get("remote_buffer_refs", []):
            kind = one["access_channel_type"]
            for number in one["remote_buffer_ids"]:
                number = _number(number, "a remote buffer's number", 0, len(self.remote) - 1)
                if kind not in self.remote[number][2]:
                    raise PlanError(
                        f"remote buffer {number} of rank {self.rank} has no {kind} channels"
                    )
                remote[kind].append(number)
        where = f"rank {self.rank}, thread block {block['id']},"
        for kind, listed in (*channels.items(), *remote.items()):
            _most(len(listed), MOST_CHANNELS, f"{kind} channels or buffers in a block", where)
        return tuple(self._op(op, channels, remote) for op in block["ops"])

    def _op(self, op: Any, channels: Any, remote: Any, inside: bool = False) -> Op:
        name = op["name"]
        if name not in FORMS and name not in CONTROL:
            raise PlanError(f"MSCCL++ has no op {shown(name)}")
        kind = op.get("channel_type", "")
        numbers = tuple(_at(channels[kind], n, "channel") for n in op.get("channel_ids", ()))
        share = op.get("tbg_info") or {"tb_id": 0, "tbg_size": 1}
        of = _number(share["tbg_size"], "tbg_size", 1, MOST_SHARES)
        pipeline = name == "pipeline"
        for key, ours in _FIELDS.items():
            if key in op and name not in ours:
                raise PlanError(f"{name} of rank {self.rank} has {key}, which is of {ours[0]}")
        if pipeline and inside:
            raise PlanError("a pipeline inside of a pipeline")
        context = op["iter_context"] if pipeline else {"unit_size": 0, "num_chunks": 0}
        ids = [_number(n, "a semaphore", 0, len(self.semaphores) - 1)
               for n in op.get("semaphore_ids", ())]  # fmt: skip
        form = FORMS.get(name, Form("l*", "l*"))
        sides = [
            tuple(
                self._region(x, letter(letters, k), kind, channels, remote)
                for k, x in enumerate(op.get(key, ()))
            )
            for key, letters in (("src_buff", form.src), ("dst_buff", form.dst))
        ]
        made = Op(
            name, channel_type=kind, channels=numbers, src=sides[0], dst=sides[1],
            share=(_number(share["tb_id"], "tb_id", 0, of - 1), of), semaphores=tuple(ids),
            barrier=_number(op["barrier_id"], "barrier_id") if name == "barrier" else 0,
            blocks=_number(op["num_threadblocks"], "num_threadblocks", 1)
            if name == "barrier" else 0,
            unit=_number(context["unit_size"], "unit_size", int(pipeline)),
            chunks=_number(context["num_chunks"], "num_chunks", int(pipeline)),
            body=tuple(self._op(x, channels, remote, True) for x in op["ops"]) if pipeline else (),
        )  # fmt: skip
        self._check(made)
        return made

    def _region(self, x: Any, what: str, kind: str, channels: Any, remote: Any) -> Region:
        key = {"l": "type", "p": "type", "m": "switch_channel_id", "n": "switch_channel_id"}
        if key.get(what, "buffer_id") not in x:
            raise PlanError(f"a region of rank {self.rank} needs {key.get(what, 'buffer_id')}: {x}")
        index, size = _number(x["index"], "a chunk's index"), _number(x["size"], "a size", 1)
        if what in "rq":
            owner, buffer, _ = self.remote[_at(remote[kind], x["buffer_id"], "remote buffer")]
            return Region((owner,), buffer, index, size)
        if what in "mn":
            number = _at(channels["switch"], x["switch_channel_id"], "switch channel")
            buffer, ranks = self.groups[number]
            return Region(ranks, buffer, index, size)
        return Region((self.rank,), _buffer(x["type"]), index, size)

    def _check(self, op: Op) -> None:
        """The regions must be those of the op's form."""
        if op.name not in FORMS:
            return
        form = FORMS[op.name]
        for side, wanted in ((op.src, form.src), (op.dst, form.dst)):
            least = len(wanted.replace("*", "")) - wanted.endswith("*")
            if len(side) < max(least, 1) or (not wanted.endswith("*") and len(side) > least):
                raise PlanError(f"{op.name} of rank {self.rank} has {len(side)} regions on a side")
        if form.pairs and len(op.src) != len(op.dst):
            raise PlanError(f"{op.name} of rank {self.rank}: sources and targets must pair")
        if len({region.size for region in (*op.src, *op.dst)}) > 1:
            raise PlanError(f"{op} has regions of different sizes")
        for k, region in enumerate(op.src):
            self._whose(op, region, letter(form.src, k))
        for k, region in enumerate(op.dst):
            self._whose(op, region, letter(form.dst, k))

    def _whose(self, op: Op, region: Region, what: str) -> None:
        if what in "pqn" and region.buffer != "s":
            raise PlanError(f"{op}: packets lie in scratch memory")
        if what in "mn" and self.rank not in region.ranks:
            raise PlanError(f"{op}: rank {self.rank} is not in the switch's group")

    def _rank(self, value: Any) -> int:
        return _number(value, "a rank", 0, self.size - 1)

    def _kind(self, kind: str) -> None:
        if kind not in self.peers:
            raise PlanError(f"MSCCL++ has no channels of type {shown(kind)}")


def letter(letters: str, k: int) -> str:
    """What the k-th region of a side is (`Form`)."""
    plain = letters.rstrip("*")
    return plain[min(k, len(plain) - 1)]


def _buffer(name: Any) -> str:
    if name not in _WORDS:
        raise PlanError(f"a buffer must be i, o or s, not {shown(name)}")
    return str(name)


def _number(value: Any, name: str, least: int = 0, most: int = 1 << 62) -> int:
    return integer(value, f"{name} of an MSCCL++ plan", least, most, PlanError)


def _at(table: Sequence[int], number: Any, what: str) -> int:
    return table[_number(number, f"a {what}'s number in a thread block", 0, len(table) - 1)]


# ---- writing -------------------------------------------------------------------------------------
def _plan_out(plan: ExecutionPlan) -> dict[str, Any]:
    return {
        "name": plan.name, "collective": plan.collective, "protocol": plan.protocol,
        "inplace": plan.inplace, "reuse_resources": plan.reuses,
        "gpus": [_Writer(rank, gpu).out() for rank, gpu in enumerate(plan.gpus)],
        "num_threads_per_block": plan.threads, "use_double_scratch_buffer": plan.double_scratch,
        "buffer_alignment": plan.alignment, "min_message_size": plan.least,
        "max_message_size": plan.most,
    }  # fmt: skip


class _Writer:
    def __init__(self, rank: int, gpu: Gpu) -> None:
        self.rank, self.gpu = rank, gpu
        self.remote: dict[tuple[int, str], list[str]] = {}  # the types of channels to each buffer
        self.groups: list[Region] = []

    def out(self) -> dict[str, Any]:
        blocks = [self._block(number, ops) for number, ops in enumerate(self.gpu.blocks)]
        channels: list[dict[str, Any]] = [
            {"channel_type": kind, "connected_to": list(self.gpu.peers(kind))}
            for kind in ("memory", "port") if self.gpu.peers(kind)
        ] + [
            {"channel_type": "switch", "buffer_type": group.buffer,
             "rank_groups": [{"size": len(group.ranks), "ranks": list(group.ranks)}]}
            for group in self.groups
        ]  # fmt: skip
        return {
            "id": self.rank, "input_chunks": self.gpu.chunks["i"],
            "output_chunks": self.gpu.chunks["o"], "scratch_chunks": self.gpu.chunks["s"],
            "threadblocks": blocks, "channels": channels,
            "remote_buffers": [
                {"rank": rank, "type": buffer, "access_channel_types": types}
                for (rank, buffer), types in self.remote.items()
            ],
            "semaphores": [{"init_value": value} for value in self.gpu.semaphores],
        }  # fmt: skip

    def _block(self, number: int, ops: Sequence[Op]) -> dict[str, Any]:
        channels: dict[str, list[int]] = {"memory": [], "port": [], "switch": []}
        refs: dict[str, list[int]] = {"memory": [], "port": []}
        done = [self._op(op, channels, refs) for op in ops]
        return {
            "id": number, "ops": done,
            "channels": [
                {"channel_type": kind, "channel_ids": ids} for kind, ids in channels.items() if ids
            ],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": ids}
                for kind, ids in refs.items() if ids
            ],
        }  # fmt: skip

    def _op(self, op: Op, channels: Any, refs: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"name": op.name}
        if op.channels:
            made["channel_ids"] = [_position(channels[op.channel_type], n) for n in op.channels]
        for name, side in (("src_buff", op.src), ("dst_buff", op.dst)):
            if side:
                form = FORMS[op.name]
                what = form.src if name == "src_buff" else form.dst
                made[name] = [
                    self._region(op, region, letter(what, k), channels, refs)
                    for k, region in enumerate(side)
                ]
        if op.channel_type:
            made["channel_type"] = op.channel_type
        if op.share != (0, 1):
            made["tbg_info"] = {"tb_id": op.share[0], "tbg_size": op.share[1]}
        if op.semaphores:
            made["semaphore_ids"] = list(op.semaphores)
        if op.name == "barrier":
            made |= {"barrier_id": op.barrier, "num_threadblocks": op.blocks}
        if len(FORMS.get(op.name, _COPY).src) > 1 and not FORMS[op.name].pairs:
            made["reduce_op"] = "sum"
        if op.body:
            made["iter_context"] = {"unit_size": op.unit, "num_chunks": op.chunks}
            made["ops"] = [self._op(inner, channels, refs) for inner in op.body]
        return made

    def _region(self, op: Op, region: Region, what: str, channels: Any, refs: Any) -> Any:
        at = {"index": region.index, "size": region.size}
        if what in "rq":
            types = self.remote.setdefault((region.ranks[0], region.buffer), [])
            if op.channel_type not in types:
                types.append(op.channel_type)
            number = [*self.remote].index((region.ranks[0], region.buffer))
            return {"buffer_id": _position(refs[op.channel_type], number), **at}
        if what in "mn":
            known = [(group.ranks, group.buffer) for group in self.groups]
            if (region.ranks, region.buffer) not in known:
                self.groups.append(region)
                known.append((region.ranks, region.buffer))
            number = known.index((region.ranks, region.buffer))
            return {"switch_channel_id": _position(channels["switch"], number), **at}
        return {"type": region.buffer, **at}


def _position(table: list[int], number: int) -> int:
    """Where a number is in a thread block's table, to which it is added if it is new."""
    if number not in table:
        table.append(number)
    return table.index(number)
