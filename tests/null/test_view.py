"""`linkweave view`: what its page holds, and what a browser makes of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from linkweave import collectives, topology
from linkweave.bench.command import pictures, predict, view
from linkweave.bench.command.cli import app
from linkweave.collectives import CollectiveError, overlap
from linkweave.topology.clusters import nodes_of
from linkweave.topology.edits import parse_ends, with_links
from linkweave.topology.layout import RADIUS, lay_out
from tests.null.helpers import linkweave

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZE = 1 << 26


def written(path: Path, *words: str) -> dict[str, Any]:
    """The only view of a page of `linkweave view`."""
    (one,) = whole(path, "view", *words, "-o")["views"]
    found: dict[str, Any] = one
    return found


def whole(path: Path, *words: str) -> dict[str, Any]:
    """What a page holds that a command writes to `path`, its last argument."""
    linkweave(*words, str(path))
    text = path.read_text()
    assert not re.search(r"(src|href)=.?https?:|@import|url\(", text), "it needs something else"
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1].replace("<\\/", "</"))
    return data


def test_a_page_has_the_simulators_figures(tmp_path: Path) -> None:
    data = written(
        tmp_path / "v.html", "dgx1-v100", "-s", "64M", "--plan", "overlapped_double_tree",
        "--plan", "ring",
    )  # fmt: skip
    machine = topology.load("dgx1-v100")
    assert [one["name"] for one in data["nodes"]] == [f"GPU {g}" for g in machine.gpus]
    assert len(data["links"]) == len(machine.fabric)
    (size,) = data["sizes"]
    assert size["name"] == "64 MiB" and size["bound"] == topology.allreduce_bound(machine)
    for run, name in zip(size["runs"], ("overlapped_double_tree", "ring"), strict=True):
        plan = collectives.plan_allreduce(machine, SIZE, name)
        line = collectives.simulate(plan, machine, SIZE)
        assert run["name"] == name and run["us"] == line.seconds * 1e6
        assert len(run["sends"]) == len(line.sends)
        links = [(data["links"][i]["a"], data["links"][i]["b"]) for i in range(len(data["links"]))]
        busy = {links[i]: share for i, share in enumerate(run["busy"]) if share}
        assert busy == {ends: pytest.approx(share, abs=1e-3)
                        for ends, share in line.utilisation.items()}  # fmt: skip
        # each link carries its connections' chunks
        carried = {links[i]: n for i, n in enumerate(run["bytes"]) if n}
        rate = {(link.src, link.dst): link.bandwidth * link.count for link in machine.fabric}
        for ends, n in carried.items():  # its time at work is that of its bytes
            assert n / rate[ends] == pytest.approx(line.busy[ends], rel=1e-9)
        for connection, way in enumerate(run["ways"]):
            assert [links[i] for i in way] == list(plan.connections[connection].links)


def test_long_plans_move_in_fewer_chunks(tmp_path: Path) -> None:
    path = tmp_path / "v.html"
    data = written(path, "2 x dgx-h100", "-s", "256M", "--plan", "packed_trees")
    (run,) = data["sizes"][0]["runs"]
    assert 0 < len(run["sends"]) <= pictures.SENDS and "are of the plan itself" in run["note"]
    assert max(end for *_, end in run["sends"]) == pytest.approx(run["us"], rel=1e-3)
    assert path.stat().st_size < 2e6


@pytest.mark.parametrize(
    "machine", ["mesh-1", "ring-5", "pcie-8", "cpu-4", "4 x mesh-4", "mi250x", "gb200-nvl72"]
)
def test_any_machine_has_a_page(machine: str, tmp_path: Path) -> None:
    data = written(tmp_path / "v.html", machine, "-s", "1M")
    x, y, width, height = data["frame"]
    for node in data["nodes"]:
        assert x <= node["x"] <= x + width and y <= node["y"] <= y + height
    assert data["sizes"][0]["runs"]


def test_what_a_page_cannot_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CollectiveError, match="ring-73 has a node of 73 GPUs; a picture shows at"):
        pictures.check(topology.load("ring-73"))
    with pytest.raises(CollectiveError, match="--node 10: 10 x dgx-a100 has nodes 0 to 9"):
        pictures.check(topology.load("10 x dgx-a100"), 10)
    with pytest.raises(CollectiveError, match="--node is for more than 72 GPUs: 2 x mesh-4 has 8"):
        pictures.check(topology.load("2 x mesh-4"), 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text(LOG)
    done = CliRunner().invoke(app, ["judge", "log.txt", "mesh-4", "--page", "nosuch/v.html"])
    assert done.exit_code and "nosuch" in str(done.exception)
    with pytest.raises(CollectiveError, match="'nosuch' is neither a file nor an algorithm"):
        pictures.views_of(topology.load("mesh-3"), [1024], ["nosuch"])


# ---- large clusters -----------------------------------------------------------------------------
def test_leaves_stand_before_their_nodes() -> None:
    machine = topology.load("11 x dgx-a100 leaf=4 oversubscription=2")
    plan = collectives.plan_allreduce(machine, 1 << 20, "hierarchical_ring")
    view, inner = pictures.views_of_plans(machine, [pictures.Made(1 << 20, [(plan, None)])])
    names = [one["name"] for one in view["nodes"]]
    assert names == [*(f"node {i}" for i in range(11)), "spine", "leaf 0", "leaf 1", "leaf 2"]
    labels = [one["label"] for one in inner["nodes"]]
    assert {"nvswitch", "nic0", "rail0.leaf0", "rail7.leaf0"} <= {*labels}
    assert len({*labels}) == len(labels)
    links = {(names[k["a"]], names[k["b"]]): i for i, k in enumerate(view["links"])}
    between = {(f"node {i}", f"leaf {i // 4}") for i in range(11)}
    between |= {(f"leaf {i}", "spine") for i in range(3)}
    assert links.keys() == between | {(b, a) for a, b in between}
    rate = view["links"][links["leaf 0", "spine"]]["rate"]
    assert rate == f"{4 * 8 * 24 / 2:g} GB/s"  # of the rails of four nodes
    (run,) = view["sizes"][0]["runs"]
    for (a, b), way in zip(run["ends"], run["ways"], strict=True):
        passed = [f"leaf {a // 4}", f"leaf {b // 4}"]
        stops = [names[a], *([passed[0], "spine", passed[1]] if a // 4 != b // 4 else passed[:1])]
        assert way == tuple(links[hop] for hop in pairwise([*stops, names[b]]))
    for leaf in (0, 1, 2):  # what comes to a leaf leaves it
        into, out = (
            sum(n for n, k in zip(run["bytes"], view["links"], strict=True)
                if names[k[end]] == f"leaf {leaf}")
            for end in "ba"
        )  # fmt: skip
        assert into == out > 0


@pytest.mark.parametrize(("name", "node"), [("10 x dgx-h100", 0), ("11 x mesh-7", 9)])
def test_a_large_cluster_has_its_nodes_and_one_of_them(
    name: str, node: int, tmp_path: Path
) -> None:
    machine, nbytes = topology.load(name), 1 << 20
    data = whole(tmp_path / "v.html", "view", name, "-s", "1M", "--node", str(node), "-o")
    assert data["open"] == 1
    outer, inner = data["views"]
    nodes = nodes_of(machine)
    plan = collectives.plan_allreduce(machine, nbytes)
    line = collectives.simulate(plan, machine, nbytes)
    home = {gpu: i for i, gpus in enumerate(nodes) for gpu in gpus}
    assert [one["name"] for one in outer["nodes"]] == [
        *(f"node {i}" for i in range(len(nodes))), "network"
    ]  # fmt: skip
    (run,), (own,) = (view["sizes"][0]["runs"] for view in (outer, inner))
    assert run["us"] == own["us"] == line.seconds * 1e6 and run["name"] == plan.algorithm
    # between nodes: all bytes, and the times in which any of a pair's sends is under way
    sizes, gpus = plan.chunk_sizes(nbytes), machine.gpus
    moved: dict[tuple[int, int], int] = {}
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for send in line.sends:
        ends = plan.connections[send.connection]
        pair = home[gpus[ends.src]], home[gpus[ends.dst]]
        if pair[0] != pair[1]:
            moved[pair] = moved.get(pair, 0) + int(sizes[send.chunk])
            times.setdefault(pair, []).append((send.start, send.end))
    out = {i: sum(n for (a, _), n in moved.items() if a == i) for i in range(len(nodes))}
    links = [(one["a"], one["b"]) for one in outer["links"]]
    told = {links[i][0]: n for i, n in enumerate(run["bytes"]) if n and links[i][0] < len(nodes)}
    assert told == {i: n for i, n in out.items() if n}
    for i, share in enumerate(run["busy"]):  # as long as its bytes take
        link = outer["links"][i]
        times_, rate = (
            ("1", link["rate"]) if " x " not in link["rate"] else link["rate"].split(" x ")
        )
        whole_rate = int(times_) * float(rate.removesuffix(" GB/s")) * 1e9
        carried = run["bytes"][i]
        assert share == pytest.approx(carried / whole_rate / line.seconds, abs=2e-3)
    pairs = [tuple(ends) for ends in run["ends"]]
    assert pairs == sorted(moved)
    for i, pair in enumerate(pairs):
        spans = [send[2:] for send in run["sends"] if send[0] == i]
        assert spans[0][0] == pytest.approx(1e6 * min(times[pair])[0], abs=0.01)
        assert spans[-1][1] == pytest.approx(1e6 * max(e for _, e in times[pair]), abs=0.01)
        assert sum(e - s for s, e in spans) <= 1e6 * sum(e - s for s, e in times[pair]) + 1
        for start, end in times[pair][:20]:
            assert any(s - 0.01 <= 1e6 * start and 1e6 * end <= e + 0.01 for s, e in spans)
    # within the node: each send that begins or ends there, and the names of those outside
    assert [one["name"] for one in inner["nodes"]][: len(nodes[node])] == [
        f"GPU {gpu}" for gpu in sorted(nodes[node])
    ]
    inside = [
        c for c in plan.connections if c.links and node in (home[gpus[c.src]], home[gpus[c.dst]])
    ]  # fmt: skip
    assert len(own["ends"]) == len(inside)
    for (a, b), c in zip(own["ends"], inside, strict=True):
        for told_end, rank in ((a, c.src), (b, c.dst)):
            name = told_end if isinstance(told_end, str) else inner["nodes"][told_end]["name"]
            assert name == f"GPU {gpus[rank]}"
    assert 0 < len(own["sends"]) <= pictures.SENDS


def test_times_that_overlap_are_one_and_short_gaps_close_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = np.array([1, 0, 1, -1, 0, 1])
    starts, ends = np.array([0.0, 5, 1, 0, 8, 9]), np.array([2.0, 6, 3, 9, 9, 10])
    want = [(0, 5.0, 6.0), (0, 8.0, 9.0), (1, 0.0, 3.0), (1, 9.0, 10.0)]
    assert pictures._merged(which, starts, ends, 10.0) == want
    monkeypatch.setattr(pictures, "SENDS", 3)
    assert pictures._merged(which, starts, ends, 10.0) == [(0, 5.0, 9.0), *want[2:]]
    monkeypatch.setattr(pictures, "SENDS", 1)  # fewer than there are numbers
    assert pictures._merged(which, starts, ends, 10.0) == [(0, 5.0, 9.0), (1, 0.0, 10.0)]
    assert pictures._merged(which[:0], starts[:0], ends[:0], 1.0) == []


# ---- what is beside pictures --------------------------------------------------------------------
def test_steps_are_those_of_the_schedules(tmp_path: Path) -> None:
    data = whole(tmp_path / "v.html", "view", "dgx1-v100", "-s", "1M", "--train",
                 "resnet50", "-o")  # fmt: skip
    machine = topology.load("dgx1-v100")
    work = predict.work_of("resnet50", machine)
    network = overlap.Network.from_topology(machine)
    assert [chart["name"] for chart in data["steps"]["charts"]] == [*predict.POLICIES]
    for chart in data["steps"]["charts"]:
        made = overlap.plan(work.profile, network, chart["name"])
        line = made.timeline
        assert chart["us"] == pytest.approx(1e6 * line.seconds, abs=0.01)
        backward, *sends, forward = (row["bars"] for row in chart["rows"])
        assert sum(map(len, sends)) == sum(len(c.pieces) for c in made.communications)
        for number, bars in enumerate(sends):
            those = [span for c, span in zip(made.communications, line.sends, strict=True)
                     if c.lane == number]  # fmt: skip
            took = sum(end - start for start, end, *_ in bars)
            assert took == pytest.approx(1e6 * sum(e - s for s, e in those), abs=0.02 * len(bars))
        for row, spans in ((backward, line.backward), (forward, line.forward)):
            want = sorted((1e6 * s, 1e6 * e) for s, e in spans)
            assert [bar[:2] for bar in row] == [pytest.approx(span, abs=0.01) for span in want]


def test_a_measured_step_has_a_page(tmp_path: Path) -> None:
    layers = tuple(overlap.Layer(name, 4000, 1e-3, 2e-3) for name in "ab")
    profile = overlap.Profile(layers)
    made = overlap.plan(profile, overlap.Network(1e-4, 1e-9), "wfbp")
    late = replace(made.timeline, seconds=2 * made.timeline.seconds)
    step = tmp_path / "step.json"
    found = overlap.MeasuredStep(made, late)
    # what neither a pass nor communication takes is the loop's own
    own = late.seconds - made.timeline.seconds
    late = replace(late, exposed_s=made.timeline.exposed_s + own)
    told = str(overlap.MeasuredStep(made, late)).splitlines()
    (line,) = (one for one in told if one.startswith("communication nothing hides"))
    assert line.split()[3] == line.split()[4]
    passes = sum(end - start for start, end in made.timeline.forward)
    assert told[-1].startswith("update, loop, forward pass ")  # as predicted passes have the update
    assert told[-1].split()[-2:] == [f"{1e3 * s:.2f}" for s in (passes, passes + own)]
    chained = overlap.plan(profile, overlap.Network(1e-4, 1e-9), "c-cube")
    told = str(overlap.MeasuredStep(chained, chained.timeline)).splitlines()
    assert [one.split()[0] for one in told[-2:]] == ["update", "the"]
    assert told[-1].split()[-2:] == ["0.00", "0.00"]
    step.write_text(found.to_json())
    data = whole(tmp_path / "v.html", "view", str(step), "-o")
    assert data["views"] == [] and [c["name"] for c in data["steps"]["charts"]] == [
        "predicted", "measured"
    ]  # fmt: skip
    assert data["steps"]["charts"][1]["us"] == pytest.approx(2e6 * made.timeline.seconds, abs=0.02)
    for option in (["--size", "1M"], ["--node", "0"]):
        refused = CliRunner().invoke(app, ["view", str(step), *option])
        assert refused.exit_code and "is shown without other options" in str(refused.exception)
    step.write_text(json.dumps(json.loads(step.read_text()), separators=(",", ":")))
    assert whole(tmp_path / "v.html", "view", str(step), "-o")["steps"] == data["steps"]
    step.write_text(step.read_text().replace('"timeline"', '"time"'))
    bad = CliRunner().invoke(app, ["view", str(step)])
    assert bad.exit_code and str(step) in str(bad.exception)


def test_a_change_is_marked_on_one_layout(tmp_path: Path) -> None:
    data = whole(tmp_path / "v.html", "what-if", "dgx1-v100", "--remove-link", "0-1",
                 "--add-link", "0-5=2", "--add-link", "0-3", "--page")  # fmt: skip
    before, after = data["views"]
    assert [(n["x"], n["y"]) for n in before["nodes"]] == [(n["x"], n["y"]) for n in after["nodes"]]
    marks = [
        {(link["a"], link["b"]): link["change"] for link in one["links"] if "change" in link}
        for one in (before, after)
    ]
    assert marks == [
        {(a, b): word for one, other, word in rows for a, b in ((one, other), (other, one))}
        for rows in (
            ((0, 1, "only here"), (0, 3, "less here"), (0, 5, "not here")),
            ((0, 1, "not here"), (0, 3, "more here"), (0, 5, "only here")),
        )
    ]  # fmt: skip
    rates = [
        {(link["a"], link["b"]): link["rate"] for link in one["links"]} for one in (before, after)
    ]
    assert [one[0, 3] for one in rates] == ["2 x 25 GB/s", "3 x 25 GB/s"]
    assert [one[0, 1] for one in rates] == ["25 GB/s", "25 GB/s"]
    assert [one[0, 5] for one in rates] == ["2 x 25 GB/s", "2 x 25 GB/s"]
    other = whole(tmp_path / "v.html", "what-if", "mesh-3", "--to", "ring-5", "--page")
    assert [len(one["nodes"]) for one in other["views"]] == [3, 5]
    assert not any("change" in link for one in other["views"] for link in one["links"])
    large = CliRunner().invoke(
        app, ["what-if", "10 x dgx-a100", "--add-nic", "1", "--page", str(tmp_path / "v.html")]
    )
    assert large.exit_code and "--page shows at most 72 GPUs" in str(large.exception)


LOG = """# nThread 1 nGpus 4 minBytes 1024 maxBytes 4194304
#       size         count      type   redop    root     time   algbw   busbw #wrong
        1024           256     float     sum      -1    10.00    0.10    0.15      0
     4194304       1048576     float     sum      -1   100.00   41.94   62.91      0
