"""Read the output of `nvidia-smi topo -m`, also after it was copied through other programs.

    $ (nvidia-smi -L; nvidia-smi topo -m) > machine.txt

The list of GPUs (-L), if it is in the same text, tells their models and UUIDs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from linkweave.topology import speeds
from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import GpuId, Vertex
from linkweave.topology.readers.assemble import NODE, PHB, PIX, PXB, SYS, Told, assemble
from linkweave.topology.topology import Topology

_LEVELS = {"PIX": PIX, "PXB": PXB, "PHB": PHB, "NODE": NODE, "SYS": SYS, "SOC": SYS}
_CELL = re.compile(r"X|NV[1-9]\d{0,2}|" + "|".join(_LEVELS))
_AFFINITIES = re.compile(r"(?:(?:CPU|NUMA) Affinity|GPU NUMA ID).*", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[[0-9;]{1,5}m")  # some lose the escape when pasted
_LISTED = re.compile(
    r"^\s*GPU (\d{1,6}): (.{1,100}?) \(UUID: (GPU-[0-9a-fA-F-]{1,64})\)", re.MULTILINE
)
_MIG = re.compile(r"MIG\b", re.IGNORECASE)
_GPU = re.compile(r"GPU(\d{1,6})")
_RESERVED = re.compile(r"(?:cpu|switch|nvswitch|host)\d*")  # our own names for vertices
_NUMA = re.compile(r"\d{1,6}(?:[-,]\d{1,6})*")
_MOST = 256  # devices; a text with more is not of one machine
_LONGEST = 64  # characters of a device's name


@dataclass(frozen=True, slots=True)
class _Cell:
    word: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line} column {self.column}"


def looks_like_smi(text: str) -> bool:
    """Whether some line starts with a GPU's label, as lines of the matrix do."""
    return any(_GPU.match(_bare(line)) for line in text.splitlines())


def _bare(line: str) -> str:
    return _ANSI.sub("", line).lstrip(" \t#>|$")


def parse_smi(text: str, name: str = "nvidia-smi", gpu: str = "") -> Topology:
    """Build the machine that the matrix shows.

    The PCIe tree follows from the levels (PIX, PXB, PHB, NODE, SYS). Speeds follow from the GPUs'
    models in the text, or from the model `gpu`. `assumptions` lists what the text does not tell.
    Raises TopologyError, with line and column, for a matrix that is cut short or contradicts
    itself.
    """
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    start, columns = _header(lines, name)
    cells, numa, assumed = _rows(lines, start, columns, name)
    missing = [c for c in columns if c not in cells and _GPU.fullmatch(c)]
    if missing:
        raise TopologyError(
            f"{name}: line {len(lines)}: the matrix ends without the rows of {', '.join(missing)}, "
            "which are in its header: was the text cut short?"
        )
    if unmatched := [c for c in columns if c not in cells]:
        assumed.append(f"no rows for {', '.join(unmatched)}: taken from their columns")
    nvlinks: dict[tuple[int, int], int] = {}
    level: dict[tuple[Vertex, Vertex], int] = {}
    for i, a in enumerate(columns):
        for b in columns[:i]:
            cell = _agreed(cells, a, b, name)
            if cell is None:
                continue
            one, other = _vertex(b), _vertex(a)
            if cell.word.startswith("NV"):
                if not (isinstance(one, int) and isinstance(other, int)):
                    raise TopologyError(f"{name}: {cell}: {a} and {b} cannot have NVLinks")
                nvlinks[one, other] = int(cell.word[2:])
            else:
                level[one, other] = _LEVELS[cell.word]
    gpus = [c for c in columns if _GPU.fullmatch(c)]
    devices = _devices([int(c[3:]) for c in gpus], text, name, gpu, assumed)
    nics = [c for c in columns if not _GPU.fullmatch(c)]
    return assemble(Told(name, devices, nics, nvlinks, level, numa, assumptions=assumed))


def _vertex(label: str) -> Vertex:
    found = _GPU.fullmatch(label)
    return int(found[1]) if found else label


def _header(lines: list[str], name: str) -> tuple[int, list[str]]:
    """Return the index of the line after the header, and the header's devices.

    The header is the first line that starts with a GPU's label and is followed by a row.
    """
    starts = [(i, _bare(line)) for i, line in enumerate(lines) if _GPU.match(_bare(line))]
    filled = [i for i, line in enumerate(lines) if line.strip(" \t#>|$\r")]
    after = dict(pairwise(filled))
    chosen: int | None = None
    for i, bare in starts:
        if _is_row(bare):
            if chosen is None:
                raise TopologyError(
                    f"{name}: line {i + 1}: the row of {bare.split()[0]} comes before any header "
                    "with the columns' names: was the text's beginning cut off?"
                )
            break
        if chosen is None or _is_row(_bare(lines[after.get(i, i)])):
            chosen = i
    if chosen is None:
        raise TopologyError(
            f"{name}: no line starts with GPU0: not the output of nvidia-smi topo -m"
        )
    where = f"{name}: line {chosen + 1}"
    columns = re.findall(r"GPU\d+|[A-Za-z][\w.:-]*", _AFFINITIES.sub("", _bare(lines[chosen])))
    if len(columns) > _MOST:
        raise TopologyError(f"{where}: {len(columns)} devices; at most {_MOST}")
    if twice := [c for c in columns if columns.count(c) > 1]:
        raise TopologyError(f"{where}: {twice[0]} is named twice in the header")
    for column in columns:
        if len(column) > _LONGEST or _RESERVED.fullmatch(column):
            raise TopologyError(f"{where}: {column[:_LONGEST]!r} cannot be a device's name here")
    return chosen + 1, columns


