"""What `topology.load` takes a name, a file or a text for, and what it says of others."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from linkweave.topology import Topology, TopologyError, load
from tests.null.fixtures import DUMPS, GRAPH_FILE, NCCL_TESTS, P2P, SMI, coloured

JSON = load("dgx1-v100").to_json()
CLUSTER = "# ours\n2 x dgx-a100\n  nics=rail # one each\n"
READ = {
    "smi": (SMI["h100"], load(SMI["h100"])),
    "coloured smi": (coloured(SMI["dgx1-v100"]), load(SMI["dgx1-v100"])),
    "xml": (DUMPS["a100x4"], load(DUMPS["a100x4"])),
    "json": (JSON, load("dgx1-v100")),
    "cluster": (CLUSTER, load("2 x dgx-a100 nics=rail")),
}
REFUSED = {
    "nccl-tests": (NCCL_TESTS, r"is a benchmark's log \(nccl-tests\), not a topology"),
    "nccl-tests and GPUs": ("GPU0 Tesla V100\n" + NCCL_TESTS, "is a benchmark's log .nccl-tests."),
    "p2p": (P2P, r"is measured figures \(p2pBandwidthLatencyTest\).* --measured FILE"),
    "graph": (GRAPH_FILE, "is an NCCL graph file .* not a topology"),
    "prose": ("Some notes\nof mine\n", "neither the output of nvidia-smi topo -m, nor an NCCL"),
    "empty": ("", "neither the output of nvidia-smi topo -m"),
    "blank": (" \n\t\n", "neither the output of nvidia-smi topo -m"),
    "links": ('{"format": "linkweave-links", "version": 1}', "linkweave-topology"),
    "numbers": ("1 2 3\n4 5 6\n", "neither the output of nvidia-smi topo -m"),
    "a list": ("[1, 2]\n", "neither the output of nvidia-smi topo -m"),
    "broken json": ('{"format"', "line 1 column 10"),
    "broken xml": ("<system", "line 1 column 1: not well-formed XML: unclosed token"),
    "cut smi": (SMI["cloud"][:90], "ends"),
    "zeros": ("\0" * 5000, ""),
}


def same(made: Topology, wanted: Topology) -> bool:
    return (made.gpus, made.links, made.devices) == (wanted.gpus, wanted.links, wanted.devices)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(
    "name", ["node7", "two words.txt", "node.v2.topo", "dgx2", "ünï", ".hidden"]
)
def test_a_file_is_read_and_gives_its_name(kind: str, name: str, tmp_path: Path) -> None:
    text, wanted = READ[kind]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    for spec in (path, str(path)):
        assert same(load(spec), wanted)
        if kind != "json":  # which tells its own
            assert load(spec).name == path.stem
    assert kind != "json" or load(path).name == "dgx1-v100"


@pytest.mark.parametrize("kind", READ)
def test_a_text_is_read_as_its_file_is(kind: str) -> None:
    text, wanted = READ[kind]
    for before in ("", "\n", "  \n\t", "\ufeff"):  # the last is a byte order mark
        assert same(load(before + text), wanted)
    assert same(load(text.replace("\n", "\r\n")), wanted)


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_in_what_windows_writes(kind: str, encoding: str, tmp_path: Path) -> None:
    text, wanted = READ[kind]
    path = tmp_path / "machine"
    path.write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert same(load(path), wanted)


def test_names_come_before_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dgx2", "2 x dgx2"):
        (tmp_path / name).write_text(SMI["cloud"])
    assert load("dgx2").switches == ("nvswitch",)
    assert load("./dgx2").gpus == (0, 1, 2, 3)
    assert load(Path("dgx2").absolute()).gpus == (0, 1, 2, 3)
    assert len(load("2 x dgx2").gpus) == 4  # but files before clusters


@pytest.mark.parametrize("kind", REFUSED)
def test_another_file_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    text, words = REFUSED[kind]
    path = tmp_path / "result.log"
    path.write_text(text)
    with pytest.raises(TopologyError, match=rf"^{re.escape(str(path))}.*{words}"):
        load(path)


@pytest.mark.parametrize("kind", ["nccl-tests", "nccl-tests and GPUs", "p2p", "graph"])
def test_another_text_is_refused_by_its_kind(kind: str) -> None:
    text, words = REFUSED[kind]
    with pytest.raises(TopologyError, match=rf"^(this text|NCCL topology) {words}"):
        load(text)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.xml", tmp_path):
        with pytest.raises(TopologyError, match=re.escape(str(path))):
            load(path)
        with pytest.raises(TopologyError, match=re.escape(f"measured figures: no file '{path}'")):
            load("mesh-4", measured=path)


@pytest.mark.parametrize(
    "data", [b"\x7fELF\x02\x01\xff", b"\xff\xfe\x00", b"\x1f\x8b\x08\x00", "é".encode("latin-1"),
             b"\xfe\xff\xd8\x00\xd8\x00", bytes(range(256))],
)  # fmt: skip
def test_a_binary_file_is_no_text(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "machine"
    path.write_bytes(data)
    with pytest.raises(TopologyError, match=rf"^{re.escape(str(path))}: not a text file"):
        load(path)
    with pytest.raises(TopologyError, match=rf"^{re.escape(str(path))}: not a text file"):
        load("mesh-4", measured=path)


def test_a_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.txt"
    path.write_text(SMI["h100"])
    monkeypatch.setattr("linkweave.topology.loading.LARGEST", path.stat().st_size)
    assert load(path).gpus == tuple(range(8))
    monkeypatch.setattr("linkweave.topology.loading.LARGEST", path.stat().st_size - 1)
    with pytest.raises(TopologyError, match=rf"^{re.escape(str(path))}: larger than"):
        load(path)


def test_an_endless_file_is_no_regular_one() -> None:
    start = time.process_time()
    with pytest.raises(TopologyError, match="/dev/zero"):
        load("/dev/zero")
    assert time.process_time() - start < 5


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("machine")
        with pytest.raises(TopologyError, match="unknown machine 'machine'"):
            load("machine")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SMI["cloud"])
    path.chmod(0)
    with pytest.raises(TopologyError, match=rf"{re.escape(str(path))}: Permission denied"):
        load(path)


@pytest.mark.parametrize("spec", [b"dgx2", b"/tmp", None, 3, ["dgx2"]])
def test_what_is_no_text_nor_path_is_refused(spec: object) -> None:
    with pytest.raises((TopologyError, TypeError), match=r"named by text|os\.PathLike"):
        load(spec)  # type: ignore[arg-type]


# ---- hostile texts -----------------------------------------------------------------------------


MESH = load("mesh-2").to_json()
DIGITS = "9" * 5000
HOSTILE_JSON = {
    "deep": '{"a": ' + "[" * 10**5,
    "deep and closed": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}",
    "a long number": MESH.replace("25000000000", DIGITS),
    "a long version": MESH.replace('"version": 1', f'"version": {DIGITS}'),
    "not a number": MESH.replace("25000000000", "NaN"),
    "a list for a kind": MESH.replace('"nvlink"', "[]"),
    "a list for a device": MESH.replace('"devices": []', '"devices": [{"gpu": []}]'),
    "a number for a device": MESH.replace('"devices": []', '"devices": [3]'),
    "null for a forwarder": MESH.replace('"forwarders": []', '"forwarders": [null]'),
}


@pytest.mark.parametrize(
    "name", ["mesh-{}", "pcie-{}", "2 x mesh-{}", "{} x dgx2", "2 x dgx2 leaf={}"]
)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(TopologyError):
        load(name.format(DIGITS))


@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_hostile_json_is_refused(kind: str) -> None:
    assert HOSTILE_JSON[kind] != MESH
    with pytest.raises(TopologyError):
        load(HOSTILE_JSON[kind])


@pytest.mark.parametrize("key", ["bus_id", "uuid", "model", "sm"])
def test_a_device_of_json_has_texts_and_a_number(key: str) -> None:
    data = json.loads(MESH)
    data["devices"] = [{"gpu": 0, key: [1]}]
    with pytest.raises(TopologyError, match=r"devices\[0\]"):
        load(json.dumps(data))
