"""What a rank asks for in one call, and how the ranks' requests differ."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.planning.algorithms import ALGORITHMS
from collectives.planning.goals import COLLECTIVES
from collectives.runtime.reference import DTYPES, OPS
from collectives.runtime.shm import Buffer

KINDS = (*COLLECTIVES, "barrier", "refused")
NAMES = ("auto", *ALGORITHMS)  # auto: of the collectives whose algorithm no caller chooses
NOTHING = Buffer(0, 0, "uint8", 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's side of a call; all but the buffer's address must agree between ranks."""

    kind: str
    buffer: Buffer
    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    layout: int = 0  # of a list: a checksum of its tensors' sizes


def difference(call: int, notices: list[tuple[int, ...]]) -> str:
    """What the ranks asked for, where they differ."""
    groups: dict[str, list[int]] = {}
    for peer, notice in enumerate(notices):
        kind, op, dtype, count, root, algorithm, settings, layout = notice
        words = KINDS[kind]
        if words == "refused":
            words = "refused its arguments"
        if words == "allreduce":
            words += f"({count} x {DTYPES[dtype]}, {OPS[op]}, {NAMES[algorithm]})"
        elif words in COLLECTIVES:
            words += f"({count} x {DTYPES[dtype]}"
            words += f", {OPS[op]}" if "reduce" in words else ""
            words += f", root {root})" if KINDS[kind] in ("broadcast", "reduce") else ")"
        if layout:
            words += f" as a list of sizes {layout:08x}"
        if settings:
            words += f" with settings {settings:08x}"
        groups.setdefault(words, []).append(peer)
    asked = "; ".join(f"ranks {peers}: {words}" for words, peers in groups.items())
    return f"the ranks' call number {call} differs: {asked}"
