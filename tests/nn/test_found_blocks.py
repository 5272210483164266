"""Which blocks are found in models of torchvision, timm, transformers and diffusers, and in shapes of one's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torchvision.models as vision
from torch import nn

from fasttrain.nn.blocks import find_blocks, names_of

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}


def timm(name):
    import timm

    return timm.create_model(name)


def hugging_face(model, **config):
    import transformers

    cls = getattr(transformers, model)
    return cls(cls.config_class(**config))


def diffusers(name, **config):
    import diffusers

    return getattr(diffusers, name)(**config)


def whisper():
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1}
    return hugging_face("WhisperForConditionalGeneration", vocab_size=50, **sizes, **widths, **TOKENS)


def clip():
    text = {**TEXT, **TOKENS, "num_hidden_layers": 2}
    return hugging_face("CLIPModel", text_config=text, vision_config={**IMAGE, "num_hidden_layers": 3})


def t5(model="T5ForConditionalGeneration", **more):
    return hugging_face(model, vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, **more)


FOUND = {
    "resnet50": (vision.resnet50, {"Bottleneck": 16}, "layer1.0", "layer4.2"),
    "vit_b_16": (
        vision.vit_b_16,
        {"EncoderBlock": 12},
        "encoder.layers.encoder_layer_0",
        "encoder.layers.encoder_layer_11",
    ),
    "mobilenet_v3_small": (vision.mobilenet_v3_small, {"InvertedResidual": 11}, "features.1", "features.11"),
    "mobilenet_v2": (vision.mobilenet_v2, {"InvertedResidual": 17}, "features.1", "features.17"),
    "swin_t": (vision.swin_t, {"SwinTransformerBlock": 12}, "features.1.0", "features.7.1"),
    "densenet121": (
        vision.densenet121,
        {"_DenseLayer": 58},
        "features.denseblock1.denselayer1",
        "features.denseblock4.denselayer16",
    ),
    "fasterrcnn_resnet50_fpn": (
        lambda: vision.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None),
        {"Bottleneck": 16},
        "backbone.body.layer1.0",
        "backbone.body.layer4.2",
    ),
    "deeplabv3_resnet50": (
        lambda: vision.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None),
        {"Bottleneck": 16},
        "backbone.layer1.0",
        "backbone.layer4.2",
    ),
    "convnext_tiny": (vision.convnext_tiny, {"CNBlock": 18}, "features.1.0", "features.7.2"),
    "efficientnet_b0": (vision.efficientnet_b0, {"MBConv": 16}, "features.1.0", "features.7.0"),
    "googlenet": (
        lambda: vision.googlenet(init_weights=False),
        {"Inception": 9, "InceptionAux": 2},
        "inception3a",
        "aux2",
    ),
    "inception_v3": (
        lambda: vision.inception_v3(init_weights=False),
        {"InceptionA": 3, "InceptionC": 4, "InceptionE": 2},
        "Mixed_5b",
        "Mixed_7c",
    ),
    "maxvit_t": (vision.maxvit_t, {"MaxVitLayer": 11}, "blocks.0.layers.0", "blocks.3.layers.1"),
    "squeezenet1_1": (vision.squeezenet1_1, {"Fire": 8}, "features.3", "features.12"),
    "shufflenet": (vision.shufflenet_v2_x1_0, {"InvertedResidual": 16}, "stage2.0", "stage4.3"),
    "timm convnext_atto": (
        lambda: timm("convnext_atto"),
        {"ConvNeXtBlock": 12},
        "stages.0.blocks.0",
        "stages.3.blocks.1",
    ),
    "timm efficientnet_b0": (lambda: timm("efficientnet_b0"), {"InvertedResidual": 15}, "blocks.1.0", "blocks.6.0"),
    "timm vit_tiny": (lambda: timm("vit_tiny_patch16_224"), {"Block": 12}, "blocks.0", "blocks.11"),
    "timm swin": (
        lambda: timm("swin_tiny_patch4_window7_224"),
        {"SwinTransformerBlock": 12},
        "layers.0.blocks.0",
        "layers.3.blocks.1",
    ),
    "timm mixer": (lambda: timm("mixer_b16_224"), {"MixerBlock": 12}, "blocks.0", "blocks.11"),
    "timm regnet": (lambda: timm("regnety_002"), {"Bottleneck": 13}, "s1.b1", "s4.b7"),
    "timm coatnet": (
        lambda: timm("coatnet_0_rw_224"),
        {"MbConvBlock": 5, "TransformerBlock2d": 9},
        "stages.0.blocks.0",
        "stages.3.blocks.1",
    ),
    "BERT": (
        lambda: hugging_face("BertForMaskedLM", **TEXT),
        {"BertLayer": 3},
        "bert.encoder.layer.0",
        "bert.encoder.layer.2",
    ),
    "ALBERT": (
        lambda: hugging_face("AlbertForMaskedLM", embedding_size=16, **TEXT),
        {"AlbertLayer": 1},
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
    ),
    "GPT-2": (
        lambda: hugging_face(
            "GPT2LMHeadModel", vocab_size=50, n_embd=32, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2
        ),
        {"GPT2Block": 3},
        "transformer.h.0",
        "transformer.h.2",
    ),
    "ViT": (
        lambda: hugging_face("ViTForImageClassification", **IMAGE),
        {"ViTLayer": 3},
        "vit.layers.0",
        "vit.layers.2",
    ),
    "T5": (lambda: t5(num_decoder_layers=2), {"T5Block": 5}, "encoder.block.0", "decoder.block.1"),
    "T5 with a large vocabulary": (
        lambda: hugging_face("T5ForConditionalGeneration", vocab_size=20000, d_model=32, d_ff=64, num_layers=2),
        {"T5Block": 4},
        "encoder.block.0",
        "decoder.block.1",
    ),
    "Llama": (
        lambda: hugging_face("LlamaForCausalLM", **TEXT),
        {"LlamaDecoderLayer": 3},
        "model.layers.0",
        "model.layers.2",
    ),
    "Mixtral": (
        lambda: hugging_face("MixtralForCausalLM", num_local_experts=4, num_key_value_heads=2, **TEXT),
        {"MixtralDecoderLayer": 3},
        "model.layers.0",
        "model.layers.2",
    ),
    "Whisper": (
        whisper,
        {"WhisperEncoderLayer": 2, "WhisperDecoderLayer": 3},
        "model.encoder.layers.0",
        "model.decoder.layers.2",
    ),
    "CLIP": (clip, {"CLIPEncoderLayer": 5}, "text_model.encoder.layers.0", "vision_model.encoder.layers.2"),
    "ResNet of transformers": (
        lambda: hugging_face("ResNetForImageClassification"),
        {"ResNetBottleNeckLayer": 16},
        "resnet.encoder.stages.0.layers.0",
        "resnet.encoder.stages.3.layers.2",
    ),
    "UNet2DModel": (
        lambda: diffusers("UNet2DModel"),
        {"ResnetBlock2D": 22, "Attention": 16},
        "down_blocks.0.resnets.0",
        "mid_block.resnets.1",
    ),
    "UNet2DConditionModel": (
        lambda: diffusers("UNet2DConditionModel"),
        {"ResnetBlock2D": 22, "Transformer2DModel": 16},
        "down_blocks.0.attentions.0",
        "mid_block.resnets.1",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_the_blocks_of_a_model_nobody_here_wrote_are_found(name):
    build, kinds, first, last = FOUND[name]
    with torch.device("meta"):
        model = build()
    blocks = find_blocks(model)
    names = names_of(model, blocks)
    assert Counter(type(block).__name__ for block in blocks) == kinds
    assert (names[0], names[-1]) == (first, last)
    assert names == [name for name, _ in model.named_modules() if name in set(names)]
    inside = {id(part) for block in blocks for part in list(block.modules())[1:]}
    assert not inside & {id(block) for block in blocks}, "a block lies in another one"


def pair(width):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Layer(nn.Module):
    """A layer whose experts hold most of it."""

    def __init__(self, width, experts):
        super().__init__()
        self.attend, self.router = nn.Linear(width, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Stage(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.widen = nn.Linear(width // 2, width)
        self.blocks = nn.ModuleList(Expert(width) for _ in range(depth))


class Towers(nn.Module):
    """Two equal encoders, as in self-distillation."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.Sequential(*(Expert(4) for _ in range(3))) for _ in range(2))


