"""The sentence recipe: on files of one's own with a small BERT made here, and the movie reviews where they were fetched."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fasttrain import ConfigError
from fasttrain.cli.data_sheet import contact_sheet
from fasttrain.config import load
from fasttrain.data.text import train_wordpiece
from recipes import sets
from recipes.sentences import Sentences
from tests.commands import ROOT
from tests.real_data import needs

WORDS = {"good": ["wonderful", "lovely", "great", "brilliant"], "bad": ["awful", "dull", "poor", "weak"]}
NOUNS = ["film", "story", "plot", "cast", "ending", "script"]


def write_sentences(path, count=240):
    """Sentences whose class one word tells, of 4 to 14 words."""
    lines = []
    for i in range(count):
        label = "good" if i % 2 else "bad"
        filling = " ".join(f"and the {NOUNS[(i + k) % 6]} is long" for k in range(i % 3))
        lines.append(f"{label}\tThe {NOUNS[i % 6]} number {i} is {WORDS[label][i % 4]} {filling}.")
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A file of sentences, and the folder of a small BERT as Hugging Face's transformers writes it."""
    folder = tmp_path_factory.mktemp("own")
    file = write_sentences(folder / "sentences.tsv")
    tokenizer = train_wordpiece(file.read_text().splitlines(), 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return file, folder


def build(own, **settings):
    file, folder = own
    data = {"file": str(file), "sequence_length": 32, "held_out": 0.2, **settings.pop("data", {})}
    model = {"path": str(folder), "pretrained": False, "dropout": 0.0}
    quiet = {"run": {"dir": None}, "log": {"every": 1}}
    return Sentences(**{"batch_size": 16, "epochs": 6, "data": data, "model": model, **quiet, **settings})


@pytest.mark.parametrize("layout", ["padded", "packed", "unpadded"])
def test_it_learns_from_a_file_of_ones_own_in_every_layout(own, layout):
    trainer = build(
        own, data={"layout": layout, "group_by_length": True}, optimizer={"name": "adamw", "lr": 3e-3}, epochs=4
    )
    assert trainer.classes == ["bad", "good"]
    held_out, train = len(trainer.data.evaluation), len(trainer.data.train)
    assert held_out + train == 240
    assert 30 < held_out < 70
    before = trainer.evaluate()
    summary = trainer.fit()
    assert before["accuracy"] < 0.8
    assert summary["metrics"]["accuracy"] > 0.95


@pytest.mark.parametrize("layout", ["padded", "packed", "unpadded"])
def test_a_look_at_the_data_shows_each_sentence_with_its_class(own, tmp_path, layout):
    trainer = build(own, data={"layout": layout}, accumulation={"name": "microbatches", "num": 2})
    sheet, texts = contact_sheet(trainer, tmp_path, None)
    assert sheet is None
    assert len(texts) == 4
    for text in texts:
        label, words = text.split(": ", 1)
        assert words.startswith("[CLS] the ")
        assert words.endswith("[SEP]")
        assert words.count("[SEP]") == words.count(" number ") == 1
        assert "[PAD]" not in words
        assert sum(f" is {word}" in words for word in WORDS[label]) == 1


def test_the_layouts_see_the_same_losses(own):
    runs = {}
    for layout in ("padded", "packed", "unpadded"):
        trainer = build(
            own, data={"layout": layout}, accumulation={"name": "microbatches", "size": 6}, steps=5, epochs=None
        )
        runs[layout] = trainer.fit()["final_loss"], trainer.evaluate()["loss"]
    assert runs["packed"] == pytest.approx(runs["padded"], rel=1e-4)
    assert runs["unpadded"] == pytest.approx(runs["padded"], rel=1e-4)


def test_weights_of_the_folder_are_taken_where_asked_for(own, tmp_path):
    _, folder = own
    scratch = build(own).model
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    with pytest.raises(ConfigError, match=r"holds no model.safetensors"):
        build((own[0], tmp_path), model={"path": str(tmp_path), "pretrained": True})
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(Exception, match=r"unknown: x"):
        build((own[0], tmp_path), model={"path": str(tmp_path), "pretrained": True})
    assert scratch.classifier.weight.shape == (2, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("good Fun.", "line 1: 'good Fun.' is no class, tab and text"),
        ("good\tFun.\n\tNo class.", "line 2"),
        ("good\tFun.\ngood\tMore.", r"holds the classes \['good'\]; give sentences of two classes"),
    ],
)
def test_a_file_that_is_none_is_refused(own, tmp_path, text, message):
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        build((tmp_path / "a.tsv", own[1]))


def test_a_sequence_longer_than_the_model_can_is_refused(own):
    with pytest.raises(ConfigError, match=r"places for 64 tokens; use 64 or less"):
        build(own, data={"sequence_length": 65})


@pytest.mark.parametrize(("config", "name"), [("bert_movie.yaml", "movie"), ("bert_gcide.yaml", "gcide")])
def test_a_config_whose_data_is_missing_says_which_command_gets_it(config, name, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path))
    resolved = load(ROOT / "configs" / config, ["run.dir=null"])
    with pytest.raises(ConfigError, match=f"get it with scripts/fetch_data {name}"):
        resolved.trainer(resolved)


def test_the_movie_reviews_and_minilm_are_read_whole():
    needs("movie")
    needs("minilm")
    resolved = load(ROOT / "configs" / "bert_movie.yaml", ["run.dir=null"])
    trainer = resolved.trainer(resolved)
    texts, labels = sets.movie_sentences()
    assert len(trainer.data.train) + len(trainer.data.evaluation) == len(texts) == 10_072
    assert abs(sum(labels) / len(labels) - 0.5) < 0.02
    assert 20 < trainer.data.train.lengths.mean() < 35
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert not any(name.startswith("encoder.embeddings") for name in trained)
    assert sum(p.numel() for p in trainer.model.parameters()) == 22_713_216 + 2 * 384 + 2
