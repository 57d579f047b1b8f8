"""Execution plans in the form in which MSCCL++'s language writes them, one for each kind of op."""

from __future__ import annotations

from typing import Any

NOP = {"name": "nop"}


def at(buffer: str, index: int, size: int = 1) -> dict[str, Any]:
    return {"type": buffer, "index": index, "size": size}


def peer(number: int, index: int, size: int = 1) -> dict[str, Any]:
    """In a remote buffer of the thread block."""
    return {"buffer_id": number, "index": index, "size": size}


def switch(index: int) -> dict[str, Any]:
    return {"switch_channel_id": 0, "index": index, "size": 1}


def move(name: str, src: Any, dst: Any, kind: str = "memory", **more: Any) -> dict[str, Any]:
    sides = [x if isinstance(x, list) else [x] for x in (src, dst)]
    made = {"name": name, "src_buff": sides[0], "dst_buff": sides[1], **more}
    return made if name in ("copy", "re", "cpkt", "upkt") else {**made, "channel_type": kind}


def pipeline(ops: Any, unit: int = 1 << 19, chunks: int = 1) -> dict[str, Any]:
    context = {"unit_size": unit, "num_chunks": chunks}
    return {"name": "pipeline", "iter_context": context, "ops": ops}


def over(name: str, *channels: int, kind: str = "memory") -> dict[str, Any]:
    return {"name": name, "channel_ids": list(channels), "channel_type": kind}


def meets(*channels: int, relaxed: bool = True) -> list[dict[str, Any]]:
    """Both sides have come so far; relaxed: their kernels have begun."""
    word = "rlx" if relaxed else ""
    return [NOP, over(word + "signal", *channels), NOP, over(word + "wait", *channels), NOP]


def block(number: int, ops: Any, channels: Any = (), refs: Any = (), kind: str = "memory",
          switches: Any = ()) -> dict[str, Any]:  # fmt: skip
    listed = [{"channel_type": kind, "channel_ids": list(channels)}] if channels else []
    if switches:
        listed.append({"channel_type": "switch", "channel_ids": list(switches)})
    remote = [{"access_channel_type": kind, "remote_buffer_ids": list(refs)}] if refs else []
    return {"id": number, "ops": list(ops), "channels": listed, "remote_buffer_refs": remote}


def gpu(rank: int, chunks: Any, blocks: Any, peers: Any, buffers: str = "",
        kind: str = "memory", semaphores: int = 0, group: Any = None) -> Any:  # fmt: skip
    """`buffers` of each peer are remote buffers, peer by peer."""
    channels: list[dict[str, Any]] = []
    if peers:
        channels.append({"channel_type": kind, "connected_to": list(peers)})
    if group:
        ranks = {"size": len(group[1]), "ranks": group[1]}
        channels.append({"channel_type": "switch", "buffer_type": group[0], "rank_groups": [ranks]})
    remote = [
        {"rank": p, "type": b, "access_channel_types": [kind]}
        for p in dict.fromkeys(peers) for b in buffers
    ]  # fmt: skip
    i, o, s = chunks
    return {
        "id": rank, "input_chunks": i, "output_chunks": o, "scratch_chunks": s,
        "threadblocks": list(blocks), "channels": channels, "remote_buffers": remote,
        "semaphores": [{"init_value": 0}] * semaphores,
    }  # fmt: skip


def plan(collective: str, gpus: Any, inplace: bool = True, packets: bool = False,
         double: bool = False) -> dict[str, Any]:  # fmt: skip
    return {
        "name": f"a_{collective}", "collective": collective, "inplace": inplace,
        "protocol": "LL" if packets else "Simple", "reuse_resources": False, "gpus": list(gpus),
        "num_threads_per_block": 1024, "use_double_scratch_buffer": double,
        "buffer_alignment": 16, "min_message_size": 0, "max_message_size": (1 << 64) - 1,
    }  # fmt: skip


def puts(size: int = 3) -> Any:
    """An all-gather in which each rank writes into the others' outputs."""
    gpus = []
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        blocks = [
            block(b, [*meets(0), move("put", at("o", rank), peer(0, rank)), NOP,
                      over("signal", 0), over("wait", 0), NOP], [b], [b])
            for b in range(size - 1)
        ]  # fmt: skip
        gpus.append(gpu(rank, (1, size, 0), blocks, others, "o"))
    return plan("allgather", gpus)


