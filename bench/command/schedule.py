"""`linkweave schedule` and `train-trace`: schedules, and what they save of a step of DDP."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from linkweave.bench.command import gantt, options
from linkweave.collectives import CollectiveError, overlap
from linkweave.collectives.overlap import POLICIES, Network, Profile, Schedule
from linkweave.topology.loading import read

LEGEND = (
    "x DDP: DDP's time over its own; above bound: over the lower bound on any schedule (of dear: "
    "any\nwhose all-reduces are divided in two); exposed: time of communication that nothing "
    "hides;\nefficiency: computation's share of the step; lanes: all-reduces under way at once; "
    "gamma: how many\ntimes as long a byte takes while two all-reduces share the network"
)
DDP = "DDP (25 MiB buckets)"
SEARCHED = ("optimal", "auto")
NEGLIGIBLE = 0.01  # the share of a step up to which schedules are called equal


def schedule(
    profile: options.ProfileOption,
    network: options.NetworkOption = "10GbE",
    workers: options.WorkersOption = None,
    policy: Annotated[
        str, typer.Option(help=f"all, auto, or one of {', '.join(POLICIES)}.")
    ] = "all",
    limit: Annotated[float, typer.Option(help="Seconds that optimal and auto may search.")] = 3.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print why, and each all-reduce.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a Gantt chart to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (one policy).")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict what DDP and other schedules of gradients take."""
    check(policy, png, trace, explain, as_json)
    loaded, net = overlap.load(profile), overlap.network_from(network, workers)
    found = planned(loaded, net, policy, limit)
    tell(found, explain=explain, png=png, trace=trace, as_json=as_json)


