"""Read a BERT that Hugging Face's transformers wrote: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.models.bert import Bert, BertForClassification, BertForMaskedLM
from fasttrain.models.bert_config import BertConfig

# Longest first, so that no name is cut short by another.
_NAMES = (
    (r"^embeddings\.word_embeddings\.", "encoder.embeddings.word."),
    (r"^embeddings\.position_embeddings\.", "encoder.embeddings.position."),
    (r"^embeddings\.token_type_embeddings\.", "encoder.embeddings.token_type."),
    (r"^embeddings\.LayerNorm\.", "encoder.embeddings.norm."),
    (r"^encoder\.layer\.(\d+)\.attention\.self\.", r"encoder.layers.\1.attention."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"encoder.layers.\1.attention.output."),
    (r"^encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"encoder.layers.\1.attention_norm."),
    (r"^encoder\.layer\.(\d+)\.intermediate\.dense\.", r"encoder.layers.\1.feedforward.expand."),
    (r"^encoder\.layer\.(\d+)\.output\.dense\.", r"encoder.layers.\1.feedforward.contract."),
    (r"^encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"encoder.layers.\1.feedforward_norm."),
    (r"^pooler\.dense\.", "encoder.pooler.dense."),
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.decoder\.", "head.decoder."),
    (r"^cls\.predictions\.bias$", "head.decoder.bias"),
    (r"^classifier\.", "classifier."),
)
# No weights (a buffer of old versions), and the next-sentence head of BertForPreTraining, which no model here has.
_NO_COUNTERPART = re.compile(r"^(embeddings\.position_ids|cls\.seq_relationship\..*)$")
_PARTS = ("encoder.pooler", "head", "classifier")  # what a file or a model may lack as a whole
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}

AnyBert = Bert | BertForMaskedLM | BertForClassification


def load_hugging_face_bert(path: str | Path, into: AnyBert | None = None) -> Any:
    """The BERT in a folder of Hugging Face's transformers, ready to be trained further.

    Without `into`, the model is the one the file holds: `BertForMaskedLM` if there is a masked-word head,
    `BertForClassification` if there is a classifier, else `Bert` (with a pooler if the file has one). Given a model,
    its encoder is filled, and its pooler and head as far as the file has them; what then starts untrained is logged.

    Takes the names of BertModel and of BertForMaskedLM and its kin, with or without `bert.` in front, `gamma` and
    `beta` for norms, and any floating dtype.

    Raises:
        ConfigError: files are missing, or the config asks for what this BERT is not (relative positions, a decoder).
        CheckpointError: weights are missing, unknown or of another shape; all of them are listed.
    """
    path = Path(path).expanduser()
    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise ConfigError(
                f"{path} holds no {name}; name a folder that save_pretrained(..., safe_serialization=True) of "
                "Hugging Face's transformers wrote, in one piece."
            )
    config = config_from_hugging_face(json.loads((path / "config.json").read_text()))
    state, unknown = rename(load_file(path / "model.safetensors"))
    model = _model_for(config, state) if into is None else into
    _fill(model, state, unknown, path, may_lack=into is not None)
    return model


def config_from_hugging_face(config: Mapping[str, Any]) -> BertConfig:
    """Our config for the content of a `config.json`.

    Raises:
        ConfigError: it asks for what this BERT is not.
    """
    wanted = {
        "model_type": "bert",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    for name, value in wanted.items():
        found = config.get(name, value)
        if found != value:
            raise ConfigError(
                f"config.json has {name}={found}, but fasttrain's BERT is {value} there; use such a model."
            )
    if config["hidden_act"] not in _ACTIVATIONS:
        raise ConfigError(f"config.json has hidden_act={config['hidden_act']}; use one of {', '.join(_ACTIVATIONS)}.")
    return BertConfig(
        vocabulary=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        feedforward=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        token_types=config["type_vocab_size"],
        dropout=config["hidden_dropout_prob"],
        attention_dropout=config["attention_probs_dropout_prob"],
        activation=_ACTIVATIONS[config["hidden_act"]],
        norm_eps=config["layer_norm_eps"],
        initial_std=config.get("initializer_range", 0.02),
    )


def rename(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights under the names of `BertForMaskedLM` and `BertForClassification`; and the names nobody knows."""
    renamed, unknown = {}, []
    for original, tensor in state.items():
        name = original.removeprefix("bert.")
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if _NO_COUNTERPART.match(name):
            continue
        for pattern, replacement in _NAMES:
            name, times = re.subn(pattern, replacement, name)
            if times:
                renamed[name] = tensor
                break
        else:
            unknown.append(original)
    return renamed, unknown


def _model_for(config: BertConfig, state: Mapping[str, Tensor]) -> AnyBert:
    if any(name.startswith("head.") for name in state):
        return BertForMaskedLM(config)
    if "classifier.weight" in state:
        return BertForClassification(config, state["classifier.weight"].shape[0])
    return Bert(config, pooler="encoder.pooler.dense.weight" in state)


def _part(name: str) -> str:
    return next((part for part in _PARTS if name.startswith(part + ".")), "encoder")


@torch.no_grad()
def _fill(model: AnyBert, state: dict[str, Tensor], unknown: list[str], path: Path, *, may_lack: bool) -> None:
    prefix = "encoder." if isinstance(model, Bert) else ""
    own = {prefix + name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    embedding = state.get("encoder.embeddings.word.weight")
    if "head.decoder.weight" in own and embedding is not None:
        decoder = state.setdefault("head.decoder.weight", embedding)
        if not torch.equal(decoder, embedding):
            raise CheckpointError(
                f"{path}: the decoder's weight is not the word embedding, but here they are one parameter; "
                "load the encoder alone, into=Bert(config)."
            )
    in_file, in_model = {_part(name) for name in state}, {_part(name) for name in own}
    untrained = in_model - in_file if may_lack else set()
    wrong = [f"unknown: {name}" for name in unknown]
    wrong += [f"unknown: {name}" for name in state if name not in own and _part(name) in in_model]
    wrong += [f"missing: {name}" for name in own if name not in state and _part(name) not in untrained]
    wrong += [
        f"shape: {name} is {list(state[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__}; check its config.json, or build the model for it:\n  "
            + "\n  ".join(sorted(wrong))
        )
    for name, tensor in own.items():
        if name in state:
            tensor.copy_(state[name])
    if untrained:
        logging.getLogger(__name__).warning(
            "%s: no weights for %s; untrained there", path, ", ".join(sorted(untrained))
        )
