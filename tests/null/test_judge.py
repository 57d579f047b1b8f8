"""Logs of nccl-tests: read, and judged beside predictions and bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from linkweave import topology
from linkweave.bench.command.cli import app
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import nccl_tests
from tests.null.helpers import linkweave

V100 = {
    8: 48.46, 1024: 48.88, 65536: 52.78, 131072: 56.56, 262144: 60.26, 524288: 61.48,
    1048576: 89.27, 2097152: 119.6, 4194304: 147.4, 8388608: 203.8, 16777216: 324.1,
    33554432: 550.8, 67108864: 992.7, 134217728: 1818.8,
}  # fmt: skip
"""us of all-reduces on 8 V100 in 2019: figures of all_reduce_perf in NCCL's issue tracker."""


def old(times: dict[int, float], ranks: int = 8, program: str = "all_reduce_perf") -> str:
    """As NCCL 2.4's time printed."""
    lines = [
        f"# {program}", "#       size         count    type   redop     time   algbw   busbw  error"
        "     time   algbw   busbw  error",
        "#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  "
        "(GB/s)  (GB/s)",
    ]  # fmt: skip
    for nbytes, us in times.items():
        rate = nbytes / us * 1e-3
        bus = rate * 2 * (ranks - 1) / ranks
        side = f"{us:9.2f} {rate:7.2f} {bus:7.2f}  1e-07"
        lines.append(f"{nbytes:12d} {nbytes // 4:13d}   float     sum {side} {side}")
    return "\n".join(lines)


def new(times: dict[int, float], wrong: str = "0", ranks: int = 8) -> str:
    """As 2.18 prints."""
    lines = [
        "# nccl-tests version 2.18.0 nccl-headers=23000 nccl-library=23000",
        "# Collective test starting: all_reduce_perf", "# Using devices",
        *(f"#  Rank  {r} Group  0 Pid   {900 + r} on host device  {r} [0x0{r}] V100"
          for r in range(ranks)),
        "#                                                              out-of-place"
        "                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     "
        "time   algbw   busbw  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             "
        "(us)  (GB/s)  (GB/s)         ",
    ]  # fmt: skip
    for nbytes, us in times.items():
        rate = nbytes / us * 1e-3
        side = f"{us:9.2f} {rate:7.2f} {rate * 1.75:7.2f} {wrong:>6}"
        lines.append(f"{nbytes:12d} {nbytes // 4:13d}     float     sum      -1 {side} {side}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.5"])


