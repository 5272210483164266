"""What a model is made of: rows, parameters counted once, and FLOPs without computing."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torchvision.models as vision
from torch import nn
from torch.nn import functional as F

from fasttrain.cli.model_table import table
from fasttrain.compiler.apply import compile_forwards
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.summary import Row, summarize
from tests.commands import DIGITS, run
from tests.nn.test_found_blocks import FOUND
from tests.stack import StackModel

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def test_a_resnet50_makes_8_178_368_512_flops_a_sample():
    with torch.device("meta"):
        model = vision.resnet50()
    summary = summarize(
        model, find_blocks(model), lambda model: model(torch.empty(4, 3, 224, 224, device="meta")), samples=4
    )
    assert (summary.flops, summary.not_counted) == (8_178_368_512, None)
    assert summary.parameters == summary.trainable == 25_557_032
    assert sum(row.flops or 0 for row in summary.rows) == summary.flops
    assert sum(row.share for row in summary.rows) == pytest.approx(1)
    blocks = [(row.name, row.kind, row.times) for row in summary.rows if row.kind == "Bottleneck"]
    assert blocks == [(f"layer{i}.0-{n - 1}", "Bottleneck", n) for i, n in ((1, 3), (2, 4), (3, 6), (4, 3))]
    assert summary.blocks == 16


def test_rows_are_blocks_and_what_stands_beside_them():
    assert [row.name for row in summarize(StackModel()).rows] == ["embed", "head", "blocks"]
    model = StackModel()
    model.extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    rows = {
        row.name: row for row in summarize(model, find_blocks(model), lambda model: model(torch.zeros(5, 8)), 5).rows
    }
    assert list(rows) == ["extra", "embed", "head", "blocks.0-1"]
    assert rows["extra"] == Row(name="extra", kind="Parameter", parameters=3, trainable=0, flops=0, share=0.0)
    assert (rows["embed"].flops, rows["head"].flops) == (2 * 8 * 8, 2 * 8 * 4)
    assert (rows["blocks.0-1"].times, rows["blocks.0-1"].flops) == (2, 2 * 2 * 2 * 8 * 16)
    assert rows["blocks.0-1"].parameters == sum(p.numel() for p in model.blocks.parameters())


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5", "Whisper", "ALBERT"])
def test_tied_weights_are_counted_once(name):
    model = FOUND[name][0]()
    summary = summarize(model, find_blocks(model))
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    assert summary.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    twice = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) - summary.parameters
    assert twice > 0
    assert sum(row.tied for row in summary.rows) <= twice
    last = summary.rows[-1]  # the output layer is the embedding; some have a bias or a layer of their own besides
    assert last.tied % 50 == 0
    assert last.tied > 0


def test_a_layer_that_is_run_three_times_computes_three_times():
    model = FOUND["ALBERT"][0]()
    once = FOUND["ALBERT"][0]()
    once.config.num_hidden_layers = 1
    flops = [
        {row.kind: row.flops for row in summarize(m, find_blocks(m), lambda m: m(input_ids=TOKENS), 2).rows}[
            "AlbertLayer"
        ]
        for m in (model, once)
    ]
    assert flops[0] == 3 * flops[1] > 0


def test_causal_and_full_attention_count_as_two_products():
    query = torch.zeros(1, 2, 16, 4)

    class Attention(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert summarize(Attention(), run=lambda model: model(query)).flops == 2 * (2 * 2 * 16 * 16 * 4)


def test_what_no_part_computes_stands_in_a_row_of_its_own():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)

        def forward(self, x):
            return F.linear(self.embedding(x), self.embedding.weight)

    (embedding, rest) = summarize(Tied(), run=lambda model: model(TOKENS[:1])).rows
    assert (embedding.flops, rest.kind, rest.flops, rest.share) == (0, "elsewhere", 2 * 8 * 4 * 10, 1.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("change", ["plain", "checkpointed", "compiled"])
def test_nothing_is_computed_and_the_model_stays_as_it_is(change):
    torch.compiler.reset()
    model = StackModel(norm=nn.BatchNorm1d, dropout=0.5)
    if change == "checkpointed":
        checkpoint_blocks(find_blocks(model))
    if change == "compiled":
        compile_forwards(find_blocks(model), backend="aot_eager")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calls = []
    hooks = [block.register_forward_hook(lambda *args: calls.append(type(args[2]).__name__)) for block in model.blocks]
    summary = summarize(model, find_blocks(model), lambda m: m(torch.zeros(4, 8)), 4)
    assert (summary.flops, summary.not_counted) == (2 * (8 * 8 + 8 * 4 + 2 * 2 * 8 * 16), None)
    assert calls == ["FakeTensor", "FakeTensor"]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {type(tensor) for tensor in model.state_dict().values()} == {torch.Tensor}
    for hook in hooks:
        hook.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_reads_values_says_why_its_flops_are_not_counted():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    summary = summarize(Reads(2, 2), run=lambda model: model(torch.ones(1, 2)))
    assert summary.flops is None
    assert summary.not_counted.startswith("DataDependentOutputException")
    assert [(row.name, row.flops) for row in summary.rows] == [("weight", None), ("bias", None)]
    told = table(summary)
    assert "FLOPs: not counted: DataDependentOutputException" in told


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "GPT-2", "UNet2DModel", "densenet121"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_table_keeps_to_80_columns(name):
    with torch.device("meta"):
        model = FOUND[name][0]()
    lines = table(summarize(model, find_blocks(model))).splitlines()
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines[1:-2]}) <= 2  # a table: the figures end in one column
    if name == "GPT-2":
        assert any(line.startswith("lm_head") and " tied " in line for line in lines)


@pytest.mark.slow
def test_explain_shows_the_model_of_a_config():
    words = ["explain", "--config", DIGITS, "--model", "activation_checkpointing=full", "precision=bf16"]
    shown = run(*words)
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()][:2] == ["part", "conv1"]
    assert "layer1.0      BasicBlock" in shown.stdout
    told = json.loads(run(*words, "--json").stdout)
    assert {"config", "step", "model"} <= set(told)
    assert told["model"]["parameters"] == sum(row["parameters"] for row in told["model"]["rows"])
    assert told["model"]["flops"] == sum(row["flops"] for row in told["model"]["rows"]) > 1e6
