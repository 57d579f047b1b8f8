"""`linkweave bench compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from linkweave.bench.command import compare
from linkweave.bench.command.cli import app
from linkweave.bench.command.compare import FASTER, SAME, SLOWER, WRONG, Change, by_key
from linkweave.collectives import CollectiveError
from tests.null.helpers import linkweave

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def row(ms: float, **extra: Any) -> dict[str, Any]:
    return {"what": "topk", "k": 5, "ms": ms, "predicted_ms": 1.0, **extra}


def timed(best: float, time: float, worst: float) -> dict[str, Any]:
    times = {"time_us": float(time), "best_us": float(best), "worst_us": float(worst)}
    return {"library": "linkweave", **times}


def changes(
    before: list[dict[str, Any]], after: list[dict[str, Any]], noise: float
) -> tuple[float, list[Change]]:
    return compare.changes(by_key(before, Path("a")), by_key(after, Path("b")), noise)


@pytest.mark.parametrize(
    ("after", "verdict"), [(10.9, SAME), (9.2, SAME), (11.1, SLOWER), (9.0, FASTER)]
)
def test_a_change_beyond_the_noise_counts(after: float, verdict: str) -> None:
    _, (change,) = changes([row(10.0)], [row(after)], 0.1)
    assert (change.field, change.verdict) == ("ms", verdict)
    assert change.ratio == pytest.approx(after / 10)


@pytest.mark.parametrize(
    ("before", "after", "noise", "verdict"),
    [
        ((8, 10, 13), (9, 11, 15), 0.0, SAME),
        ((8, 10, 13), (9, 14, 15), 0.0, SAME),  # its best is below the other's median
        ((8, 10, 13), (11, 12, 15), 0.0, SAME),  # its median is below the other's worst
        ((8, 10, 13), (11, 14, 15), 0.0, SLOWER),
        ((8, 10, 13), (5, 6, 7), 0.0, FASTER),
        ((8, 10, 13), (5, 6, 10.5), 0.0, SAME),
        ((9.99, 10, 10.01), (10.14, 10.15, 10.16), 0.1, SAME),  # small changes of steady rows
        ((9.99, 10, 10.01), (10.24, 10.25, 10.26), 0.1, SLOWER),
    ],
)
def test_ranges_of_rounds_decide_where_they_are_known(
    before: tuple[float, ...], after: tuple[float, ...], noise: float, verdict: str
) -> None:
    _, (change,) = changes([timed(*before)], [timed(*after)], noise)
    assert change.verdict == verdict


def test_what_slows_everyone_down_is_the_machine() -> None:
    before = [row(10.0, library="linkweave"), row(20.0, library="gloo")]
    after = [row(20.5, library="linkweave"), row(40.0, library="gloo")]
    drift, (ours, gloo) = changes(before, after, 0.1)
    assert drift == 2.0 and ours.verdict == gloo.verdict == SAME
    drift, (ours, _) = changes(before, [row(30.0, library="linkweave"), after[1]], 0.1)
    assert ours.verdict == SLOWER


def test_rows_are_paired_by_what_was_asked_for() -> None:
    before = [row(1.0, k=1, state="near"), row(2.0, k=2)]
    after = [row(4.0, k=2), row(1.0, k=1, state="far", wrong=0), row(1.0, k=3)]
    _, found = changes(before, after, 0.1)
    assert [(change.before, change.after) for change in found] == [(1.0, 1.0), (2.0, 4.0)]


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*epyc*.json")))
def test_a_recorded_file_equals_itself(name: str) -> None:
    data = compare.read(RESULTS / name)
    _, found = changes(data["rows"], data["rows"], 0.0)
    assert {change.verdict for change in found} <= {SAME}
    assert found or name.startswith("convergence")


def test_peers_times_in_our_rows_are_drift() -> None:
    before, after = ({"nbytes": 4, "seconds": s, "gloo_seconds": t} for s, t in ((1, 2), (1.5, 3)))
    drift, (change,) = changes([before], [after], 0.1)
    assert (drift, change.field, change.verdict) == (1.5, "seconds", SAME)
    _, (change,) = changes([before], [before | {"gloo_seconds": 4}], 0.1)
    assert change.verdict == FASTER


def test_what_is_asked_for_may_be_a_fraction() -> None:
    two = [row(1.0, density=0.1), row(2.0, density=0.2)]
    _, found = changes(two, two, 0.1)
    assert [change.verdict for change in found] == [SAME, SAME]
    with pytest.raises(CollectiveError, match="a: nothing tells two rows apart: 'topk 5'"):
        changes([row(1.0), row(2.0)], [row(1.0)], 0.1)


def test_wrong_results_and_lost_rows_fail(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    words = ["bench", "compare", *map(str, files), "--fail-on-slower"]
    for rows, status in (
        ([row(1.0), row(1.0, k=6)], 0), ([row(1.0)], 1), ([row(1.0), row(1.0, k=6, wrong=5)], 1),
        ([row(1.0), row(1.0, k=6) | {"ms": None, "wrong": 5}], 1),
    ):  # fmt: skip
        for file, held in zip(files, ([row(1.0), row(1.0, k=6)], rows), strict=True):
            file.write_text(json.dumps({"rows": held}))
        done = CliRunner().invoke(app, words)
        assert done.exit_code == status, done.output
        assert (f"only in {files[0]}: 1\n  topk 6\n" in done.stdout) == (len(rows) == 1)
        wrong = f"wrong in {files[1]}: 1\n  topk 6\n"
        assert (wrong in done.stdout) == any("wrong" in one for one in rows)
    _, (change,) = changes([row(1.0)], [row(1.0, wrong=1)], 0.1)
    assert change.verdict == WRONG


def test_rows_without_rounds_are_compared() -> None:
    lacking = {"a": 1, "time_us": 1, "best_us": None, "worst_us": None}
    _, (change,) = changes([lacking], [lacking], 0.1)
    assert change.verdict == SAME


def test_the_command_warns_and_fails(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ms, cores in zip(files, (1.0, 2.0), (2, 4), strict=True):
        machine = {"cpu": "x", "cores": cores, "date": file.name}
        file.write_text(json.dumps({"machine": machine, "rows": [row(ms)]}))
    words = ["bench", "compare", *map(str, files)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "1 slower, 0 faster, 0 within noise" in done.stdout
    assert "cores: 2 and 4" in done.stderr and "date" not in done.stderr
    assert CliRunner().invoke(app, [*words, "--fail-on-slower"]).exit_code == 1
    assert CliRunner().invoke(app, [*words, "--fail-on-slower", "--noise", "2"]).exit_code == 0
    told = json.loads(linkweave(*words, "--json"))
    assert told["drift"] == 1.0 and told["changes"][0]["verdict"] == SLOWER


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "must be an object with a list of rows"),
     ('{"rows": [1]}', "must be an object with a list of rows"),
     ('{"rows": []}', "no row in common"), ('{"rows": [{"a": 1}]}', "no time in common"),
     ("[" * 100_000, "is not JSON")],
)  # fmt: skip
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CollectiveError, match=message):
        app(["bench", "compare", str(path), str(path)], standalone_mode=False)


def test_a_time_that_is_no_longer_there_is_lost() -> None:
    one = by_key([row(1.0), row(1.0, k=6)], Path("a"))
    other = by_key([row(1.0) | {"ms": None}], Path("b"))
    assert compare.left_out(one, other) == ["topk 5 ms", "topk 6"]
    assert compare.left_out(other, one) == []
    assert compare.left_out(one, one | by_key([row(-0.1)], Path("b"))) == []


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("library", "linkweave empty", "gloo"), ("embedding", "columns, 2D", "TorchRec, columns"),
        ("hook", "gTop-k, momentum", "PowerSGD, rank 1"), ("hook", "top-k", "fp16"),
        ("implementation", "gtopk with selection", "torch"),
        ("implementation", "all-gather and sum", "gloo"),
    ],
)  # fmt: skip
def test_rows_of_others_tell_the_drift(field: str, ours: str, theirs: str) -> None:
    before = [row(10.0, **{field: name}) for name in (ours, theirs)]
    after = [row(ms, **{field: name}) for ms, name in ((10.0, ours), (20.0, theirs))]
    assert changes(before, after, 0.1)[0] == 2.0


def test_a_list_is_no_part_of_a_key() -> None:
    rows = [row(1.0) | {"density": [0.1, 0.2]}]
    assert changes(rows, rows, 0.1)[1][0].verdict == SAME