def loops(size: int = 3) -> Any:
    """An all-to-all in a pipeline: one thread block sends, another one waits and copies."""
    gpus = []
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        blocks = []
        for b, other in enumerate(others):
            # a peer's scratch has a chunk for each of its others
            mine = [r for r in range(size) if r != other].index(rank)
            first = [move("put", at("i", other), peer(0, mine)), NOP, over("signal", 1), NOP,
                     {"name": "sem_release", "semaphore_ids": [b]}, NOP]  # fmt: skip
            second = [{"name": "sem_acquire", "semaphore_ids": [b]}, over("wait", 0), NOP,
                      move("copy", at("s", b), at("i", other)), NOP]  # fmt: skip
            both = [pipeline(x) for x in (first, second)]
            again = size - 1 + b
            blocks.append(block(2 * b, [*meets(0), both[0]], [again, b], [b]))
            blocks.append(block(2 * b + 1, [both[1]], [b]))
        gpus.append(gpu(rank, (size, size, size - 1), blocks, others * 2, "s", semaphores=size - 1))
    return plan("alltoall", gpus)


def packets(size: int = 4) -> Any:
    """An all-reduce: each rank adds up its chunk of all, and sends the sum."""
    gpus = []
    for rank in range(size):
        others = [r for r in range(size) if r != rank]
        each = [*range(size - 1)]
        ops = [
            move("ppkt", [at("i", r) for r in others], [peer(b, rank) for b in each]),
            move("respkt", [at("i", rank), *(at("s", r) for r in others)],
                 [at("i", rank), *(peer(b, size + rank) for b in each)], reduce_op="sum"),
            NOP, *(move("upkt", at("s", size + r), at("i", r)) for r in others),
        ]  # fmt: skip
        blocks = [block(0, ops, each, each)]
        gpus.append(gpu(rank, (size, size, 2 * size), blocks, others, "s"))
    return plan("allreduce", gpus, packets=True)


def two(collective: str, ops: Any, chunks: tuple[int, int, int], buffers: str, kind: str = "memory",
        inplace: bool = True, packets: bool = False, double: bool = False) -> Any:  # fmt: skip
    """Two ranks with a thread block each, whose ops are a function of (rank, other)."""
    gpus = [
        gpu(rank, chunks, [block(0, ops(rank, 1 - rank), [0], range(len(buffers)), kind)],
            [1 - rank], buffers, kind)
        for rank in range(2)
    ]  # fmt: skip
    return plan(collective, gpus, inplace, packets, double)


def reads() -> Any:
    """`rres`: each rank reads, adds and writes its chunk of both."""
    return two("allreduce", lambda a, b: [
        *meets(0, relaxed=False), move("rres", [at("i", a), peer(0, a)], [at("i", a), peer(0, a)]),
        *meets(0, relaxed=False)], (2, 2, 0), "i")  # fmt: skip


def reads_only() -> Any:
    """`rre`, of a rank's chunk of both."""
    return two("reducescatter", lambda a, b: [
        *meets(0, relaxed=False), move("rre", [at("i", a), peer(0, a)], at("o", 0)),
        *meets(0, relaxed=False)], (2, 1, 0), "i", inplace=False)  # fmt: skip


def gets() -> Any:
    """`get` from scratch memory."""
    return two("allgather", lambda a, b: [
        move("copy", at("i", 0), at("s", a)), move("copy", at("i", 0), at("o", a)),
        *meets(0, relaxed=False), move("get", peer(0, b), at("s", b)), NOP,
        move("copy", at("s", b), at("o", b)), *meets(0, relaxed=False)],
        (1, 2, 2), "s", inplace=False)  # fmt: skip


def sums() -> Any:
    """`res`: a rank adds up its chunk of both, and sends the sum."""
    return two("allreduce", lambda a, b: [
        *meets(0), move("put", at("i", b), peer(1, 0)), *meets(0, relaxed=False),
        move("res", [at("i", a), at("s", 0)], [at("i", a), peer(0, a)]),
        *meets(0, relaxed=False)], (2, 2, 1), "is")  # fmt: skip


def ports(name: str) -> Any:
    """`pws`, `pwsf` or `put` over a port channel, whose proxy reads the source later."""

    def ops(a: int, b: int) -> list[dict[str, Any]]:
        sent = move(name, at("i", 0), peer(0, a), "port", channel_ids=[0])
        more = [over("signal", 0, kind="port")] if name == "put" else []
        flush = [over("flush", 0, kind="port")] if name != "pwsf" else []
        meet = [over("signal", 0, kind="port"), over("wait", 0, kind="port"), NOP]
        # a flush by itself does nothing: that the peer has all says that it was read
        return [*meet, sent, *more, *flush, move("copy", at("i", 0), at("o", a)),
                over("wait", 0, kind="port"), NOP, *(meet if name != "pwsf" else [])]  # fmt: skip

    return two("allgather", ops, (1, 2, 0), "o", "port", inplace=False)


def one_shot(name: str) -> Any:
    """`repkt`, `recpkt`: each rank adds up all."""

    def ops(a: int, b: int) -> list[dict[str, Any]]:
        first = [move("ppkt", at("i", 0), peer(0, 0))]
        if name == "repkt":
            return [*first, move(name, [at("i", 0), at("s", 0)], at("o", 0))]
        return [*first, move(name, [at("i", 0), at("s", 0)], [at("i", 0), at("s", 1)]),
                move("upkt", at("s", 1), at("o", 0))]  # fmt: skip

    return two("allreduce", ops, (1, 1, 2), "s", inplace=False, packets=True, double=True)


