"""`linkweave schedule`, and `auto` on all models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linkweave.bench.command import gantt
from linkweave.bench.command import schedule as shown
from linkweave.bench.command.cli import app
from linkweave.bench.reproduce import schedules
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.cluster.cluster_map import ClusterMap


def run(words: str) -> str:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    return done.output


def test_all_policies_side_by_side_drawn_and_traced(tmp_path: Path) -> None:
    out = run(f"schedule --profile vgg16 --workers 8 --limit 0.3 --png {tmp_path}/g.png")
    lines = [line.split() for line in out.splitlines() if line[:1].strip()]
    names = [line[0] for line in lines if line and line[0] in (*overlap.POLICIES, "auto")]
    assert names == [*overlap.POLICIES, "auto"]
    assert "synthetic" in out and "8 workers" in out and "x DDP" in out
    assert "DDP (25 MiB buckets)" in out and max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "g.png").stat().st_size > 10_000


@pytest.mark.parametrize("policy", ["us-byte", "c-cube"])
def test_a_trace_has_bars_and_arrows(policy: str, tmp_path: Path) -> None:
    run(f"schedule --profile resnet152 --policy {policy} --trace {tmp_path}/t.json --explain")
    data = json.loads((tmp_path / "t.json").read_text())
    events = data["traceEvents"]
    assert data["otherData"] == {"profile": "resnet152", "synthetic": True}
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "backward", 1: "lane 0", 2: "forward"}
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) >= 2 * 467
    # arrows begin and end within bars: from the gradients to what sends them, then to who waits
    ends = {ph: {e["id"]: e for e in events if e["ph"] == ph} for ph in "sf"}
    sends = [e for e in bars if e["tid"] == 1]
    assert ends["s"].keys() == ends["f"].keys() and len(ends["s"]) == 2 * len(sends)
    for number, send in enumerate(sends):
        there, on = f"0.{2 * number}", f"0.{2 * number + 1}"
        assert (ends["s"][there]["tid"], ends["f"][on]["tid"]) == (0, 2)
        for one in (ends["f"][there], ends["s"][on]):
            assert one["tid"] == 1 and send["ts"] <= one["ts"] <= send["ts"] + send["dur"]
        assert all(ends["s"][one]["ts"] <= ends["f"][one]["ts"] for one in (there, on))


def test_one_slow_policy_does_not_squeeze_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    profile, network = overlap.model("vgg16"), overlap.network("10GbE", 8)
    fast = [overlap.plan(profile, network, name) for name in ("mg-wfbp", "us-byte")]
    slow = overlap.plan(profile, replace(network, startup_s=network.startup_s * 1000), "wfbp")
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    gantt.draw([gantt.predicted(s) for s in (*fast, slow)], tmp_path / "g.png")
    longest = max(s.predicted_seconds for s in fast)
    assert drawn[0].axes[0].get_xlim()[1] < 3 * 1e3 * longest < 1e3 * slow.predicted_seconds
    assert drawn[0].axes[2].get_title(loc="left").endswith("goes on")


def test_json_and_a_profile_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("name,nbytes,forward_s,backward_s\na,4000,0.1,0.2\nb,8000,0.1,0.2\n")
    out = run(f"schedule --profile {file} --network 56GbIB --policy optimal --limit 0.2 --json")
    data = json.loads(out)
    (found,) = data["schedules"]
    assert data["verdict"].startswith("nothing to gain")
    assert found["profile"]["name"] == "mine" and not found["profile"]["synthetic"]
    assert found["lower_bound_seconds"] <= found["predicted_seconds"]
    assert sum(p["nbytes"] for c in found["communications"] for p in c["pieces"]) == 12_000


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    net = overlap.Network(2e-3, 1.1e-9, workers=4)
    file.write_text(ClusterMap((2, 2, 2, 2), 0.0, net, {}).to_json())
    for spec in ("a=2ms,b=1.1ns,workers=4", file):
        out = run(f"schedule --profile vgg16 --network {spec} --workers 8 --policy ddp")
        assert "8 workers, start-up 4.667 ms, 1.283 ns a byte" in out


def made(policy: str, step_ms: float, bound_ms: float = 80.0) -> overlap.Schedule:
    """A schedule of which only the time and the bound are looked at."""
    found = overlap.plan(overlap.model("vgg16"), overlap.Network(0.0, 0.0), "wfbp")
    found = replace(found, policy=policy)
    found.__dict__["timeline"] = replace(found.timeline, seconds=step_ms / 1e3)
    found.__dict__["lower_bound_seconds"] = bound_ms / 1e3
    return found


@pytest.mark.parametrize(
    ("times", "bound", "said"),
    [
        ({"ddp": 100}, 99.1,
         "nothing to gain: no schedule saves more than 0.9 % of the 100.0 ms that "
         "DDP (25 MiB buckets) takes"),
        ({"ddp": 100}, 80,
         "no schedule saves more than 20.0 % of the 100.0 ms that DDP (25 MiB buckets) takes"),
        ({"ddp": 100, "us-byte": 88, "wfbp": 90}, 80,
         "us-byte, the best named policy, saves 12.0 % of a step of DDP (25 MiB buckets): 88.0 "
         "instead of 100.0 ms"),
        ({"us-byte": 88}, 80,
         "us-byte saves 12.0 % of a step of DDP (25 MiB buckets): 88.0 instead of 100.0 ms"),
        ({"ddp": 100, "us-byte": 88, "wfbp": 99, "optimal": 87.5, "auto": 87.5}, 80,
         "us-byte, the best named policy, saves 12.0 % of a step of DDP (25 MiB buckets): 88.0 "
         "instead of 100.0 ms"),
        ({"ddp": 100, "us-byte": 99.5, "wfbp": 120, "optimal": 85, "auto": 85}, 80,
         "us-byte, the best named policy, takes as long as DDP (25 MiB buckets), within 1.0 %: "
         "99.5 instead of 100.0 ms; auto saves 15.0 %: 85.0 ms"),
        ({"wfbp": 120}, 80,
         "wfbp takes 20.0 % longer than DDP (25 MiB buckets): 120.0 instead of 100.0 ms"),
        ({"auto": 81}, 80,
         "auto saves 19.0 % of a step of DDP (25 MiB buckets): 81.0 instead of 100.0 ms"),
    ],
)  # fmt: skip
def test_the_verdict(times: dict[str, float], bound: float, said: str) -> None:
    schedules = [made(policy, ms, bound) for policy, ms in times.items()]
    assert shown.verdict(schedules, made("ddp", 100, bound)) == said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--profile alexnet", "'alexnet' is neither a file nor a model"),
        ("--profile vgg16 --network fast", "network 'fast' is neither a file nor a preset"),
        ("--profile vgg16 --policy best", "unknown policy 'best'"),
        ("--profile vgg16 --trace x.json", "--trace needs one policy"),
        ("--profile vgg16 --workers 0", "workers must be an integer from 1 to 1000000000, not 0"),
        ("--profile vgg16 --policy wfbp --json --explain", "--explain goes without --json"),
        ("--profile vgg16 --policy wfbp --png x.pdf", "ends in .png, not x.pdf"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, told: str) -> None:
    done = CliRunner().invoke(app, ["schedule", *words.split()])
    assert isinstance(done.exception, CollectiveError) and told in str(done.exception)


def test_the_table_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "WORKERS", (64,))
    monkeypatch.setattr(schedules, "LIMIT_S", 0.3)
    monkeypatch.setattr(overlap, "models", lambda: ("vgg16",))
    rows = list(schedules.rows())
    assert len(rows) == len(overlap.PRESETS)
    assert "slower than a named policy: 0" in schedules.table(rows)
