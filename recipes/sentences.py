"""Fine-tuning a BERT to sort sentences into classes: reviews of movies into good and bad, or sentences of your own.

    scripts/fetch_data movie minilm
    python -m fasttrain --config configs/bert_movie.yaml
    python -m fasttrain --config configs/bert_movie.yaml data.file=mine.tsv model.path=~/some-bert

A file of your own has a sentence a line: its class, a tab, the text. The held-out part is chosen by the hash of each text,
so that no sentence ever changes sides. How sequences lie in a batch is a setting (docs/text.md); the loss is the same in all
layouts.
Source: Devlin et al. 2018, arXiv:1810.04805, section 4.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasttrain import Data, Trainer
from fasttrain.data.documents import is_held_out
from fasttrain.data.text import Layout, LayoutConfig, Sequences, encode, load_tokenizer, separate_sequences, special_ids
from fasttrain.data.text.tokenizer import PAD, SEPARATOR, START
from fasttrain.errors import ConfigError
from fasttrain.lazy import F, np, torch
from recipes import sets


@dataclass(frozen=True, kw_only=True)
class Model:
    """A BERT in a folder of Hugging Face's transformers, with its tokenizer.json or vocab.txt.

    `path`: null is MiniLM, which scripts/fetch_data gets. `pretrained`: false takes its shape and draws new weights.
    `dropout` after embeddings, attention and feed-forward; none on attention weights, where kernels for variable lengths
    have none.
    """

    path: str | None = None
    pretrained: bool = True
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Labelled(LayoutConfig):
    """Which sentences, and how they lie in a batch. `file`: null is the movie reviews. `held_out`: share of them."""

    file: str | None = None
    held_out: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out={self.held_out} is no share; use a number between 0 and 1.")


def labelled_lines(path: str) -> tuple[list[str], list[int], list[str]]:
    """Sentences of a file, their classes as numbers, and the names of these in order.

    Raises:
        ConfigError: it is not there, a line is no class and text, or there are fewer than two classes.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.file={path}: there is no such file; name one with a class, a tab and a text a line.")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        label, tab, text = line.partition("\t")
        if not tab or not label.strip() or not text.strip():
            raise ConfigError(
                f"{path}, line {number}: {line[:60]!r} is no class, tab and text; write good, a tab, Fun."
            )
        rows.append((text.strip(), label.strip()))
    names = sorted({label for _, label in rows})
    if len(names) < 2:
        raise ConfigError(f"data.file={path} holds the classes {names}; give sentences of two classes or more.")
    return [text for text, _ in rows], [names.index(label) for _, label in rows], names


class Sentences(Trainer):
    """Tell the class of a sentence."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        """Settings of the run, the model and the sentences."""

        model: Model = field(default_factory=Model)
        data: Labelled = field(default_factory=Labelled)

    layout: Layout
    classes: list[str]
    tokenizer: Any
    special: dict[str, int]

    @property
    def folder(self) -> Path:
        """Where the BERT lies."""
        path = self.config.model.path
        return sets.path_of("minilm") if path is None else Path(path).expanduser()

    def build_data(self) -> Data:
        """Sentences as token sequences, cut at `data.sequence_length`; the held-out ones by length."""
        data = self.config.data
        if data.file is None:
            (texts, labels), self.classes = sets.movie_sentences(), ["bad", "good"]
        else:
            texts, labels, self.classes = labelled_lines(data.file)
        tokenizer = self.tokenizer = load_tokenizer(self.folder)
        special = self.special = special_ids(tokenizer)
        self.layout = Layout(data, {"tokens": special[PAD]})
        sides = []
        for wanted in (False, True):
            chosen = [i for i, text in enumerate(texts) if is_held_out(text, data.held_out) == wanted]
            if not chosen:
                raise ConfigError(
                    f"data.held_out={data.held_out} leaves no sentence of {len(texts)} to "
                    f"{'evaluate' if wanted else 'train'} on; choose another share, or give more sentences."
                )
            ids = (ids[: data.sequence_length - 2] for ids in encode(tokenizer, [texts[i] for i in chosen]))
            tokens, ends = separate_sequences(
                ids, data.sequence_length, start=special[START], separator=special[SEPARATOR]
            )
            sides.append(Sequences(ends, {"tokens": tokens}, {"label": np.array([labels[i] for i in chosen])}))
        train, held_out = sides
        return Data(
            train=train,
            evaluation=held_out.sorted_by_length(),
            lengths=train.lengths if data.group_by_length else None,
            collate=self.layout.collate,
            lay_out=self.layout.lay_out,
        )

    def build_model(self) -> Any:
        """The BERT with a new classifier."""
        from fasttrain.models.bert import BertForClassification
        from fasttrain.models.hugging_face_bert import config_from_hugging_face, load_hugging_face_bert

        file = self.folder / "config.json"
        if not file.is_file():
            raise ConfigError(f"model.path={self.folder} holds no config.json; name a folder of transformers.")
        config = config_from_hugging_face(json.loads(file.read_text()))
        longest = self.config.data.sequence_length
        if longest > config.positions:
            raise ConfigError(
                f"data.sequence_length={longest}, and the BERT in {self.folder} has places for {config.positions} tokens; "
                f"use {config.positions} or less."
            )
        config = dataclasses.replace(config, dropout=self.config.model.dropout, attention_dropout=0.0)
        model = BertForClassification(config, classes=len(self.classes))
        return load_hugging_face_bert(self.folder, into=model) if self.config.model.pretrained else model

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Tokens, padding mask, no token types; where rows hold several sentences, their boundaries and first tokens."""
        return batch["tokens"], batch.get("mask"), None, batch.get("boundaries"), batch.get("first")

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy over sentences."""
        return F.cross_entropy(output, batch["label"])

    def count(self, batch: Any) -> Any:
        """Sentences: what the mean is over, however many stand in a row."""
        return len(batch["label"])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        """Share of sentences whose class is told right."""
        return {"accuracy": (output.argmax(-1) == batch["label"]).double().mean()}

    def as_text(self, batch: Any) -> list[str]:
        """The sentences of a batch as the model sees them, each after the name of its class."""
        tokens = batch["tokens"]
        rows = torch.arange(len(tokens)) * tokens.shape[1]
        flat = tokens.flatten().tolist()
        ids = [flat[a : flat.index(self.special[SEPARATOR], a) + 1] for a in batch.get("first", rows).tolist()]
        texts = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        return [f"{self.classes[label]}: {text}" for label, text in zip(batch["label"].tolist(), texts, strict=True)]