def two_shot() -> Any:
    """`recspkt`: a rank adds up its chunk, keeps the sum as packets and sends it."""
    return two("allreduce", lambda a, b: [
        move("ppkt", at("i", b), peer(0, 0)),
        move("recspkt", [at("i", a), at("s", 0)], [at("o", a), at("s", 2), peer(0, 1)]),
        move("upkt", at("s", 1), at("o", b)), move("upkt", at("s", 2), at("i", a))],
        (2, 2, 3), "s", inplace=False, packets=True, double=True)  # fmt: skip


def ring() -> Any:
    """`rppkt`: packets go on from rank to rank of three."""
    gpus = []
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        ops = [
            move("copy", at("i", 0), at("o", rank)), move("ppkt", at("i", 0), peer(0, rank)),
            move("rppkt", at("s", before), peer(0, before)),
            move("upkt", at("s", before), at("o", before)),
            move("upkt", at("s", after), at("o", after)),
        ]  # fmt: skip
        refs = [0] if after < before else [1]
        peers = sorted((after, before))
        gpus.append(gpu(rank, (1, 3, 3), [block(0, ops, [0, 1], refs)], peers, "s"))
    return plan("allgather", gpus, inplace=False, packets=True, double=True)


def barrier() -> Any:
    """Two thread blocks of a rank meet."""

    def rank(a: int, b: int) -> dict[str, Any]:
        met = {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}
        first = [*meets(0), move("put", at("i", 0), peer(0, 0)), NOP, over("signal", 0),
                 over("wait", 0), met]  # fmt: skip
        second = [move("copy", at("i", 0), at("o", a)), met, move("copy", at("s", 0), at("o", b))]
        return gpu(a, (1, 2, 1), [block(0, first, [0], [0]), block(1, second)], [b], "s")

    return plan("allgather", [rank(0, 1), rank(1, 0)], inplace=False)


def groups() -> Any:
    """Two thread blocks share a put, half of it each."""

    def rank(a: int, b: int) -> dict[str, Any]:
        blocks = [
            block(k, [*meets(0), move("put", at("i", 0), peer(0, a),
                                      tbg_info={"tb_id": k, "tbg_size": 2}),
                      move("copy", at("i", 0), at("o", a),
                           tbg_info={"tb_id": k, "tbg_size": 2}),
                      NOP, over("signal", 0), over("wait", 0)], [k], [0])
            for k in range(2)
        ]  # fmt: skip
        return gpu(a, (1, 2, 0), blocks, [b, b], "o")

    return plan("allgather", [rank(0, 1), rank(1, 0)], inplace=False)


def switches(name: str) -> Any:
    """`glres`, `gstore` and `gstorepkt`, over two ranks."""
    gpus = []
    for rank in range(2):
        if name == "gstorepkt":
            ops = [move("cpkt", at("i", 0), at("s", 2 + rank)),
                   move(name, at("s", 2 + rank), switch(rank), "switch"),
                   *(move("upkt", at("s", r), at("o", r)) for r in range(2))]  # fmt: skip
        elif name == "gstore":
            ops = [*meets(0), move(name, at("i", 0), switch(rank), "switch"),
                   *meets(0, relaxed=False)]  # fmt: skip
        else:
            ops = [*meets(0, relaxed=False), move(name, switch(rank), switch(rank), "switch"),
                   *meets(0, relaxed=False)]  # fmt: skip
        buffer = {"glres": "i", "gstore": "o", "gstorepkt": "s"}[name]
        chunks = (2, 2, 0) if name == "glres" else (1, 2, 4)
        used = [] if name == "gstorepkt" else [1 - rank]
        gpus.append(gpu(rank, chunks, [block(0, ops, [0][: len(used)], (), switches=[0])], used,
                        group=(buffer, [0, 1])))  # fmt: skip
    kind = "allreduce" if name == "glres" else "allgather"
    packed = name == "gstorepkt"
    return plan(kind, gpus, name == "glres", packed, packed)


FILES: dict[str, Any] = {
    "put": puts(), "pipeline": loops(), "respkt": packets(), "rres": reads(), "rre": reads_only(),
    "get": gets(), "res": sums(), "pws": ports("pws"), "pwsf": ports("pwsf"),
    "flush": ports("put"), "repkt": one_shot("repkt"), "recpkt": one_shot("recpkt"),
    "recspkt": two_shot(), "rppkt": ring(), "barrier": barrier(), "shares": groups(),
    "glres": switches("glres"), "gstore": switches("gstore"), "gstorepkt": switches("gstorepkt"),
}  # fmt: skip