def written(times: dict[int, float], program: str = "./build/all_reduce_perf") -> str:
    rows: list[dict[str, Any]] = [
        {"size": n, "count": n // 4, "type": "float", "redop": "sum", "root": "    -1",
         "out_of_place": {"time": us, "alg_bw": n / us * 1e-3, "bus_bw": n / us * 1.75e-3,
                          "nwrong": 0.0},
         "in_place": {"time": us, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": None}}
        for n, us in times.items()
    ]  # fmt: skip
    return json.dumps(
        {
            "version": 3,
            "args": [program],
            "results": rows,
            "config": {"nthreads": 1, "ngpus": 8, "devices": [{"rank": 0}]},
        }
    )


TAGGED = "\n".join(f"[1,0]<stdout>:{line}" for line in new(V100).splitlines())


@pytest.mark.parametrize("text", [old(V100), new(V100), TAGGED, written(V100)])
def test_each_form_is_read(text: str) -> None:
    assert nccl_tests.is_log(text)
    log = nccl_tests.read(text)
    assert (log.collective, log.ranks) == ("allreduce", 0 if text == old(V100) else 8)
    assert all(row.fits("allreduce", 8) for row in log.rows)
    assert not all(row.fits("allreduce", 7) for row in log.rows)
    assert {row.nbytes: pytest.approx(row.seconds * 1e6) for row in log.rows} == V100
    assert not any(row.wrong for row in log.rows)


def test_the_figures_of_a_dgx1() -> None:
    """134,217,728 bytes in 1,818.8 us are 73.8 GB/s, 86 % of 24/7 links of 25 GB/s."""
    told = nccl_tests.judge(nccl_tests.read(old(V100)), topology.load("dgx1-v100"))
    last = told.rows[-1]
    assert last.bound == pytest.approx(24 / 7 * 25e9)
    assert f"{last.algbw / 1e9:.2f} {last.share:.3f}" == "73.79 0.861"
    words = ". ".join(told.sentences)
    assert "at 128 MiB you reach 86% of what these links allow" in words
    assert "below 2 MiB start-up dominates: 48 us even for 8 bytes" in words
    assert "from 8 bytes to 4 MiB plans of ours are predicted to be faster" in words
    assert told.rows[0].algorithm == "one_shot" and told.rows[-1].algorithm == "packed_trees"


def test_switches_that_reduce_are_recognised() -> None:
    """273 GB/s on 8 H100, above what is possible without them."""
    n = 8 << 30
    told = nccl_tests.judge(
        nccl_tests.read(new({1 << 20: 30.0, n: n / 273e9 * 1e6})), topology.load("dgx-h100")
    )
    words = ". ".join(told.sentences)
    assert "you reach 106% of what these links allow. that is above the bound without" in words
    assert "the links allow 450 GB/s, of which it is 61%" in words
    told = nccl_tests.judge(nccl_tests.read(new({n: n / 200e9 * 1e6})), topology.load("dgx1-v100"))
    assert "no algorithm can do that" in ". ".join(told.sentences)


def test_what_is_wrong_is_told_first() -> None:
    wrong = nccl_tests.judge(nccl_tests.read(new(V100, "3")), topology.load("dgx1-v100"))
    assert wrong.sentences[0].startswith("14 sizes have wrong results, the first 8 bytes")
    for word in ("inf", "nan"):
        told = nccl_tests.judge(nccl_tests.read(new(V100, word)), topology.load("dgx1-v100"))
        assert told.sentences[0].startswith("14 sizes have wrong results")
    unseen = nccl_tests.judge(nccl_tests.read(new(V100, "N/A")), topology.load("dgx1-v100"))
    assert unseen.sentences[0] == "results were not checked (-c 0)"


NAMELESS = old(V100, program="my benchmark")
UNFIT = [
    (old(V100), "mesh-4", "not of as many ranks, by its busbw, but mesh-4"),
    (new(V100, ranks=4), "dgx1-v100", "of 4 ranks, but dgx1-v100 has 8"),
    (new(V100, ranks=1), "mesh-1", "one GPU, on which nothing is sent"),
    (NAMELESS, "dgx1-v100", "name it with --collective"),
    *((text, "dgx1-v100", None) for text in ("", "{}", '{"results": 3}', old({}))),
    (new(V100) + "\n" + old(V100, program="all_gather_perf"), "dgx1-v100",
     "has several tests, of allgather, allreduce"),
    (new(V100) + "\n" + new(V100).splitlines()[-4], "dgx1-v100", "several times of"),
    (new(V100).replace(" time ", " cputime "), "dgx1-v100", r"times of the CPU \(-C\)"),
    (written(V100).replace("time", "cpu_time"), "dgx1-v100", r"times of the CPU \(-C\)"),
    (old(V100).rsplit(" ", 6)[0], "dgx1-v100", "was the text cut short"),
    ('{"a": 1}', "dgx1-v100", "no JSON of nccl-tests: it lacks 'results'"),
    ('{"format": "linkweave-plan"}', "dgx1-v100", "nccl-tests: its format is 'linkweave-plan'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "machine", "words"), UNFIT, ids=range(len(UNFIT)))
def test_logs_that_do_not_fit(text: str, machine: str, words: str | None) -> None:
    with pytest.raises(CollectiveError, match=words):
        nccl_tests.judge(nccl_tests.read(text), topology.load(machine))


def test_a_collective_may_be_named_but_not_another_one() -> None:
    machine = topology.load("dgx1-v100")
    assert nccl_tests.judge(nccl_tests.read(NAMELESS), machine, "allreduce").rows
    with pytest.raises(CollectiveError, match="is of allreduce, not of broadcast"):
        nccl_tests.judge(nccl_tests.read(old(V100)), machine, "broadcast")


def test_other_collectives() -> None:
    for program, kind in nccl_tests.NAMES.items():
        log = nccl_tests.read(old({1 << 16: 60.0, 1 << 24: 400.0}, program=f"{program}_perf"))
        assert log.collective == kind
        machine = topology.load("dgx1-v100")
        if kind != "allreduce":  # whose busbw it has
            rows = tuple(replace(row, busbw=row.algbw * 7 / 8) for row in log.rows)
            log = nccl_tests.Log(kind, 0, rows)
        told = nccl_tests.judge(log, machine)
        assert len(told.rows) == 2 and told.rows[1].predicted > 0


def test_a_tuner_has_the_fastest_way_of_each_size(tmp_path: Path) -> None:
    tree = {1 << n: 20.0 + (1 << n) / 1e4 for n in range(10, 24)}
    ring = {1 << n: 60.0 + (1 << n) / 1e5 for n in range(12, 26)}
    logs = {"tree/ll": nccl_tests.read(new(tree)), "ring/simple": nccl_tests.read(new(ring))}
    text = nccl_tests.tuner_file(logs, 1)
    assert text == (
        "allreduce,4096,370727,tree,ll,-1,1,8\nallreduce,370728,8388608,ring,simple,-1,1,8\n"
    )
    for names in ({"tree": logs["tree/ll"]}, {"tree/ll": nccl_tests.Log("alltoall", 8, ())},
                  {**logs, "pat/ll": nccl_tests.read(new({7: 1.0}))}):  # fmt: skip
        with pytest.raises(CollectiveError):
            nccl_tests.tuner_file(names, 1)
    for name, times in (("a", tree), ("b", ring)):
        (tmp_path / name).write_text(new(times))
    runs = [f"tree/ll={tmp_path / 'a'}", f"ring/simple={tmp_path / 'b'}"]
    out = tmp_path / "conf"
    linkweave("nccl-tuner", *runs, "--out", str(out))
    assert out.read_text() == text
    assert CliRunner().invoke(app, ["nccl-tuner", "tree/ll"]).exit_code


def test_explain_puts_measured_times_beside_ours(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(new(V100))
    words = ["plan", "dgx1-v100", "-s", "64M", "--explain", "--measured", str(path)]
    said = " ".join(linkweave(*words).split())
    assert "NCCL took 992.7 us, 67.60 GB/s, 78.9% of the bound, and 1.19 times as long" in said
    done = CliRunner().invoke(app, [*words, "--gpus", "0-3"])
    assert done.exit_code and "of 8 ranks" in str(done.exception)
    path.write_text(old(V100, program="all_gather_perf"))
    done = CliRunner().invoke(app, words)
    assert done.exit_code and "only all-reduces" in str(done.exception)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(new(V100))
    assert "At 128 MiB you reach 86% of what" in linkweave("judge", str(path), "-t", "dgx1-v100")
    told = json.loads(linkweave("judge", str(path), "dgx1-v100", "--json"))
    assert len(told["rows"]) == len(V100)