"""


def test_a_judgement_has_a_page(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG)
    data = whole(tmp_path / "v.html", "judge", str(log), "mesh-4", "-c", "allreduce", "--page")
    (one,), told = data["views"], data["judged"]
    assert [size["name"] for size in one["sizes"]] == ["1 KiB", "4 MiB"]
    want = [(1024, 10.0), (1 << 22, pytest.approx(100.0))]
    assert [(row["bytes"], row["us"]) for row in told["rows"]] == want
    for row, size in zip(told["rows"], one["sizes"], strict=True):
        (run,) = size["runs"]
        assert run["name"] == row["by"] and run["us"] == pytest.approx(row["best"])
        assert row["theirs"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
    assert told["bound"] == topology.allreduce_bound(topology.load("mesh-4")) / 1e9


def test_plans_of_files_are_shown(tmp_path: Path) -> None:
    """Whatever their collective, and over whatever links."""
    machine = topology.load("dgx1-v100")
    for collective in ("broadcast", "alltoall"):
        made = collectives.plan_collective(collective, machine, 1 << 20)
        file = tmp_path / f"{collective}.json"
        file.write_text(made.to_json())
        data = written(tmp_path / "v.html", "dgx1-v100", "-s", "1M", "--plan", str(file))
        (run,) = data["sizes"][0]["runs"]
        assert (run["share"] == "-") == (collective == "alltoall")
        assert data["bound"].startswith(f"{collective}:" if collective == "broadcast" else "no bou")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CollectiveError, match=re.escape(str(tmp_path / "bad.json"))):
        pictures.views_of(machine, [1 << 20], [str(tmp_path / "bad.json")])


def test_autos_choice_comes_first_and_measured_times_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINKWEAVE_ALGORITHM", "chain")
    data = written(tmp_path / "v.html", "mesh-4", "-s", "1M")
    assert data["sizes"][0]["runs"][0]["name"] == "chain"
    assert all(not run["measured"] for run in data["sizes"][0]["runs"])


def test_odd_names_do_no_harm(tmp_path: Path) -> None:
    name = "x<!--<script></script>&\"'"
    plain = topology.load("mesh-3")
    named = topology.Topology(name, plain.gpus, plain.links)
    text = view.page(name, view.about(named), pictures.views_of(named, [1024], []))
    assert text.count("<script") == 2 and text.count("</script>") == 2
    data = re.search(r'application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None and json.loads(data[1])["title"] == name


# ---- in a browser -------------------------------------------------------------------------------
def shown(page: Path, state: str) -> str:
    """The page's text, where the address has this state."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000",
         "--enable-logging=stderr", "--dump-dom", f"file://{page}#{quote(state, '/%&=')}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Uncaught" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_time_and_what_is_chosen(tmp_path: Path) -> None:
    page = tmp_path / "v.html"
    data = written(page, "dgx1-v100", "-s", "1M", "-s", "64M", "--plan", "overlapped_double_tree",
                   "--plan", "ring")  # fmt: skip
    run = data["sizes"][1]["runs"][1]
    text = shown(page, "64MiB/ring/0.5/l0")
    assert f"{run['us'] / 2:.1f} us of {run['us']:.1f} us" in text
    link = data["links"][0]
    head = f"{data['nodes'][link['a']]['name']} to {data['nodes'][link['b']]['name']}"
    assert f'<h2 id="chosen">{head}</h2>' in text
    assert f"{100 * run['busy'][0]:.0f} % of the time" in text
    assert text.count("<polyline") == 2 * len(data["links"]) + 1  # what is chosen has a border
    other = shown(page, "64MiB/ring/0.500/n3")
    assert '<h2 id="chosen">GPU 3</h2>' in other and "waits for" in other
    old = shown(page, "64MiB/50% ring/0.5/n99")  # of another page
    assert 'id="chosen">overlapped_double_tree</h2>' in old and old.count("<polyline") > 9
    written(page, "mesh-1", "-s", "1M")
    assert 'id="chosen">' in shown(page, "")
    written(page, "dgx1-v100", "-s", "1M", "--plan", "overlapped_double_tree")
    first = shown(page, "1MiB/overlapped_double_tree/0/")
    assert '<h2 id="chosen">overlapped_double_tree</h2>' in first and "0.0 us of" in first


