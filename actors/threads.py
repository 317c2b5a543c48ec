"""Threads of a compute process: how many, and how they wait; and how many compiled kernels it keeps."""

from __future__ import annotations

import sys

KERNEL_CACHE_CAPACITY = 256
"""Kernels that oneDNN, and torch's layer above it, each keep of what they compiled for an operation and a
shape. One takes a quarter of a MiB, and by default both keep a thousand: a process that meets many sizes of
steps would grow by half a GiB. Steps of the usual few sizes need some dozens."""

SWITCH_INTERVAL_SECONDS = 0.0005
"""How long the engine's thread may keep the interpreter once the event loop wants it. Python's default
of 5 ms would delay each message by as much whenever the engine is in pure Python code."""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with ``num_threads`` threads.

    They must be set before torch is imported, hence in the actor's runtime environment. Idle OpenMP
    threads sleep instead of spinning: two processes that spin on shared cores slow each other ten-fold.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: must be at least 1, got {num_threads}")
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # gRPC's handlers of forks leave some children of a process with open streams to crash (measured: one
        # in three). Without them a child that keeps its hands off gRPC lives.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNEL_CACHE_CAPACITY),
        "LRU_CACHE_CAPACITY": str(KERNEL_CACHE_CAPACITY),
    }


def apply(num_threads: int) -> None:
    """Let torch compute with ``num_threads`` threads in the calling thread and those started later.

    Call it on the engine's own thread: OpenMP keeps the count per thread.
    """
    import torch

    torch.set_num_threads(num_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
