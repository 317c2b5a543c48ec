"""A process that serves does not look at what it started with, and still collects what it makes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
import torch
from paceline.actors import garbage

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
garbage.freeze()
after = cycle()
print(before() is None, after() is not None, gc.get_freeze_count() > 50_000, len(gc.get_objects()) < 5_000)
gc.collect()
print(after() is None)
"""


def test_what_was_there_is_left_alone_and_what_comes_is_collected() -> None:
    """In a process of its own: it changes the collector of the whole process."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == ["True"] * 5