def _is_row(bare: str) -> bool:
    words = bare.split(maxsplit=2)
    return len(words) > 1 and bool(_CELL.fullmatch(words[1]))


def _rows(
    lines: list[str], start: int, columns: list[str], name: str
) -> tuple[dict[str, dict[str, _Cell]], dict[int, str], list[str]]:
    """Read cells by row and column, and NUMA nodes by GPU; note rows that were skipped."""
    cells: dict[str, dict[str, _Cell]] = {}
    numa: dict[int, str] = {}
    assumed: list[str] = []
    mig = 0
    known = set(columns)
    for i, line in enumerate(lines[start:], start):
        bare = _bare(line)
        label = next((w for w in bare.split(maxsplit=1)[:1] if w in known), None)
        if len(cells) == len(columns):
            break  # what follows the matrix
        if label is None:
            if not bare.strip():
                continue  # pasted with empty lines between
            if _MIG.match(bare):
                mig += 1
                continue
            if _GPU.match(bare):
                raise TopologyError(
                    f"{name}: line {i + 1}: a row of {bare.split()[0]}, which the header lacks"
                )
            break  # the legend, or whatever follows the matrix
        if label in cells:
            raise TopologyError(f"{name}: line {i + 1}: a second row of {label}")
        at = len(line) - len(bare) + len(label)
        found, end = _cells(line, i + 1, at, label, columns, name)
        cells[label] = found
        if node := _numa(line[end:]):
            gpu = _vertex(label)
            if isinstance(gpu, int):
                numa[gpu] = node
    if mig:
        assumed.append(f"{mig} rows of MIG devices passed over: they have no peer access")
    return cells, numa, assumed


def _cells(
    line: str, at_line: int, at: int, label: str, columns: list[str], name: str
) -> tuple[dict[str, _Cell], int]:
    """Read the cells of a row; return them and the index where they end."""
    found: dict[str, _Cell] = {}
    for word in re.finditer(r"\S+", line[at:]):
        if len(found) == len(columns):
            break
        column = columns[len(found)]
        cell = _Cell(word[0], at_line, at + word.start() + 1)
        if not _CELL.fullmatch(cell.word) or (cell.word == "X") != (column == label):
            raise TopologyError(
                f"{name}: {cell}: {label} to {column} is {cell.word[:40]!r}; expected "
                + ("X, as they are the same" if column == label else
                   "NV and a number, or " + ", ".join(_LEVELS))
            )  # fmt: skip
        found[column] = cell
    if len(found) < len(columns):
        raise TopologyError(
            f"{name}: line {at_line} column {len(line) + 1}: the row of {label} ends after "
            f"{len(found)} of {len(columns)} cells: was the text cut short?"
        )
    last = found[columns[-1]]
    return found, last.column - 1 + len(last.word)


def _numa(tail: str) -> str:
    """Return the NUMA node from the text after the cells, the CPU list without one, or "".

    The fields are CPU affinity, NUMA affinity and, with recent drivers, the GPU's own NUMA node.
    """
    fields = [f.strip() for f in (tail.split("\t") if "\t" in tail else re.split(r" {2,}", tail))]
    while fields and not fields[0]:
        fields.pop(0)
    node = fields[1] if len(fields) > 1 else ""
    if len(fields) == 3 and not node:  # two tabs between the columns
        node = fields[2]
    if _NUMA.fullmatch(node):
        return node
    # GPUs with the same list of CPUs belong to the same node
    return f"CPUs {fields[0]}" if fields and _NUMA.fullmatch(fields[0]) else ""


def _agreed(cells: dict[str, dict[str, _Cell]], a: str, b: str, name: str) -> _Cell | None:
    """The cell of two devices, which must be the same in both halves of the matrix."""
    one, other = cells.get(a, {}).get(b), cells.get(b, {}).get(a)
    if one and other and one.word != other.word:
        raise TopologyError(
            f"{name}: {one} says {one.word} for {a} to {b}, but {other} says {other.word} for the "
            "way back"
        )
    return one or other


def _devices(
    gpus: list[int], text: str, name: str, default: str, assumed: list[str]
) -> list[GpuId]:
    listed = {int(g): (model, uuid) for g, model, uuid in _LISTED.findall(text)}
    if strangers := [g for g in gpus if g not in listed] if listed else []:
        raise TopologyError(
            f"{name}: the matrix has GPU{strangers[0]}, but the list of GPUs in the same text has "
            f"only {', '.join(map(str, listed))}"
        )
    devices = []
    for g in gpus:
        model, uuid = listed.get(g, (default, ""))
        sm = speeds.compute_capability(model) or speeds.compute_capability(default)
        if model and not sm:
            assumed.append(
                f"{model}: unknown model, any NVLinks taken as {speeds.NVLINK / 1e9:g} GB/s, PCIe "
                f"as {speeds.PCIE / 1e9:g} GB/s"
            )
        devices.append(GpuId(g, uuid=uuid, model=model, sm=sm))
    if len(gpus) > 1 and any(speeds.without_peers(device.model) for device in devices):
        assumed.append(speeds.PEERS)
    return devices
