"""Passes packets between two TUN devices, each of them late or not at all.

    python -m tests.integration.packet_forwarder DEVICE DEVICE SECONDS LOSS SEED

The devices are open file descriptors. Ends with its standard input, and prints how many packets it passed on
and how many it dropped.
"""

from __future__ import annotations

import os
import random
import select
import sys
import time
from collections import deque

LARGEST_PACKET = 1 << 16


def forward(first: int, second: int, seconds: float, loss: float, seed: int) -> tuple[int, int]:
    """Every packet is passed on after ``seconds``, and with the probability ``loss`` never; in order."""
    other = {first: second, second: first}
    rng = random.Random(seed)
    under_way: deque[tuple[float, int, bytes]] = deque()
    num_passed = num_lost = 0
    while True:
        due = under_way[0][0] - time.monotonic() if under_way else None
        readable, _, _ = select.select([first, second, 0], [], [], None if due is None else max(due, 0.0))
        if 0 in readable:
            return num_passed, num_lost
        for device in readable:
            packet = os.read(device, LARGEST_PACKET)
            if rng.random() < loss:
                num_lost += 1
            else:
                under_way.append((time.monotonic() + seconds, other[device], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, packet = under_way.popleft()
            os.write(device, packet)
            num_passed += 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print(
        *forward(
            int(arguments[0]), int(arguments[1]), float(arguments[2]), float(arguments[3]), int(arguments[4])
        )
    )
