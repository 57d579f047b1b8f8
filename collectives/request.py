"""What a rank asks for in one call, and how the ranks' requests differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from collectives.planning.algorithms import ALGORITHMS
from collectives.planning.goals import COLLECTIVES, SENDRECV, Root
from collectives.planning.others import OTHERS
from collectives.runtime.arrivals import Arrivals
from collectives.runtime.dtypes import DTYPES, OPS
from collectives.runtime.memory import Spot
from collectives.runtime.shm import Buffer

KINDS = (*COLLECTIVES, SENDRECV, "barrier", "refused", "exchange")
EXCHANGES = ("GPUs", "kernels", "memory of GPUs", "access to GPUs", "troubles", "colors", "memory",
             "sparse_allreduce", "merges", "tensors")  # fmt: skip
"""What ranks tell each other of on the host; the place of one is its request's root."""

DEVICES = ("cpu", "gpu")
NAMES = tuple(dict.fromkeys(["auto", *ALGORITHMS, *(n for of in OTHERS.values() for n in of)]))
_DTYPES, _OPS = tuple(DTYPES), tuple(OPS)
NOTHING = Buffer(0, 0, "uint8", 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's side of a call; all but where its values lie must agree between ranks."""

    kind: str
    buffer: Buffer
    op: str = "sum"
    root: Root = 0
    algorithm: str = "auto"
    layout: int = 0  # of a list: a checksum of its tensors' sizes
    device: str = "cpu"
    label: str = ""  # for people and profilers; not compared
    layers: tuple[int, ...] | None = None  # bytes of each, for a gradient queue
    spot: Spot | None = None  # on GPUs: where the buffer lies in memory that all see
    arrivals: Arrivals | None = field(default=None, compare=False)  # which a CPU rank counts
    source: Buffer | None = field(default=None, compare=False)  # of the values; None: in place


def notice(request: Request, settings: int = 0) -> tuple[int, ...]:
    """A request as numbers, which all ranks compare; `settings`: their checksum, or 0."""
    buffer, root = request.buffer, request.root
    place = root if isinstance(root, int) else crc32(repr(root).encode())
    return (
        KINDS.index(request.kind), _OPS.index(request.op), _DTYPES.index(buffer.dtype),
        buffer.nbytes // buffer.itemsize, place, NAMES.index(request.algorithm), settings,
        request.layout, DEVICES.index(request.device),
        *(request.spot or (-1, 0)),
    )  # fmt: skip


def words(notice: tuple[int, ...]) -> str:
    """What a notice asks for; an offset of -1 is left out."""
    kind, op, dtype, count, root, algorithm, settings, layout, device, piece, offset = notice
    asked = KINDS[kind]
    if asked == "refused":
        asked = "refused its arguments"
    if asked == "exchange":
        asked = f"told of its {EXCHANGES[root]}"
    if asked == "allreduce":
        asked += f"({count} x {_DTYPES[dtype]}, {_OPS[op]}, {NAMES[algorithm]})"
    elif asked in (*COLLECTIVES, SENDRECV):
        asked += f"({count} x {_DTYPES[dtype]}"
        asked += f", {_OPS[op]}" if "reduce" in asked else ""
        if KINDS[kind] == SENDRECV:
            asked += f", pairs {root:08x}"
        asked += f", root {root})" if KINDS[kind] in ("broadcast", "reduce") else ")"
    if layout:
        asked += f" in parts of sizes {layout:08x}"
    if settings:
        asked += f" with settings {settings:08x}"
    if piece >= 0:
        asked += (f" at {offset}" if offset >= 0 else "") + f" in shared memory {piece}"
    return asked + (" on the GPU" if DEVICES[device] == "gpu" else "")


def difference(call: int, notices: list[tuple[int, ...]]) -> str:
    """What the ranks asked for, where they differ."""
    groups: dict[str, list[int]] = {}
    for peer, said in enumerate(notices):
        groups.setdefault(words(said), []).append(peer)
    asked = "; ".join(f"ranks {peers}: {what}" for what, peers in groups.items())
    return f"the ranks' call number {call} differs: {asked}"
