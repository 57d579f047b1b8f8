"""`linkweave plan`."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from linkweave import collectives
from linkweave.bench.command import options
from linkweave.collectives import CollectiveError, Explanation, Plan
from linkweave.collectives.foreign import mscclpp, nccl_graph, nvls, rccl
from linkweave.collectives.foreign.mscclpp_export import check_size, exported
from linkweave.collectives.planning.algorithms.registry import ALGORITHMS
from linkweave.collectives.planning.collective import COLLECTIVES
from linkweave.collectives.planning.explain import size_text
from linkweave.collectives.planning.planner import candidates, choose, predict
from linkweave.collectives.planning.simulate import MAX_CHUNKS
from linkweave.topology import Topology, bound, reducing_bound
from linkweave.topology.bounds import BOUNDED
from linkweave.topology.checks import integer
from linkweave.topology.loading import read
from linkweave.topology.parts import parts_of
from linkweave.topology.text import counted
from linkweave.topology.timings import measured_seconds

MOST_CHUNKS = 8 * MAX_CHUNKS


LARGE = 64 << 20  # bytes for which a plan is made where no size is asked for


def read_plans(
    path: Path, machine: Topology, nbytes: int = LARGE
) -> mscclpp.ExecutionPlan | list[Plan]:
    """Read a plan of MSCCL++ as it is; or one of ours, or the rings and chains of NCCL or RCCL, as
    all-reduces of so many bytes, verified on the machine. Raises CollectiveError."""
    text = read(str(path))
    with options.naming(path):
        if mscclpp.is_plan(text):
            return mscclpp.read(text)
        return plans_in(text, path, machine, nbytes)


def plan_file(text: str) -> Path | None:
    """The file that `--plan` names; None for an algorithm. Raises CollectiveError for neither."""
    if text in ("auto", *ALGORITHMS["allreduce"]):
        return None
    if not os.path.isfile(text):
        raise CollectiveError(
            f"--plan: {text!r} is neither a file nor an algorithm; algorithms are "
            f"{', '.join(ALGORITHMS['allreduce'])}"
        )
    return Path(text)


def plans_in(text: str, path: Path, machine: Topology, nbytes: int = LARGE) -> list[Plan]:
    if rccl.is_text(text):
        return [
            collectives.plan_allreduce(machine, nbytes, one) for one in rccl.read(text).values()
        ]
    if not nccl_graph.is_graph(text):
        made = Plan.from_json(text)
        collectives.verify(made, machine)
        return [made]
    graphs = nccl_graph.read(text, str(path))
    kinds = [nccl_graph.RING, nccl_graph.TREE]
    if any(link.kind == "network" for link in machine.fabric):
        kinds = kinds[: nccl_graph.RING in graphs]  # between nodes NCCL makes trees of its own
    taken = [graphs[kind] for kind in kinds if kind in graphs]
    return [collectives.plan_allreduce(machine, nbytes, graph.algorithm) for graph in taken]


def plan(
    size: options.SizeOption,
    machine: options.OptionalMachine = None,
    topo: options.TopologyOption = "",
    collective: options.CollectiveOption = "allreduce",
    root: options.RootOption = 0,
    algorithm: options.AlgorithmOption = "auto",
    chunks: options.ChunksOption = None,
    gpus: options.GpusOption = None,
    gpu: options.ModelOption = None,
    measured: options.MeasuredOption = None,
    steps: Annotated[bool, typer.Option("--steps", help="Print every step of every rank.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Compare all algorithms and print why one is chosen.")
    ] = False,
    sparse: Annotated[
        int | None, typer.Option(help="With --explain: entries a rank of sparse all-reduces.")
    ] = None,
    to: options.ToOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Make and verify the plan for a message, and summarise it.

    Large clusters take longer: 64 GPUs about 25 s.
    """
    found = options.machine_of(one_of(machine, topo), gpus, measured, gpu)
    nbytes = options.parse_size(size)
    check_chunks(chunks)
    if as_json and steps:
        raise CollectiveError("--json prints the plan with its steps: leave out --steps")
    if to is not None:
        if to[0] not in ENGINES:
            raise CollectiveError(f"--to writes plans for {', '.join(ENGINES)}, not for {to[0]!r}")
        options.writable(to=to[1])
    if explain:
        if to is not None:
            raise CollectiveError("--explain compares all: --to writes one")
        if collective != "allreduce":
            raise CollectiveError("--explain is for all-reduce; simulate compares the others")
        if algorithm != "auto" or chunks is not None:
            raise CollectiveError("--explain compares all: leave out --algorithm and --chunks")
        with options.console.status("comparing"):
            told = collectives.explain(found, nbytes, sparse)
        print(explanation_json(told) if as_json else told)
        return
    if sparse is not None:
        raise CollectiveError("--sparse goes with --explain")
    if algorithm == NVLS and (steps or chunks is not None):
        raise CollectiveError(f"{NVLS} is no plan of ours: leave out --steps and --chunks")
    switches = algorithm == NVLS or (algorithm == "auto" and chunks is None and not steps)
    if to is not None and to[0] == "mscclpp" and switches:
        text = by_switches(to[1], found, nbytes, collective, algorithm)
        if text:
            print(to[1].read_text().rstrip() if as_json else text)
            return
    if algorithm == NVLS:
        raise CollectiveError(f"{NVLS}: only MSCCL++ has ops for it: add --to mscclpp FILE")
    with options.console.status("planning"):
        made = collectives.plan_collective(collective, found, nbytes, root, algorithm, chunks)
        if as_json or steps:
            text = made.to_json() if as_json else str(made)
        else:
            why = _reason(found, nbytes, made, algorithm)
            text = summary(made, found, nbytes, why, measured)
        if algorithm != "auto":
            _warn(made, found, nbytes)
    print(text)
    if to is not None:
        written = write_for(*to, made, found, nbytes)
        if as_json:
            options.console.print(written, highlight=False, soft_wrap=True)
        else:
            print(written)


