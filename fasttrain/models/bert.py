"""BERT: a bidirectional transformer encoder, with heads for masked words and for classification.

Source: Devlin et al. 2018, arXiv:1810.04805. As in the original, norms come after the residual sums and positions are
learned. Attention is torch's `scaled_dot_product_attention`, which picks flash, memory-efficient or plain kernels. Rows may
hold several sequences each (`Boundaries`), which then do not see one another.

Shapes: B batch, S sequence, W width, H heads, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.errors import BatchError
from fasttrain.models.bert_config import BertConfig
from fasttrain.nn.attention import attend_within, block_diagonal, needs_mask
from fasttrain.nn.boundaries import Boundaries
from fasttrain.nn.losses import cross_entropy, linear_cross_entropy


class Embeddings(nn.Module):
    """Sum of the embeddings of word, position and token type, normalised. `[B, S]` ids to `[B, S, W]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.token_type = nn.Embedding(config.token_types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, token_types: Tensor | None = None, within: Boundaries | None = None) -> Tensor:
        """`token_types` `[B, S]`: which of two texts a token is of; left out, all are of the first.

        Positions begin anew with each sequence of `within`.
        """
        length, longest = tokens.shape[1] if within is None else within.longest, self.position.num_embeddings
        if length > longest:
            raise BatchError(
                f"sequences of {length} tokens were given, but this BERT has positions for {longest}; cut them, or "
                f"build the model with positions={length}."
            )
        if token_types is None:
            token_types = torch.zeros_like(tokens)
        places = torch.arange(length, device=tokens.device) if within is None else within.places().view_as(tokens)
        x = self.word(tokens) + self.position(places) + self.token_type(token_types)
        return self.dropout(self.norm(x))


def _cast_once(x: Tensor) -> Tensor:
    """Under autocast, the narrow copy that several products share; each would make and keep one of its own."""
    return x.to(_dtype_of_products(x))


def _dtype_of_products(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class SelfAttention(nn.Module):
    """Multi-head attention of each token to all others. `[B, S, W]` to `[B, S, W]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None = None, within: Boundaries | None = None) -> Tensor:
        """`mask`, boolean and broadcast to `[B, H, S, S]`: True where a token may be looked at.

        Instead of it `within`: the sequences that rows consist of, each of which sees itself alone.
        """
        x = _cast_once(x)
        dropout = self.dropout if self.training else 0.0
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)) for project in (self.query, self.key, self.value)
        )
        if within is not None:
            query, key, value = (part.flatten(0, 1) for part in (query, key, value))  # [B * S, H, W / H]
            return self.output(attend_within(query, key, value, within, dropout).view_as(x))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))  # [B, H, S, W / H]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.output(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers around an activation, on each token alone. `[B, S, W]` to `[B, S, W]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, config.feedforward)
        self.activation = activation(config.activation)
        self.contract = nn.Linear(config.feedforward, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        return self.contract(self.activation(self.expand(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to its input and normalised. `[B, S, W]` to `[B, S, W]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.feedforward = FeedForward(config)
        self.feedforward_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, within: Boundaries | None = None) -> Tensor:
        """`mask` and `within` as in `SelfAttention`."""
        x = self.attention_norm(x + self.dropout(self.attention(x, mask, within)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


class Pooler(nn.Module):
    """What the first token, [CLS], has gathered of the whole text. `[B, S, W]` to `[B, W]`.

    Where rows hold several sequences each: `first` `[N]`, the first token of each of them among all B x S. Gives `[N, W]`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor, first: Tensor | None = None) -> Tensor:
        """A linear layer and tanh on the first token."""
        return torch.tanh(self.dense(hidden[:, 0] if first is None else hidden.flatten(0, 1)[first]))


class Bert(nn.Module):
    """The encoder: token ids `[B, S]` to hidden states `[B, S, W]`; `bert.pooler(hidden)` gives `[B, W]`.

    `pooler=False` leaves the pooler out, where nothing would train it (masked words alone).
    """

    def __init__(self, config: BertConfig, *, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.pooler = Pooler(config) if pooler else None
        self.apply(partial(initialise, std=config.initial_std))

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        within: Boundaries | None = None,
    ) -> Tensor:
        """Hidden states of the last layer.

        `attention_mask` `[B, S]`, boolean or 0/1: true for words, false for padding, which no token then looks at. What
        comes out at padding itself means nothing. Without padding leave it out: the fastest kernels take no mask.

        Instead of it `within`: rows hold several sequences each, which do not see one another, and whose positions begin
        anew; `[1, T]` with all of them in one row is a batch without padding.
        """
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(tokens, token_types, within)
        if within is not None:
            within, mask = self._kept_apart(x, within)
        for layer in self.layers:
            x = layer(x, mask, within)
        return x

    def _kept_apart(self, x: Tensor, within: Boundaries) -> tuple[Boundaries | None, Tensor | None]:
        """What keeps the sequences of rows apart here: their boundaries, or a mask where no kernel takes these."""
        config = self.config
        dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
        dropout = dropout if self.training else 0.0
        head_width = config.width // config.heads
        if needs_mask(x.device, x.shape[0], _dtype_of_products(x), head_width, dropout):
            return None, block_diagonal(within, x.shape[0])
        return within, None


class MaskedLMHead(nn.Module):
    """From hidden states `[..., W]` to a score for each token of the vocabulary `[..., V]`, or to their loss."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.activation = activation(config.activation)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.decoder = nn.Linear(config.width, config.vocabulary)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token by token; with `labels` `[...]` the mean cross-entropy over those that are not -100: 0-dim."""
        x = self.norm(self.activation(self.dense(hidden)))
        if labels is None:
            return self.decoder(x)
        if type(self.decoder) is not nn.Linear:  # an adapter, or products in float8: more than the weight and the bias
            return cross_entropy(self.decoder(x), labels)
        return linear_cross_entropy(x, self.decoder.weight, labels, self.decoder.bias)


class BertForMaskedLM(nn.Module):
    """BERT that guesses hidden words. The decoder's weight is the word embedding: one parameter under two names."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Bert(config, pooler=False)
        self.head = MaskedLMHead(config)
        self.head.apply(partial(initialise, std=config.initial_std))
        self.head.decoder.weight = self.encoder.embeddings.word.weight

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        within: Boundaries | None = None,
    ) -> Tensor:
        """Scores `[B, S, V]`; with `positions` `[B, P]` (where words are hidden) only those: `[B, P, V]`.

        The head costs V x W a token, often more than all layers together, and the loss reads the hidden words alone.
        With `labels` (`[B, S]`, or `[B, P]`; -100 where there is none) the mean loss, and never all scores at once.
        """
        hidden = self.encoder(tokens, attention_mask, token_types, within)
        if positions is not None:
            hidden = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        return self.head(hidden, labels)


class BertForClassification(nn.Module):
    """BERT that sorts whole texts into classes: scores `[B, classes]` from the pooled [CLS].

    With several texts a row (`within`, and `first` `[N]` as in `Pooler`): `[N, classes]`.
    """

    def __init__(self, config: BertConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Bert(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, classes)
        initialise(self.classifier, std=config.initial_std)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        within: Boundaries | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        """Scores of each class."""
        hidden = self.encoder(tokens, attention_mask, token_types, within)
        assert self.encoder.pooler is not None
        return self.classifier(self.dropout(self.encoder.pooler(hidden, first)))


def activation(name: str) -> nn.Module:
    """The activation of that name in a `BertConfig`."""
    return nn.ReLU() if name == "relu" else nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Draw the weights of a linear layer or an embedding from a normal distribution; biases are zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
