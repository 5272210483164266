"""Models in compiled code, by blocks and as a whole: the numbers and names of eager code, and how many graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from tests.helpers import QUIET, Recorder, state
from tests.outside import CLASSES, GPT2, OUTSIDE, SAMPLES, SPECIAL, TOKENS, Classify, Words, timm
from tests.stack import gradients

# Of the libraries; and what dynamo looks at and hides by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
LAYERS = 10  # more than the graphs that torch makes of a function


class OurResNet(Classify):
    """In float64: at a ReLU a rounding of float32 near zero is another gradient."""

    depth = "resnet8"

    def build_data(self):
        images, labels = super().build_data().train
        return Data(train=(images.double(), labels), shuffle=False)

    def build_model(self):
        return build_resnet(self.depth, num_classes=CLASSES, stem="small", width=8).double()


class DeeperResNet(OurResNet):
    depth = "resnet18"


class OurBert(Words):
    def build_model(self):
        sizes = {"vocabulary": TOKENS, "width": 32, "layers": 3, "heads": 2, "feedforward": 64}
        return BertForMaskedLM(BertConfig(**sizes, positions=16, dropout=0.0))

    def compute_loss(self, batch):
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class Gpt2(Words):
    """Without the cache of its keys, whose state every layer would be guarded on."""

    layers = 3

    def build_model(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(vocab_size=TOKENS, **SPECIAL, **(GPT2 | {"n_layer": self.layers}), use_cache=False)
        )

    def compute_loss(self, batch):
        scores = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def evaluated(trainer):
    """The same, evaluated on what it is trained on."""

    def build_data(self):
        train = trainer.build_data(self).train
        return Data(train=train, evaluation=train, shuffle=False)

    return type(trainer.__name__, (trainer,), {"build_data": build_data})


# Each with the number of kinds of its blocks.
MODELS: dict[str, tuple[type[Trainer], int]] = {
    "ResNet": (OurResNet, 3),
    "BERT": (OurBert, 1),
    "vit_b_16": (OUTSIDE["vit_b_16"].trainer, 1),
    "convnext_atto": (timm("convnext_atto", 64, depths=(2, 2, 2, 2)), 4),
    "GPT-2": (Gpt2, 1),
}
# Blocks whose input is laid out in memory in another way than what the block before hands on, in eager code too.
LAYOUTS = {"vit_b_16": 1, "swin_t": 1, "diffusion U-Net": 1}
# A wider net, which inductor would take too long for.
WIDER: dict[str, tuple[type[Trainer], int]] = {
    "ResNet-18": (DeeperResNet, 7),
    **{
        name: (OUTSIDE[name].trainer, kinds)
        for name, kinds in {
            "mobilenet_v3_small": 9,
            "swin_t": 2,
            "timm efficientnet_b0": 11,
            "timm vit_tiny": 1,
            "BERT": 1,
            "ViT": 1,
            "diffusion U-Net": 8,
        }.items()
    },
}


@dataclass
class Trained:
    """What a run came to. `graphs`: so far, after each step and at the end; gradients are of one more forward."""

    losses: list[float]
    evaluations: list[float]
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    graphs: list[int]
    breaks: dict[str, int]


def train(trainer, compile=None):
    """Three steps of plain SGD, each followed by an evaluation."""
    torch.compiler.reset()
    counters.clear()
    graphs = []

    class Watcher(Recorder):
        def stepped(self, record):
            super().stepped(record)
            graphs.append(counters["stats"]["unique_graphs"])

    watcher = Watcher()
    settings = {"batch_size": SAMPLES, "steps": 3, "optimizer": {"name": "sgd", "lr": 0.01}, "compile": compile}
    run = evaluated(trainer)(**settings, **QUIET, observers=[watcher])
    run.fit()
    weights = state(run)
    run.compute_loss(run.data.train).backward()
    graphs.append(counters["stats"]["unique_graphs"])
    return Trained(
        [record["loss"] for record in watcher.steps],
        [record["metrics"]["loss"] for record in watcher.evaluations],
        weights,
        gradients(run.model),
        graphs,
        dict(counters["graph_break"]),
    )


@functools.cache
def eager(trainer):
    return train(trainer)


def distance(some, others):
    """Between two sets of tensors, relative to the length of the first."""
    square = sum((some[name].double() - others[name].double()).square().sum() for name in some)
    return (square / sum(tensor.double().square().sum() for tensor in some.values())).sqrt().item()


def compare(name, trainer, kinds, how, backend):
    plain, compiled = (
        eager(trainer),
        train(trainer, {"name": how, "backend": backend, "strict": True, "reference_steps": 0}),
    )
    assert len(plain.losses) == len(plain.evaluations) == 3
    assert compiled.losses == pytest.approx(plain.losses, rel=2e-6)
    assert compiled.evaluations == pytest.approx(plain.evaluations, rel=2e-6)
    assert list(compiled.weights) == list(plain.weights)
    assert list(compiled.gradients) == list(plain.gradients)
    assert distance(plain.weights, compiled.weights) < 1e-6
    assert distance(plain.gradients, compiled.gradients) < 1e-5
    assert compiled.breaks == {}
    # One for each kind in training, as many again in evaluation, and none after the first step.
    graphs = kinds if how == "blocks" else 1
    laid_out = LAYOUTS.get(name, 0) if how == "blocks" else 0
    assert compiled.graphs[0] == graphs + laid_out
    assert compiled.graphs[-1] == compiled.graphs[1] <= 2 * compiled.graphs[0] + laid_out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_inductors_code_trains_and_evaluates_as_in_eager_code(name, how):
    trainer, kinds = MODELS[name]
    compare(name, trainer, kinds, how, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "model"])
@pytest.mark.parametrize("name", WIDER)
def test_a_model_that_was_traced_trains_and_evaluates_as_in_eager_code(name, how):
    trainer, kinds = WIDER[name]
    compare(name, trainer, kinds, how, "aot_eager")


@pytest.mark.slow
def test_a_decoder_with_a_cache_has_a_graph_for_each_layer_and_none_runs_uncompiled():
    """Its layers read their place in the cache, and the cache at that place."""

    class Cached(Gpt2):
        layers = LAYERS

        def build_model(self):
            model = super().build_model()
            model.config.use_cache = True
            return model

    plain = train(Cached)
    compiled = train(Cached, {"name": "blocks", "backend": "aot_eager", "strict": True, "reference_steps": 0})
    assert compiled.losses == pytest.approx(plain.losses, rel=2e-6)
    assert compiled.graphs[0] == LAYERS
    assert compiled.graphs[-1] == compiled.graphs[1] == 2 * LAYERS
