"""Tests that need a GPU: `pytest tests/gpu`. Without one all of them are skipped, and say why."""

import os
from pathlib import Path

# Read by cuBLAS when it is first used; the deterministic runs need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark what is in this folder, and skip it where there is no GPU."""
    hidden = " (CUDA_VISIBLE_DEVICES is empty: run `pytest tests/gpu`)" if hides_gpus() else ""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device{hidden}"))


def hides_gpus():
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


@pytest.fixture(autouse=True)
def as_it_was():
    """Deterministic kernels and the allocator's peaks are of one test alone."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.empty_cache()
