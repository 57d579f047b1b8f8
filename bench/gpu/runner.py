"""Runs the rows of `bench.gpu_suite`, each in a process of its own.

A CUDA error often ends the whole context, and a wrong kernel can hang or crash the process. The
parent therefore never uses CUDA: it forks a process for each row, and goes on when that process
has ended or exceeded its limit.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from linkweave.collectives.launch.processes import die_with

Result = dict[str, Any]

ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Set in each row's process: lazy loading synchronises the GPU, and streams must not alias."""

SLACK, START_S = 3.0, 20.0  # a row's limit is `SLACK` times its expected seconds, and `START_S`

GRACE_S = 3.0  # how long an ended process may take to disappear

END_S = 8.0
"""Kept free at the end of the budget, to kill the last row's processes and to write its result."""

STDERR = 8000  # characters that are kept: a traceback of many threads


class Failed(Exception):
    """A row's result is wrong."""


class LeftOut(Exception):
    """A row cannot run on this machine."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement.

    part: "core", or "ipc" for ranks in processes, which take turns on one GPU.
    seconds: expected duration, with the start of the process; about what an H200 took.
    measure: returns figures for JSON. Raises Failed or LeftOut. It need not free memory after an
        error, as its process ends.
    """

    name: str
    part: str
    seconds: float
    measure: Callable[[], Result]
    remedy: str = ""  # what to do if it fails

    @property
    def limit(self) -> float:
        return SLACK * self.seconds + START_S


def run(rows: Iterable[Row], deadline: float) -> Iterator[Result]:
    """Yield the result of each row; all end before `deadline`, a time of `time.monotonic`.

    A row that is expected to take longer than what is left is left out.
    """
    for row in rows:
        left = max(0.0, deadline - END_S - time.monotonic())
        if row.seconds > left:
            found = {"state": f"left out: {left:.0f} s are left"}
        else:
            found = in_process(row, min(row.limit, left))
        yield {"name": row.name, "expected_s": row.seconds, **found}


def in_process(row: Row, limit: float) -> Result:
    """Run a row in a forked process; kill its process group after `limit` seconds.

    Returns `state`, `took_s`, `limit_s`, the figures, and the end of what it wrote to `stderr`.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        if not (pid := os.fork()):
            _child(row, result, log, limit, parent)
        try:
            _ended(pid, limit + GRACE_S)
        finally:
            with suppress(ProcessLookupError):  # before its child has made the group
                os.killpg(pid, signal.SIGKILL)
        took = time.monotonic() - start
        _ended(pid, GRACE_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
        found = _read(result, os.waitstatus_to_exitcode(status) if ended else None, limit, took)
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
    found |= {"took_s": round(took, 2), "limit_s": round(limit, 2)}
    return {**found, "stderr": text[-STDERR:]} if text else found


def _ended(pid: int, seconds: float) -> bool:
    """Wait for the end of a child process, which stays a zombie; whether it came in time."""
    until = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _read(result: IO[bytes], code: int | None, limit: float, took: float) -> Result:
    """What a process has written; or how it ended without a result."""
    result.seek(0)
    if text := result.read():
        found: Result = json.loads(text)
        return found
    if took >= limit:
        how = f"no result after {limit:.0f} s"
    elif code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    else:
        how = f"exited with status {code} and no result"
    return {"state": f"failed: {how}"}


def _child(row: Row, result: IO[bytes], log: IO[bytes], limit: float, parent: int) -> NoReturn:
    code = 1
    try:
        die_with(parent)  # which may be killed in a way that it does not notice
        os.setpgid(0, 0)
        os.environ.update(ENVIRONMENT)
        for fd in (1, 2):
            os.dup2(log.fileno(), fd)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(log)
        faulthandler.dump_traceback_later(limit, exit=True, file=log)
        os.write(result.fileno(), _measured(row))
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # a broken context can hang at exit


def _measured(row: Row) -> bytes:
    try:
        return json.dumps({"state": "ok", **row.measure()}, default=float).encode()
    except LeftOut as error:
        state = f"left out: {error}"
    except BaseException as error:
        traceback.print_exc()
        state = f"failed: {type(error).__name__}: {error}"
    return json.dumps({"state": state}).encode()


def write(path: Path, found: Result) -> None:
    """Write JSON at once: a reader, or an interrupt, never meets half a file. A device or a pipe
    is not replaced but written to."""
    text, there = json.dumps(found, indent=1) + "\n", path.resolve()
    if there.exists() and not there.is_file():
        there.write_text(text)
        return
    made = there.with_name(f".{there.name}")
    try:
        made.write_text(text)
        os.replace(made, there)
    except OSError as error:
        made.unlink(missing_ok=True)
        if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        there.write_text(text)  # it is mounted, or its folder cannot be written to


def summary(rows: Iterable[Result]) -> str:
    """A table: how each row ended, and its seconds beside those expected."""
    lines = [f"{'took':>7}{'expected':>10}  row"]
    for row in rows:
        took = f"{row['took_s']:7.1f}" if "took_s" in row else f"{'-':>7}"
        state = "" if row["state"] == "ok" else f": {row['state']}"
        lines.append(f"{took}{row['expected_s']:10g}  {row['name']}{state}")
    return "\n".join(lines)
