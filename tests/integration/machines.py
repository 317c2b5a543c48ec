"""Ray nodes as processes of ``ray start`` that are switched off and, where each has a namespace, cut off."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.cluster.runtime import free_port
from tests.integration.network_namespaces import Bridge, Place, inside

OBJECT_STORE_BYTES = 150 * 1024 * 1024


@dataclass(eq=False)
class Machine:
    process: subprocess.Popen[bytes]
    folder: Path
    place: Place | None
    """None: on this machine's own addresses, so that it cannot be cut off."""
    cut: bool = False

    @property
    def lost(self) -> bool:
        """``ray start --block`` ends with any process of its node."""
        return self.process.poll() is not None


class Machines:
    """Use ``machines``."""

    def __init__(self, address: str, resources: Mapping[str, int], bridge: Bridge | None) -> None:
        self._address = address
        self._resources = resources
        self._bridge = bridge
        self._mending: list[threading.Timer] = []
        self.there: list[Machine] = []
        """The one that was left alone for longest comes first."""

    def add(self) -> None:
        place = self._bridge.add_place() if self._bridge else None
        # Nodes that start in one folder at a time may take each other's sockets, whose paths must be short.
        folder = Path(tempfile.mkdtemp(prefix="pl-node-", dir="/tmp"))

        def start() -> subprocess.Popen[bytes]:
            options = {
                "address": self._address,
                "node-ip-address": place.address if place else self._address.rpartition(":")[0],
                "temp-dir": folder,
                "num-cpus": 1,
                "resources": json.dumps(self._resources),
                "object-store-memory": OBJECT_STORE_BYTES,
                "dashboard-agent-listen-port": free_port(),
                "include-log-monitor": "false",
            }
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
            return subprocess.Popen(
                [*ray, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

        self.there.append(Machine(inside(place.namespace, start) if place else start(), folder, place))

    def switch_off(self, machine: Machine) -> None:
        """All its processes end at once."""
        self.there.remove(machine)
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(machine.process.pid)
            for process in [started, *started.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        machine.process.wait()
        shutil.rmtree(machine.folder, ignore_errors=True)
        if machine.place and self._bridge:
            self._bridge.remove_place(machine.place)

    def replace_lost(self) -> int:
        """Ray ends the processes of a node that it missed for too long. Returns how many there were."""
        lost = [machine for machine in self.there if machine.lost and not machine.cut]
        for machine in lost:
            self.switch_off(machine)
            self.add()
        return len(lost)

    @property
    def can_be_cut_off(self) -> bool:
        return self._bridge is not None

    def cut_off(self, machine: Machine, seconds: float) -> None:
        """For so long nothing reaches it, nor leaves it; its processes live."""
        self.there.remove(machine)
        self.there.append(machine)
        self._set(machine, "down")
        timer = threading.Timer(seconds, self._set, (machine, "up"))
        timer.start()
        self._mending.append(timer)

    def _set(self, machine: Machine, state: str) -> None:
        assert self._bridge is not None
        assert machine.place is not None
        machine.cut = state == "down"
        self._bridge.set_cable(machine.place, state)

    def mend(self) -> None:
        """Returns when nothing is cut off any more."""
        for timer in self._mending:
            timer.join()
        self._mending.clear()

    def close(self) -> None:
        self.mend()
        for machine in list(self.there):
            self.switch_off(machine)


@contextlib.contextmanager
def machines(
    address: str,
    count: int,
    resources: Mapping[str, int],
    bridge: Bridge | None,
    wait_for: Callable[[int], None],
) -> Iterator[Machines]:
    """So many nodes of the cluster at ``address``, for the length of the block.

    Args:
        wait_for: returns when Ray knows so many of them. They start one after the other: Ray gives a node up
            that is not there within 30 s.
    """
    found = Machines(address, resources, bridge)
    try:
        for number in range(1, count + 1):
            found.add()
            wait_for(number)
        yield found
    finally:
        found.close()
