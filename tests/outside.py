"""Trainers of models nobody here wrote: torchvision, timm, transformers, diffusers; small, with random weights."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fasttrain import Data, Trainer

SAMPLES, CLASSES, TOKENS, LENGTH = 4, 5, 40, 12
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def generator():
    return torch.Generator().manual_seed(7)


def images(size, n=SAMPLES):
    return torch.randn(n, 3, size, size, generator=generator())


def labels(n=SAMPLES):
    return torch.randint(CLASSES, (n,), generator=generator())


class Classify(Trainer):
    """An image and its class."""

    size = 32

    def build_data(self):
        return Data(train=(images(self.size), labels()), shuffle=False)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


def torchvision(name, pixels=32, **settings):
    def build_model(self):
        import torchvision

        return getattr(torchvision.models, name)(num_classes=CLASSES, **settings)

    return type(name, (Classify,), {"size": pixels, "build_model": build_model})


class Vit(Classify):
    """vit_b_16, but narrow."""

    def build_model(self):
        from torchvision.models import VisionTransformer

        sizes = {"image_size": 32, "patch_size": 16, "num_layers": 4, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
        return VisionTransformer(**sizes, num_classes=CLASSES)


class Swin(Classify):
    def build_model(self):
        from torchvision.models import SwinTransformer

        sizes = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
        return SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=CLASSES)


def timm(name, pixels=32, **settings):
    def build_model(self):
        import timm

        return timm.create_model(name, num_classes=CLASSES, **settings)

    return type(f"timm_{name}", (Classify,), {"size": pixels, "build_model": build_model})


class Words(Trainer):
    """Token ids, of which the model makes its own loss: a mean over all that is no padding."""

    model_class, settings = "", {}

    def build_data(self):
        ids = torch.randint(3, TOKENS, (SAMPLES, LENGTH), generator=generator())
        return Data(
            train={"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}, shuffle=False
        )

    def build_model(self):
        import transformers

        cls = getattr(transformers, self.model_class)
        return cls(cls.config_class(vocab_size=TOKENS, **SPECIAL, **self.settings))

    def compute_loss(self, batch):
        return self.model(**batch).loss


def words(model, **settings):
    return type(model, (Words,), {"model_class": model, "settings": settings})


class HuggingFaceViT(Classify):
    def build_model(self):
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=CLASSES, **WIDTH))

    def loss(self, output, batch):
        return F.cross_entropy(output.logits, batch[1])


class Whisper(Words):
    """Spectrograms `[n, 80, frames]` to words."""

    model_class = "WhisperForConditionalGeneration"
    settings = {
        **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 50},
        **{"decoder_start_token_id": 1},
    }

    def build_data(self):
        ids = torch.randint(3, TOKENS, (SAMPLES, LENGTH), generator=generator())
        sound = torch.randn(SAMPLES, 80, 100, generator=generator())
        return Data(train={"input_features": sound, "labels": ids}, shuffle=False)


class Boxes(torch.utils.data.Dataset):
    """Images of different sizes, each with a box or two."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        boxes = torch.tensor([[4.0, 4, 30, 40], [10, 10, 44, 36]])[: 1 + i % 2]
        image = torch.rand(3, 56 + 4 * i, 64 - 2 * i, generator=g)
        return image, {"boxes": boxes, "labels": torch.tensor([1, 2])[: len(boxes)]}


class FasterRcnn(Trainer):
    """Lists of images and of targets; the model gives a dict of losses."""

    def build_data(self):
        return Data(
            train=Boxes(),
            collate=lambda samples: [list(column) for column in zip(*samples, strict=True)],
            shuffle=False,
        )

    def build_model(self):
        from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

        # A fixed choice of boxes: the sampler of regions draws from the global generator otherwise.
        return fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, box_batch_size_per_image=64
        )

    def count(self, batch):
        return len(batch[0])

    def split(self, batch, n):
        bounds = [len(batch[0]) * i // n for i in range(n + 1)]
        return [[column[low:high] for column in batch] for low, high in itertools.pairwise(bounds)]

    def compute_loss(self, batch):
        return sum(self.model(*batch).values())


class Diffusion(Trainer):
    """Noise that was added to an image is to be told from it."""

    def build_data(self):
        clean, noise = images(16), torch.randn(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(8))
        time = torch.tensor([10, 200, 500, 900])[:SAMPLES]
        keep = (1 - time / 1000)[:, None, None, None]
        return Data(train=(keep.sqrt() * clean + (1 - keep).sqrt() * noise, time, noise), shuffle=False)

    def build_model(self):
        from diffusers import UNet2DModel

        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        widths = {"block_out_channels": (16, 32), "norm_num_groups": 8, "attention_head_dim": 8}
        return UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, layers_per_block=1, **widths)

    def inputs(self, batch):
        return batch[:2]

    def loss(self, output, batch):
        return F.mse_loss(output.sample, batch[2])


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A trainer, what kind of layers its model has, and how many blocks of which class.

    `statistics`: batch norm, so that microbatches and ranks compute other numbers by nature.
    """

    trainer: type[Trainer]
    block: str
    convolutional: bool = False
    statistics: bool = False


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**WIDTH, "num_key_value_heads": 1}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OUTSIDE = {
    "resnet50": Outside(trainer=torchvision("resnet50", 64), block="Bottleneck", convolutional=True, statistics=True),
    "vit_b_16": Outside(trainer=Vit, block="EncoderBlock"),
    "mobilenet_v3_small": Outside(
        trainer=torchvision("mobilenet_v3_small", 64, dropout=0.0),
        block="InvertedResidual",
        convolutional=True,
        statistics=True,
    ),
    "swin_t": Outside(trainer=Swin, block="SwinTransformerBlock"),
    "densenet121": Outside(
        trainer=torchvision("densenet121", 64), block="_DenseLayer", convolutional=True, statistics=True
    ),
    "fasterrcnn": Outside(trainer=FasterRcnn, block="InvertedResidual"),
    "timm convnext_atto": Outside(trainer=timm("convnext_atto"), block="ConvNeXtBlock", convolutional=True),
    "timm efficientnet_b0": Outside(
        trainer=timm("efficientnet_b0", 64), block="InvertedResidual", convolutional=True, statistics=True
    ),
    "timm vit_tiny": Outside(trainer=timm("vit_tiny_patch16_224", img_size=32), block="Block"),
    "BERT": Outside(trainer=words("BertForMaskedLM", **WIDTH, **NO_DROPOUT), block="BertLayer"),
    "GPT-2": Outside(trainer=words("GPT2LMHeadModel", **GPT2), block="GPT2Block"),
    "ViT": Outside(trainer=HuggingFaceViT, block="ViTLayer"),
    "T5": Outside(trainer=words("T5ForConditionalGeneration", decoder_start_token_id=0, **T5), block="T5Block"),
    "Llama": Outside(trainer=words("LlamaForCausalLM", **LLAMA), block="LlamaDecoderLayer"),
    "Whisper": Outside(trainer=Whisper, block="WhisperEncoderLayer"),
    "diffusion U-Net": Outside(trainer=Diffusion, block="ResnetBlock2D", convolutional=True),
}


def train(name, **slots):
    """The trainer after two steps, with plain SGD unless another optimizer is asked for, and its losses."""
    from tests.helpers import QUIET, Recorder

    watcher = Recorder()
    settings = {"batch_size": SAMPLES, "steps": 2, "optimizer": {"name": "sgd", "lr": 0.01}, **QUIET, **slots}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the libraries' own
        trainer = OUTSIDE[name].trainer(**settings, observers=[watcher])
        trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]
