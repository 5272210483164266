"""The shape of a BERT; needs no torch, so that configs can hold it."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT encoder. The defaults are BERT-base (110 M parameters).

    `vocabulary`: number of token ids. `positions`: longest sequence. `feedforward`: width inside a block, usually 4 x
    `width`. `dropout`: after embeddings, attention and feed-forward, and on attention weights too unless
    `attention_dropout` says otherwise. `activation`: gelu (by the error function), gelu_tanh or relu.
    `initial_std`: of all weight matrices; 0.02 suits widths of 768 and more, a narrow model starts faster with about
    1 / sqrt(width).
    BERT-large: width 1024, 24 layers, 16 heads, feedforward 4096.
    Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    vocabulary: int = 30522
    width: int = 768
    layers: int = 12
    heads: int = 12
    feedforward: int = 3072
    positions: int = 512
    token_types: int = 2
    dropout: float = 0.1
    attention_dropout: float | None = None
    activation: str = "gelu"
    norm_eps: float = 1e-12
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "feedforward", "positions", "token_types"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of a BERT must be at least 1.")
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} cannot be shared out over heads={self.heads}; use a multiple of {self.heads}."
            )
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"{name}={value} is no probability of dropping; use 0 or more and less than 1.")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation} is not known; use one of {', '.join(ACTIVATIONS)}.")
