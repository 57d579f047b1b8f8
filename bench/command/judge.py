"""`linkweave judge`: what nccl-tests has measured, beside predictions and bounds."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from linkweave.bench.command import options
from linkweave.bench.command.plans import one_of
from linkweave.collectives import CollectiveError
from linkweave.collectives.foreign import nccl_tests
from linkweave.collectives.planning.explain import size_text
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
    as_json: options.JsonOption = False,
) -> None:
    """Judge a log of nccl-tests, size by size."""
    found = options.machine_of(one_of(machine, topo), gpus, measured, gpu)
    text = read(str(log))
    with options.console.status("planning"):
        told = nccl_tests.judge(nccl_tests.read(text, str(log)), found, collective)
    if as_json:
        print(json.dumps({"topology": found.name, **asdict(told)}))
        return
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
    for sentence in told.sentences:
        print(textwrap.fill(sentence[0].upper() + sentence[1:] + ".", options.WIDTH))


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
