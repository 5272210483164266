"""adapters on models nobody here wrote, with recomputation, compiled blocks, and on ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from fasttrain import Data, Trainer
from fasttrain.models.bert import Bert
from fasttrain.models.bert_config import BertConfig
from fasttrain.nn.low_rank import is_adapter
from tests.helpers import QUIET, Recorder, largest_difference, state
from tests.ranks import run_ranks
from tests.stack import Stack

WORDS = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**WORDS, num_labels=4, initializer_range=0.2, hidden_dropout_prob=0.0)
    )


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WORDS))


def t5():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    small = {name: value for name, value in WORDS.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**small, image_size=8, patch_size=4, num_labels=4)
    )


# How many layers of a model are corrected.
MODELS = {"bert": (bert, 12), "gpt2": (gpt2, 8), "llama": (llama, 14), "t5": (t5, 32), "vit": (vit, 12)}


class OneBatch(Trainer):
    """The same batch in each step."""

    kind = "bert"

    def build_data(self):
        g = torch.Generator().manual_seed(0)
        if self.kind == "vit":
            return Data(train={"pixel_values": torch.randn(8, 3, 8, 8, generator=g), "labels": torch.arange(8) % 4})
        words = torch.randint(1, 40, (8, 6), generator=g)
        return Data(train={"input_ids": words, "labels": torch.arange(8) % 4 if self.kind == "bert" else words})

    def build_model(self):
        return MODELS[self.kind][0]()

    def compute_loss(self, batch):
        return self.model(**batch).loss


def one_batch(model, steps=20, **given):
    kind = type("Run", (OneBatch,), {"kind": model})
    trainer = kind(
        batch_size=8,
        steps=steps,
        optimizer={"name": "adamw", "lr": 1e-2},
        **given,
        observers=[w := Recorder()],
        **QUIET,
    )
    before = state(trainer)
    trainer.fit()
    after = state(trainer)
    return trainer, [r["loss"] for r in w.steps], {n for n in before if not torch.equal(before[n], after[n])}


@pytest.mark.parametrize("name", ["lora", "qlora"])
@pytest.mark.parametrize("model", MODELS)
def test_only_adapters_move_and_the_loss_of_one_batch_falls(model, name):
    trainer, losses, changed = one_batch(model, adapters={"name": name, "rank": 4})
    corrected = [module for module in trainer.model.modules() if "lora_A" in module._modules]
    assert len(corrected) == MODELS[model][1]
    assert changed == {n for n, _ in trainer.model.named_parameters() if is_adapter(n)}
    assert len(changed) == 2 * len(corrected)
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("model", MODELS)
def test_recomputed_blocks_give_the_same_adapters_though_their_inputs_need_no_gradient(model):
    plain = one_batch(model, 3, adapters="lora")
    again = one_batch(model, 3, adapters="lora", activation_checkpointing="full")
    assert plain[1] == again[1]
    assert largest_difference(state(plain[0]), state(again[0])) == 0.0


def test_the_bert_of_this_package_takes_adapters():
    from fasttrain.core.strategy import Context
    from fasttrain.strategies.adapters import layers_to_adapt

    model = Bert(BertConfig(vocabulary=64, width=16, layers=2, heads=2, feedforward=32))
    layers = layers_to_adapt(model, None, Context(device=torch.device("cpu")), "lora", False)
    assert len(layers) >= 8
    assert all(isinstance(layer, nn.Linear) for layer in layers)


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_compiled_blocks_are_one_full_graph_and_train_alike(name):
    given = {"batch_size": 8, "steps": 3, "adapters": name, **QUIET}
    plain = Stack(**given)
    compiled = Stack(**given, compile={"name": "blocks", "backend": "aot_eager", "fullgraph": name == "lora"})
    plain.fit()
    compiled.fit()
    assert largest_difference(state(plain), state(compiled)) < 1e-6


ADAPTERS = {
    "lora": {"name": "lora", "train": ["head"]},
    "qlora": {"name": "qlora"},
    "freeze": {"name": "freeze", "freeze": ["embed", "blocks.0"], "unfreeze": {"blocks.0": 2}},
}


def train_on_this_rank(name):
    trainer = Stack(batch_size=8, steps=4, optimizer={"name": "sgd", "lr": 0.05}, adapters=ADAPTERS[name], **QUIET)
    before = state(trainer)
    trainer.fit()
    after = state(trainer)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {n: v.numpy() for n, v in after.items()}, {n for n in before if not torch.equal(before[n], after[n])}, ranks


@pytest.mark.ranks
@pytest.mark.parametrize("name", ADAPTERS)
def test_two_ranks_train_as_one_process_does(name):
    weights, changed, _ = train_on_this_rank(name)
    for theirs, moved, ranks in run_ranks(2, train_on_this_rank, name, timeout_s=200):
        assert ranks == 2
        assert moved == changed
        tensors = [{n: torch.from_numpy(v) for n, v in one.items()} for one in (weights, theirs)]
        assert largest_difference(*tensors) < 1e-6