NVLS = "nvls"  # the all-reduce by switches, which is no plan of ours


def by_switches(
    path: Path, machine: Topology, nbytes: int, collective: str, algorithm: str
) -> str:  # fmt: skip
    """Write the all-reduce by switches if that is asked for, or expected to be the fastest; says
    what was written."""
    if collective != "allreduce" or (algorithm == "auto" and not nvls.possible(machine)):
        return ""
    if nbytes <= 0:
        raise CollectiveError(f"--to writes plans for messages of some bytes, not {nbytes}")
    told = nvls.predict(machine, nbytes)
    # of plans of ours, times count what links carry on the wire
    other = predict(machine, nbytes, choose(machine, nbytes))[0] / told.payload
    if algorithm == "auto" and told.seconds >= other:
        return ""
    made, rate, reduced = nvls.nvls(machine), nbytes / told.seconds, reducing_bound(machine)
    check_size(made, nbytes)
    path.write_text(made.to_json() + "\n")
    why = f"auto expects it to be {other / told.seconds:.1f} times as fast as plans for any engine"
    facts = {
        "plan": f"allreduce of {size_text(nbytes)} on {machine.name}",
        "algorithm": f"{NVLS}: {'as asked' if algorithm == NVLS else why}",
        "predicted": f"{told.seconds * 1e6:.1f} us, {rate / 1e9:.2f} GB/s, by {told.inputs}",
        "bound": f"{reduced}; this plan reaches {rate / reduced.algbw:.0%}" if reduced else "none",
        "written": f"{path}: mscclpp takes it for messages of {made.least} to {made.most} bytes",
    }
    return _facts(facts)


ENGINES = ("mscclpp", "nccl", "rccl")


def write_for(engine: str, path: Path, made: Plan, machine: Topology, nbytes: int) -> str:
    if engine == "nccl":
        graphs = nccl_graph.of_plan(made, machine)
        path.write_text(nccl_graph.write(graphs))
        what = f"{counted(len(graphs[0].channels), 'channel')} of {graphs[0].speed:g} GB/s"
        if any(graphs[0].nets):
            what += ", the same for each node"
        trees = ", for its trees" if len(graphs) == 1 else ""
        return f"{path}: {what}{trees}, for NCCL_GRAPH_FILE; NCCL sizes its own chunks"
    if engine == "rccl":
        path.write_text(text := rccl.write(made, machine))
        lost = "".join(
            f"; GPUs {machine.gpus[a]} and {machine.gpus[b]} have no link: RCCL finds its own way"
            for a, *_, b in made.detours
        )
        return f"{path}: sets {text.partition('=')[0]}{lost}"
    foreign = exported(made, nbytes, machine)
    path.write_text(foreign.to_json() + "\n")
    return f"{path}: {engine} takes it for messages of {foreign.least} to {foreign.most} bytes"


