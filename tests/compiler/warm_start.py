"""A process that trains with each of several settings, and prints what the compiler took from its caches.

python -m tests.compiler.warm_start FOLDER
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.helpers import QUIET
from tests.stack import Stack

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "budget": {"activation_checkpointing": {"name": "budget", "budget": 0.5}},
    "model": {"compile": {"name": "model"}},
    "optimizer": {"compile": {"optimizer": True, "loss": True}},
    "bf16": {"precision": "bf16"},
    "ema": {"weight_averaging": "ema", "accumulation": {"name": "microbatches", "num": 2}},
}
if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
    del VARIANTS["budget"]  # refused before torch 2.14


def cached(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Hits and misses of torch's two caches of graphs while a few steps train, and the graphs that there were."""
    torch.compiler.reset()
    counters.clear()
    given = {"name": "blocks", "cache": folder, "reference_steps": 0, **settings.get("compile", {})}
    trainer = Stack(batch_size=8, steps=2, **{**settings, **QUIET, "compile": given})
    trainer.fit()
    of_aot, of_inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "hits": of_aot["autograd_cache_hit"],
        "misses": of_aot["autograd_cache_miss"],
        "bypassed": of_aot["autograd_cache_bypass"],
        "inductor_misses": of_inductor["fxgraph_cache_miss"],
        "inductor_bypassed": of_inductor["fxgraph_cache_bypass"],
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[2:] or list(VARIANTS)
    print(json.dumps({name: cached(sys.argv[1], VARIANTS[name]) for name in wanted}))