HANDS = """<script>{
  const done = [], told = document.createElement("pre"), node = key =>
    document.querySelector('[data-key="' + key + '"]');
  const send = (to, event) => to.dispatchEvent(event);
  const read = id => done.push(document.getElementById(id).textContent);
  const slider = document.getElementById("time"), chart = document.getElementById("gantt");
  slider.value = 250; send(slider, new Event("input")); read("now");
  send(node("l0"), new MouseEvent("mouseenter")); read("chosen"); read("facts");
  send(node("n3"), new MouseEvent("click")); read("chosen");
  send(window, new KeyboardEvent("keydown", { key: "Escape" })); read("chosen");
  const box = chart.getBoundingClientRect(), at = { clientX: box.right - 2, clientY: box.top + 2 };
  send(chart, new MouseEvent("mousemove", at)); read("bar");
  told.id = "told"; told.textContent = JSON.stringify(done); document.body.append(told);
}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_slider_moves_and_a_pointer_reads(tmp_path: Path) -> None:
    page = tmp_path / "v.html"
    data = written(page, "mesh-4", "-s", "1M", "--plan", "ring")
    page.write_text(page.read_text() + HANDS)
    found = re.search('<pre id="told">(.*?)</pre>', shown(page, ""))
    assert found is not None
    now, link, facts, gpu, nothing, bar = json.loads(html.unescape(found[1]))
    run, first = data["sizes"][0]["runs"][0], data["links"][0]
    assert now == f"{run['us'] / 4:.1f} us of {run['us']:.1f} us"
    assert link == f"{data['nodes'][first['a']]['name']} to {data['nodes'][first['b']]['name']}"
    assert f"{100 * run['busy'][0]:.0f} % of the time" in facts
    assert (gpu, nothing) == ("GPU 3", "ring")
    last = [s for s in run["sends"] if s[0] == 0 and s[3] > 0.99 * run["us"]]
    ends = " to ".join(str(end) for end in run["ends"][0])
    assert bar.startswith(f"{ends}: " + ("chunk" if last else "nothing"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_nodes_changes_steps_and_judgements(tmp_path: Path) -> None:
    page, log = tmp_path / "v.html", tmp_path / "log.txt"
    data = whole(page, "view", "10 x dgx1-v100", "-s", "1M", "--train", "resnet50",
                 "-o")  # fmt: skip
    text = shown(page, "1MiB/any/0.5/n0/0")
    assert '<h2 id="chosen">node 0</h2>' in text and "choose it again to see it" in text
    inner = shown(page, "1MiB/any/0.5/n1/1")
    assert '<h2 id="chosen">GPU 1</h2>' in inner and '<option value="1">node 0' in inner
    assert inner.count("<canvas") == 2 + len(data["steps"]["charts"])
    step = shown(page, "1MiB/any/0.5/n0/-1&step=0.5")  # and a picture that is not there
    half = max(chart["us"] for chart in data["steps"]["charts"]) * 1.01 / 2
    assert "ddp: " in step and re.search(rf'id="when">{int(half / 1000)}\.\d\d ms', step)
    assert '<section id="judged" hidden' in step and '<section id="steps">' in step
    whole(page, "what-if", "mesh-4", "--remove-link", "0-1", "--page")
    text = shown(page, "64MiB///l0/1")
    assert 'class="link gone"' in text and '<p id="marks" class="soft">' in text
    log.write_text(LOG)
    whole(page, "judge", str(log), "mesh-4", "-c", "allreduce", "--page")
    text = shown(page, "")
    assert "4 MiB: measured 100.0 us, 41.94 GB/s" in text and 'class="theirs"' in text
    assert '<p id="marks" class="soft" hidden' in text


def test_lines_run_through_no_other_gpu() -> None:
    """Where GPUs are joined directly, whatever the layout."""
    for name, add in (("dgx1-v100", "0-5"), ("dgx1-v100", "0-6"), ("mesh-8", ""), ("mi300x", ""),
                      ("dgx1-p100", "")):  # fmt: skip
        machine = topology.load(name)
        machine = with_links(machine, parse_ends(add, "--add-link")) if add else machine
        where = lay_out(machine, machine.fabric, arcs=True)
        for link in machine.fabric:
            points = where.curve(link.src, link.dst)
            for gpu in {*machine.gpus} - {link.src, link.dst}:
                nearest = min(abs(point - where.seats[gpu]) for point in points)
                assert nearest > RADIUS, (name, add, link.src, link.dst, gpu)


def test_judged_sizes_that_are_not_whole_blocks_have_pages(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG.replace("0.15", "0.07").replace("62.91", "27.96").replace("4 min", "3 min"))
    data = whole(tmp_path / "v.html", "judge", str(log), "mesh-3", "-c", "alltoall", "--page")
    sizes = [size["runs"][0] for size in data["views"][0]["sizes"]]
    assert [sum(run["bytes"]) for run in sizes] == [3 * 342 * 2, 3 * 1398102 * 2]