def summary(
    made: Plan, machine: Topology, nbytes: int, reason: str, measured: str | None = None
) -> str:  # fmt: skip
    """Describe a plan and its predicted time, one line for each fact."""
    line = collectives.simulate(made, machine, nbytes)
    first = line.first_chunk_seconds * 1e6  # 0: a rank's own, as in an all-to-all
    ready = f"; the first chunk is ready after {first:.1f} us" if first else ""
    facts = {
        "plan": f"{made.collective} of {size_text(nbytes)} on {machine.name}",
        "algorithm": reason if made.algorithm in reason else f"{made.algorithm}: {reason}",
        "predicted": f"{line.seconds * 1e6:.1f} us, {line.algbw / 1e9:.2f} GB/s{ready}",
    }
    if machine.on_memory:
        facts["predicted"] += "; on CPUs without the call itself, 10 us or more"
    if made.collective in BOUNDED and line.seconds:
        best = bound(
            machine, made.collective, made.root if made.collective == "broadcast" else None
        )
        share = nbytes / line.seconds * float(best.seconds_per_byte)
        facts["bound"] = f"{best}; this plan reaches {share:.0%}"
        if made.collective == "allreduce" and (reduced := reducing_bound(machine)):
            facts["bound"] += (
                f". Switches that reduce (NVLS, for which --to mscclpp writes a plan) allow "
                f"{reduced.algbw / 1e9:.4g} GB/s"
            )
    if measured:
        timed = timed_of(machine, made.collective, made.algorithm, nbytes)
        of = f"{timed[0] * 1e6:.1f} us, by figures of" if timed else "figures of"
        facts["measured"] = f"{of} {measured}"
    facts["made of"] = made_of(made, machine)
    facts["detours"] = "; ".join(
        f"{a} - {b} over {', '.join(map(str, via))}" for a, *via, b in made.detours
    ) or "none"  # fmt: skip
    facts["chunks"] = (
        f"{made.num_chunks} of {size_text(min(nbytes, made.chunk_bytes(nbytes)))} at most"
    )
    facts["links"] = "exclusive" if made.exclusive else "; ".join(("shared", *made.notes))
    if told := [text for text in machine.assumptions if not text.startswith("measured: ")]:
        facts["assumed"] = "; ".join(told)
    return _facts(facts) + "\n--steps prints the steps of every rank"


def made_of(plan: Plan, machine: Topology) -> str:
    """In words: trees, rings or phases, and channels."""
    parts = parts_of(plan, machine)
    words = counted(len(parts), parts[0].name.split()[0]) if parts else "nothing"
    if plan.trees:
        depths = [tree.depth for tree in plan.trees]
        words += f", depth {' to '.join(map(str, sorted({min(depths), max(depths)})))}"
    return f"{words}, on {counted(len({track.channel for track in plan.tracks}), 'channel')}"


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(
        textwrap.fill(fact, options.WIDTH, initial_indent=f"{name:11}", subsequent_indent=" " * 11)
        for name, fact in facts.items()
    )


def _reason(machine: Topology, nbytes: int, made: Plan, algorithm: str) -> str:
    if algorithm != "auto":
        return "as asked"
    if COLLECTIVES[made.collective].tunable and os.environ.get("LINKWEAVE_ALGORITHM"):
        return "LINKWEAVE_ALGORITHM asks for it"
    if len(machine.gpus) == 1:
        return "there is nothing to choose between"
    if timed_of(machine, made.collective, made.algorithm, nbytes):
        return "the fastest by measured times"
    if len(names := candidates(machine, made.collective, made.root)) == 1:
        return "the only one for this machine"
    compares = "; --explain compares them" if made.collective == "allreduce" else ""
    return f"auto expects it to be the fastest of {len(names)} algorithms{compares}"


def timed_of(
    machine: Topology, collective: str, algorithm: str, nbytes: int
) -> tuple[float, int] | None:
    """Measured seconds and chunks of a message, as `measured_seconds`, if auto chooses by them."""
    if not COLLECTIVES[collective].tunable:
        return None
    return measured_seconds(machine.timings, algorithm, nbytes)


def _warn(made: Plan, machine: Topology, nbytes: int) -> None:
    """Warn if the algorithm is predicted to be slower than auto's choice."""
    auto = choose(machine, nbytes, made.collective, made.root)
    best = predict(machine, nbytes, auto, made.collective, made.root)[0]
    seconds = collectives.simulate(made, machine, nbytes).seconds
    if seconds > 1.02 * best:
        options.console.print(
            f"warning: {made.algorithm} is predicted to take {seconds / best:.2f} times as long as "
            f"{auto}, which auto would take", highlight=False, soft_wrap=True,
        )  # fmt: skip


def one_of(machine: str | None, topo: str) -> str:
    if machine and topo:
        raise CollectiveError(f"the machine is {machine} or --topo {topo}: give one of them")
    return machine or topo or "auto"


def check_chunks(chunks: int | None) -> None:
    """Raise CollectiveError for no chunks, or more than any plan has a use for."""
    if chunks is not None:
        integer(chunks, "--chunks", 1, MOST_CHUNKS)


def explanation_json(told: Explanation) -> str:
    rows = [{**asdict(row), "busiest": row.busiest and [*row.busiest]} for row in told.rows]
    return json.dumps({
        "topology": told.topology, "size": told.nbytes, "auto": told.choice,
        "reason": told.reason, "bound": told.bound.algbw, "bottleneck": told.bottleneck,
        "rows": rows, "refused": dict(told.refused), "crossovers": told.crossovers,
        "sparse": [{**asdict(row), "seconds": row.seconds if math.isfinite(row.seconds) else None}
                   for row in told.sparse],
    })  # fmt: skip
