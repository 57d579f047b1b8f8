"""Everything that one GPU can show: `python -m linkweave.bench.gpu_suite --budget 480`.

All ranks run on the one GPU, so links are the GPU's own memory; rows called "emulated links" hold
each send to a stated rate. Most rows launch all ranks of a plan at once ("virtual ranks"); the rows
of threads and processes go through `collectives.spawn`. Rows come in the order of importance, each
is checked before it is timed, and the JSON is written after every row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linkweave.bench.gpu_api import Arrays, CupyArrays, TorchTensors, with_cuda
from linkweave.bench.gpu_rows import Row, Suite
from linkweave.bench.timing import machine


def run(suite: Suite, budget: float, only: str, out: Path | None) -> list[Row]:
    """The rows whose names contain `only`, until the budget (s) is spent."""
    start, rows = time.monotonic(), []
    # asked before anything can break the GPU's context
    of = {"machine": machine(), "device": suite.device.describe()} if out else {}
    for name, measure in suite.rows():
        if only not in name:
            continue
        if time.monotonic() - start > budget:
            rows.append({"name": name, "state": "left out: the budget was spent"})
        else:
            try:
                rows.append({"name": name, "state": "ok", **measure()})
            except Exception as error:  # the other rows are wanted all the same
                rows.append({"name": name, "state": f"failed: {type(error).__name__}: {error}"})
        print(json.dumps(rows[-1]), flush=True)
        if out:
            text = {**of, "rows": rows}
            out.write_text(json.dumps(text, indent=1) + "\n")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m linkweave.bench.gpu_suite", description=__doc__
    )
    parser.add_argument("--budget", type=float, default=480, help="seconds (default 480)")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--out", type=Path, help="write JSON here, after every row")
    given = parser.parse_args(arguments)
    try:
        from linkweave.kernels.gpu.device import CudaDevice

        device = CudaDevice()
    except Exception as error:  # CuPy's own kinds, where it can be imported at all
        print(f"no GPU to run on: {error}", file=sys.stderr)
        return 2
    libraries: list[Arrays] = [CupyArrays()]
    if with_cuda():
        libraries.append(TorchTensors())
    else:
        print("torch is not here, or has no CUDA: its rows are left out", file=sys.stderr)
    rows = run(Suite(device, libraries=libraries), given.budget, given.only, given.out)
    return int(any(row["state"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
