"""`linkweave reproduce`: papers' values beside ours, kept parts, text and page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from linkweave import collectives
from linkweave.bench.command.cli import app
from linkweave.bench.reproduce import (
    asc_wfbp,
    c_cube,
    command,
    gtopk,
    measured,
    papers,
    predictions,
    report,
    us_byte,
)
from linkweave.bench.reproduce.rows import (
    CPU_RANKS,
    INPUT,
    OTHER,
    SIMULATED,
    Part,
    Plot,
    Row,
    Series,
)
from linkweave.collectives import CollectiveError, overlap
from tests.null.helpers import linkweave

QUICK = {  # parts of a second or two
    "c_cube.communication": c_cube.communication, "c_cube.training": c_cube.training,
    "c_cube.measurements": c_cube.measurements,
    "us_byte.measurements": us_byte.measurements, "us_byte.analysis": us_byte.analysis,
    "asc_wfbp.network": asc_wfbp.network, "asc_wfbp.steps": asc_wfbp.steps,
    "gtopk.training": gtopk.training,
    "predictions.steps": predictions.steps,
}  # fmt: skip


def values(part: Part) -> dict[tuple[str, str], Row]:
    found = {(row.item, row.what): row for row in part.rows}
    assert len(found) == len(part.rows), "two rows of one value"
    return found


@pytest.mark.parametrize("name", QUICK)
def test_a_part_is_shown(name: str) -> None:
    part = QUICK[name]()
    values(part)
    for plot in part.plots:
        assert report.drawn(plot).startswith("<svg role")


def test_overlapped_trees_gain_what_c_cube_measured() -> None:
    found = values(c_cube.communication())
    ours = found["figure 12a", "C1 over B at 64 MB"].ours
    assert ours == pytest.approx(c_cube.equation_ratio(64 << 20), rel=0.01)
    assert found["figure 5", "steps of 4 chunks on 4 nodes, tree"].ours == 10
    assert found["figure 5", "steps of 4 chunks on 4 nodes, overlapped tree"].ours == 7


def test_the_baseline_differs_from_c1_in_overlap_alone() -> None:
    """Section V-B: the baseline has the detours too."""
    nbytes = 1 << 20
    plans = [collectives.plan_allreduce(c_cube.machine(), nbytes, name, 8)
             for name in (c_cube.baseline, "ccube_dgx1")]  # fmt: skip
    ends = [sorted((c.src, c.dst) for c in plan.connections) for plan in plans]
    assert ends[0] == ends[1] and plans[0].trees == plans[1].trees
    assert all(max(len(track.phases) for track in plan.tracks) == n
               for plan, n in zip(plans, (2, 1), strict=True))  # fmt: skip


def test_figure_13_is_within_ten_points_of_the_paper() -> None:
    found = values(c_cube.training())
    for what in ("CC over B, mean", "C1 over B, mean"):
        row = found["figure 13", what]
        assert isinstance(row.ours, float) and isinstance(row.theirs, float)
        assert abs(row.ours - row.theirs) < 0.10
    efficiency = found["figure 13", "CC, efficiency up to"].ours
    assert isinstance(efficiency, float) and 98 <= efficiency <= 100
    assert found["figure 13", "CC below R"].ours == "zfnet 16, low bandwidth"


def test_only_growing_computation_leaves_bubbles() -> None:
    found = values(c_cube.patterns())
    assert found["figure 16", "case 1: idle between layers"].ours == 0
    late = found["figure 16", "case 2: idle between layers"].ours
    assert isinstance(late, float) and late > 100


def test_slower_links_take_as_long_as_more_bytes() -> None:
    fast, slow = (c_cube.network("ring", slower) for slower in (1, 4))
    assert slow.seconds(1 << 20) == fast.seconds(4 << 20)
    assert slow.arrivals(1 << 20, [1 << 19]) == fast.arrivals(4 << 20, [1 << 21])


def test_a_limit_of_equation_42_is_the_papers() -> None:
    for model, (*_, limit) in asc_wfbp.MODELS.items():
        assert asc_wfbp.limit_of(asc_wfbp.profile_of(model)) == pytest.approx(limit, rel=0.01)


def test_steps_are_predicted_within_five_percent() -> None:
    row = predictions.steps().rows[0]
    assert isinstance(row.ours, float) and row.ours < 5
    assert predictions.errors([(90.0, 100.0), (100.0, 80.0)]) == pytest.approx([10.0, 25.0])


def test_no_order_of_equal_blocks_is_slower() -> None:
    profile = overlap.Profile((overlap.Layer("a", 64, 0.0, 1.0), overlap.Layer("b", 64, 0.0, 1.0)))
    made = overlap.plan(profile, overlap.Network(1.0, 1.0), "us-byte")
    assert us_byte._slower(made) == 0


def test_differences() -> None:
    assert Row("t", "v", 2.0, 3.0, SIMULATED).difference == "+50%"
    assert Row("t", "v", 98.0, 97.0, SIMULATED, "%").difference == "-1.0 points"
    assert Row("t", "v", "grows", 3.0, SIMULATED).difference == ""
    assert Row("t", "v", None, 3.0, SIMULATED).difference == ""
    assert Row("t", "v", 0.0, 3.0, SIMULATED).difference == ""


def test_gains_are_compared_as_gains() -> None:
    row = Row("t", "A over B", 1.18, 1.02, SIMULATED)
    assert row.difference == "gain 2 for 18 %"
    assert row.apart == pytest.approx(0.02 / 0.18 - 1)
    assert Row("t", "A over B", 1.0, 1.02, SIMULATED).apart is None  # a share of nothing
    assert Row("t", "A over B", 20.0, 22.0, SIMULATED, "%").apart == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("theirs", "ours", "holds"),
    [
        ("11 to 26 %", 15.0, True), ("11 to 26 %", 27.0, False), ("11 to 26 %", "12 to 20 %", True),
        ("11 to 26 %", "-66 to 0 %", False), ("at most 5 %", 2.0, True), ("at most 5", 6.0, False),
        ("below 1", 0.6, True), ("above 1", 1.2, True), ("above 40 %", "0% to 100%", None),
        ("0.7 to 7.5 % on 4 GPUs", 6.5, True), ("close", 3.0, None), (2.0, 3.0, None),
    ],
)  # fmt: skip
def test_ranges_in_words_hold_or_not(
    theirs: float | str, ours: float | str, holds: bool | None
) -> None:
    row = Row("t", "v", theirs, ours, SIMULATED)
    assert row.holds is holds
    if holds is not None:
        assert row.difference == ("within" if holds else "outside")


def test_inputs_and_other_peoples_values_do_not_count() -> None:
    assert not Row("t", "v", 2.0, 2.0, f"{INPUT}, the model's").counts
    assert not Row(OTHER, "v", 2.0, 2.0, SIMULATED).counts
    assert not Row("t", "v", None, 2.0, SIMULATED).counts
    rows = (Row("t", "v", 2.0, 2.0, INPUT), Row("t", "w", 2.0, 2.1, SIMULATED),
            Row("t", "x", "1 to 2", 3.0, SIMULATED), Row(OTHER, "y", 2.0, 2.0, SIMULATED),
            Row("t", "z", None, 2.0, CPU_RANKS))  # fmt: skip
    said = report.summary([papers.Done("c-cube", "one", Part(rows), 0.0)])
    assert said.startswith("2 values of papers: 2 simulated; 0 not reproduced")
    assert "Of 1 that are numbers on both sides, 1 within 10%, 1 within 30%; of 1 ranges" in said
    assert "0 hold. Not counted: 1 that are the papers' own inputs, 1 of another" in said
    assert said.endswith("1 that are ours alone, of which 1 are measured")


@pytest.mark.parametrize(
    ("ours", "how", "reason"), [(None, "", ""), (None, SIMULATED, "why"), (1.0, "guessed", "")]
)
def test_a_row_says_how_or_why_not(ours: float | None, how: str, reason: str) -> None:
    with pytest.raises(ValueError, match="figure 1"):
        Row("figure 1", "v", 1.0, ours, how, reason=reason)


def test_every_paper_has_a_title_and_parts() -> None:
    assert set(papers.PAPERS) == set(papers.TITLES) == set(command.PAPERS)


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A paper of two parts; returns the names of those that are computed."""
    ran: list[str] = []

    def make(name: str) -> Part:
        ran.append(name)
        lost = Row("figure 2", "power", 1.0, None, reason="needs <watts>")
        made = Row("figure 1", f"speed {name}", 2.0, 2.5, SIMULATED, reason="because")
        lines = (Series("a", (1, 2), (1.0, 2.0)), Series("b", (1, 2), (2.0, 1.0)))
        plot = Plot(f"Plot {name}", "Two & lines.", "x", "y", lines, log="x", level=1.0)
        return Part((made, lost), (plot,), ("a note",))

    both = {"one": lambda: make("one"), "two": lambda: make("two")}
    monkeypatch.setitem(papers.PAPERS, "c-cube", both)
    return ran


