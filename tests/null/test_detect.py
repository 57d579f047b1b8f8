"""This machine's GPUs, asked of a driver that is only played: shuffled, hidden, broken, absent."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from linkweave.topology import Topology, TopologyError, bound, load
from linkweave.topology.readers import detect
from tests.null.fixtures import Driver

find_machine: Callable[..., Topology] = detect.detect
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _nothing_of_the_machine_beneath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_numa", lambda bus: "")
    monkeypatch.setattr(detect, "_hidden_devices", lambda: "")


def found_by(driver: Driver, **environ: str) -> Topology:
    topo = find_machine(environ, driver)
    assert (driver.started, driver.shut) == (1, 1)
    return topo


def cells(topology: Topology, numbers: Sequence[int]) -> list[list[str]]:
    return [[topology.cell(a, b) for b in numbers] for a in numbers]


# ---- what is found ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_dgx1_in_any_order_of_its_buses(seed: int) -> None:
    dgx1 = load("dgx1-v100")
    order = random.Random(seed).sample(range(8), 8)
    topo = found_by(Driver(dgx1, order))
    assert (topo.name, topo.gpus) == ("auto", tuple(range(8)))
    assert topo.isomorphic_to(dgx1) is not None
    assert cells(topo, range(8)) == cells(dgx1, order)  # PCIe beneath included
    assert bound(topo).links == bound(dgx1).links
    assert [d.gpu for d in topo.devices] == list(range(8))
    assert topo.devices[3].uuid == Driver(dgx1).uuid(order[3])
    assert {(d.model, d.sm) for d in topo.devices} == {("Tesla V100-SXM2-16GB", 70)}


def test_names_of_gpus_find_them() -> None:
    driver = Driver(load("dgx1-v100"), [5, 2, 7, 0, 1, 3, 4, 6])
    topo = found_by(driver)
    assert [d.bus_id for d in topo.devices][:3] == ["0000:06:00.0", "0000:17:00.0", "0000:28:00.0"]
    for n, gpu in enumerate(driver.order):
        assert topo.find(uuid=driver.uuid(gpu)) == n
        assert topo.find(bus_id=topo.devices[n].bus_id.upper()) == n
    with pytest.raises(TopologyError, match="auto has no GPU GPU-x; it knows GPU-f05-11, GPU-c02"):
        topo.find(uuid="GPU-x")
    with pytest.raises(TopologyError, match="auto has no GPU 0000:99:00"):
        topo.find(bus_id="0000:99:00.0")
    with pytest.raises(TopologyError, match="none by UUID or bus id"):
        load("mesh-2").find(uuid="GPU-f05-11")
    assert load(topo.to_json()) == topo
    assert topo.subset([6, 2]).find(uuid=driver.uuid(driver.order[2])) == 2


@pytest.mark.parametrize(
    ("name", "sm", "model"),
    [("dgx2", (7, 0), "Tesla V100-SXM3-32GB"), ("dgx-a100", (8, 0), "NVIDIA A100-SXM4-40GB"),
     ("dgx-h100", (9, 0), "NVIDIA H100 80GB HBM3")],
)  # fmt: skip
def test_nvswitch(name: str, sm: tuple[int, int], model: str) -> None:
    machine = load(name)
    beneath = load(f"pcie-{len(machine.gpus)}").links
    whole = replace(machine, links=(*machine.links, *beneath))
    topo = found_by(Driver(whole, sm=sm, model=model))
    assert topo.isomorphic_to(machine) is not None
    assert topo.fabric[0].bandwidth == 25 * 10**9
    assert cells(topo, topo.gpus) == cells(machine, machine.gpus)


def test_gpus_without_nvlink() -> None:
    topo = found_by(Driver(load("pcie-8"), sm=(7, 5), model="Tesla T4"))
    assert {k.kind for k in topo.links} == {"pcie", "host"}
    assert cells(topo, range(8)) == cells(load("pcie-8"), range(8))
    assert found_by(Driver(load("pcie-1"))).gpus == (0,)


def test_nvlinks_have_the_speed_of_their_model() -> None:
    p100 = found_by(Driver(load("dgx1-p100"), sm=(6, 0), model="Tesla P100-SXM2-16GB"))
    assert {k.bandwidth for k in p100.fabric} == {20 * 10**9}
    assert p100.isomorphic_to(load("dgx1-p100")) is not None
    assert found_by(Driver(load("dgx1-p100"))).isomorphic_to(p100) is None


def test_links_that_are_down_do_not_count() -> None:
    driver = Driver(load("dgx1-v100"))
    zero = driver.remotes[0].index(3)
    three = driver.remotes[3].index(0)
    driver.off = {(0, zero), (3, three)}
    topo = found_by(driver)
    assert topo.by_ends[0, 3].count == topo.by_ends[3, 0].count == 1
    assert sum(k.count for k in topo.fabric) == 2 * 23


def test_nodes_of_memory_name_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(load("dgx1-v100"))
    near = {f"0000:{6 + 0x11 * g:02x}:00.0": str(1 - g // 4) for g in range(8)}
    monkeypatch.setattr(detect, "_numa", near.__getitem__)
    topo = found_by(driver)
    assert topo.ways[0, 7][2:4] == ("cpu1", "cpu0")


# ---- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------

VISIBLE = [  # and which of the driver's devices CUDA numbers 0, 1, ...
    ("0,1,2,3,4,5,6,7", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("3", [3]),
    ("6,2,5", [6, 2, 5]),
    (" 6 , 2 ", [6, 2]),
    ("GPU-c02-11,GPU-a00-11", [2, 0]),
    ("GPU-h", [7]),
    ("GPU-b01,4", [1, 4]),
    ("1,2,9,3", [1, 2]),
    ("1,-1,3", [1]),
    ("0,3,GPU-zz,1", [0, 3]),
    ("2,nonsense", [2]),
]


@pytest.mark.parametrize(("listed", "expected"), VISIBLE)
def test_cuda_chooses_and_orders(listed: str, expected: list[int]) -> None:
    driver, dgx1 = Driver(load("dgx1-v100")), load("dgx1-v100")
    topo = found_by(driver, CUDA_VISIBLE_DEVICES=listed)
    assert topo.gpus == tuple(range(len(expected)))
    assert [d.uuid for d in topo.devices] == [driver.uuid(g) for g in expected]
    assert cells(topo, topo.gpus) == cells(dgx1.subset(expected), expected)
    if len(expected) < 8:
        said = f"CUDA_VISIBLE_DEVICES={listed} shows {len(expected)} of 8 GPUs"
        assert said in topo.assumptions
    bad = next((w for w in ("9", "-1", "GPU-zz", "nonsense") if w in listed.split(",")), None)
    assert any("hides it and all after it" in a for a in topo.assumptions) == (bad is not None)
    if bad:
        assert any(repr(bad) in a for a in topo.assumptions)


@pytest.mark.parametrize("listed", ["", "-1", "NoDevFiles", "8", "GPU-", "MIG-GPU-a00-11/0/0"])
def test_cuda_hides_all(listed: str) -> None:
    topo = found_by(Driver(load("dgx1-v100")), CUDA_VISIBLE_DEVICES=listed)
    assert topo.links == load(f"cpu-{CORES}").links
    assert f"CUDA_VISIBLE_DEVICES={listed}" in topo.assumptions[-1]


def test_several_models_are_told() -> None:
    driver = Driver(load("pcie-2"))
    names = {0: "Tesla P4", 1: "Tesla V100-PCIE-16GB"}
    driver.nvmlDeviceGetName = names.__getitem__  # type: ignore[method-assign,assignment]
    assert any("fastest first" in a for a in found_by(driver).assumptions)
    driver.started = driver.shut = 0
    by_bus = found_by(driver, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert not any("fastest first" in a for a in by_bus.assumptions)


# ---- what a container hides, and what the driver says of it ----------------------------------


@pytest.mark.parametrize("bus", ["", "\0\0", "fffffff:ffff:ff.0", "00000000:00:00.0", b"\0"])
def test_hidden_gpus_are_told(bus: str | bytes) -> None:
    dgx1 = load("dgx1-v100")
    driver = Driver(dgx1, hidden=(4, 5, 6, 7))
    driver.nowhere = bus
    topo = found_by(driver)
    assert cells(topo, range(4)) == cells(dgx1, range(4))
    told = [a for a in topo.assumptions if "hidden from this process" in a]
    for gpu, (n, words) in enumerate(zip((2, 2, 1, 1), told, strict=True)):  # to its twin
        assert words.startswith(str(n)) and f"of GPU {gpu} lead" in words


def test_gpus_that_cuda_hides_are_told_by_bus() -> None:
    topo = found_by(Driver(load("dgx1-v100")), CUDA_VISIBLE_DEVICES="0,1")
    told = [a for a in topo.assumptions if "hidden from this process" in a]
    assert any("GPU 0" in a and "0000:4a:00.0" in a for a in told)  # GPU 4's
    assert len(told) == 3 + 3  # 0 leads to 2, 3 and 4; 1 to 2, 3 and 5


def test_mig_is_told() -> None:
    driver = Driver(load("pcie-3"), sm=(8, 0), model="NVIDIA A100-PCIE-40GB")
    driver.mig = {0: (0, 0), 1: (1, 1), 2: (1, 0)}
    told = [a for a in found_by(driver).assumptions if "MIG" in a]
    assert told == [
        "GPU 1 is in MIG mode: no peer access, no NVLink",
        "GPU 2 is in MIG mode: no peer access, no NVLink",
    ]


@pytest.mark.parametrize("listed", ["MIG-aa-1", "MIG-GPU-c02-11/1/0,MIG-aa-1", "MIG-aa-1,0"])
def test_cuda_shows_one_mig_instance(listed: str) -> None:
    driver = Driver(load("pcie-3"), sm=(8, 0), model="NVIDIA A100-PCIE-40GB")
    driver.mig, driver.instances = {2: (1, 1)}, {"MIG-aa-1": 2, "MIG-GPU-c02-11/1/0": 2}
    found = found_by(driver, CUDA_VISIBLE_DEVICES=listed)
    assert [d.uuid for d in found.devices] == [driver.uuid(2)]
    assert f"CUDA_VISIBLE_DEVICES={listed} shows 1 of 3 GPUs" in found.assumptions


@pytest.mark.parametrize(
    ("machine", "down", "other", "words"),
    [("dgx1-v100", 0, 3, r"NVLinks? from GPU 0 to GPU 3, and of [12] back: is a"),
     ("dgx1-v100", 3, 0, r"NVLinks? from GPU 0 to GPU 3, and of [12] back: is a"),
     ("dgx1-p100", 0, 4, "GPU"), ("dgx1-p100", 4, 0, "GPU")],
)  # fmt: skip
def test_a_link_that_only_one_end_tells_is_refused(
    machine: str, down: int, other: int, words: str
) -> None:
    driver = Driver(load(machine))
    driver.off = {(down, driver.remotes[down].index(other))}
    with pytest.raises(TopologyError, match=words):
        find_machine({}, driver)
    assert driver.shut == 1


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetMigMode"]
)
def test_an_old_driver_does_not_know_what_is_remote_nor_mig(function: str) -> None:
    driver = Driver(load("dgx1-v100"), **{function: Driver.NVML_ERROR_FUNCTION_NOT_FOUND})
    assert found_by(driver).isomorphic_to(load("dgx1-v100")) is not None


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
                 "nvmlDeviceGetPciInfo"]
)  # fmt: skip
def test_a_driver_that_fails_is_shut_down(function: str) -> None:
    driver = Driver(load("dgx1-v100"), **{function: 999})
    with pytest.raises(TopologyError, match=r"the GPU driver failed .*: error 999"):
        find_machine({}, driver)
    assert (driver.started, driver.shut) == (1, 1)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemoteDeviceType",
                 "nvmlDeviceGetNvLinkRemotePciInfo"]
)  # fmt: skip
def test_nvlinks_that_the_driver_does_not_tell_of_are_noted(function: str) -> None:
    """With any error, as in a virtual machine: the GPUs can be used."""
    found = found_by(Driver(load("dgx1-v100"), **{function: 999}))
    assert found.assumptions[0] == (
        "the driver does not tell of NVLinks (error 999); taken as none"
    )
    assert len(found.gpus) == 8 and not [k for k in found.links if k.kind == "nvlink"]


# ---- no driver -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [9, 12])
def test_without_a_driver_the_cpus(value: int) -> None:
    driver = Driver(load("mesh-1"), nvmlInit=value)
    topo = find_machine({}, driver)
    assert topo == load(f"cpu-{CORES}")
    assert driver.shut == 0  # never begun


@pytest.mark.parametrize("device", ["nvidia0", "nvidiactl"])
@pytest.mark.parametrize("value", [9, 12, 999])
def test_a_driver_that_should_be_there(
    value: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    there = os.path.exists
    monkeypatch.setattr(
        os.path, "exists",
        lambda p: p == f"/dev/{device}" if str(p).startswith("/dev/nvidia") else there(p),
    )  # fmt: skip
    driver = Driver(load("mesh-1"), nvmlInit=value)
    with pytest.raises(TopologyError, match=f"does not answer: .*there is /dev/{device}: is the"):
        find_machine({}, driver)


def test_a_driver_that_does_not_answer() -> None:
    """Of another version than its library."""
    with pytest.raises(TopologyError, match=r"the GPU driver does not answer: error 18$"):
        find_machine({}, Driver(load("mesh-1"), nvmlInit=18))


def test_a_driver_without_gpus() -> None:
    topo = found_by(Driver(load("pcie-2"), hidden=(0, 1)))
    assert topo.links == load(f"cpu-{CORES}").links
    assert topo.assumptions[-1] == "the driver has no GPU"


def test_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    topo = find_machine({})
    assert topo.links == load(f"cpu-{CORES}").links
    assert "nvidia-ml-py is not installed" in topo.assumptions[-1]


def test_auto_asks_the_installed_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(load("dgx1-v100"))
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    topo: Topology = load("auto")
    assert [d.uuid for d in topo.devices] == ["GPU-b01-11", "GPU-a00-11"]
    assert len(find_machine({}).gpus) == 8


def test_distances_that_the_driver_does_not_tell_are_noted() -> None:
    """As under WSL 2, and with virtual GPUs."""
    for error in (3, 999):
        found = found_by(Driver(load("pcie-4"), nvmlDeviceGetTopologyCommonAncestor=error))
        assert len(found.gpus) == 4
        assert found.assumptions[0].startswith("the driver does not tell how far apart GPUs are")


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType"]
)
def test_nvlinks_whose_far_end_is_not_told_are_noted(function: str) -> None:
    found = found_by(Driver(load("dgx1-v100"), **{function: Driver.NVML_ERROR_NOT_SUPPORTED}))
    assert not [k for k in found.links if k.kind == "nvlink"]
    told = "6 NVLinks of GPU 0 lead to what the driver does not tell, which is hidden"
    assert any(note.startswith(told) for note in found.assumptions)