class Unet(nn.Module):
    """Blocks as attributes, made by a function."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.head = pair(4), pair(8), pair(4), nn.Linear(4, 1)


SHAPES = {
    "experts stay in their layer": (lambda: nn.ModuleList(Layer(4, 8) for _ in range(2)), ["0", "1"]),
    "a stage is opened": (
        lambda: nn.Sequential(Stage(4, 1), Stage(8, 2)),
        ["0.blocks.0", "1.blocks.0", "1.blocks.1"],
    ),
    "two equal towers are opened": (Towers, [f"{tower}.{i}" for tower in ("student", "teacher") for i in range(3)]),
    "a Sequential of Sequentials": (
        lambda: nn.Sequential(nn.Linear(4, 4), pair(4), pair(4), nn.Linear(4, 2)),
        ["1", "2"],
    ),
    "a linear layer with its activation": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)), nn.Linear(4, 2)),
        ["0", "1", "2"],
    ),
    "Sequentials of blocks are opened": (
        lambda: nn.Sequential(*(nn.Sequential(Expert(4), Expert(4)) for _ in range(2))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "a ModuleDict": (lambda: nn.ModuleDict({"a": Expert(4), "b": Expert(4)}), ["a", "b"]),
    "attributes": (Unet, ["first", "second", "third"]),
    "torch's Transformer": (
        lambda: nn.Transformer(8, 2, 1, 2, 16, batch_first=True),
        ["encoder.layers.0", "decoder.layers.0", "decoder.layers.1"],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_found_in_shapes_of_ones_own(shape):
    build, names = SHAPES[shape]
    model = build()
    assert names_of(model, find_blocks(model)) == names


@pytest.mark.parametrize("build", [vision.vgg11, vision.alexnet])
def test_a_chain_of_plain_layers_has_no_blocks(build):
    from fasttrain import ConfigError

    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError, match="no repeated blocks were found"):
        find_blocks(model)
