"""NCCL's topology files: the machine in them, what is refused and how fast, and writing them."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

from linkweave.topology import GpuId, Link, Topology, TopologyError, bound, load
from linkweave.topology.readers.nccl_write import to_nccl_xml
from tests.null.fixtures import (
    DUMPS,
    MACHINES,
    SMI,
    VENDOR_FILES,
    cpu,
    drawn,
    gpu,
    listed,
    net,
    nvlink,
    nvlinks_of,
    pci,
    ports_of,
    system,
    tree_of,
)

GB = 10**9
LONGEST = 2.0  # seconds to refuse a hostile text
WRITABLE = [
    "dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "dgx-h100",
    *(f"{family}-{n}" for family in ("mesh", "ring") for n in (1, 2, 3, 8)),
    "mesh-40", "pcie-5", "pcie-8", "pcie-17",
]  # fmt: skip
NVSWITCH, CPU = "0x068000", "0x068001"
HIDDEN = "fffffff:ffff:ff"


def bus(g: int) -> str:
    return f"0000:{g + 1:02x}:00.0"


def slot(g: int, inside: str = "", sm: int = 80, speed: str = "16 GT/s") -> str:
    """A GPU straight under a CPU."""
    return pci(bus(g), "0x030200", gpu(g, sm, inside), speed)


def rates(topology: Topology, kind: str) -> dict[tuple[int | str, int | str], float]:
    """GB/s of one link, by its ends."""
    return {(k.src, k.dst): k.bandwidth / GB for k in topology.links if k.kind == kind}


# ---- real machines -------------------------------------------------------------------------------


def test_the_dump_of_a_dgx1() -> None:
    made = load(DUMPS["dgx1-v100"])
    assert made.gpus == tuple(range(8))
    assert nvlinks_of(made) == MACHINES["dgx1-v100"].nvlinks
    switches = " | ".join(f"switch{s}: {2 * s} {2 * s + 1}" for s in range(4))
    assert tree_of(made) == drawn(
        f"{switches} | cpu0: switch0 switch1 cpu1 | cpu1: switch2 switch3"
    ) | {
        ends
        for nic in ("enp1s0f0", "lxcbr0", "br-d774142ed332")
        for ends in ((nic, "cpu0", "network"), ("cpu0", nic, "network"))
    }
    assert set(rates(made, "nvlink").values()) == {25}
    assert set(rates(made, "pcie").values()) == set(rates(made, "host").values()) == {12}
    assert rates(made, "socket") == {("cpu0", "cpu1"): 6, ("cpu1", "cpu0"): 6}
    assert rates(made, "network")["enp1s0f0", "cpu0"] == 0.125
    assert rates(made, "network")["cpu0", "lxcbr0"] == 1.25
    assert made.assumptions == ()
    buses = ["06", "07", "0a", "0b", "85", "86", "89", "8a"]
    assert made.devices == tuple(GpuId(g, f"0000:{b}:00.0", sm=70) for g, b in enumerate(buses))
    assert made.find(bus_id="0000:0A:00.0") == 2


def test_numbers_are_the_devices_not_the_order_of_the_file() -> None:
    text = DUMPS["a100x4"]
    made = load(text)
    assert re.findall(r'<gpu dev="(\d)', text) == ["0", "3", "2", "1"]
    assert made.gpus == (0, 1, 2, 3)
    assert nvlinks_of(made) == dict.fromkeys(MACHINES["quad"].nvlinks, 4)
    ends = [ends for ends in rates(made, "host") if isinstance(ends[0], int)]
    assert ends == [(0, "cpu3"), (1, "cpu2"), (2, "cpu1"), (3, "cpu0")]
    assert [(d.gpu, d.bus_id[5:7], d.sm) for d in made.devices] == [
        (0, "03", 80), (1, "41", 80), (2, "82", 80), (3, "c1", 80)
    ]  # fmt: skip
    assert set(rates(made, "host").values()) == {24}
    assert rates(made, "network")["cxi2", "cpu2"] == 24  # 200 Gb/s, but PCIe 4 has 24 GB/s
    assert len(rates(made, "socket")) == 12
    assert set(rates(made, "socket").values()) == {16}
    assert bound(made).links == 8


def test_a_dump_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "node.topo.xml"
    path.write_text('<?xml version="1.0" encoding="iso-8859-1"?>\n' + DUMPS["a100x4"])
    made = load(path)
    assert made.name == "node.topo"
    assert made.links == load(DUMPS["a100x4"]).links


@pytest.mark.parametrize("name", VENDOR_FILES)
def test_a_vendors_file_has_no_gpus(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.xml"
    path.write_text(VENDOR_FILES[name])
    with pytest.raises(TopologyError, match="no <gpu> elements: it has 8 slots for GPUs") as told:
        load(path)
    assert str(path) in str(told.value) and "NCCL_TOPO_DUMP_FILE" in str(told.value)


# ---- made up machines ----------------------------------------------------------------------------


def test_several_nvswitches_are_drawn_as_one() -> None:
    planes = "".join(nvlink(f"0000:c{i}:00.0", n, NVSWITCH) for i, n in enumerate((5, 5, 4, 4)))
    made = load(system(cpu(0, "".join(slot(g, planes, 90, "32 GT/s") for g in range(8)))))
    assert ports_of(made) == dict.fromkeys(range(8), 18)
    assert nvlinks_of(made) == {}
    assert made.isomorphic_to(load("dgx-h100")) is not None
    assert set(rates(made, "host").values()) == {48}
    assert bound(made).links == Fraction(8 * 18, 14)


def test_a_hidden_switch_is_a_switch() -> None:
    made = load(system(cpu(0, "".join(slot(g, nvlink(HIDDEN, 12, NVSWITCH)) for g in range(4)))))
    assert ports_of(made) == dict.fromkeys(range(4), 12)


@pytest.mark.parametrize(("sm", "each"), [(60, 20), (70, 25), (80, 25), (86, 14.0625), (90, 25),
                                          (100, 50), (120, 50), (75, 25)])  # fmt: skip
def test_nvlinks_are_as_fast_as_the_gpus_are(sm: int, each: float) -> None:
    pair = slot(0, nvlink(bus(1), 2), sm) + slot(1, nvlink(bus(0), 2), sm)
    assert rates(load(system(cpu(0, pair))), "nvlink") == {(0, 1): each, (1, 0): each}


def test_two_generations_meet_at_the_slower() -> None:
    pair = slot(0, nvlink(bus(1), 2), 60) + slot(1, nvlink(bus(0), 2), 70)
    assert rates(load(system(cpu(0, pair))), "nvlink") == {(0, 1): 20, (1, 0): 20}


def test_nvlinks_of_one_pair_add_up_and_targets_in_capitals_are_found() -> None:
    one = pci("0000:AB:00.0", "0x030200", gpu(0, 70, nvlink("0000:0C:00.0", 1)))
    other = pci("0000:0C:00.0", "0x030200", gpu(1, 70, nvlink("0000:ab:00.0", 1)))
    assert nvlinks_of(load(system(cpu(0, one + other)))) == {(0, 1): 1}
    pair = slot(0, nvlink(bus(1), 2) + nvlink(bus(1), 1)) + slot(1, nvlink(bus(0), 3))
    assert nvlinks_of(load(system(cpu(0, pair)))) == {(0, 1): 3}


def test_nvlinks_to_a_cpu() -> None:
    power = 'arch="ppc64" vendor="" familyid="0" modelid="0"'
    inside = [slot(g, nvlink("0004:00:00.0", 3, CPU), 70) for g in range(4)]
    made = load(system(cpu(0, inside[0] + inside[1], power), cpu(8, inside[2] + inside[3], power)))
    found = {(k.src, k.dst): (k.count, k.bandwidth) for k in made.links if k.kind == "nvlink"}
    near = {0: "cpu0", 1: "cpu0", 2: "cpu8", 3: "cpu8"}
    assert found == {ends: (3, 25 * GB) for g, at in near.items() for ends in ((g, at), (at, g))}
    assert rates(made, "socket") == {("cpu0", "cpu8"): 32, ("cpu8", "cpu0"): 32}
    assert rates(made, "host") == {}


def test_chip_to_chip_stands_for_pcie() -> None:
    chip = '<c2c bw="90000" count="5"/>\n'
    arm = 'arch="arm64" vendor="" familyid="0" modelid="0"'
    made = load(system(*(cpu(g, slot(g, chip, 90), arm) for g in range(2))))
    assert {k.count for k in made.links if k.kind == "host"} == {5}
    assert set(rates(made, "host").values()) == {90}
    assert rates(made, "socket")["cpu0", "cpu1"] == 6


@pytest.mark.parametrize(
    ("attributes", "each"),
    [
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"', 10),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"', 40),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1"', 16),
        ('arch="ppc64" vendor=""', 32),
        ('arch="arm64" vendor=""', 6),
    ],
)
def test_between_cpus_of_a_kind(attributes: str, each: int) -> None:
    made = load(system(cpu(0, slot(0), attributes), cpu(1, slot(1), attributes)))
    assert rates(made, "socket") == {("cpu0", "cpu1"): each, ("cpu1", "cpu0"): each}
    assert made.assumptions == ()


def test_an_unknown_cpu_is_said() -> None:
    made = load(system(cpu(0, slot(0), 'vendor="Acme"'), cpu(1, slot(1), 'vendor="Acme"')))
    assert rates(made, "socket")["cpu0", "cpu1"] == 10
    assert made.assumptions == ("unknown CPU 'Acme': 10 GB/s between CPUs",)


@pytest.mark.parametrize(
    ("speed", "width", "each"),
    [
        ("8 GT/s", 16, 12), ("8.0 GT/s PCIe", 16, 12), ("16.0 GT/s PCIe", 16, 24), ("8 GT/s", 8, 6),
        ("32.0 GT/s PCIe", 16, 48), ("2.5 GT/s", 16, 3), ("5 GT/s", 4, 1.5), ("64 GT/s", 16, 96),
        ("8 GT/s", 0, 12),
    ],
)  # fmt: skip
def test_pcie_speeds(speed: str, width: int, each: float) -> None:
    made = load(system(cpu(0, pci(bus(0), "0x030200", gpu(0, 70, ""), speed, width))))
    assert rates(made, "host") == {(0, "cpu0"): each, ("cpu0", 0): each}
    assert made.assumptions == ()


@pytest.mark.parametrize("speed", ["", "Unknown speed", "9 GT/s", "fast", "-8 GT/s", "8e400 GT/s"])
def test_a_missing_link_speed_is_assumed_and_said(speed: str) -> None:
    text = system(cpu(0, slot(0, speed=speed)))
    for some in (text, re.sub(r" link_\w+=\"[^\"]*\"", "", text)):
        made = load(some)
        assert rates(made, "host")[0, "cpu0"] == 12
        assert "is not known: 12 GB/s" in made.assumptions[0]


def test_nics_are_as_fast_as_they_say_and_their_port_allows() -> None:
    nics = "".join(net("same", i, mbps) for i, mbps in enumerate((10000, 400000, 0)))
    made = load(system(cpu(0, slot(0) + pci("0000:99:00.0", "0x020000", f"<nic>{nics}</nic>"))))
    out = {ends: rate for ends, rate in rates(made, "network").items() if ends[1] == "cpu0"}
    assert out == {("same", "cpu0"): 1.25, ("same.2", "cpu0"): 12, ("same.3", "cpu0"): 12}
    assert made.assumptions == ("speed of the NICs not told: 12 GB/s each",)


def test_bridges_without_devices_are_left_out() -> None:
    empty = pci("0000:50:00.0", "0x060400", pci("0000:51:00.0", "0x010802"))
    made = load(system(cpu(0, empty + slot(0) + empty)))
    assert tree_of(made) == drawn("cpu0: 0")


def test_a_target_that_is_not_there_is_said() -> None:
    made = load(system(cpu(0, slot(0, nvlink("0000:77:00.0", 2)))))
    assert nvlinks_of(made) == {} and made.gpus == (0,)
    assert made.assumptions == (
        "GPU 0 has NVLinks to 0000:77:00.0, which is not in the file: left out",
    )


# ---- what is refused -----------------------------------------------------------------------------


def two(first: str, second: str) -> str:
    return system(cpu(0, slot(0, first) + slot(1, second)))


BAD: list[tuple[str, str]] = [
    (two(nvlink(bus(1), 2), nvlink(bus(0), 3)),
     "line 5: <nvlink> joins GPU 0 to GPU 1 by 2 NVLinks, but back there are 3"),
    (two(nvlink(bus(1), 2), ""), "joins GPU 0 to GPU 1 by 2 NVLinks, but back there are 0"),
    (two("", nvlink(bus(0), 2)), "joins GPU 1 to GPU 0 by 2 NVLinks, but back there are 0"),
    (two(nvlink(bus(0), 2), ""), "line 5: <nvlink> joins GPU 0 to itself"),
    (two(nvlink(bus(1), 0), nvlink(bus(0), 0)), "line 5: <nvlink> has count 0"),
    (two(nvlink(bus(1), -1), nvlink(bus(0), -1)), "line 5: <nvlink> has count -1"),
    (two(nvlink(bus(1), 10**30), nvlink(bus(0), 10**30)), "count=10+ is out of all proportion"),
    (two('<nvlink target="" count="1"/>', ""), "line 5: <nvlink> needs target"),
    (two('<nvlink count="1"/>', ""), "line 5: <nvlink> needs target"),
    (two(f'<nvlink target="{bus(1)}"/>', ""), "<nvlink> needs a whole number count, not None"),
    (two(f'<nvlink target="{bus(1)}" count="1.5"/>', ""), "needs a whole number count, not '1.5'"),
    (two('<c2c bw="0" count="1"/>', ""), "line 5: <c2c> has bw 0 and count 1"),
    (two('<c2c bw="5"/>', ""), "line 5: <c2c> needs a whole number count"),
    (system(cpu(0, slot(0)), cpu(0, slot(1))), "line 8: <cpu> comes twice with numaid 0"),
    (system(cpu(0, slot(0)), cpu(1, slot(0))), "line 10: <gpu> comes twice with dev 0"),
    (system(cpu(0, slot(0))).replace('dev="0"', 'dev="-1"'), "line 4: <gpu> has dev -1"),
    (system(cpu(0, slot(0))).replace('dev="0"', ""), "line 4: <gpu> needs a whole number dev"),
    (system(cpu(0, slot(0))).replace('sm="80"', 'sm="x"'), "line 4: <gpu> needs a whole number sm"),
    (system(cpu(0, slot(0))).replace('numaid="0"', ""), "<cpu> needs a whole number numaid"),
    (system(cpu(0, slot(0))).replace(f'busid="{bus(0)}"', ""), "line 3: <pci> needs busid"),
    (system(cpu(0, slot(0))).replace('class="0x030200"', ""), "line 3: <pci> needs class"),
    (system(cpu(0, slot(0))).replace('width="16"', 'width="wide"'), "line 3: .* number link_width"),
    (system(slot(0)), "at least one GPU"),
    (system(), "has no <gpu> elements: dump the whole topology"),
    ("<system/>", "line 1: version None of NCCL's topology; only 1 is known"),
    (system(cpu(0, slot(0))).replace('"1"', '"2"', 1), "line 1: version '2' of NCCL's topology"),
    ("<topology>\n</topology>", "line 1: <topology> is not NCCL's <system>"),
    (system(cpu(0, slot(0), 'host_hash="0x1"'), cpu(1, slot(1), 'host_hash="0x2"')),
     "is of several hosts: give one host's, as a node"),
    ("<system version='1'>\n <cpu>\n</system>", "line 3 column 3: not well-formed XML: mismatched"),
    ("<system version='1'>\n", "line 2 column 1: not well-formed XML: no element found"),
    ("<system version=1/>", "line 1 column 17: not well-formed XML"),
    ("<system/><system/>", "line 1 column 10: not well-formed XML: junk after document element"),
    ("<system a='1' a='2'/>", "line 1 column 15: not well-formed XML: duplicate attribute"),
    ("<system>\0</system>", "line 1 column 9: not well-formed XML"),
    ("<", "not well-formed XML"),
    (DUMPS["a100x4"][:900], r"line \d+ column \d+: not well-formed XML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_broken_file_is_told_where(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        load(text)


def _laughs() -> str:
    entities = '<!ENTITY a0 "ha">' + "".join(
        f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(9)
    )
    return f'<?xml version="1.0"?>\n<!DOCTYPE system [{entities}]>\n<system v="&a9;">&a9;</system>'


HOSTILE: dict[str, tuple[Callable[[], str], str]] = {
    "laughs": (_laughs, "line 2 column .*document type .DTD. is not allowed"),
    "doctype": (lambda: '<!DOCTYPE system SYSTEM "file:///etc/passwd"><system/>', "document"),
    "entity": (lambda: '<system version="&a;"/>', "undefined entity"),
    "deep": (lambda: "<a>" * 10**4 + "</a>" * 10**4, "elements lie more than 64 deep"),
    "many": (lambda: system("<a/>\n" * 10**6), "line 50001 column 1: more than 50000 elements"),
    "long value": (lambda: system(cpu(0, slot(0), f'arch="{"x" * 2**20}"')), "more than 255 char"),
    "long key": (lambda: f'<system {"x" * 2**20}="1"/>', "more than 255 char"),
    "attributes": (lambda: "<a" + "".join(f' b{i}="1"' for i in range(10**4)) + "/>", "at most 64"),
    "a long number": (lambda: two(nvlink(bus(1), int("9" * 200)), ""), "out of all proportion"),
    "a long tag": (lambda: f"<{'a' * 2**20}/>", "is not NCCL's <system>"),
    "comment": (lambda: "<!--" + "-" * 2**20, "not well-formed"),
    "text": (lambda: "<system>" + "x" * 2**20 + "</system>", "version None"),
}


@pytest.mark.parametrize(("make", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_at_once(make: Callable[[], str], words: str) -> None:
    text, start = make(), time.process_time()
    with pytest.raises(TopologyError, match=words):
        load(text)
    assert time.process_time() - start < LONGEST


@pytest.mark.parametrize(
    "inside",
    [
        lambda: "".join(slot(g, nvlink(HIDDEN, 1, NVSWITCH)) for g in range(4000)),
        lambda: "<nic>" + "".join(net("same", i, 1000) for i in range(8000)) + "</nic>" + slot(0),
        lambda: (
            slot(0) + "</cpu>" + "".join(cpu(i, "") for i in range(1, 1500)) + "<cpu numaid='0'>"
        ),
    ],
    ids=["GPUs", "NICs of one name", "CPUs"],
)
def test_a_machine_beyond_all_sizes_takes_no_time(inside: Callable[[], str]) -> None:
    text = system(cpu(10**6, inside()))
    start = time.process_time()
    try:
        load(text)
    except TopologyError:
        pass
    assert time.process_time() - start < LONGEST


# ---- writing -------------------------------------------------------------------------------------

DEVICE = {"busid", "class", "link_speed", "link_width"}
REQUIRED = {
    "system": {"version"},
    "cpu": {"numaid", "affinity", "arch", "vendor", "familyid", "modelid"},
    "pci": DEVICE,
    "gpu": {"dev", "sm", "rank", "gdr"},
    "nvlink": {"target", "count", "tclass"},
    "net": {"name", "dev", "speed", "port", "guid", "maxconn", "gdr"},
    "nic": set(),
    "c2c": {"bw", "count"},
}
INSIDE = {
    "cpu": "system", "pci": "cpu pci", "gpu": "pci", "nvlink": "gpu", "c2c": "gpu",
    "nic": "pci cpu", "net": "nic",
}  # fmt: skip
CHIPS = system(*(cpu(g, slot(g, '<c2c bw="450000" count="1"/>', 90)) for g in range(2)))
TEXTS = {
    **DUMPS,
    **{f"smi {name}": text for name, text in SMI.items()},
    "models": listed("NVIDIA RTX A6000", 4) + SMI["cloud"],
    "chips": CHIPS,
    "power": system(*(cpu(8 * g, slot(g, nvlink("0004:00:00.0", 3, CPU), 70)) for g in range(2))),
}


def written(topology: Topology) -> Topology:
    """Written, and read back under the same name."""
    return replace(load(to_nccl_xml(topology)), name=topology.name)


def check_form(text: str) -> None:
    """The attributes that NCCL's parser asks for, where it looks for them; no bus id twice."""
    parents = {child: parent for parent in ElementTree.fromstring(text).iter() for child in parent}
    for element, parent in parents.items():
        assert parent.tag in INSIDE[element.tag].split()
        assert set(element.keys()) >= REQUIRED[element.tag], element.tag
        assert all(value or key == "affinity" for key, value in element.items())
    buses = Counter(e.get("busid") for e in parents if e.tag == "pci")
    assert max(buses.values()) == 1
    targets = {e.get("target") for e in parents if e.get("tclass") == "0x030200"}
    assert targets <= set(buses)
    for tag, key in (("gpu", "dev"), ("gpu", "rank"), ("net", "dev"), ("cpu", "numaid")):
        values = [e.get(key) for e in parents if e.tag == tag]
        assert len(set(values)) == len(values), f"{key} of {tag} twice"
    for e in parents:
        assert re.fullmatch(r"0x0[236]\d{4}", e.get("class", "0x030200"))
        assert all(e.get(key, "0").isdecimal() for key in ("dev", "sm", "count", "speed", "numaid"))


