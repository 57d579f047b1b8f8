"""What nccl-tests has measured, and how far that is from what a machine allows.

The text and the JSON (`-J FILE`) of nccl-tests 2.18 are read, and the text of older ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.collective import ALLREDUCE
from linkweave.collectives.planning.explain import NCCL, size_text
from linkweave.collectives.planning.planner import plan_collective
from linkweave.collectives.planning.simulate import simulate
from linkweave.topology import Topology, bound, reducing_bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.checks import parse_json, shown
from linkweave.topology.text import ranks
from linkweave.topology.timings import Timing

NAMES = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast", "reduce": "reduce", "alltoall": "alltoall", "gather": "gather",
    "scatter": "scatter",
}  # fmt: skip
"""Our names of the collectives, by the names of its programs."""
_HEAD = re.compile(r"^#?\s*size\s+count\s+type\b.*\salgbw\s+busbw\s+\S", re.MULTILINE)
_PROGRAM = re.compile(rf"\b({'|'.join(sorted(NAMES, key=len, reverse=True))})_perf")
_RANK = re.compile(r"^#?\s*Rank\s+(\d+)\b", re.MULTILINE)
_TAG = re.compile(r"^(?:\[\d+,\d+\]<\w+>:|\d+:) ?", re.MULTILINE)
"""What mpirun and srun put before each line, if they are asked to."""


@dataclass(frozen=True, slots=True)
class Row:
    """A size in bytes, as nccl-tests counts it: a rank's whole buffer. `wrong` values were found;
    None if nobody looked. Rates in GB/s are as printed, off by at most `slack`."""

    nbytes: int
    seconds: float
    wrong: int | None
    algbw: float = 0.0
    busbw: float = 0.0
    slack: float = 0.0

    def fits(self, collective: str, size: int) -> bool:
        """Whether the rates are those of so many ranks."""
        factor = _FACTORS.get(collective)
        if factor is None:
            return True
        off = abs(self.busbw - self.algbw * factor * (size - 1) / size)
        return off <= self.slack * (1 + factor) + 1e-9


@dataclass(frozen=True, slots=True)
class Log:
    """Measured times of a collective, out of place where there are such, by ascending sizes.
    `ranks` is 0 and `collective` empty where the log does not tell."""

    collective: str
    ranks: int
    rows: tuple[Row, ...]


def is_log(text: str) -> bool:
    return bool(_HEAD.search(_TAG.sub("", text))) or (
        text.lstrip().startswith("{") and '"bus_bw"' in text
    )


def read(text: str, where: str = "nccl-tests") -> Log:
    """Read a log of one test. Raises CollectiveError if there are no figures in it, or several of a
    size: of several types, ops, roots or cycles."""
    if text.lstrip().startswith("{"):
        collective, ranks, rows = _from_json(parse_json(text, where, CollectiveError), where)
    else:
        text = _TAG.sub("", text)
        found = {NAMES[name] for name in _PROGRAM.findall(text)}
        if len(found) > 1 or len({line.strip() for line in _HEAD.findall(text)}) > 1:
            raise CollectiveError(
                f"{where} has several tests, of {', '.join(sorted(found))}: give one of them"
            )
        collective = found.pop() if found else ""
        ranks = len({int(rank) for rank in _RANK.findall(text)})
        rows = [*_from_text(text, where)]
    kept = sorted((row for row in rows if row.nbytes and row.seconds > 0), key=lambda r: r.nbytes)
    if not kept:
        raise CollectiveError(f"{where}: no figures of nccl-tests in it")
    for one, other in pairwise(kept):
        if one.nbytes == other.nbytes:
            raise CollectiveError(
                f"{where} has several times of {size_text(one.nbytes)}: give a log of one type, "
                "one op, one root and one cycle"
            )
    return Log(collective, ranks, tuple(kept))


def _from_text(text: str, where: str) -> Iterator[Row]:
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().lstrip("#").split()
        if _HEAD.search(line):
            if "time" not in words:
                raise CollectiveError(f"{where} has times of the CPU (-C), not of collectives")
            columns = words
            continue
        if not columns or line.lstrip().startswith("#") or not words or not words[0].isdecimal():
            continue
        # a line that was cut short, or columns that have been added behind those of the header
        at = {name: columns.index(name) for name in ("time", "algbw", "busbw")}
        if len(words) < len(columns):
            raise CollectiveError(
                f"{where}: line {number} has {len(words)} columns, not {len(columns)}: was the "
                "text cut short?"
            )
        try:
            seconds, algbw, busbw = (float(words[at[k]]) for k in ("time", "algbw", "busbw"))
            told = words[at["busbw"] + 1]
            # an older version prints the largest error, of which 1e-3 is none
            wrong = None if told == "N/A" else int(not float(told) < 1)
            if wrong and math.isfinite(float(told)):
                wrong = int(float(told))
        except ValueError:
            raise CollectiveError(f"{where}: line {number}: no figures: {shown(line)}") from None
        digits = min(len(words[at[k]].partition(".")[2]) for k in ("algbw", "busbw"))
        yield Row(int(words[0]), seconds * 1e-6, wrong, algbw, busbw, 0.5 * 10**-digits)


def _from_json(data: Any, where: str) -> tuple[str, int, list[Row]]:
    try:
        program = _PROGRAM.search(" ".join(map(str, data.get("args", ()))))
        rows = []
        for row in data["results"]:
            side = row.get("out_of_place") or row["in_place"]
            if "cpu_time" in side:
                raise CollectiveError(f"{where} has times of the CPU (-C), not of collectives")
            wrong = side.get("nwrong")
            rates = float(side["alg_bw"]), float(side["bus_bw"])
            wrong = None if wrong is None else int(wrong)
            seconds = float(side["time"]) * 1e-6
            rows.append(Row(int(row["size"]), seconds, wrong, *rates, 1e-3 * rates[1]))
        config = data.get("config") or {}
        each = int(config.get("nthreads", 1)) * int(config.get("ngpus", 1))
        devices = config.get("devices") or ()
        return NAMES[program[1]] if program else "", each * len(devices), rows
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = repr(error)
        if isinstance(data, dict) and isinstance(data.get("format"), str):
            why = f"its format is {shown(data['format'])}"
        elif isinstance(error, KeyError):
            why = f"it lacks {error}"
        raise CollectiveError(f"{where} is no JSON of nccl-tests: {why}") from None


_FACTORS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1, "alltoall": 1}
"""busbw = algbw * factor * (n - 1) / n."""


def with_times(topology: Topology, text: str, where: str) -> Topology:
    """The machine with NCCL's measured all-reduces, beside which `explain` puts ours."""
    log = read(text, where)
    if (log.collective or ALLREDUCE) != ALLREDUCE:
        raise CollectiveError(f"{where}: times of {log.collective}; only all-reduces are compared")
    _check_ranks(log, topology, ALLREDUCE)
    times = tuple(Timing(NCCL, row.nbytes, 1, row.seconds) for row in log.rows)
    return replace(topology, timings=(*topology.timings, *times))


