"""One thread a process: tests run beside each other, and compare bits. On the CPU; those of tests/gpu run apart."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not any(argument == "gpu" or "tests/gpu" in argument for argument in sys.argv[1:]):
    # A trainer takes a GPU where it finds one. `pytest tests/gpu` and `pytest -m gpu` leave them in sight.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

torch.set_num_threads(1)
