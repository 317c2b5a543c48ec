"""Network namespaces of a test's own: of a process, of a thread, of nodes on a bridge that can be cut off."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

CLONE_NEWNET = 0x40000000

ResultT = TypeVar("ResultT")

HERE_ADDRESS = "192.0.2.1"
"""Of the bridge: where the namespace is reached in which it was made."""


def apart(command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` in a namespace of its own, with the rights of root in there."""
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--net", *rights, *command]


def unavailable(script: str) -> str:
    """Why the lines of Python in ``script`` cannot run in a namespace here; empty: they can."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            return f"there is no command {tool!r}"
    found = subprocess.run(apart([sys.executable, "-c", script]), capture_output=True, text=True)
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


def ip(*lines: str) -> None:
    """Run ``ip`` in the calling thread's namespace, once for each line of arguments."""
    for line in lines:
        subprocess.run(["ip", *line.split()], check=True)


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter(namespace: int) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace, given as an open file."""
    _system_call("setns", namespace, CLONE_NEWNET)


def _in_a_thread(work: Callable[[], ResultT]) -> ResultT:
    """A namespace is a thread's: this one ends in another, the rest stay where they are."""
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def inside(namespace: int, work: Callable[[], ResultT]) -> ResultT:
    """Do ``work`` in that namespace. Processes that it starts are there as well."""

    def run() -> ResultT:
        enter(namespace)
        return work()

    return _in_a_thread(run)


def new_namespace(work: Callable[[], ResultT]) -> tuple[int, ResultT]:
    """A namespace beside the caller's, as an open file, and the result of ``work`` in there."""

    def run() -> tuple[int, ResultT]:
        _system_call("unshare", CLONE_NEWNET)
        ip("link set dev lo up")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY), work()

    return _in_a_thread(run)


@dataclass(frozen=True)
class Place:
    """A namespace on the bridge."""

    address: str
    namespace: int
    link: str
    """The bridge's end of its cable."""


class Bridge:
    """Joins namespaces to the caller's. Use ``bridged``."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self._places: list[Place] = []
        ip(
            "link set dev lo up",
            "link add name bridge0 type bridge",
            f"address add {HERE_ADDRESS}/24 dev bridge0",
            "link set dev bridge0 up",
            # By its default route a host finds out which address is its own.
            "route add default dev bridge0",
        )

    def add_place(self) -> Place:
        number = next(self._numbers)
        address, link = f"192.0.2.{number}", f"cable{number}"
        here = os.getpid()

        def lay() -> None:
            ip(
                f"link add name cable type veth peer name {link} netns {here}",
                f"address add {address}/24 dev cable",
                "link set dev cable up",
                "route add default dev cable",
            )

        namespace, _ = new_namespace(lay)
        ip(f"link set dev {link} master bridge0", f"link set dev {link} up")
        place = Place(address, namespace, link)
        self._places.append(place)
        return place

    def set_cable(self, place: Place, state: str) -> None:
        """``state``: up or down. What is sent while it is down is lost."""
        ip(f"link set dev {place.link} {state}")

    def remove_place(self, place: Place) -> None:
        """Its processes have ended."""
        self._places.remove(place)
        ip(f"link delete dev {place.link}")
        os.close(place.namespace)

    def close(self) -> None:
        for place in list(self._places):
            self.remove_place(place)
        ip("link delete dev bridge0")


@contextlib.contextmanager
def bridged() -> Iterator[Bridge]:
    """Only where ``apart`` has put the process: it changes the namespace's default route."""
    bridge = Bridge()
    try:
        yield bridge
    finally:
        bridge.close()
