"""What Triton needs of the host."""

from __future__ import annotations

import importlib


def check_triton() -> None:
    """Raise RuntimeError if this process cannot launch Triton's kernels.

    Triton compiles C against Python's headers, before the first launch and in some versions for
    each kernel, unless its cache has the result; images of containers often lack a compiler. This
    compiles what all launches need.
    """
    try:
        _ = importlib.import_module("triton").runtime.driver.active
    except Exception as error:  # of subprocess, of the file system, or of Triton's own
        raise RuntimeError(
            f"Triton cannot launch kernels here: {error}. If it lacks a C compiler or Python's "
            "headers, install gcc and python3-dev"
        ) from error
