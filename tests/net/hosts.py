"""Hosts in network namespaces, joined by a switch: they share nothing but the network.

Each host has its own network, processes, mounts, name and /dev/shm, so no rank can open the memory
of another host. Needs root and iproute2.

    python tests/net/hosts.py 4x2 1gbit bench train --model vgg11

runs that command of linkweave as two ranks on each of four hosts, with links of 1 Gbit/s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Thread

PORT = 29511
_numbers = count()

_SET_UP = """set -e
mount -t tmpfs shm /dev/shm
hostname "$0"
mkdir /dev/shm/.names && echo "$1" > /dev/shm/.names/hosts
mount --bind /dev/shm/.names/hosts /etc/hosts
echo ready
exec sleep infinity"""


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    for name in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(name) is None:
            return f"hosts in network namespaces need the command {name}"
    trial = f"lw{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    _run(f"ip netns del {trial}")
    return ""


class Hosts:
    """`n` hosts, each with a link of `rate` ("1gbit") both ways to one switch."""

    def __init__(self, n: int, rate: str = "1gbit") -> None:
        name = f"lw{os.getpid()}n{next(_numbers)}"
        self.names = [f"{name}h{i}" for i in range(n)]
        self._switch = f"{name}s"
        self._inits: list[int] = []  # the first process of each host, whose end ends all others
        self._processes: list[subprocess.Popen[str]] = []
        burst = "256kb" if rate.endswith("gbit") and int(rate[:-4]) > 1 else "64kb"
        try:
            _run(f"ip netns add {self._switch}")
            self._in_switch("link add name switch0 type bridge")
            self._in_switch("link set switch0 up")
            for i, host in enumerate(self.names):
                _run(f"ip netns add {host}")
                self._in_switch(f"link add name p{i} type veth peer name eth0 netns {host}")
                self._in_switch(f"link set p{i} master switch0")
                _run(f"ip -n {host} addr add {self.address(i)}/24 dev eth0")
                _run(f"ip -n {host} link set lo up")
                for space, port in ((self._switch, f"p{i}"), (host, "eth0")):
                    # tbf cuts a packet longer than its burst by the CPU; each packet costs a timer
                    _run(f"ip -n {space} link set {port} gso_max_size 60000 up")
                    shaped = f"rate {rate} burst {burst} latency 200ms"
                    _run(f"tc -n {space} qdisc add dev {port} root tbf {shaped}")
                self._inits.append(self._set_up(i))
        except BaseException:
            self.close()
            raise

    def _set_up(self, host: int) -> int:
        """Start the host's first process. Returns its number."""
        addresses = {i: self.address(i) for i in range(len(self.names))}
        addresses[host] = "127.0.1.1"  # as Debian and Ubuntu write it
        every = (f"{address} host{i}" for i, address in addresses.items())
        names = "\n".join(["127.0.0.1 localhost", *every])
        words = ["ip", "netns", "exec", self.names[host], "unshare", "--pid", "--fork",
                 "--kill-child", "--mount", "--mount-proc", "--uts", "sh", "-c", _SET_UP,
                 f"host{host}", names]  # fmt: skip
        holder = subprocess.Popen(words, text=True, stdout=subprocess.PIPE)
        self._processes.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return int(child)

    def _in_switch(self, words: str) -> None:
        _run(f"ip -n {self._switch} {words}")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def link(self, host: int, state: str) -> None:
        """Set a host's link "up" or "down"."""
        self._in_switch(f"link set p{host} {state}")

    def start(
        self, host: int, command: Sequence[str], env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host."""
        words = ["nsenter", "-t", str(self._inits[host]), "-p", "-m", "-u", "-n",
                 f"--wd={os.getcwd()}", *command]  # fmt: skip
        made = subprocess.Popen(
            words, env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0"} | (env or {}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._processes.append(made)
        return made

    def ranks(
        self, sizes: Sequence[int], script: Sequence[str], env: dict[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start `sizes[i]` ranks of a Python script on host i, as torchrun numbers them."""
        started, world = [], sum(sizes)
        for host, size in enumerate(sizes):
            for local in range(size):
                job = {
                    "RANK": str(len(started)), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": str(PORT),
                }  # fmt: skip
                command = [sys.executable, *script]
                started.append(self.start(host, command, job | (env or {})))
        return started

    def close(self) -> None:
        """Kill what still runs, and remove the namespaces."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout:  # who has read all has closed it
                process.stdout.close()
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def main(shape: str, rate: str, *words: str) -> int:
    """Run a command of linkweave on all ranks; print what they print. Returns rank 0's status."""
    hosts, _, ranks = shape.partition("x")
    with Hosts(int(hosts), rate) as made:
        started = made.ranks(
            [int(ranks)] * int(hosts), ["-m", "linkweave", *words],
            {"OMP_NUM_THREADS": "1"},  # as torchrun sets it
        )  # fmt: skip
        readers = [Thread(target=_show, args=(process,)) for process in started]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return started[0].wait()


def _show(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
