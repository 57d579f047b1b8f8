"""The `linkweave` command as tests run it: within the test's process, or in one of its own."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from unittest import mock

from linkweave.bench.command import cli

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What `linkweave WORDS` prints and returns, without the start of another interpreter.

    It prints into files, as ranks that are forked print too.
    """
    code = 0
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        with (
            chdir(cwd), redirect_stdout(out), redirect_stderr(err),
            mock.patch.object(sys, "argv", ["linkweave", *words]),
            mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        ):  # fmt: skip
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess(words, code, *said)


def command_in_a_process(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", cli.__name__, *words],
        cwd=cwd, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def run_script_in_a_process(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=280,
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, cwd=path.parent,
    )  # fmt: skip


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    """What `python PATH` prints and returns in the file's folder, in a fork of a process that has
    imported torch and linkweave: to import them takes longer than most examples."""
    out, err = path.with_suffix(".out"), path.with_suffix(".err")
    err.touch()
    server = get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo", "linkweave.collectives.training", __name__])
    process = server.Process(target=_as_main, args=(path, out, err))
    process.start()
    process.join(280)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{path} runs for more than 280 s:\n{err.read_text()}")
    return subprocess.CompletedProcess([], process.exitcode, out.read_text(), err.read_text())


def _as_main(path: Path, out: Path, err: Path) -> None:
    for number, file in ((1, out), (2, err)):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), number)
    sys.argv = [str(path)]
    os.chdir(path.parent)
    runpy.run_path(str(path), run_name="__main__")
    atexit._run_exitfuncs()  # as Python does at its end; multiprocessing's processes do not
