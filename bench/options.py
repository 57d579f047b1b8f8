"""What the commands' options have in common."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.console import Console

from linkweave.collectives import CollectiveError
from linkweave.collectives.planning.fields import shown
from linkweave.collectives.planning.goals import COLLECTIVES

console = Console(stderr=True)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "64M": binary units K, M, G, an optional B. Raises CollectiveError."""
    found = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise CollectiveError(f"a size is like 1024, 64K, 16M or 1G, not {shown(text)}")
    return int(found[1]) * _UNITS[found[2].upper()]


def at_least(*options: tuple[str, int, int]) -> None:
    """Raise CollectiveError for the first (flag, value, least) that is too small."""
    for flag, value, least in options:
        if value < least:
            raise CollectiveError(f"{flag} must be at least {least}, not {value}")


TopologyOption = Annotated[
    str, typer.Option("--topology", "--topo", "-t", help="Machine's name, a file, or auto.")
]
SizeOption = Annotated[str, typer.Option("--size", "-s", help="Message in bytes: 64K, 16M, 1G.")]
AlgorithmOption = Annotated[
    str, typer.Option("--algorithm", "--force", "-a", help="auto, or a name.")
]
CollectiveOption = Annotated[
    str, typer.Option("--collective", "-c", help=f"One of {', '.join(COLLECTIVES)}.")
]
RootOption = Annotated[int, typer.Option(help="Of a broadcast or a reduce.")]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", "-k", help="Chunks over all trees; default: the model's.")
]
MeasuredOption = Annotated[
    str | None,
    typer.Option(help="Lay over: JSON of bench links or algorithms, p2pBandwidthLatencyTest."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