@pytest.mark.parametrize("name", TEXTS)
def test_a_dump_is_written_as_it_was_read(name: str) -> None:
    made = load(TEXTS[name])
    again = written(made)
    assert again.links == made.links
    assert again.gpus == made.gpus
    if name in DUMPS:
        assert again.devices == made.devices
    check_form(to_nccl_xml(made))


@pytest.mark.parametrize("name", WRITABLE)
def test_every_named_machine_can_be_written(name: str) -> None:
    made = load(name)
    text = to_nccl_xml(made)
    first = written(made)
    assert written(first) == first
    assert first.gpus == made.gpus
    assert nvlinks_of(first) == nvlinks_of(made) and ports_of(first) == ports_of(made)
    assert rates(first, "nvlink") == rates(made, "nvlink")
    assert first.isomorphic_to(made) is not None
    check_form(text)


@pytest.mark.parametrize("name", ["pcie-1", "pcie-4"])
def test_a_machine_without_a_cpu_is_given_one(name: str) -> None:
    made = written(load(name))
    assert bound(made) == bound(load(name)) or made.gpus == (0,)
    check_form(to_nccl_xml(load(name)))


@pytest.mark.parametrize("seed", range(20))
def test_bandwidths_and_bus_ids_survive(seed: int) -> None:
    rng = random.Random(seed)
    speeds = ["2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s", "64 GT/s"]
    sm = rng.choice((60, 70, 80, 86, 90, 100))
    numbers = rng.sample(range(20), 6)

    def xml_of(g: int) -> str:
        inside = nvlink(HIDDEN, rng.randint(1, 18), NVSWITCH) if rng.random() < 0.7 else ""
        at = f"{rng.randrange(16):04x}:{g + 1:02x}:{rng.randrange(32):02x}.{rng.randrange(8)}"
        return pci(
            at, "0x030200", gpu(g, sm, inside), rng.choice(speeds), rng.choice((1, 4, 8, 16))
        )

    def nic(i: int) -> str:
        some = net(f"mlx5_{i}", i, rng.choice((1000, 25000, 100000, 200000, 400000)))
        return pci(f"0000:{0xA0 + i:02x}:00.0", "0x020000", f"<nic>\n{some}</nic>\n")

    def switch(i: int) -> str:
        inside = xml_of(numbers[2 * i]) + nic(i) + xml_of(numbers[2 * i + 1])
        return pci(f"0000:{0xB0 + i:02x}:00.0", "0x060400", inside, rng.choice(speeds))

    made = load(system(cpu(0, switch(0) + nic(7)), cpu(1, switch(1)), cpu(3, switch(2) + nic(8))))
    again = written(made)
    assert again.links == made.links
    assert again.devices == made.devices
    check_form(to_nccl_xml(made))


