"""Blocks, loss and optimizer step compiled by inductor, against eager code."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.models.bert import Bert
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from tests.helpers import QUIET, Recorder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Images(Trainer):
    """A small ResNet."""

    def build_data(self):
        g = torch.Generator().manual_seed(1)
        return Data(train=(torch.randn(24, 3, 8, 8, generator=g), torch.randint(3, (24,), generator=g)))

    def build_model(self):
        return build_resnet("resnet8", num_classes=3, stem="small", width=8)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1], label_smoothing=0.1)


class Words(Trainer):
    """A small BERT that predicts each token."""

    def build_data(self):
        return Data(train=(torch.randint(50, (24, 12), generator=torch.Generator().manual_seed(1)),))

    def build_model(self):
        settings = BertConfig(vocabulary=50, width=16, layers=2, heads=2, feedforward=32, dropout=0.0)
        return Bert(settings, pooler=False)

    def loss(self, output, batch):
        hidden = output[0] if isinstance(output, tuple) else output
        return F.cross_entropy(hidden.flatten(0, 1), batch[0].flatten() % hidden.shape[-1])


@pytest.mark.parametrize(("kind", "optimizer"), [(Images, "lamb"), (Words, "adamw")])
def test_five_steps_have_the_losses_of_eager_ones(kind, optimizer):
    losses, on = [], {"name": "blocks", "optimizer": True, "loss": True, "cache": None, "reference_steps": 0}
    for compile in (None, on):
        torch.compiler.reset()
        settings = {"batch_size": 8, "steps": 5, "optimizer": optimizer, "schedule": "cosine", "compile": compile}
        trainer = kind(**settings, observers=[seen := Recorder()], **QUIET)
        summary = trainer.fit()
        losses.append([record["loss"] for record in seen.steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(set(losses[1])) == 5
    assert summary["compile"]["breaks"] == []
