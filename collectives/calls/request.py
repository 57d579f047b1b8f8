"""Requests: what a rank asks for in one call, and how the ranks' requests differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from zlib import crc32

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS, NAMES
from linkweave.collectives.planning.collective import ALLREDUCE, COLLECTIVES, Root
from linkweave.collectives.planning.layout import Sizes
from linkweave.collectives.planning.lower import Algorithm
from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import DTYPES, OPS, Buffer
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.gpu.memory import SymmetricAddress
from linkweave.topology import Topology

KINDS = (*COLLECTIVES, "barrier", "refused", "exchange")
EXCHANGES = ("GPUs", "kernels", "memory of GPUs", "access to GPUs", "troubles", "colors", "memory",
             "sparse_allreduce", "merges", "tensors", "plan", "sizes", "lanes",
             "calls")  # fmt: skip
"""What ranks exchange on the host. A request holds the index of its exchange as its root."""

ORDER, FIRST = 9, 10
"""Indices into a notice: the number of a call on lanes; whether a plan is made for it."""
ASSUMED = 2  # at FIRST: the call's sizes are assumed
_KIND, _COUNT, _ROOT, _PARTS = 0, 3, 4, 7
DEVICES = ("cpu", "gpu")
WORDS = {name: i for i, name in enumerate(NAMES)}
_DTYPES, _OPS = tuple(DTYPES), tuple(OPS)
NOTHING = Buffer(0, 0, "uint8", 1)
_FUNCTION, _PLAN = 1 << 32, 1 << 33  # set above the checksum of an algorithm without a name

How = str | Callable[[Topology], Algorithm] | Plan
"""The algorithm of a call: a name, a function that makes one for a topology, or a plan."""


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's side of a call. All but the addresses must be the same on all ranks."""

    kind: str
    buffer: Buffer
    op: str = "sum"
    root: Root = 0
    algorithm: How = "auto"
    parts: int = 0  # a checksum of the sizes of the parts of the message
    device: str = "cpu"
    sizes: Sizes | None = None  # bytes of each block if they differ (`planning.layout`)
    layers: tuple[int, ...] | None = None  # bytes of each layer of a gradient queue
    symmetric: SymmetricAddress | None = None  # position of the buffer in symmetric memory
    layer_counters: LayerCounters | None = field(
        default=None, compare=False
    )  # counted by a CPU rank
    source: Buffer | None = field(default=None, compare=False)  # the input; None: in place
    result: Buffer | None = field(default=None, compare=False)  # the output; None: in place

    @property
    def kind_of_call(self) -> tuple[object, ...]:
        """The key of calls that need no new preparation."""
        b = self.buffer
        return (
            self.kind, b.nbytes, b.dtype, self.op, self.root, algorithm_word(self.algorithm),
            self.parts, self.sizes, self.layers,
        )  # fmt: skip


def algorithm_word(algorithm: How) -> int:
    """An algorithm as a number, for comparison between ranks. Raises CollectiveError."""
    if isinstance(algorithm, str):
        if algorithm not in WORDS:
            raise CollectiveError(
                f"unknown algorithm {algorithm!r}; choose from auto, "
                f"{', '.join(ALGORITHMS[ALLREDUCE])}, of which "
                "linkweave simulate shows those that a machine can run, or give a function that "
                "makes one"
            )
        return WORDS[algorithm]
    if isinstance(algorithm, Plan):
        return _PLAN | checksum(algorithm)
    if not isinstance(algorithm, FunctionType):
        raise CollectiveError(
            f"algorithm must be a name or a function of a topology, not {algorithm!r}"
        )
    cells = [cell.cell_contents for cell in algorithm.__closure__ or ()]
    bound = [*cells, *(algorithm.__defaults__ or ()), *(algorithm.__kwdefaults__ or {}).items()]
    parts = (algorithm.__qualname__, _code(algorithm.__code__), [_plain(value) for value in bound])
    return _FUNCTION | crc32(repr(parts).encode())