def _check_ranks(log: Log, topology: Topology, collective: str) -> None:
    size = len(topology.gpus)
    wrong = next((row for row in log.rows if not row.fits(collective, size)), None)
    if (log.ranks and log.ranks != size) or (wrong and not log.ranks):
        whose = f"of {log.ranks} ranks" if log.ranks else "not of as many ranks, by its busbw"
        raise CollectiveError(
            f"the log is {whose}, but {topology.name} has {ranks(topology)}: name those "
            "on which it was made"
        )


# ---- judging -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Judged:
    """A measured size beside the best plan of ours and the bound; rates are algbw in bytes/s."""

    nbytes: int
    seconds: float
    predicted: float
    algorithm: str
    bound: float | None

    @property
    def algbw(self) -> float:
        return self.nbytes / self.seconds

    @property
    def share(self) -> float | None:
        """Of the bound; None where there is none."""
        return self.algbw / self.bound if self.bound else None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What to say of a log: its rows, and sentences."""

    collective: str
    rows: tuple[Judged, ...]
    sentences: tuple[str, ...]


_DOMINATES = 2.0
"""Below the size at which a message takes so many times the shortest one, start-up dominates."""
_FASTER = 1.5
"""From where on a plan of ours is said to be faster: predictions count what links carry on the
wires, of which NCCL reckons four fifths as payload, and are within a fifth."""
_SMALL = 0.05  # below such a share of the bound, the largest message says nothing of links


def judge(log: Log, topology: Topology, collective: str = "") -> Judgement:
    """Compare a log with the machine on which it was made.

    collective: what was measured, where the log does not tell.
    Raises CollectiveError if it is of another number of ranks, or tells another collective.
    """
    kind = log.collective or collective
    if not kind:
        raise CollectiveError("the log does not tell the collective: name it with --collective")
    if collective and kind != collective:
        raise CollectiveError(f"the log is of {kind}, not of {collective}")
    size = len(topology.gpus)
    if size < 2:
        raise CollectiveError(f"{topology.name} has one GPU, on which nothing is sent")
    _check_ranks(log, topology, kind)
    best = bound(topology, kind).algbw if kind in BOUNDED else None
    rows = []
    for row in log.rows:
        plan = plan_collective(kind, topology, whole(row.nbytes, kind, size))
        predicted = simulate(plan, topology, row.nbytes).seconds
        rows.append(Judged(row.nbytes, row.seconds, predicted, plan.algorithm, best))
    return Judgement(kind, tuple(rows), tuple(_sentences(log, rows, topology, kind)))


def whole(nbytes: int, collective: str, size: int) -> int:
    """The size in whole blocks, where there are such."""
    return -(-nbytes // size) * size if collective == "alltoall" else nbytes


def _sentences(log: Log, rows: list[Judged], topology: Topology, kind: str) -> Iterator[str]:
    wrong = [row for row in log.rows if row.wrong]
    if wrong:
        yield (
            f"{len(wrong)} sizes have wrong results, the first {size_text(wrong[0].nbytes)}: look "
            "into that before any time"
        )
    elif any(row.wrong is None for row in log.rows):
        yield "results were not checked (-c 0)"
    peak = max(rows, key=lambda row: row.algbw)
    share = peak.share
    if share is not None and share < _SMALL:
        yield "the largest message is too small to say what the links do"
    elif share is not None:
        yield f"at {size_text(peak.nbytes)} you reach {share:.0%} of what these links allow"
    if share is not None and share > 1:
        reduced = reducing_bound(topology) if kind == "allreduce" else None
        if reduced and peak.algbw <= reduced.algbw:
            yield (
                f"that is above the bound without switches that reduce, so NVLS was used; with "
                f"them the links allow {reduced.algbw / 1e9:.4g} GB/s, of which it is "
                f"{peak.algbw / reduced.algbw:.0%}"
            )
        else:
            yield "no algorithm can do that: is the log of another machine, or of faster links?"
    least = min(row.seconds for row in rows)
    slow = [row for row in rows if row.seconds < _DOMINATES * least]
    if len(slow) > 1 and slow[-1] is not rows[-1]:
        above = rows[rows.index(slow[-1]) + 1].nbytes
        yield (
            f"below {size_text(above)} start-up dominates: {least * 1e6:.0f} us even for "
            f"{size_text(min(rows, key=lambda row: row.seconds).nbytes)}"
        )
    yield from _compared(rows)


def _compared(rows: list[Judged]) -> Iterator[str]:
    """Where plans of ours are predicted to be faster, and where not."""
    runs: list[list[Judged]] = []
    before = False
    for row in rows:
        gains = row.seconds > _FASTER * row.predicted
        if gains and before:
            runs[-1].append(row)
        elif gains:
            runs.append([row])
        before = gains
    for run in runs:
        most = max(run, key=lambda row: row.seconds / row.predicted)
        names = ", ".join(dict.fromkeys(row.algorithm for row in run))
        sizes = size_text(run[0].nbytes)
        sizes = f"from {sizes} to {size_text(run[-1].nbytes)}" if len(run) > 1 else f"at {sizes}"
        yield (
            f"{sizes} plans of ours are predicted to be faster, up to "
            f"{most.seconds / most.predicted:.1f} times, not counting launches: {names}"
        )
    if not runs:
        yield "at no size is a plan of ours predicted to be clearly faster"


# ---- a tuner's file ------------------------------------------------------------------------------
TUNED = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce")
TUNER_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
TUNER_PROTOCOLS = ("ll", "ll128", "simple")


def tuner_file(logs: Mapping[str, Log], nodes: int, collective: str = "") -> str:
    """The lines of NCCL's example tuner (`NCCL_TUNER_CONFIG_FILE`): for each size the way that was
    measured to be the fastest; other sizes than those of all logs are left to NCCL.

    logs: by "ALGORITHM/PROTOCOL", as `NCCL_ALGO` and `NCCL_PROTO` had them; all of one collective.
    A choice holds up to the geometric mean of two sizes.
    Source: `plugins/tuner/example/README.md` of NCCL 2.30.
    """
    for name in logs:
        algorithm, _, protocol = name.partition("/")
        if algorithm not in TUNER_ALGORITHMS or protocol not in TUNER_PROTOCOLS:
            raise CollectiveError(
                f"{name} must be ALGORITHM/PROTOCOL: {', '.join(TUNER_ALGORITHMS)}; "
                f"{', '.join(TUNER_PROTOCOLS)}"
            )
    kinds = {log.collective or collective for log in logs.values()}
    sizes_of = {log.ranks for log in logs.values()} - {0}
    if len(kinds) != 1 or not kinds <= set(TUNED) or len(sizes_of) > 1:
        told = ", ".join(sorted(kinds - {""})) or "none that they tell"
        raise CollectiveError(
            f"the logs must be of one of {', '.join(TUNED)}, which --collective may name, and of "
            f"as many ranks; they are of {told}"
        )
    kind, ranks = kinds.pop(), max(sizes_of, default=0)
    times = {name: {row.nbytes: row.seconds for row in log.rows} for name, log in logs.items()}
    sizes = sorted(set.intersection(*map(set, times.values())))
    if not sizes:
        raise CollectiveError("the logs have no size in common")
    best = [min(times, key=lambda name: times[name][n]) for n in sizes]
    lines, first = [], sizes[0]
    for at, (nbytes, name) in enumerate(zip(sizes, best, strict=True)):
        if at + 1 < len(sizes) and best[at + 1] == name:
            continue
        last = int((nbytes * sizes[at + 1]) ** 0.5) if at + 1 < len(sizes) else nbytes
        word = kind.replace("_", "")
        ways = name.replace("/", ",")
        lines.append(f"{word},{first},{last},{ways},-1,{nodes},{ranks or -1}")
        first = last + 1
    return "\n".join(lines) + "\n"
