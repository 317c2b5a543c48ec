"""The ranks that share one model: how they meet, what they tell each other, how they sum.

One process per rank, joined by ``torch.distributed``: gloo for what lies in main memory, NCCL between GPUs.
Rank 0, the leader, decides everything. Before each step it sends the others the ragged batch, and all ranks
run the same forward pass, each with its slice of the weights and its heads of the KV cache.

A rank waits without limit only for the next step. Every other wait is bounded by ``timeout_seconds``, so that
a rank that died or hangs makes the others fail within that time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from paceline.actors.engine.batch import SequenceSlice
from paceline.actors.engine.batch_codec import (
    Words,
    decode_batch,
    encode_batch,
    encode_stop,
    message_length,
)
from paceline.actors.engine.errors import ShardGroupError

dist: Any = torch.distributed
"""Untyped: what it exports is told to no type checker."""

Store = Any
"""A ``torch.distributed.Store``."""

LEADER = 0

FIRST_WORDS = 2048
"""Every step's message begins with a broadcast of this size (8 KiB); a longer one goes on in a second."""

_IDLE = timedelta(days=3650)
"""How long a rank waits for the next step."""


@dataclass(frozen=True)
class ShardMember:
    """One rank's place in its group.

    Raises:
        ValueError: on construction, naming the field.
    """

    rank: int
    size: int
    host: str
    """Address of the leader, where the ranks meet."""
    port: int
    """Port of the leader's store. The leader's own member has it too, see ``open_store``."""
    timeout_seconds: float = 15.0
    """A rank that keeps another one waiting for so long within a step is lost."""
    start_timeout_seconds: float = 600.0
    """How long ranks may differ in coming up: processes started, weights loaded."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"size: a group has at least 2 ranks, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank: must be in [0, {self.size - 1}], got {self.rank}")

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER


@dataclass
class GroupTimes:
    """Seconds that this rank has spent in talking to others, waiting included."""

    num_steps: int = 0
    broadcast_seconds: float = 0.0
    num_collectives: int = 0
    collective_seconds: float = 0.0


def open_store(host: str, start_timeout_seconds: float) -> Store:
    """The leader's store, on a free port of ``host``, where the ranks of one group meet.

    Raises: ShardGroupError: there is no free port.
    """
    try:
        return dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=start_timeout_seconds)
        )
    except RuntimeError as error:
        raise ShardGroupError(f"cannot open a store for the ranks on {host}: {_first_line(error)}") from error


class ShardGroup:
    """One rank's end of the group. Not thread-safe, but any thread may use it, one at a time.

    A process can be in one group only, since ``torch.distributed`` has one default group, which the
    tensor-parallel plans of ``transformers`` use.
    """

    def __init__(
        self, member: ShardMember, store: Store, device: torch.device, *, ordered: bool = True
    ) -> None:
        self.member = member
        self._ordered = ordered or device.type == "cpu"
        self.device = device
        self.times = GroupTimes()
        self._store = store
        self._first = torch.zeros(FIRST_WORDS, dtype=torch.int32)
        self._world: Any = dist.group.WORLD
        self._closed = False

    @classmethod
    def join(
        cls,
        member: ShardMember,
        device: torch.device,
        store: Store | None = None,
        *,
        ordered: bool = True,
    ) -> ShardGroup:
        """Meet the other ranks. Blocks until all are there.

        Args:
            store: the leader's own; None = dial it.
            ordered: whether ``sum`` adds in the order of the ranks on a GPU too.

        Raises:
            ShardGroupError: not all ranks have come within ``start_timeout_seconds``.
        """
        if dist.is_initialized():
            raise ShardGroupError("this process is in a group already")
        _use_interface_of(member.host)
        patience = timedelta(seconds=member.start_timeout_seconds)
        try:
            if store is None:
                store = dist.TCPStore(member.host, member.port, is_master=False, timeout=patience)
            _meet(store, member, "joined", _device_name(device))
            backend = "gloo"
            if device.type == "cuda":
                torch.cuda.set_device(device)
                names = {store.get(f"joined/{rank}") for rank in range(member.size)}
                # NCCL refuses two ranks on one GPU; gloo takes their tensors through main memory.
                backend = "cpu:gloo,cuda:nccl" if len(names) == member.size else "gloo"
            # transformers binds a rank to the GPU of this number.
            os.environ["LOCAL_RANK"] = str(device.index or 0)
            dist.init_process_group(
                backend,
                store=store,
                rank=member.rank,
                world_size=member.size,
                timeout=timedelta(seconds=member.timeout_seconds),
            )
        except (RuntimeError, ValueError) as error:
            raise ShardGroupError(
                f"rank {member.rank} of {member.size} cannot join its group at {member.host}:{member.port}: "
                f"{_first_line(error)}"
            ) from error
        return cls(member, store, device, ordered=ordered)

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def size(self) -> int:
        return self.member.size

    @property
    def is_leader(self) -> bool:
        return self.member.is_leader

    # ------------------------------------------------------------ while coming up

    def meet(self, stage: str) -> None:
        """Wait until all ranks have come to ``stage``, with the patience of a start.

        Raises: ShardGroupError: they have not within ``start_timeout_seconds``.
        """
        try:
            _meet(self._store, self.member, stage, "")
        except RuntimeError as error:
            raise ShardGroupError(
                f"not all of {self.size} ranks are {stage} after {self.member.start_timeout_seconds:g} s"
            ) from error

    def smallest(self, name: str, value: int) -> int:
        """The smallest ``value`` that any rank gives under ``name``; each rank gives one."""
        _meet(self._store, self.member, name, str(value))
        return min(int(self._store.get(f"{name}/{rank}")) for rank in range(self.size))

    # ------------------------------------------------------------ steps

    def announce(self, batch: Sequence[SequenceSlice], block_size: int) -> None:
        """Leader: send the batch of a step to all ranks. They compute it when they have it.

        Raises: ShardGroupError: a rank is lost or late.
        """
        began = time.perf_counter()
        self._send(encode_batch(batch, block_size))
        self.times.num_steps += 1
        self.times.broadcast_seconds += time.perf_counter() - began

    def announcer(self, block_size: int) -> Callable[[Sequence[SequenceSlice]], None]:
        """``announce`` for a cache of that block size."""
        return lambda batch: self.announce(batch, block_size)

    def receive(self) -> list[SequenceSlice] | None:
        """Other ranks: wait for the next step; None = there will be none.

        Raises: ShardGroupError: the leader is lost.
        """
        self._broadcast(self._first, _IDLE)
        length = message_length(self._first.numpy())
        words = self._first
        if length > FIRST_WORDS:
            words = torch.empty(length, dtype=torch.int32)
            words[:FIRST_WORDS] = self._first
            self._broadcast(words[FIRST_WORDS:], self._timeout)
        self.times.num_steps += 1
        return decode_batch(words[:length].numpy())

    def close(self) -> None:
        """Leader: tell the other ranks that there is no further step. Idempotent; a lost rank is no error."""
        if self._closed or not self.is_leader:
            return
        self._closed = True
        try:
            self._send(encode_stop())
        except ShardGroupError:
            # It went before it was told to: there is nobody left to tell.
            return

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.member.timeout_seconds)

    def _send(self, words: Words) -> None:
        head = words[:FIRST_WORDS]
        self._first[: len(head)] = torch.from_numpy(head)
        self._broadcast(self._first, self._timeout)
        if len(words) > FIRST_WORDS:
            self._broadcast(torch.from_numpy(np.ascontiguousarray(words[FIRST_WORDS:])), self._timeout)

    def _broadcast(self, words: torch.Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = LEADER
        options.rootTensor = 0
        options.timeout = timeout
        try:
            self._world.broadcast([words], options).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    # ------------------------------------------------------------ within a step

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' ``partial`` tensors, of one shape; the same to the bit on all ranks.

        On a CPU, or if ``ordered``, the terms are added in the order of the ranks, in float32. A ring would
        add each part of the tensor in an order of its own, and a row's sum would depend on where in the step
        it lies. On a CPU this is the faster way too, up to four ranks.
        """
        if not self._ordered:
            began = time.perf_counter()
            try:
                dist.all_reduce(partial)
            except RuntimeError as error:
                raise self._lost(error) from error
            self._count(began)
            return partial
        terms = self.gather(partial)
        total = terms[0].float() if partial.dtype != torch.float64 else terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(partial.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' ``part`` tensors, of one shape ``[…]``, as ``[size, …]``, on all ranks."""
        began = time.perf_counter()
        parts = part.new_empty(self.size, *part.shape)
        try:
            _all_gather(parts.view(-1), part.contiguous().view(-1))
        except RuntimeError as error:
            raise self._lost(error) from error
        self._count(began)
        return parts

    def _count(self, began: float) -> None:
        self.times.num_collectives += 1
        self.times.collective_seconds += time.perf_counter() - began

    def _lost(self, error: RuntimeError) -> ShardGroupError:
        return ShardGroupError(
            f"rank {self.rank} of {self.size} waited for another rank that is lost or hangs "
            f"({_first_line(error)})"
        )


def leave_group() -> None:
    """Free this process for another group, if it is in one. Whoever waits for this rank fails."""
    if dist.is_initialized():
        dist.destroy_process_group()


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _meet(store: Store, member: ShardMember, stage: str, value: str) -> None:
    store.set(f"{stage}/{member.rank}", value or "-")
    store.wait(
        [f"{stage}/{rank}" for rank in range(member.size)],
        timedelta(seconds=member.start_timeout_seconds),
    )


def _device_name(device: torch.device) -> str:
    """The same for two ranks on one GPU, and only then. Ranks on CPUs need no name."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def _use_interface_of(host: str) -> None:
    """Let gloo listen where ranks on other nodes reach it.

    By default it takes the address that the host's own name stands for, which on many systems is loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = interface_towards(host)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_towards(host: str) -> str | None:
    """Name of the network interface through which this machine reaches ``host``; None = not found out."""
    import socket

    try:
        import fcntl
    except ImportError:
        return None
    try:
        family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
        if family != socket.AF_INET:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A datagram socket sends nothing on connecting; it only chooses its own address.
            probe.connect((host, 9))
            own_address = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(
                        probe.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(_IFREQ_BYTES, b"\0")
                    )
                except OSError:
                    continue
                if found[20:24] == own_address:
                    return name
    except OSError:
        return None
    return None


_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 256


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