def test_text_json_and_page(two_parts: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = ["reproduce", "c-cube", "--html", str(page)]
    printed = linkweave(*run)
    assert "needs <watts>" in printed and "1, 3: because" in printed
    said = " ".join(printed.split())
    assert "4 values of papers: 2 simulated; 2 not reproduced, 50%." in said
    assert "Of 2 that are numbers on both sides, 0 within 10%, 2 within 30%;" in said
    assert max(map(len, printed.splitlines())) <= 100
    text = page.read_text()
    assert text.count("<svg role") == 2 and "needs &lt;watts&gt;" in text
    assert not re.search(r"(src|href)=.?https?:", text), "the page needs something else"
    rows = json.loads(linkweave(*run[:2], "--json"))[0]["rows"]
    assert [row["difference"] for row in rows] == ["+25%", ""]
    assert two_parts == ["one", "two"] * 2


def test_every_record_has_its_command() -> None:
    for name in measured.COMMANDS:
        assert measured.recorded(name).rows, name
    parts = [make() for name, make in QUICK.items() if name != "asc_wfbp.steps"]
    rows = [row for part in parts for row in part.rows if row.record]
    assert len(rows) > 60 and {row.record for row in rows} <= measured.COMMANDS.keys()
    assert all(row.how.startswith("measured") for row in rows)


def test_measurements_are_repeated_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "queue-4-epyc-2-cores"
    row = Row("t", "v", 1.0, 2.0, CPU_RANKS, record=name)
    monkeypatch.setitem(papers.PAPERS, "c-cube", {"one": lambda: Part((row, row))})
    fake = tmp_path / "fake.sh"
    fake.write_text(f'cp {measured.RESULTS / name}.json "$2"; echo took "$1"\n')
    monkeypatch.setitem(measured.COMMANDS, name, f"sh {fake}")
    monkeypatch.chdir(tmp_path)
    run = ["reproduce", "c-cube", "--measure"]
    app(run, standalone_mode=False)
    said = capfd.readouterr()
    assert said.out.count("took --out") == 1 and f"{name}: sh {fake}" in said.out + said.err
    assert (tmp_path / "out/reproduce" / f"{name}.json").exists()
    monkeypatch.setitem(measured.COMMANDS, name, "false")
    with pytest.raises(CollectiveError, match=f"not repeated: {name}; the lines above"):
        app(run, standalone_mode=False)
    for words in (["all"], ["choice"], ["c-cube", "--html", "x.html"]):
        with pytest.raises(CollectiveError, match="goes with one paper alone"):
            app(["reproduce", *words, "--measure"], standalone_mode=False)


def test_measured_rows_name_their_file() -> None:
    found = measured.recorded("gtopk-vgg16-4-hosts-1gbit")
    assert re.match(r"\d{4}-\d\d-\d\d, AMD EPYC, 2 cores", found.where)
    with pytest.raises(LookupError, match="has no row with"):
        found.row(hook="none")


def test_series_differ_by_colour_or_mark() -> None:
    from matplotlib import pyplot as plt

    lines = tuple(Series(str(i), (1, 2), (1.0, 2.0)) for i in range(12))
    figure, axis = plt.subplots()
    report._draw(axis, Plot("t", "c", "x", "y", lines))
    assert len({(line.get_color(), line.get_marker()) for line in axis.lines}) == 12
    plt.close(figure)


@pytest.mark.slow
def test_all_papers_leave_out_less_than_a_fifth() -> None:
    rows = [row for one in papers.collect(tuple(papers.PAPERS)) for row in one.part.rows]
    assert sum(row.ours is None for row in rows) <= len(rows) / 5
