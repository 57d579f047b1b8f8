"""The `linkweave` command as tests run it: within the test's process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from unittest import mock

from linkweave.bench import cli

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
        cwd=cwd, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
