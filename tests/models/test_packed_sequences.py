"""Sequences that share rows: on real text, in double precision, loss and gradient are those of separate sequences."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F

from fasttrain.core.batch import cut
from fasttrain.data import documents
from fasttrain.data.text import (
    IGNORED,
    Layout,
    LayoutConfig,
    encode,
    mask_tokens,
    masked_positions,
    special_ids,
    train_wordpiece,
)
from fasttrain.models import bert
from fasttrain.models.bert import Bert, BertForClassification, BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.nn import attention
from fasttrain.nn.attention import attend_within, block_diagonal, needs_mask
from fasttrain.nn.boundaries import boundaries

LONGEST = 48
LAYOUTS = ("padded", "packed", "unpadded")
EXACT = 1e-12


@functools.cache
def real_samples(count=24):
    """Docstrings of the standard library as sequences with hidden words, and a class each."""
    texts = documents.docstrings(["json", "email", "logging"])[:count]
    tokenizer = train_wordpiece(texts, 300)
    special = special_ids(tokenizer)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i, ids in enumerate(encode(tokenizer, texts)):
        tokens = torch.tensor([special["[CLS]"], *ids[: 5 + (5 * i) % (LONGEST - 7)], special["[SEP]"]])
        hidden, labels = mask_tokens(
            tokens,
            vocabulary=300,
            mask_id=special["[MASK]"],
            special_ids=tuple(special.values()),
            generator=generator,
        )
        samples.append({"tokens": hidden, "labels": labels, "label": torch.tensor(i % 3)})
    assert len({len(sample["tokens"]) for sample in samples}) > 8
    return samples


def config(**changes):
    sizes = {"vocabulary": 320, "width": 24, "layers": 2, "heads": 4, "feedforward": 40, "positions": LONGEST}
    return BertConfig(**{**sizes, "dropout": 0.0, **changes})


def laid_out(kind, batch=None, **settings):
    made = Layout(LayoutConfig(layout=kind, sequence_length=LONGEST, **settings), {"tokens": 0, "labels": IGNORED})
    return made.lay_out(made.collate(real_samples()) if batch is None else batch)


def words_loss(model, batch):
    """Sum over hidden words."""
    positions, labels = masked_positions(batch["labels"])
    scores = model(batch["tokens"], batch.get("mask"), positions=positions, within=batch.get("boundaries"))
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def classes_loss(model, batch):
    """Sum over sequences."""
    scores = model(batch["tokens"], batch.get("mask"), within=batch.get("boundaries"), first=batch.get("first"))
    return F.cross_entropy(scores, batch["label"], reduction="sum")


TASKS = {
    "masked words": (lambda: BertForMaskedLM(config()), words_loss),
    "classes": (lambda: BertForClassification(config(), classes=3), classes_loss),
}


def separately(model, loss_of):
    """Loss and gradient of the sequences one by one, without padding."""
    model.zero_grad()
    total = 0.0
    for sample in real_samples():
        loss = loss_of(model, {name: entry.unsqueeze(0) for name, entry in sample.items()})
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in model.parameters()]


def relative(a, b):
    """Euclidean distance of all gradients together, relative to their norm."""
    difference = sum((x - y).pow(2).sum() for x, y in zip(a, b, strict=True)).sqrt()
    return float(difference / sum(y.pow(2).sum() for y in b).sqrt())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("by_mask", [False, True], ids=["a call a sequence", "block-diagonal mask"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layout_gives_the_gradient_of_separate_sequences(kind, by_mask, task, monkeypatch):
    monkeypatch.setattr(bert, "needs_mask", lambda *_: by_mask)
    build, loss_of = TASKS[task]
    torch.manual_seed(0)
    model = build().double()
    expected, gradients = separately(model, loss_of)
    model.zero_grad()
    loss = loss_of(model, laid_out(kind, row_length=2 * LONGEST))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=EXACT)
    assert relative([parameter.grad for parameter in model.parameters()], gradients) < EXACT


@pytest.mark.parametrize("kind", LAYOUTS)
def test_microbatches_laid_out_one_by_one_sum_to_the_same_gradient(kind):
    torch.manual_seed(0)
    model = BertForMaskedLM(config()).double()
    expected, gradients = separately(model, words_loss)
    model.zero_grad()
    padded = Layout(LayoutConfig(sequence_length=LONGEST), {"tokens": 0, "labels": IGNORED}).collate(real_samples())
    total = 0.0
    for microbatch in cut(padded, 5):
        loss = words_loss(model, laid_out(kind, microbatch))
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, rel=EXACT)
    assert relative([parameter.grad for parameter in model.parameters()], gradients) < EXACT


@pytest.mark.parametrize("by_mask", [False, True])
def test_a_token_sees_nothing_of_its_neighbours_in_the_row(by_mask, monkeypatch):
    monkeypatch.setattr(bert, "needs_mask", lambda *_: by_mask)
    torch.manual_seed(0)
    model = Bert(config()).double()
    batch = laid_out("packed", row_length=2 * LONGEST)
    hidden = model(batch["tokens"], within=batch["boundaries"])
    stretch = batch["boundaries"].stretches().view_as(batch["tokens"])
    changed = batch["tokens"].clone()
    changed[stretch == 2] = 7
    moved = (model(changed, within=batch["boundaries"]) != hidden).any(-1)
    assert moved[stretch == 2].all()
    assert not moved[stretch != 2].any()
    assert len({row[0] for row in (stretch == 2).nonzero().tolist()}) == 1
    assert (stretch[(stretch == 2).any(1)] != 2).any()  # there are neighbours


def test_a_wrong_boundary_would_be_seen():
    torch.manual_seed(0)
    model = BertForMaskedLM(config()).double()
    _, gradients = separately(model, words_loss)
    batch = laid_out("unpadded")
    lengths = list(batch["boundaries"].lengths)
    lengths[0], lengths[1] = lengths[0] - 1, lengths[1] + 1
    model.zero_grad()
    words_loss(model, {**batch, "boundaries": boundaries(lengths)}).backward()
    assert relative([parameter.grad for parameter in model.parameters()], gradients) > 1e-4


def test_attention_within_boundaries_is_that_under_the_mask_of_blocks():
    generator = torch.Generator().manual_seed(0)
    within = boundaries([3, 1, 4, 5, 3])  # two rows of eight
    query, key, value = (torch.randn(16, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = block_diagonal(within, rows=2)
    assert mask.shape == (2, 1, 8, 8)
    assert mask[0, 0].int().tolist()[0] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert int(mask.sum()) == 9 + 1 + 16 + 25 + 9
    rows = (x.view(2, 8, 2, 8).transpose(1, 2) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*rows, attn_mask=mask).transpose(1, 2).reshape(16, 2, 8)
    assert torch.allclose(attend_within(query, key, value, within), expected, rtol=0, atol=1e-14)


def test_a_cpu_takes_a_call_a_sequence_and_a_gpu_without_16_bits_a_mask(caplog):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    attention._tell_once.cache_clear()
    assert not needs_mask(cpu, 4, torch.float32, 8, 0.0)
    assert needs_mask(gpu, 4, torch.float32, 8, 0.0)
    assert needs_mask(gpu, 4, torch.float32, 8, 0.0)
    assert not needs_mask(gpu, 1, torch.float32, 8, 0.0)  # a mask over all tokens of a batch would be too large
    assert caplog.text.count("attend with a mask here (cuda, torch.float32, heads of 8") == 1


@pytest.mark.parametrize(
    ("dtype", "head", "dropout", "takes"),
    [
        (torch.bfloat16, 64, 0.0, True),
        (torch.float16, 256, 0.0, True),
        (torch.float32, 64, 0.0, False),
        (torch.bfloat16, 12, 0.0, False),
        (torch.bfloat16, 264, 0.0, False),
        (torch.bfloat16, 64, 0.1, False),
    ],
)
def test_the_kernel_for_variable_lengths_is_taken_where_it_can_be(dtype, head, dropout, takes, monkeypatch):
    monkeypatch.setattr(attention, "_is_ampere", lambda device: True)
    assert attention.takes_varlen(torch.device("cuda", 0), dtype, head, dropout) is takes
    assert not attention.takes_varlen(torch.device("cpu"), dtype, head, dropout)
    monkeypatch.setattr(attention, "_is_ampere", lambda device: False)
    assert not attention.takes_varlen(torch.device("cuda", 0), dtype, head, dropout)


def test_the_kernel_for_variable_lengths_is_called_by_the_names_that_torch_has():
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def test_dropout_falls_on_attention_weights_of_packed_sequences_too():
    within, x = boundaries([5, 3]), torch.ones(8, 2, 4)
    torch.manual_seed(0)
    dropped = attend_within(x, x, x, within, dropout=0.5)
    assert not torch.equal(dropped, attend_within(x, x, x, within))
    assert 0 < dropped.mean() < 2


def test_a_sequence_beyond_the_positions_is_refused_in_rows_too():
    model = Bert(config(positions=16))
    tokens = torch.zeros(1, 40, dtype=torch.int64)
    assert model(tokens, within=boundaries([16, 16, 8])).shape == (1, 40, 24)
    with pytest.raises(bert.BatchError, match="sequences of 17 tokens were given, but this BERT has positions for 16"):
        model(tokens, within=boundaries([17, 16, 7]))