def test_renumbered_and_partial_machines_are_written() -> None:
    some = load(SMI["dgx1-v100"]).subset([5, 1, 4])
    again = written(some)
    assert again.gpus == (1, 4, 5)
    assert nvlinks_of(again) == nvlinks_of(some)


def test_names_are_quoted() -> None:
    name = "a<b>&\"'ü"
    made = Topology("m", (0,), (
        Link(0, "cpu0", 12 * GB, kind="host"), Link("cpu0", 0, 12 * GB, kind="host"),
        Link(name, "cpu0", GB, kind="network"), Link("cpu0", name, GB, kind="network"),
    ))  # fmt: skip
    assert rates(written(made), "network") == {(name, "cpu0"): 1, ("cpu0", name): 1}


@pytest.mark.parametrize("spec", ["mesh-129", "17 x dgx-a100", "33 x dgx1-v100 nics=1"])
def test_a_cluster_of_more_than_128_gpus_is_not_written(spec: str) -> None:
    size = len(load(spec).gpus)
    with pytest.raises(TopologyError, match=rf"has {size} GPUs: an NCCL topology is of one node"):
        to_nccl_xml(load(spec))


@pytest.mark.parametrize("spec", ["2 x dgx-a100", "2 x dgx1-v100", "4 x pcie-8 nics=1", "cpu-4"])
def test_what_is_not_one_node_of_gpus_is_not_written(spec: str) -> None:
    """The form has no place for a memory either: what was written would be another machine."""
    with pytest.raises(TopologyError, match=spec):
        to_nccl_xml(load(spec))


def test_measured_nvlinks_are_not_written_as_another_gpus() -> None:
    slower = tuple(replace(k, bandwidth=24_200_000_000) for k in load("mesh-2").links)
    with pytest.raises(TopologyError, match=r"GPU 0 has NVLinks of 24.2 GB/s; NCCL's form knows"):
        to_nccl_xml(replace(load("mesh-2"), links=slower))
