"""The `linkweave` command."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from linkweave.bench import commands
from linkweave.bench.command import (
    compare,
    judge,
    plans,
    predict,
    schedule,
    simulate,
    topo,
    verify,
    view,
    what_if,
)
from linkweave.bench.command.options import INSTALL, JsonOption, RanksOption, install, writable
from linkweave.bench.commands import bench
from linkweave.bench.reproduce import command as reproduce
from linkweave.collectives import CollectiveError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    help="Plan collectives for the links a machine has: look at it, plan, simulate, measure.",
)  # fmt: skip
for command in (*commands.COMMANDS, compare.compare):
    bench.command()(command)
app.add_typer(bench, name="bench")
for command in (
    topo.topo, view.view, plans.plan, verify.verify, judge.judge, judge.nccl_tuner,
    simulate.simulate, what_if.what_if, predict.predict, schedule.schedule, schedule.train_trace,
    reproduce.reproduce,
):  # fmt: skip
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"linkweave {version_of('linkweave')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check the driver, peer access, IPC, shared memory and limits."""
    from linkweave.collectives.runtime.gpu.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print("\n".join(map(str, checks)))
    if any(check.state == "problem" for check in checks):
        raise SystemExit(1)


@app.command()
def selftest(
    gpus: Annotated[str, typer.Option(help="all, none, or indices such as 0,2.")] = "all",
    report: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
) -> None:
    """Test collectives on this machine's ranks and GPUs.

    The exit status is 0 for PASS, 1 for FAIL, and 3 for PASS but for what was left out.
    """
    from linkweave.bench.command import selftest as shown

    writable(report=report)
    raise SystemExit(shown.run(gpus, sys.stdout, report))


@app.command()
def demo(
    ranks: RanksOption = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 12,
    out: Annotated[Path, typer.Option(help="The folder of the picture.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Train a small CNN, and compare schedules."""
    from linkweave.bench.command.demo import run, summary

    result = run(ranks, epochs, out)
    print(json.dumps(result) if as_json else summary(result))


def end_at_once(*_: object) -> None:
    """Leave the process: Numba swallows a KeyboardInterrupt raised while it compiles."""
    os.write(2, b"\nlinkweave: interrupted\n")
    os._exit(130)


def main() -> None:
    if sys.argv[1:2] == ["selftest"]:  # which then ends its processes and writes its report
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] not in (["bench"], ["demo"], ["selftest"]):  # those have processes to stop
        signal.signal(signal.SIGINT, end_at_once)
    try:
        app(standalone_mode=True)
    except ModuleNotFoundError as error:
        if error.name not in INSTALL:
            raise
        print(f"linkweave: this needs {error.name}: {install(error.name)}", file=sys.stderr)
        raise SystemExit(2) from None
    except (CollectiveError, OSError, MemoryError) as error:
        print(f"linkweave: {_words(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, MemoryError):
        return f"not enough memory{f': {error}' if str(error) else ''}"
    return str(error)


if __name__ == "__main__":
    main()
