"""`linkweave reproduce`: papers' values beside ours, and tables of the planner's choices."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from linkweave.bench.command.options import WIDTH, JsonOption, console, writable
from linkweave.collectives import CollectiveError

PAPERS = ("c-cube", "gtop-k", "embrace", "asc-wfbp", "us-byte", "predictions")
# tables about the planner; the times are those on two idle cores
_TABLES = {
    "c-cube-14": ("trees against rings up to 1,024 ranks", "15 s"),
    "clusters": ("auto on clusters against the bound", "35 min"),
    "choice": ("what auto takes against the best of all algorithms", "2.5 min"),
    "schedules": ("auto for all models and networks", "5 min"),
}


def reproduce(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="; ".join((
            f"A paper: {', '.join(PAPERS)}", "all: all of them (2 min)",
            *(f"{name}: {words} ({time})" for name, (words, time) in _TABLES.items()),
        ))),
    ],
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write one page with plots, for a paper or all."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Instead, repeat a paper's recorded measurements, and "
                           "compare each with its record; hosts need root. 1 to 40 min each."),
    ] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Put papers' figures beside ours, or tabulate auto's choices."""
    if measure:
        if what not in PAPERS or page or as_json:
            raise CollectiveError("--measure goes with one paper alone")
        _measure(what, Path("out/reproduce"))
    elif what in _TABLES:
        if page:
            raise CollectiveError(f"--html is for papers, not for {what}")
        _table(what, as_json)
    elif what in (*PAPERS, "all"):
        names = PAPERS if what == "all" else (what,)
        _papers(names, page, as_json)
    else:
        raise CollectiveError(
            f"unknown {what!r}: choose a paper ({', '.join(PAPERS)}), all, or a table "
            f"({', '.join(_TABLES)})"
        )


def _papers(names: tuple[str, ...], page: Path | None, as_json: bool) -> None:
    from linkweave.bench.reproduce import papers, report

    writable(html=page)
    done = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(papers.parts_of(names)))
        for one in papers.collect(names, lambda name: progress.update(task, description=name)):
            done.append(one)
            progress.advance(task)
    if as_json:
        print(papers.as_json(done))
    else:
        for name in names:
            print(f"{report.paper_text(name, [one for one in done if one.paper == name])}\n")
        if words := report.summary(done):
            print(textwrap.fill(words, WIDTH))
    if page:
        page.write_text(report.page(done))
        console.print(f"written: {page}", highlight=False)


def _measure(paper: str, folder: Path) -> None:
    """Run the command of each record that a paper's rows quote, and compare what it writes."""
    from linkweave.bench.reproduce import papers
    from linkweave.bench.reproduce.measured import COMMANDS, RESULTS

    parts = [one.part for one in papers.collect([paper])]
    names = dict.fromkeys(row.record for part in parts for row in part.rows if row.record)
    if not names:
        raise CollectiveError(f"no row of {paper} quotes a record")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    failed = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        made = folder / f"{name}.json"
        console.print(f"\n{name}: {COMMANDS[name]}", highlight=False, soft_wrap=True)
        done = subprocess.run(
            f"{COMMANDS[name]} --out {shlex.quote(str(made.resolve()))} && linkweave bench compare "
            f"{shlex.quote(str(RESULTS / name))}.json {shlex.quote(str(made.resolve()))}",
            shell=True, env={**os.environ, "PATH": path},
        )  # fmt: skip
        if done.returncode:
            failed.append(name)
    if failed:
        raise CollectiveError(f"not repeated: {', '.join(failed)}; the lines above say why")


def _table(what: str, as_json: bool) -> None:
    from linkweave.bench.reproduce import choice, clusters, scale, schedules

    tables = {
        "c-cube-14": (scale, len(scale.RANKS) * len(scale.SIZES)),
        "clusters": (clusters, clusters.TOTAL),
        "choice": (choice, len(choice.MACHINES)),
        "schedules": (schedules, schedules.TOTAL),
    }
    module, total = tables[what]
    console.print(f"about {_TABLES[what][1]} on two idle cores", highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        rows = [*progress.track(module.rows(), total=total, description="simulating")]
    print(json.dumps([asdict(row) for row in rows]) if as_json else module.table(rows))