def train_trace(
    step: Annotated[Path, typer.Argument(help="A file that DataParallel.save_step wrote.")],
    png: Annotated[Path | None, typer.Option(help="Draw Gantt charts to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace to this file.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compare a measured training step with its prediction."""
    options.writable(png=png, trace=trace)
    with options.naming(step):
        found = overlap.MeasuredStep.from_json(read(str(step)))
    charts = gantt.of_step(found)
    if as_json:
        print(json.dumps({
            "policy": found.schedule.policy, "seconds": found.timeline.seconds,
            "predicted_seconds": found.schedule.predicted_seconds,
        }))  # fmt: skip
    else:
        print(found)
    if png:
        gantt.draw(charts, png)
        options.console.print(f"drawn: {png}", highlight=False)
    if trace:
        trace.write_text(gantt.trace(charts))
        options.console.print(f"written: {trace}", highlight=False)


def table(schedules: Sequence[Schedule], ddp: Schedule) -> str:
    """One line for each schedule, and a legend; `ddp` is DDP's schedule for the same case."""
    base = ddp.predicted_seconds
    rows = [
        (s.policy, f"{s.predicted_seconds * 1e3:.2f}",
         f"{base / s.predicted_seconds if s.predicted_seconds else 1:.2f}", f"{s.gap:.1%}",
         f"{s.timeline.exposed_s * 1e3:.2f}", f"{efficiency(s):.1%}", s.all_reduces,
         s.lanes)
        for s in schedules
    ]  # fmt: skip
    heads = ("policy", "ms", "x DDP", "above bound", "exposed ms", "efficiency", "all-reduces",
             "lanes")  # fmt: skip
    notes = {s.note: s.policy for s in reversed(schedules) if s.note}
    lines = [textwrap.fill(f"{name}: {note}", options.WIDTH) for note, name in notes.items()]
    return "\n".join((options.table(heads, rows), LEGEND, *reversed(lines)))


def efficiency(schedule: Schedule) -> float:
    """The share of a step in which the GPU computes; 1 if nothing takes time."""
    step = schedule.predicted_seconds
    return 1 - schedule.timeline.exposed_s / step if step else 1.0


def verdict(schedules: Sequence[Schedule], ddp: Schedule) -> str:
    """Say in one sentence what the schedules save of a step of DDP.

    The best named policy speaks for all of them; a search is mentioned where it saves more, by
    NEGLIGIBLE or above. Where the lower bound leaves less than that to save, there is no gain.
    """
    base = ddp.predicted_seconds
    most = ddp.gap / (1 + ddp.gap)  # that the lower bound leaves to save
    bound = f"no schedule saves more than {_share(most)} of the {_ms(ddp)} ms that {DDP} takes"
    rivals = [s for s in schedules if s.policy != "ddp"]
    if most < NEGLIGIBLE:
        return f"nothing to gain: {bound}"
    if not rivals:
        return bound

    def saving(schedule: Schedule) -> float:
        return 1 - schedule.predicted_seconds / base

    named = [s for s in rivals if s.policy not in SEARCHED]
    best = max(named or rivals, key=saving)
    name = f"{best.policy}, the best named policy," if len(named) > 1 else best.policy
    if saving(best) >= NEGLIGIBLE:
        words = f"{name} saves {_share(saving(best))} of a step of {DDP}"
    elif saving(best) > -NEGLIGIBLE:
        words = f"{name} takes as long as {DDP}, within {_share(NEGLIGIBLE)}"
    else:
        words = f"{name} takes {_share(-saving(best))} longer than {DDP}"
    words += f": {_ms(best)} instead of {_ms(ddp)} ms"
    top = max(reversed(rivals), key=saving)  # auto before optimal, which is the same
    if saving(top) >= saving(best) + NEGLIGIBLE:
        words += f"; {top.policy} saves {_share(saving(top))}: {_ms(top)} ms"
    return words


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ms(schedule: Schedule) -> str:
    ms = schedule.predicted_seconds * 1e3
    return f"{ms:.{1 + (ms < 10) + (ms < 1)}f}"  # so that a gain of 1 % shows


def planned(
    profile: Profile, network: Network, policy: str = "all", limit_s: float = 3.0
) -> list[Schedule]:
    """The schedules of a policy, or of all and `auto`; the search ends after `limit_s`."""
    names = [*overlap.POLICIES, "auto"] if policy == "all" else [policy]
    found: list[Schedule] = []
    with Progress(
        console=options.console, transient=True, disable=not options.console.is_terminal
    ) as progress:
        for name in progress.track(names, description="planning"):
            if name == "auto" and found:  # which is the optimal one under another name
                same = next(one for one in found if one.policy == "optimal")
                found.append(replace(same, policy=name))
                continue
            given: dict[str, Any] = {"limit_s": limit_s} if name in ("auto", "optimal") else {}
            found.append(overlap.plan(profile, network, name, **given))
    return found


def check(policy: str, png: Path | None, trace: Path | None, explain: bool, as_json: bool) -> None:
    """Raise CollectiveError, before anything is planned, for what `tell` cannot do."""
    options.writable(png=png, trace=trace)
    if trace and policy == "all":
        raise CollectiveError("--trace needs one policy: name it with --policy")
    if as_json and explain:
        raise CollectiveError("--explain goes without --json")


def tell(
    found: Sequence[Schedule], words: str = "", *, explain: bool = False, png: Path | None = None,
    trace: Path | None = None, as_json: bool = False, **extra: Any,
) -> None:  # fmt: skip
    """Print schedules of one profile and network beside DDP's, with `words` before the table, or as
    JSON with `extra` fields; draw and trace them where asked."""
    profile, network = found[0].profile, found[0].network
    base = overlap.plan(profile, network, "ddp")
    if as_json:
        print(_json(found, base, extra))
    else:
        print("\n".join(filter(None, (str(profile), str(network), words))))
        print(f"\n{table(found, base)}\n")
        print(textwrap.fill(verdict(found, base), options.WIDTH))
        if explain:
            for made in found:
                print(f"\n{made.explain()}\n{made if len(found) == 1 else ''}".rstrip())
    if png:
        gantt.draw([gantt.predicted(made) for made in found], png)
        options.console.print(f"drawn: {png}", highlight=False)
    if trace:
        trace.write_text(gantt.trace([gantt.predicted(found[0])]))
        options.console.print(f"written: {trace}", highlight=False)


def _json(schedules: Sequence[Schedule], ddp: Schedule, extra: dict[str, Any]) -> str:
    rows = [
        {
            **s.to_data(), "predicted_seconds": s.predicted_seconds,
            "lower_bound_seconds": s.lower_bound_seconds, "efficiency": efficiency(s),
        }
        for s in schedules
    ]  # fmt: skip
    return json.dumps({"verdict": verdict(schedules, ddp), **extra, "schedules": rows})
