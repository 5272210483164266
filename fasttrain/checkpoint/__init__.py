"""Checkpoints: a folder a step, holding tensors and JSON and nothing else."""

from fasttrain.checkpoint.folder import Checkpoint, checkpoints_in, newest
from fasttrain.checkpoint.io import load_plain, load_tensors, save, stored_tensors

__all__ = ["Checkpoint", "checkpoints_in", "load_plain", "load_tensors", "newest", "save", "stored_tensors"]
