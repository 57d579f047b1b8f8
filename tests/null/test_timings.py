"""Measured times of whole all-reduces: how they are read, and that the planner trusts them."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from linkweave import collectives
from linkweave.collectives.planning.planner import candidates, choose, predict
from linkweave.topology import Topology, TopologyError, load
from linkweave.topology.timings import FORMAT, Timing, measured_seconds, parse_timings
from tests.cpu.commands import command

ROOT = Path(__file__).parents[2]
RING = {"algorithm": "ring", "nbytes": 1024, "num_chunks": 4, "seconds": 1e-5}
KIB, MIB = 1 << 10, 1 << 20
SLOW = (
    Timing("chain", 4 * KIB, 2, 1e-6),
    Timing("chain", MIB, 16, 1e-4),
    Timing("one_shot", 4 * KIB, 1, 2e-6),
    Timing("one_shot", MIB, 1, 4e-4),
)
"""A chain that wins on cpu-4 from 4 KiB to 1 MiB, which the model gives to one or two shots."""


def text(*rows: object, **top: Any) -> str:
    head = {"format": FORMAT, "version": 1, "topology": "cpu-4"}
    return json.dumps({**head, "rows": rows, **top})


def parsed(*rows: object, **top: Any) -> tuple[Timing, ...]:
    return parse_timings(text(*rows, **top), "cpu-4", "a.json")


def timed(*timings: Timing, name: str = "cpu-4") -> Topology:
    return replace(load(name), timings=timings)


COLLECTIVES: dict[str, Any] = {
    "benchmark": "collectives", "ranks": 4, "device": "cpu", "topology": "auto", "rows": [
        {"collective": "allreduce", "library": "linkweave", "algorithm": "chain", "size": 1024,
         "num_chunks": 4, "time_us": 10.0, "wrong": 0},
        {"collective": "allreduce", "library": "linkweave", "algorithm": "ring", "size": 2048,
         "num_chunks": 4, "time_us": 1.0, "wrong": 3},
        {"collective": "allreduce", "library": "gloo", "algorithm": "", "size": 1024,
         "num_chunks": 0, "time_us": 9.0, "wrong": 0},
        {"collective": "broadcast", "library": "linkweave", "algorithm": "", "size": 1024,
         "num_chunks": 0, "time_us": 5.0, "wrong": 0},
    ],
}  # fmt: skip


def test_times_of_collectives_are_read() -> None:
    """All-reduces of linkweave with right results, by the algorithm that it took."""
    found = load("cpu-4", json.dumps(COLLECTIVES)).timings
    assert found == (Timing("chain", 1024, 4, 1e-5),)
    for change, words in (
        ({"ranks": 8}, "times of 8 cpu ranks of auto, not of 4 cpu ranks of cpu-4"),
        ({"device": "cuda"}, "times of 4 cuda ranks of auto, not of 4 cpu ranks"),
        ({"topology": "dgx1"}, "times of 4 cpu ranks of dgx1, not of"),
        ({"rows": COLLECTIVES["rows"][1:]}, "no all-reduces of linkweave or NCCL"),
        ({"rows": [{"collective": "allreduce"}]}, "no JSON of bench collectives: KeyError"),
        ({"rows": None}, "no JSON of bench collectives: TypeError"),
    ):
        with pytest.raises(TopologyError, match=words):
            load("cpu-4", json.dumps({**COLLECTIVES, **change}))


def recorded(ranks: int) -> Path:
    (path,) = (ROOT / "bench/results").glob(f"algorithms-cpu-{ranks}-*.json")
    return path


# ---- reading ---------------------------------------------------------------------------------


REFUSED = [
    *((name, value, f"must be an integer from 1 to .*, not {value!r}$")
      for name in ("nbytes", "num_chunks")
      for value in (0, -1, True, 1.0, "8", None, (1 << 50) + 1)),
    *(("seconds", value, r"must be a number from 1e-12 to 1e\+09, not ")
      for value in (0, -1e-6, math.inf, math.nan, True, "1", None, [1], 10**400)),
    *(("algorithm", value, rf"must be a name, not {re.escape(repr(value))}$")
      for value in ("", None, 3, ["ring"])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), REFUSED, ids=range(len(REFUSED)))
def test_values_are_refused_by_name_and_value(name: str, value: object, words: str) -> None:
    with pytest.raises(TopologyError, match=f"^timing: {name} {words}"):
        Timing(**{**RING, name: value})  # type: ignore[arg-type]


def test_rows_are_read_in_order() -> None:
    largest = Timing("chain", 1 << 50, 1 << 20, 1)
    assert parsed(RING, asdict(largest)) == (Timing(**RING), largest)  # type: ignore[arg-type]
    assert parsed() == ()


@pytest.mark.parametrize(
    ("top", "words"),
    [
        (
            {"format": "linkweave-links"},
            'needs "format": "linkweave-timings" at the top, but it is \'linkweave-links\'',
        ),
        ({"version": 2}, "version 2 is unknown; known: 1"),
        ({"version": None}, "version None is unknown; known: 1"),
        ({"topology": "cpu-8"}, "times of cpu-8, not of cpu-4"),
        ({"topology": None}, "times of None, not of cpu-4"),
    ],
)
def test_other_formats_and_machines_are_refused(top: dict[str, object], words: str) -> None:
    with pytest.raises(TopologyError) as told:
        parsed(RING, **top)
    assert str(told.value) == f"a.json: {words}"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (None, 'must be an object with "algorithm", "nbytes", "num_chunks", "seconds", not None'),
        ([1], "must be an object with"),
        ({}, r"must be an object with .*, not {}$"),
        ({**RING, "more": 1}, "must be an object with"),
        ({**RING, "seconds": -1}, ": timing: seconds must be .*, not -1$"),
        ({**RING, "nbytes": 0.5}, ": timing: nbytes must be .*, not 0.5$"),
        ({**RING, "algorithm": ""}, ": timing: algorithm must be a name, not ''$"),
    ],
)
def test_malformed_rows_are_named(row: object, said: str) -> None:
    with pytest.raises(TopologyError, match=rf"^a.json: rows\[1\]:? ?{said.lstrip(': ')}"):
        parsed(RING, row, RING)


@pytest.mark.parametrize("rows", [None, {}, "ring", 3])
def test_rows_must_be_a_list(rows: object) -> None:
    with pytest.raises(TopologyError, match=r"^a\.json: rows must be a list, not "):
        parsed(rows=rows)


@pytest.mark.parametrize(
    "hostile",
    ["", "[]", "null", "3", '"x"', "{", text(RING)[:-1], text(RING) + "}", "[" * 10**5]
    + [text(RING).replace("1e-05", "9" * 5000)]
    + [text().replace("[]", "[" * depth + "]" * depth) for depth in (50, 900, 10**5)],
)
def test_hostile_json_is_refused(hostile: str) -> None:
    with pytest.raises(TopologyError, match=r"^a\.json: ") as told:
        parse_timings(hostile, "cpu-4", "a.json")
    assert len(str(told.value)) < 400


# ---- between sizes ---------------------------------------------------------------------------


def test_exact_where_it_was_measured() -> None:
    rows = (Timing("ring", 4096, 8, 3e-5), Timing("tree", 1024, 1, 1e-9), Timing(**RING))  # type: ignore[arg-type]
    assert measured_seconds(rows, "ring", 1024) == (1e-5, 4)
    assert measured_seconds(rows, "ring", 4096) == (3e-5, 8)
    assert measured_seconds(rows, "tree", 1024) == (1e-9, 1)


def test_a_straight_line_in_logarithms_between() -> None:
    rows = (Timing("ring", 1024, 4, 1e-5), Timing("ring", 16384, 16, 9e-5))
    for nbytes, seconds, chunks in (
        (2048, 1e-5 * 9**0.25, 4), (4095, 3e-5, 4), (4096, 3e-5, 16), (8192, 1e-5 * 9**0.75, 16),
    ):  # fmt: skip
        found = measured_seconds(rows, "ring", nbytes)
        assert found is not None
        assert found[0] == pytest.approx(seconds, rel=1e-3) and found[1] == chunks


def test_neighbours_only() -> None:
    """A third size beyond does not bend the line."""
    near = (Timing("ring", 1024, 4, 1e-5), Timing("ring", 4096, 8, 4e-5))
    far = (Timing("ring", 1 << 30, 99, 1.0), *near, Timing("ring", 1, 1, 1e-9))
    assert measured_seconds(far, "ring", 2048) == measured_seconds(near, "ring", 2048)


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 4097, 1 << 40])
def test_nothing_outside(nbytes: int) -> None:
    rows = (Timing("ring", 1024, 4, 1e-5), Timing("ring", 4096, 8, 4e-5))
    assert measured_seconds(rows, "ring", nbytes) is None
    assert measured_seconds(rows, "tree", 2048) is None
    assert measured_seconds((), "ring", 2048) is None


# ---- on a machine ----------------------------------------------------------------------------


def test_load_keeps_them_beside_the_links(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"
    path.write_text("\ufeff\n" + text(RING))
    machine = load("cpu-4", measured=path)
    assert machine == timed(Timing(**RING)) == load("cpu-4", measured=text(RING))  # type: ignore[arg-type]
    assert machine != load("cpu-4") and machine.links == load("cpu-4").links
    with pytest.raises(TopologyError, match="times of cpu-4, not of mesh-4"):
        load("mesh-4", measured=path)
    with pytest.raises(TopologyError, match='needs "format": "linkweave-topology"'):
        load(path)


def test_some_of_the_ranks_have_none_of_them() -> None:
    assert timed(*SLOW).subset([0, 1]).timings == ()
    assert timed(*SLOW).subset([0, 1, 2, 3]).timings == SLOW


def test_a_machines_json_holds_them() -> None:
    machine = timed(*SLOW)
    assert Topology.from_json(machine.to_json()) == machine == load(machine.to_json())
    data = json.loads(machine.to_json())
    data["timings"][2]["num_chunks"] = 0
    with pytest.raises(TopologyError, match=r"timings\[2\]: timing: num_chunks must be .*, not 0$"):
        Topology.from_json(json.dumps(data))
    data["timings"] = {}
    with pytest.raises(TopologyError, match="timings must be a list, not a dict of 0 items"):
        Topology.from_json(json.dumps(data))
    del data["timings"]
    assert Topology.from_json(json.dumps(data)) == load("cpu-4")


@pytest.mark.parametrize(
    ("nbytes", "chunks", "seconds"),
    [
        (4 * KIB, 2, 1e-6),
        (8 * KIB, 2, 1e-6 * 100 ** (1 / 8)),
        (64 * KIB, 16, 1e-5),
        (MIB, 16, 1e-4),
    ],
)
def test_the_fastest_measured_is_taken(nbytes: int, chunks: int, seconds: float) -> None:
    machine, plain = timed(*SLOW), load("cpu-4")
    assert choose(plain, nbytes) != "chain" == choose(machine, nbytes)
    plan = collectives.plan_allreduce(machine, nbytes)
    assert (plan.algorithm, plan.num_chunks) == ("chain", chunks)
    assert predict(machine, nbytes, "chain")[0] == pytest.approx(seconds)
    assert predict(machine, nbytes, "two_shot") == predict(plain, nbytes, "two_shot")
    collectives.verify(plan, machine)


@pytest.mark.parametrize("nbytes", [0, 1, 3 * KIB + 1, MIB + 1, 64 * MIB])
def test_outside_the_model_chooses(nbytes: int) -> None:
    machine, plain = timed(*SLOW), load("cpu-4")
    assert collectives.plan_allreduce(machine, nbytes) == collectives.plan_allreduce(plain, nbytes)
    assert predict(machine, nbytes, "chain") == predict(plain, nbytes, "chain")


def test_other_collectives_know_nothing_of_them() -> None:
    names = candidates(load("cpu-4"), "broadcast")
    rows = [Timing(name, n, 1, 1e-9) for name in names for n in (KIB, MIB)]
    plans = (
        collectives.plan_collective("broadcast", machine, 64 * KIB)
        for machine in (timed(*rows), load("cpu-4"))
    )
    assert len(set(plans)) == 1


def test_explain_marks_what_was_measured() -> None:
    told = collectives.explain(timed(*SLOW), 64 * KIB)
    first = told.rows[0]
    assert told.choice == first.algorithm == "chain"
    assert first.num_chunks == 16 and first.seconds == pytest.approx(1e-5)
    assert {row.algorithm for row in told.rows if row.measured} == {"chain", "one_shot"}
    lines = str(told).splitlines()
    marked = [line.split()[0] for line in lines if line.endswith("% (measured)")]
    assert marked == [row.algorithm for row in told.rows if row.measured]
    assert lines[-1] == "auto takes one_shot from 1 KiB, chain from 4 KiB, two_shot from 2 MiB"
    assert not any(row.measured for row in collectives.explain(timed(*SLOW), KIB).rows)


def test_unknown_algorithms_are_ignored() -> None:
    rows = [Timing(name, n, 1, 1e-12) for name in ("rong", "ccube_dgx1") for n in (1, 1 << 40)]
    plain = load("cpu-4")
    for nbytes in (KIB, MIB):
        assert choose(timed(*rows), nbytes) == choose(plain, nbytes)
        assert choose(timed(*rows, *SLOW), 64 * KIB) == "chain"
    assert {row.measured for row in collectives.explain(timed(*rows), KIB).rows} == {False}


def test_the_environment_still_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "two_shot")
    assert collectives.plan_allreduce(timed(*SLOW), 64 * KIB).algorithm == "two_shot"
    assert collectives.explain(timed(*SLOW), 64 * KIB).choice == "two_shot"


def test_gpus_may_have_them_too() -> None:
    rows = [Timing("ring", n, 8, 1e-9) for n in (KIB, 1 << 30)]
    plan = collectives.plan_allreduce(timed(*rows, name="mesh-3"), MIB)
    assert (plan.algorithm, plan.num_chunks) == ("ring", 8)


def test_the_command_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"
    path.write_text(text(*map(asdict, SLOW)))

    def plan(topo: str) -> subprocess.CompletedProcess[str]:
        return command("plan", "-t", topo, "-s", "64K", "--measured", str(path), "--json")

    made = collectives.Plan.from_json(plan("cpu-4").stdout)
    assert made == collectives.plan_allreduce(timed(*SLOW), 64 * KIB)
    refused = plan("cpu-2")
    assert refused.returncode == 2
    assert refused.stderr == f"linkweave: {path}: times of cpu-4, not of cpu-2\n"


# ---- what was recorded on this project's machine ---------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_recorded_times_decide(ranks: int) -> None:
    machine = load(f"cpu-{ranks}", measured=recorded(ranks))
    assert {t.algorithm for t in machine.timings} <= set(candidates(machine))
    sizes = sorted({t.nbytes for t in machine.timings})
    assert sizes == [1 << i for i in range(10, 29, 2)]
    for size in sizes:
        rows = [t for t in machine.timings if t.nbytes == size]
        best = min(rows, key=lambda t: t.seconds)
        assert choose(machine, size) == best.algorithm
        assert collectives.plan_allreduce(machine, size).num_chunks == best.num_chunks


BEYOND = {(4, MIB): 1.17}
"""Where the model's choice is further from the fastest than a tenth: ranks and size."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_model_alone_chooses_nearly_as_well(ranks: int) -> None:
    plain = load(f"cpu-{ranks}")
    found: dict[int, dict[str, float]] = {}
    for t in load(f"cpu-{ranks}", measured=recorded(ranks)).timings:
        found.setdefault(t.nbytes, {})[t.algorithm] = t.seconds
    for size, seconds in found.items():
        ratio = seconds[choose(plain, size)] / min(seconds.values())
        assert ratio <= BEYOND.get((ranks, size), 1.1), (size, ratio)
