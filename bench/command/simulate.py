"""`linkweave simulate`: messages by each algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from linkweave import collectives
from linkweave.bench.command import options
from linkweave.bench.command.plans import check_chunks, one_of, read_plans, timed_of
from linkweave.collectives import CollectiveError, Plan
from linkweave.collectives.foreign import mscclpp, mscclpp_timing, nvls
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose
from linkweave.collectives.planning.simulate import Timeline
from linkweave.topology import Topology, bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.text import assumed

LEGEND = (
    "busiest link: share of the time in which it carries bytes; detours: connections over another "
    "GPU;\nshared: connections take turns on some link"
)


def simulate(
    size: options.SizeOption,
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    collective: options.CollectiveOption = "allreduce",
    root: options.RootOption = 0,
    algorithm: options.AlgorithmOption = "all",
    chunks: options.ChunksOption = None,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
    plan: options.PlanFileOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace, of one algorithm.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict a message by each algorithm."""
    found = options.machine_of(one_of(machine, topo), gpus, measured, gpu)
    nbytes = options.parse_size(size)
    check_chunks(chunks)
    options.writable(trace=trace)
    given: list[Plan] = []
    chosen = None
    if plan is not None:
        if (collective, root, algorithm, chunks) != ("allreduce", 0, "all", None):
            raise CollectiveError(
                "--plan has its own collective, root, algorithm and chunks: leave those out"
            )
        if not plan.exists() or plan.is_dir():
            raise CollectiveError(f"--plan: no file {str(plan)!r}; --algorithm takes a name")
        theirs = read_plans(plan, found, nbytes)
        if isinstance(theirs, mscclpp.ExecutionPlan):
            told = mscclpp_timing.simulate(theirs, found, nbytes)
            _tell(theirs, told, found, nbytes, as_json)
            return
        given = theirs
        collective, root = given[0].collective, given[0].root
        names = tuple(made.algorithm for made in given)
        foreign_rings = given[0].algorithm.startswith(("nccl_", "rccl_"))
        if foreign_rings and trace is not None:
            given, names = given[:1], names[:1]
        elif foreign_rings:  # beside what NCCL could be given
            given += [collectives.plan_allreduce(found, nbytes, name) for name in ("ring", "chain")]
            names += ("ring", "chain")
    else:
        with options.console.status("planning"):
            collectives.plan_collective(collective, found, nbytes, root)  # refuses what is wrong
            chosen = choose(found, nbytes, collective, root)
            every = algorithm == "all"
            names = candidates(found, collective, root) if every else (algorithm,)
    if trace and len(names) > 1:
        raise CollectiveError("--trace needs one algorithm: name it with --algorithm")
    rows: list[dict[str, Any]] = []
    with Progress(
        console=options.console, transient=True, disable=not options.console.is_terminal
    ) as progress:
        for at, name in enumerate(progress.track(names, description="simulating")):
            made = given[at] if given else collectives.plan_collective(
                collective, found, nbytes, root, name, chunks
            )  # fmt: skip
            line = collectives.simulate(made, found, nbytes)
            rows.append(_row(made, line))
            if trace:
                line.save_trace(trace)
                options.console.print(f"written: {trace}", highlight=False)
    rows.sort(key=lambda row: row["time_us"])
    if as_json:
        what = {"topology": found.name, "collective": collective, "size": nbytes}
        print(json.dumps({**what, "auto": chosen, "rows": rows}))
        return
    taken = f"; auto takes {chosen}" if chosen else f" by {plan}"
    if chosen and (timed := timed_of(found, collective, chosen, nbytes)):
        taken += f", by measured times the fastest ({timed[0] * 1e6:.1f} us); predicted:"
    if given and collective in BOUNDED:
        taken += f", where at most {bound(found, collective).algbw / 1e9:.2f} GB/s are possible"
    print(f"{collective} of {size_text(nbytes)} on {found.name}{taken}")
    print(options.table(
        ("algorithm", "chunks", "us", "GB/s", "first chunk us", "busiest link", "detours", ""),
        [(r["algorithm"], r["chunks"], f"{r['time_us']:.1f}", f"{r['algbw_gbs']:.2f}",
          f"{r['first_chunk_us']:.1f}", f"{r['busiest_link']:.0%}", r["detours"],
          "" if r["exclusive"] else "shared") for r in rows],
    ))  # fmt: skip
    print("\n".join([LEGEND, *assumed(found)]))
    if collective == "allreduce" and not given and nvls.possible(found):
        switched = nvls.predict(found, nbytes)
        print(
            f"by switches, which plans for MSCCL++ use (plan --to mscclpp): "
            f"{switched.seconds * 1e6:.1f} us, {nbytes / switched.seconds / 1e9:.2f} GB/s"
        )


def _tell(
    plan: mscclpp.ExecutionPlan, told: mscclpp_timing.Simulated, machine: Topology, nbytes: int,
    as_json: bool,
) -> None:  # fmt: skip
    row = {"algorithm": plan.name, "time_us": told.seconds * 1e6,
           "algbw_gbs": nbytes / told.seconds / 1e9 if told.seconds else 0.0,
           "busiest_link": max(told.utilisation.values(), default=0.0)}  # fmt: skip
    if as_json:
        what = {"topology": machine.name, "collective": plan.collective, "size": nbytes}
        print(json.dumps({**what, "auto": None, "rows": [row]}))
        return
    print(f"{plan.collective} of {size_text(nbytes)} on {machine.name} by MSCCL++")
    print(options.table(
        ("plan", "us", "GB/s", "busiest link"),
        [(row["algorithm"], f"{row['time_us']:.1f}", f"{row['algbw_gbs']:.2f}",
          f"{row['busiest_link']:.0%}")],
    ))  # fmt: skip


def _row(made: Plan, line: Timeline) -> dict[str, Any]:
    return {
        "algorithm": made.algorithm,
        "chunks": made.num_chunks,
        "time_us": line.seconds * 1e6,
        "algbw_gbs": line.algbw / 1e9,
        "first_chunk_us": line.first_chunk_seconds * 1e6,
        "busiest_link": max(line.utilisation.values(), default=0.0),
        "exclusive": made.exclusive,
        "detours": len(made.detours),
    }