def _code(code: CodeType) -> tuple[object, ...]:
    consts = [_code(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    return code.co_code, code.co_names, consts


def _plain(value: object) -> object:
    """A value whose `repr` is the same on all ranks: for objects other than these, the type."""
    simple = value is None or isinstance(value, int | float | str | bytes | tuple)
    return value if simple else type(value).__qualname__


@lru_cache(maxsize=64)
def checksum(plan: Plan) -> int:
    """A checksum of a plan's content."""
    return crc32(plan.to_json().encode())


def name_of(algorithm: How) -> str:
    """The algorithm's name in messages."""
    if isinstance(algorithm, Plan):
        return algorithm.algorithm
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")


def notice(
    request: Request, settings: int = 0, order: int = 0, first: bool = False
) -> tuple[int, ...]:
    """A request as numbers, which the ranks compare.

    `settings` is the checksum of the settings, or 0; `order` is the number of a call among those
    of all lanes, or 0; `first` says that a plan is about to be made.
    """
    buffer, root = request.buffer, request.root
    root_word = root if isinstance(root, int) else crc32(repr(root).encode())
    return (
        KINDS.index(request.kind), _OPS.index(request.op), _DTYPES.index(buffer.dtype),
        buffer.nbytes // buffer.itemsize, root_word, algorithm_word(request.algorithm), settings,
        request.parts, DEVICES.index(request.device), order, int(first),
        *(request.symmetric or (-1, 0)),
    )  # fmt: skip


Key = tuple[tuple[int, ...], Root]


def key_of(request: Request) -> Key:
    """What the ranks agree on once: the notice without its offset, and the root.

    The root is part of the key because a notice has only a checksum of pairs.
    """
    return notice(request)[:-1], request.root


def unsure(notices: Sequence[Sequence[int]]) -> bool:
    """Whether some ranks assume the sizes of an uneven all-to-all, and the others exchange them or
    assume other ones: then all exchange them."""
    assumes = [row[FIRST] == ASSUMED for row in notices]
    exchanges = [
        KINDS[row[_KIND]] == "exchange" and EXCHANGES[row[_ROOT]] == "sizes" for row in notices
    ]
    return any(assumes) and all(a or e for a, e in zip(assumes, exchanges, strict=True))


def values(kind: str, count: int, dtype: str) -> str:
    """The values of a call, in words; of gathers, those of all ranks."""
    return f"{count} x {dtype}" + " in all" * COLLECTIVES[kind].gathers


def words(notice: Sequence[int]) -> str:
    """A notice as text, for messages. An offset of -1 is left out."""
    kind, op, dtype, count, root, algorithm, settings, parts, device, order, *rest = notice
    _, piece, offset = rest
    asked = KINDS[kind]
    if algorithm < len(NAMES):
        how = NAMES[algorithm]
    else:
        own = "plan" if algorithm & _PLAN else "algorithm"
        how = f"own {own} of checksum {algorithm % _FUNCTION:08x}"
    if asked == "refused":
        asked = "refused its arguments"
    if asked == "exchange":
        asked = f"told of its {EXCHANGES[root]}"
    if collective := COLLECTIVES.get(asked):
        what = [values(asked, count, _DTYPES[dtype])]
        what += [_OPS[op]] * collective.combines + [how] * collective.tunable
        roots = {"none": [], "rank": [f"root {root}"], "pairs": [f"pairs of checksum {root:08x}"]}
        asked += f"({', '.join([*what, *roots[collective.root]])})"
    if parts:
        asked += f" in {parts_words(parts)}"
    if settings:
        asked += f" with settings of checksum {settings:08x}"
    if order:
        asked += f" as call {order} on lanes"
    if piece >= 0:
        asked += (f" at {offset}" if offset >= 0 else "") + f" in shared memory {piece}"
    return asked + (" on the GPU" if DEVICES[device] == "gpu" else "")


def parts_words(parts: int) -> str:
    """What a call's parts are told by."""
    return f"parts whose sizes have the checksum {parts:08x}"


def difference(notices: Sequence[Sequence[int]], refusals: dict[int, str]) -> str:
    """A message that says which ranks asked for what. `refusals` holds ranks' own errors."""
    texts = [words(row) for row in notices]
    if len({*texts}) == 1:
        first = [" for the first time" * (row[FIRST] == 1) for row in notices]
        texts = [text + more for text, more in zip(texts, first, strict=True)]
    groups: dict[str, list[int]] = {}
    for peer, text in enumerate(texts):
        why = f": {refusals[peer]}" if refusals.get(peer) else ""
        groups.setdefault(text + why, []).append(peer)
    asked = "; ".join(f"ranks {peers}: {what}" for what, peers in groups.items())
    others = {(*row[:_COUNT], *row[_COUNT + 1 : _PARTS + 1]) for row in notices}
    if len(others) == 1 and KINDS[notices[0][_KIND]] == "allgather" and not notices[0][_PARTS]:
        asked += ". Parts of different lengths need counts=, the rows of each rank"
    kinds = {KINDS[row[_KIND]] for row in notices}
    if kinds == {"alltoall", "exchange"} and "told of its sizes" in texts:
        asked += ". Splits that are given on one rank must be given on all"
    return f"the ranks' calls differ: {asked}"
