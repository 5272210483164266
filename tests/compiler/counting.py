"""A backend that counts graphs, and a compiler as a new process has it. Tests of compiled code import both.

    from tests.compiler.counting import GRAPHS, fresh_compiler

`fresh_compiler` is a fixture that each test of the importing module uses; `backend="counting"` is aot_eager, and `GRAPHS`
holds what it was given since the test began.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from fasttrain.compiler import apply

GRAPHS: list[torch.fx.GraphModule] = []


def counting(graph, inputs):
    """aot_eager, writing down each graph it is given."""
    GRAPHS.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)


torch._dynamo.register_backend(counting, name="counting")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graph, no size and no limit is left of what ran before."""
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit, config.accumulated_recompile_limit = 8, 256  # torch's own
    apply._NUMBERS.clear()
    torch.compiler.reset()
    GRAPHS.clear()
    yield
    config.recompile_limit, config.accumulated_recompile_limit = limits
