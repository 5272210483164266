"""The figures of the page about memory, counted anew."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fasttrain import Context, Plan
from fasttrain.config import load
from fasttrain.core.task import Task
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.nn.activations import LiveStorages
from fasttrain.registry import find

PAGE = (Path(__file__).parents[1] / "docs" / "memory.md").read_text(encoding="utf-8")

BF16 = {"precision": {"name": "bf16"}}
PIECES = {"accumulation": {"name": "microbatches", "size": 8}}
SELECTIVE = {"activation_checkpointing": {"name": "selective"}}
FULL = {"activation_checkpointing": {"name": "full"}}
NARROW = {"optimizer": {"name": "adamw", "state_dtype": "bf16"}}
# First column of the page's table: settings, and whether the loss is made in chunks.
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, False),
    "`precision: bf16`": (BF16, False),
    "and the loss in chunks": (BF16, True),
    "and `accumulation: {name: microbatches, size: 8}`": (BF16 | PIECES, True),
    "and `activation_checkpointing: selective`": (BF16 | PIECES | SELECTIVE, True),
    "or `activation_checkpointing: full`": (BF16 | PIECES | FULL, True),
    "and `optimizer.state_dtype: bf16`": (BF16 | PIECES | FULL | NARROW, True),
    "or `precision: bf16_true`": ({"precision": {"name": "bf16_true"}} | PIECES | FULL, True),
}


def most_at_once(slots: dict[str, Any], in_chunks: bool, sequences: int = 32) -> int:
    """Bytes of weights, gradients, states and activations in two steps of BERT-base, 512 tokens a sequence."""
    with FakeTensorMode(), LiveStorages() as live:
        context, strategies = Context(device=torch.device("cpu")), []
        for slot, given in ({"optimizer": {"name": "adamw"}} | slots).items():
            cls = find(slot, given["name"])
            strategies.append(cls(cls.Config(**{key: value for key, value in given.items() if key != "name"})))
        precision = next((strategy for strategy in strategies if strategy.slot == "precision"), None)
        if precision is not None:
            context = replace(context, dtypes=precision.dtypes())
        plan = Plan(strategies, context)
        model = plan.model(BertForMaskedLM(BertConfig(dropout=0.0)))
        optimizer = plan.optimizer(None)(model)
        plan.started(model, optimizer, 0)

        def loss(tokens: Any) -> Any:
            if in_chunks:
                return model(tokens, labels=tokens)
            return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        task, tokens = Task(model, loss), torch.zeros(sequences, 512, dtype=torch.long)
        for _ in range(2):
            plan.gradients_of(task, tokens)
            plan.update(optimizer, plan.gradients(model, optimizer))
            optimizer.zero_grad(set_to_none=True)
        return live.peak


@pytest.mark.slow
def test_the_figures_of_the_page_are_what_is_counted():
    table = PAGE.partition("## Together, counted")[2]
    told = {row: int(mib.replace(",", "")) for row, mib in re.findall(r"^\| (.+) \| ([\d,]+) \|$", table, re.MULTILINE)}
    assert list(told) == list(ROWS)
    for row, (slots, in_chunks) in ROWS.items():
        # Two microbatches hold as much at once as four.
        counted = most_at_once(slots, in_chunks, 16 if "accumulation" in slots else 32) / 2**20
        assert counted == pytest.approx(told[row], abs=1), row


def test_weights_gradients_and_states_of_the_page_are_its_bytes_a_parameter():
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in BertForMaskedLM(BertConfig()).parameters())
    told = re.search(r"states are ([\d,]+) MiB of it, ([\d,]+) with `state_dtype`, (\d+) with `bf16_true`", PAGE)
    assert told is not None
    expected = [round(parameters * size / 2**20) for size in (4 + 4 + 8, 4 + 4 + 4, 2 + 2 + 4)]
    assert [int(mib.replace(",", "")) for mib in told.groups()] == expected


def test_every_setting_of_the_page_is_one(tmp_path):
    settings = re.findall(r"\[`([\w.]+): ([^`]+)`\]\(strategies/", PAGE)
    assert len(settings) == 13
    config = tmp_path / "config.yaml"
    config.write_text("trainer: tests.helpers:Mlp\nbatch_size: 8\n")
    for key, value in settings:
        needed = ["optimizer=adamw"] if key.startswith("optimizer.") else []
        load(config, [*needed, f"{key}={value}"])
