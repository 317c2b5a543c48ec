"""Checks groups of two ranks on one GPU, also where there are several: python -m tests.gpu.check_shards

NCCL refuses two ranks on one GPU, so there they exchange tensors through main memory. All else (what is read,
computed, stored and sent) is as on a GPU for each rank. Exits with pytest's status; 5 without a GPU.
"""

from __future__ import annotations

import os
import sys

import pytest

NO_TESTS = 5


def main() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[0]
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device")
        return NO_TESTS
    print(f"two ranks on one {torch.cuda.get_device_name(0)}")
    return int(
        pytest.main(["-m", "gpu and not weights", "-ra", "tests/gpu/test_tensor_parallel.py", *sys.argv[1:]])
    )


if __name__ == "__main__":
    sys.exit(main())
