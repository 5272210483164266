"""Single tricks in loops that know no Trainer, as the page shows them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch

PAGE = (Path(__file__).parents[1] / "docs" / "without_the_trainer.md").read_text(encoding="utf-8")
PLAIN, IMAGES, COMPILED, PLAN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def ran(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(example, "docs/without_the_trainer.md", "exec"), names)
    return names


def test_the_plain_loop_has_its_blocks_checkpointed_and_its_moments_narrow():
    names = ran(PLAIN)
    assert names["checkpointed"] == 3
    moments = [s[key] for s in names["optimizer"].state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(list(names["both"].parameters()))
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    assert all(loss.isfinite() for loss in names["losses"])


def test_the_plain_loop_computes_what_it_would_without_the_tricks_that_save_memory():
    plain = PLAIN.replace("checkpoint_blocks(find_blocks(model))", "0").replace(", rows=64", "")
    assert plain != PLAIN
    assert torch.stack(ran(plain)["losses"]).sub(torch.stack(ran(PLAIN)["losses"])).abs().max() < 1e-6


def test_images_and_weights_lie_channels_last():
    names = ran(IMAGES)
    assert names["images"].is_contiguous(memory_format=torch.channels_last)


def test_compiled_blocks_are_recorded_and_compared_and_no_gradient_is_left():
    names = ran(COMPILED)
    assert names["made"].graphs == 2  # the first block gets another memory layout
    assert not names["made"].breaks
    assert names["found"].eager_s > 0
    assert all(parameter.grad is None for parameter in names["model"].parameters())


def test_the_plan_does_what_is_asked_of_it():
    names = ran(PLAN)
    assert set(names["checkpoint"]["plan"]) >= {"weight_averaging"}
    assert names["loss"].isfinite()
    assert names["loss"].dtype == torch.float32
    microbatches = names["plan"].split(names["task"], names["batch"])
    assert [len(images) for images, _ in microbatches] == [8, 8, 8, 8]


def test_every_function_of_the_table_is_there():
    named = re.findall(r"`(fasttrain[\w.]+)\(", PAGE)
    assert len(named) == 18
    for function in named:
        module, _, name = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
