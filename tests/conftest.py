"""One thread a process: tests run beside each other, and compare bits."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
