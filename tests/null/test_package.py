"""The wheel and the sdist: what is in them, what they say of themselves, and that they work."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, check=False, timeout=280,
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist, which is built from what git knows."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    files = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    with tarfile.open(clone / "files.tar", "w") as packed:
        for name in files:
            if (ROOT / name).exists() or (ROOT / name).is_symlink():
                packed.add(ROOT / name, name, recursive=False)
    with tarfile.open(clone / "files.tar") as packed:
        packed.extractall(clone, filter="fully_trusted")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(clone), cwd=out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_one_package_with_its_sources(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"linkweave", "linkweave-0.1.0.dist-info"}
    for wanted in (
        "kernels/plan/plan.cu", "collectives/overlap/models.json", "py.typed",
        "bench/results/network-4x2-1gbit.json", "topology/machines.py", "bench/command/cli.py",
    ):  # fmt: skip
        assert f"linkweave/{wanted}" in names
    assert not [name for name in names if name.split("/")[-1].startswith(("test_", "conftest"))]


def test_the_sdist_holds_what_a_build_needs(built: tuple[Path, Path]) -> None:
    names = tarfile.open(built[1]).getnames()
    for wanted in ("pyproject.toml", "README.md", "LICENSE"):
        assert f"linkweave-0.1.0/{wanted}" in names


def test_both_describe_themselves(built: tuple[Path, Path]) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built), cwd=ROOT)
    assert said.count("PASSED") == 2


@pytest.mark.parametrize("torch", [True, False])
def test_the_wheel_works(built: tuple[Path, Path], torch: bool, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
        "--target", str(target), str(built[0]), cwd=tmp_path)  # fmt: skip
    block = "class No:\n def find_spec(self, name, *_):\n  if name == 'torch': raise ImportError\n"
    code = (
        ("" if torch else f"import sys\n{block}sys.meta_path.insert(0, No())\n")
        + "import linkweave\nfrom linkweave import topology\n"
        "plan = linkweave.plan_allreduce(topology.load('dgx1-v100'), 1 << 16)\n"
        "print(linkweave.__file__, plan.algorithm)"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    assert said.startswith(f"{target}/linkweave/__init__.py ")


def test_the_shell_completes_commands() -> None:
    code = (
        "import sys; sys.argv = ['linkweave']; from linkweave.bench.command.cli import main; main()"
    )
    told = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(ROOT), COMP_CWORD="1",
               _LINKWEAVE_COMPLETE="complete_bash", COMP_WORDS="linkweave si")  # fmt: skip
    assert told.split() == ["simulate"]
