"""`linkweave view`: what its page holds, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from linkweave import collectives, topology
from linkweave.bench.command import view
from linkweave.bench.command.cli import app
from linkweave.collectives import CollectiveError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZE = 1 << 26


def written(path: Path, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["view", *words, "-o", str(path)])
    assert done.exit_code == 0, done.output
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
        busy = {links[int(i)]: share for i, share in run["busy"].items()}
        assert busy == {ends: pytest.approx(share, abs=1e-3)
                        for ends, share in line.utilisation.items()}  # fmt: skip
        # each link carries its connections' chunks
        carried = {links[int(i)]: n for i, n in run["bytes"].items()}
        rate = {(link.src, link.dst): link.bandwidth * link.count for link in machine.fabric}
        for ends, n in carried.items():  # its time at work is that of its bytes
            assert n / rate[ends] == pytest.approx(line.busy[ends], rel=1e-9)
        for connection, way in enumerate(run["ways"]):
            assert [links[i] for i in way] == list(plan.connections[connection].links)


def test_long_plans_move_in_fewer_chunks(tmp_path: Path) -> None:
    path = tmp_path / "v.html"
    data = written(path, "2 x dgx-h100", "-s", "256M", "--plan", "packed_trees")
    (run,) = data["sizes"][0]["runs"]
    assert 0 < len(run["sends"]) <= view.SENDS and "are of the plan itself" in run["note"]
    assert max(end for *_, end in run["sends"]) == pytest.approx(run["us"], rel=1e-3)
    assert path.stat().st_size < 2e6


@pytest.mark.parametrize("machine", ["mesh-1", "ring-5", "pcie-8", "cpu-4", "4 x mesh-4", "mi250x"])
def test_any_machine_has_a_page(machine: str, tmp_path: Path) -> None:
    data = written(tmp_path / "v.html", machine, "-s", "1M")
    x, y, width, height = data["frame"]
    for node in data["nodes"]:
        assert x <= node["x"] <= x + width and y <= node["y"] <= y + height
    assert data["sizes"][0]["runs"]


def test_what_a_page_cannot_show(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="has 128 GPUs: a page shows at most 64"):
        view.page(topology.load("16 x dgx-a100"), [1024], [])
    with pytest.raises(CollectiveError, match="'nosuch' is neither a file nor an algorithm"):
        view.page(topology.load("mesh-3"), [1024], ["nosuch"])


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
        view.page(machine, [1 << 20], [str(tmp_path / "bad.json")])


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
    text = view.page(named, [1024], [])
    assert text.count("<script") == 2 and text.count("</script>") == 2
    data = re.search(r'application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None and json.loads(data[1])["title"] == name


def shown(page: Path, state: str) -> str:
    """The page's text, where the address has this state."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000",
         "--enable-logging=stderr", "--dump-dom", f"file://{page}#{quote(state, '/%')}"],
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
    assert f"{100 * run['busy']['0']:.0f} % of the time" in text
    assert text.count("<polyline") == 2 * len(data["links"])
    other = shown(page, "64MiB/ring/0.500/n3")
    assert '<h2 id="chosen">GPU 3</h2>' in other and "waits for" in other
    old = shown(page, "64MiB/50% ring/0.5/n99")  # of another page
    assert 'id="chosen">overlapped_double_tree</h2>' in old and old.count("<polyline") > 9
    written(page, "mesh-1", "-s", "1M")
    assert 'id="chosen">' in shown(page, "")
    written(page, "dgx1-v100", "-s", "1M", "--plan", "overlapped_double_tree")
    first = shown(page, "1MiB/overlapped_double_tree/0/")
    assert '<h2 id="chosen">overlapped_double_tree</h2>' in first and "0.0 us of" in first
