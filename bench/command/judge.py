"""`linkweave judge`: what nccl-tests has measured, beside predictions and bounds."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from linkweave import collectives
from linkweave.bench.command import options, pictures
from linkweave.bench.command.pictures import Made
from linkweave.bench.command.plans import one_of
from linkweave.bench.command.view import write
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import nccl_tests
from linkweave.collectives.planning.explain import size_text
from linkweave.topology import Topology
from linkweave.topology.loading import read


def judge(
    log: Annotated[Path, typer.Argument(help="What nccl-tests printed, or wrote with -J.")],
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    collective: Annotated[
        str, typer.Option("--collective", "-c", help="What was measured, if the log has no name.")
    ] = "",
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Show the judgement, and our plans in motion, on a page, an .html file."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Judge a log of nccl-tests, size by size."""
    options.writable(page=page)
    found = options.machine_of(one_of(machine, topo), gpus, measured, gpu)
    text = read(str(log))
    if page:
        pictures.check(found)
    with options.console.status("planning"):
        told = nccl_tests.judge(nccl_tests.read(text, str(log)), found, collective)
    if as_json:
        print(json.dumps({"topology": found.name, **asdict(told)}))
    else:
        tell(told, found)
    if page:
        with options.console.status("simulating"):
            views = pictures.views_of_plans(found, plans_of(told, found))
        write(page, f"{told.collective} on {found.name}", f"measured by nccl-tests: {log}", views,
              judged=as_data(told))  # fmt: skip


def tell(told: nccl_tests.Judgement, found: Topology) -> None:
    best = told.rows[0].bound
    print(f"{told.collective} on {found.name}, measured by nccl-tests")
    print(options.table(
        ("size", "measured us", "GB/s", "of the bound", "our best us", "by"),
        [(size_text(row.nbytes), f"{row.seconds * 1e6:.1f}", f"{row.algbw / 1e9:.2f}",
          "-" if row.share is None else f"{row.share:.1%}", f"{row.predicted * 1e6:.1f}",
          row.algorithm) for row in told.rows], left=(5,),
    ))  # fmt: skip
    if best:
        print(f"bound: {best / 1e9:.4g} GB/s on the wires, as our best counts; it is simulated")
    for sentence in sentences(told):
        print(textwrap.fill(sentence, options.WIDTH))


def sentences(told: nccl_tests.Judgement) -> list[str]:
    ends = ("" if text.endswith("?") else "." for text in told.sentences)
    return [
        f"{text[0].upper()}{text[1:]}{end}" for text, end in zip(told.sentences, ends, strict=True)
    ]


def plans_of(told: nccl_tests.Judgement, machine: Topology) -> list[Made]:
    """Our plans for the smallest, the middle and the largest size."""
    last = len(told.rows) - 1
    rows = [told.rows[i] for i in dict.fromkeys((0, last // 2, last))]
    found = []
    for row in rows:
        nbytes = nccl_tests.whole(row.nbytes, told.collective, len(machine.gpus))
        plan = collectives.plan_collective(
            told.collective, machine, nbytes, algorithm=row.algorithm
        )
        found.append(Made(nbytes, [(plan, None)]))
    return found


def as_data(told: nccl_tests.Judgement) -> dict[str, Any]:
    rows = [
        {"bytes": row.nbytes, "size": size_text(row.nbytes), "us": row.seconds * 1e6,
         "theirs": row.algbw / 1e9, "share": row.share and f"{row.share:.1%}",
         "best": row.predicted * 1e6, "by": row.algorithm,
         "ours": row.nbytes / row.predicted / 1e9 if row.predicted else 0.0}
        for row in told.rows
    ]  # fmt: skip
    return {"rows": rows, "bound": (told.rows[0].bound or 0) / 1e9, "says": sentences(told)}


def nccl_tuner(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="ALGO/PROTO=LOG...", help="Logs of nccl-tests, such as ring/ll=a."),
    ],
    out: Annotated[Path, typer.Option(help="The tuner's file to write.")] = Path("nccl_tuner.conf"),
    nodes: Annotated[int, typer.Option(help="The number of nodes that it is for.")] = 1,
    collective: Annotated[
        str, typer.Option("--collective", "-c", help="What was measured, if logs have no name.")
    ] = "",
) -> None:
    """Write the measured choice for NCCL's example tuner."""
    options.writable(out=out)
    logs = {}
    for run in runs:
        name, equals, path = run.partition("=")
        if not equals or name in logs:
            raise CollectiveError(f"runs are ALGO/PROTO=LOG, each once, not {run!r}")
        logs[name] = nccl_tests.read(read(path), path)
    text = nccl_tests.tuner_file(logs, nodes, collective)
    out.write_text(text)
    print(f"{text}{out}: for NCCL_TUNER_CONFIG_FILE")
