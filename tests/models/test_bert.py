"""BERT: its shapes, its padding, its tied weights; and equality with the formulas of the paper."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fasttrain.data.text import mask_tokens, masked_positions
from fasttrain.errors import BatchError, CheckpointError, ConfigError
from fasttrain.models.bert import Bert, BertForClassification, BertForMaskedLM, SelfAttention
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.hugging_face_bert import config_from_hugging_face, load_hugging_face_bert
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.losses import linear_cross_entropy

SMALL = BertConfig(vocabulary=50, width=24, layers=3, heads=4, feedforward=40, positions=16, dropout=0.0)


def tokens_of(batch=3, length=10, seed=0):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---- shapes and sizes


def test_the_default_is_bert_base_with_its_published_number_of_parameters():
    with torch.device("meta"):
        model = Bert(BertConfig())
    assert sum(p.numel() for p in model.parameters()) == 109_482_240


def test_bert_large_has_its_published_number_of_parameters():
    with torch.device("meta"):
        model = Bert(BertConfig(width=1024, layers=24, heads=16, feedforward=4096))
    assert sum(p.numel() for p in model.parameters()) == 335_141_888


def test_each_model_gives_the_shape_it_documents():
    torch.manual_seed(0)
    tokens = tokens_of()
    bert = Bert(SMALL)
    assert bert(tokens).shape == (3, 10, 24)
    assert bert.pooler(bert(tokens)).shape == (3, 24)
    assert BertForMaskedLM(SMALL)(tokens).shape == (3, 10, 50)
    assert BertForMaskedLM(SMALL)(tokens, positions=torch.zeros(3, 2, dtype=torch.int64)).shape == (3, 2, 50)
    assert BertForClassification(SMALL, classes=7)(tokens).shape == (3, 7)


@pytest.mark.parametrize("rows", [4096, 7])
def test_with_labels_it_gives_the_loss_of_its_scores(rows, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "__defaults__", (*linear_cross_entropy.__defaults__[:-1], rows))
    torch.manual_seed(0)
    model, tokens = BertForMaskedLM(SMALL), tokens_of()
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.5, -100)
    positions, kept = masked_positions(labels, multiple=1)
    for more, target in (({}, labels), ({"positions": positions}, kept)):
        gradients = []
        for loss in (
            F.cross_entropy(model(tokens, **more).flatten(0, 1), target.flatten()),
            model(tokens, **more, labels=target),
        ):
            model.zero_grad()
            loss.backward()
            gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other) if rows == 4096 else torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_an_output_layer_that_was_swapped_is_asked_for_the_scores():
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    torch.manual_seed(0)
    model, tokens = BertForMaskedLM(SMALL), tokens_of()
    model.head.decoder.__class__ = Doubled
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert torch.equal(model(tokens, labels=tokens), expected)


def test_where_no_word_is_hidden_the_loss_is_no_number_and_moves_nothing():
    model, tokens = BertForMaskedLM(SMALL), tokens_of()
    loss = model(tokens, labels=torch.full_like(tokens, -100))
    (loss * 0.0).backward()  # what a rank does that has nothing to count while the others have
    assert torch.isnan(loss)
    assert not any(p.grad.any() for p in model.parameters())


def test_its_layers_are_the_blocks_that_checkpointing_and_sharding_find():
    model = BertForMaskedLM(SMALL)
    assert find_blocks(model) == list(model.encoder.layers)
    assert len(model.encoder.layers) == 3


def test_weights_start_with_the_std_of_the_paper_and_biases_at_zero():
    torch.manual_seed(0)
    model = BertForMaskedLM(dataclasses.replace(SMALL, vocabulary=400, width=96))
    checked = 0
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            bound = 5 * 0.02 / (2 * parameter.numel()) ** 0.5  # five standard errors of a standard deviation
            assert parameter.std().item() == pytest.approx(0.02, abs=bound), name
            checked += 1
    assert checked == 3 + 3 * 6 + 1


def test_the_std_of_the_first_weights_can_be_set():
    torch.manual_seed(0)
    model = BertForMaskedLM(dataclasses.replace(SMALL, vocabulary=400, initial_std=0.2))
    assert model.head.decoder.weight.std().item() == pytest.approx(0.2, rel=0.05)
    assert model.encoder.layers[0].feedforward.expand.weight.std().item() == pytest.approx(0.2, rel=0.1)


def test_the_same_seed_gives_the_same_weights():
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(torch.cat([p.detach().flatten() for p in BertForMaskedLM(SMALL).parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---- padding, positions, dropout


def test_padding_changes_nothing_whatever_it_holds():
    torch.manual_seed(0)
    model = BertForMaskedLM(SMALL).double()
    alone = tokens_of(1, 6)
    outputs = []
    for filler in (0, 17, 49):
        padded = torch.full((2, 10), filler)
        padded[0, :6], padded[1] = alone[0], tokens_of(1, 10, seed=1)[0]
        mask = torch.arange(10) < torch.tensor([[6], [10]])
        outputs.append(model(padded, mask))
        assert torch.allclose(outputs[-1][0, :6], model(alone)[0], rtol=0, atol=1e-13)
        assert torch.allclose(outputs[-1][1], model(padded[1:])[0], rtol=0, atol=1e-13)
        assert not torch.allclose(model(padded)[0, :6], model(alone)[0], rtol=0, atol=1e-4)
    assert torch.equal(outputs[0][0, :6], outputs[1][0, :6])
    assert torch.equal(outputs[0][0, :6], outputs[2][0, :6])


def test_no_gradient_flows_into_padding():
    torch.manual_seed(0)
    model = BertForMaskedLM(SMALL)
    tokens = torch.tensor([[5, 6, 7, 44, 44]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    encoded = model.encoder(tokens, mask)
    encoded[0, :3].square().sum().backward()
    touched = model.encoder.embeddings.word.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [5, 6, 7]


def test_a_mask_of_numbers_is_the_mask_of_booleans():
    torch.manual_seed(0)
    model, tokens = Bert(SMALL), tokens_of()
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[0, 4:] = 0
    for dtype in (torch.float32, torch.int32, torch.bool):
        assert torch.equal(model(tokens, mask.to(dtype)), model(tokens, mask))
    assert torch.allclose(model(tokens, torch.ones_like(mask)), model(tokens), atol=1e-6)


def test_a_sample_of_nothing_but_padding_stays_finite_and_harms_no_other():
    torch.manual_seed(0)
    model, tokens = BertForMaskedLM(SMALL), tokens_of(2, 8)
    mask = torch.tensor([[1] * 8, [0] * 8])
    output = model(tokens, mask)
    assert output.isfinite().all()
    output[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert torch.allclose(output[0], model(tokens[:1])[0], atol=1e-6)


def test_token_types_and_positions_and_order_matter():
    torch.manual_seed(0)
    model, tokens = Bert(SMALL), tokens_of()
    zeros = torch.zeros_like(tokens)
    assert torch.equal(model(tokens), model(tokens, None, zeros))
    assert not torch.allclose(model(tokens), model(tokens, None, 1 - zeros), atol=1e-3)
    assert not torch.allclose(model(tokens.flip(1)).flip(1), model(tokens), atol=1e-3)


def test_a_sequence_longer_than_its_positions_is_refused():
    with pytest.raises(BatchError, match=r"sequences of 17 tokens.*positions for 16.*positions=17"):
        Bert(SMALL)(tokens_of(1, 17))


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    model, tokens = Bert(dataclasses.replace(SMALL, dropout=0.5)), tokens_of()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_dropout_on_attention_weights_can_be_set_apart():
    model = Bert(dataclasses.replace(SMALL, dropout=0.0, attention_dropout=0.5))
    assert not torch.equal(model(tokens_of()), model(tokens_of()))
    assert {layer.attention.dropout for layer in model.layers} == {0.5}
    assert {layer.attention.dropout for layer in Bert(dataclasses.replace(SMALL, dropout=0.3)).layers} == {0.3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"width=24 cannot be shared out over heads=5; use a multiple of 5"),
        ({"layers": 0}, r"layers=0 .* at least 1"),
        ({"dropout": 1.0}, r"dropout=1\.0 .* less than 1"),
        ({"activation": "swish"}, r"activation=swish .* gelu, gelu_tanh, relu"),
    ],
)
def test_sizes_without_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **change)


# ---- the masked-word head


def test_decoder_and_word_embedding_are_one_parameter():
    model = BertForMaskedLM(SMALL)
    assert model.head.decoder.weight is model.encoder.embeddings.word.weight
    names = [name for name, _ in model.named_parameters()]
    assert "head.decoder.weight" not in names
    assert names.count("encoder.embeddings.word.weight") == 1
    assert set(model.state_dict()) == {*names, "head.decoder.weight"}

    twin = copy.deepcopy(model)
    twin.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert twin.head.decoder.weight is twin.encoder.embeddings.word.weight
    assert torch.equal(twin.head.decoder.weight, model.head.decoder.weight + 1)


def test_every_parameter_of_the_masked_word_model_gets_a_gradient():
    model = BertForMaskedLM(SMALL)
    model(tokens_of()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_scores_at_positions_give_the_loss_and_the_gradients_of_scores_everywhere():
    torch.manual_seed(0)
    model = BertForMaskedLM(SMALL).double()
    inputs, labels = mask_tokens(
        tokens_of(6, 16), vocabulary=50, mask_id=4, special_ids=(0, 1, 2, 3, 4), probability=0.3
    )
    everywhere = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(everywhere, list(model.parameters()))

    positions, kept = masked_positions(labels)
    assert positions.shape[1] < 16
    scores = model(inputs, positions=positions)
    loss = F.cross_entropy(scores.flatten(0, 1), kept.flatten())
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert loss.item() == pytest.approx(everywhere.item(), abs=1e-13)
    assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) < 1e-13


# ---- Hugging Face's files


def hugging_face_config(config=SMALL):
    return {
        "model_type": "bert",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feedforward,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }


def hugging_face_weights(config=SMALL, *, prefix="bert.", pooler=True, masked_lm=True, old_norms=False):
    """Random weights under the names that transformers writes."""
    generator, weights = torch.Generator().manual_seed(7), {}

    def draw(name, *shape):
        weights[name] = torch.randn(shape, generator=generator) * 0.3

    def linear(name, inputs, outputs):
        draw(f"{name}.weight", outputs, inputs)
        draw(f"{name}.bias", outputs)

    def norm(name):
        for part in ("gamma", "beta") if old_norms else ("weight", "bias"):
            draw(f"{name}.{part}", config.width)

    width, wide = config.width, config.feedforward
    draw(f"{prefix}embeddings.word_embeddings.weight", config.vocabulary, width)
    draw(f"{prefix}embeddings.position_embeddings.weight", config.positions, width)
    draw(f"{prefix}embeddings.token_type_embeddings.weight", config.token_types, width)
    norm(f"{prefix}embeddings.LayerNorm")
    for i in range(config.layers):
        layer = f"{prefix}encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", width, width)
        linear(f"{layer}.attention.output.dense", width, width)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", width, wide)
        linear(f"{layer}.output.dense", wide, width)
        norm(f"{layer}.output.LayerNorm")
    if pooler:
        linear(f"{prefix}pooler.dense", width, width)
    if masked_lm:
        linear("cls.predictions.transform.dense", width, width)
        norm("cls.predictions.transform.LayerNorm")
        draw("cls.predictions.bias", config.vocabulary)
    return weights


def write(folder, weights, **changes):
    import json

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**hugging_face_config(), **changes}))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def erf(x):
    """Abramowitz and Stegun 7.1.5: the power series, in double precision good for |x| < 5."""
    total, term = x.copy(), x.copy()
    for n in range(1, 120):
        term = -term * x * x / n
        total = total + term / (2 * n + 1)
    return np.where(np.abs(x) < 4.5, 2 / np.sqrt(np.pi) * total, np.sign(x))


def reference(weights, tokens, mask, types, heads=4, prefix="bert."):
    """BERT in numpy, written from the formulas: hidden states `[B, S, W]`, pooled `[B, W]`, scores `[B, S, V]`."""
    w = {name.removeprefix(prefix): tensor.double().numpy() for name, tensor in weights.items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        scale = w.get(f"{name}.weight", w.get(f"{name}.gamma"))
        shift = w.get(f"{name}.bias", w.get(f"{name}.beta"))
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * scale + shift

    def gelu(x):
        return x * 0.5 * (1 + erf(x / np.sqrt(2)))

    batch, length = tokens.shape
    x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][types]
    x = norm(x + w["embeddings.position_embeddings.weight"][:length], "embeddings.LayerNorm")
    size = x.shape[-1] // heads
    for i in range(SMALL.layers):
        layer = f"encoder.layer.{i}"
        query, key, value = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        mixed = np.zeros_like(x)
        for b in range(batch):
            for h in range(heads):
                cut = slice(h * size, (h + 1) * size)
                scores = query[b, :, cut] @ key[b, :, cut].T / np.sqrt(size)
                scores = np.where(mask[b][None, :], scores, -np.inf)
                share = np.exp(scores - scores.max(-1, keepdims=True))
                mixed[b, :, cut] = share / share.sum(-1, keepdims=True) @ value[b, :, cut]
        x = norm(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        wide = gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    pooled = np.tanh(linear(x[:, 0], "pooler.dense")) if "pooler.dense.weight" in w else None
    scores = None
    if "cls.predictions.bias" in w:
        head = norm(gelu(linear(x, "cls.predictions.transform.dense")), "cls.predictions.transform.LayerNorm")
        scores = head @ w["embeddings.word_embeddings.weight"].T + w["cls.predictions.bias"]
    return x, pooled, scores


def sample():
    tokens = tokens_of(3, 12, seed=3)
    mask = torch.arange(12) < torch.tensor([[12], [5], [9]])
    types = (torch.arange(12) >= 4).long().expand(3, 12)
    return tokens, mask, types


def largest_difference(ours, expected, where=None):
    difference = np.abs(ours.detach().numpy() - expected)
    return (difference if where is None else difference[where.numpy()]).max()


@pytest.mark.parametrize("prefix", ["bert.", ""])
@pytest.mark.parametrize("old_norms", [False, True])
def test_a_masked_word_model_of_hugging_face_gives_the_scores_of_the_formulas(tmp_path, prefix, old_norms):
    weights = hugging_face_weights(prefix=prefix, old_norms=old_norms)
    model = load_hugging_face_bert(write(tmp_path / "model", weights)).double()
    assert type(model) is BertForMaskedLM
    tokens, mask, types = sample()
    _, _, scores = reference(weights, tokens.numpy(), mask.numpy(), types.numpy(), prefix=prefix)
    assert np.abs(scores).max() > 1
    assert largest_difference(model(tokens, mask, types), scores, mask) < 1e-12


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_an_encoder_of_hugging_face_gives_the_states_of_the_formulas(tmp_path, prefix):
    weights = hugging_face_weights(prefix=prefix, masked_lm=False)
    model = load_hugging_face_bert(write(tmp_path / "model", weights)).double()
    assert type(model) is Bert
    tokens, mask, types = sample()
    hidden, pooled, _ = reference(weights, tokens.numpy(), mask.numpy(), types.numpy(), prefix=prefix)
    ours = model(tokens, mask, types)
    assert largest_difference(ours, hidden, mask) < 1e-12
    assert largest_difference(model.pooler(ours), pooled) < 1e-12


def test_every_weight_of_the_file_arrives_and_ties_stay(tmp_path):
    weights = hugging_face_weights()
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    weights["bert.embeddings.position_ids"] = torch.arange(16)[None]
    weights["cls.seq_relationship.weight"] = torch.zeros(2, 24)
    model = load_hugging_face_bert(write(tmp_path / "model", weights))
    assert model.head.decoder.weight is model.encoder.embeddings.word.weight
    held = sorted(float(p.detach().double().sum()) for p in model.parameters())
    dropped = ("position_ids", "seq_relationship", "pooler", "decoder")
    written = sorted(float(t.double().sum()) for n, t in weights.items() if not any(word in n for word in dropped))
    assert held == written
    assert len(held) == 5 + 3 * 16 + 5


def test_half_precision_files_are_read_into_full_precision(tmp_path):
    weights = {name: tensor.half() for name, tensor in hugging_face_weights().items()}
    model = load_hugging_face_bert(write(tmp_path / "model", weights))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.head.decoder.bias, weights["cls.predictions.bias"].float())


def test_a_classifier_takes_the_encoder_of_a_file_and_says_what_starts_untrained(tmp_path, caplog):
    torch.manual_seed(0)
    model = BertForClassification(SMALL, classes=3)
    fresh = model.classifier.weight.detach().clone()
    weights = hugging_face_weights()
    with caplog.at_level("WARNING"):
        assert load_hugging_face_bert(write(tmp_path / "model", weights), into=model) is model
    assert "no weights for classifier; untrained there" in caplog.text
    assert torch.equal(model.classifier.weight, fresh)
    assert torch.equal(model.encoder.pooler.dense.weight, weights["bert.pooler.dense.weight"])
    assert torch.equal(
        model.encoder.layers[2].attention.key.bias, weights["bert.encoder.layer.2.attention.self.key.bias"]
    )


def test_a_classifier_of_hugging_face_keeps_its_classes(tmp_path):
    weights = hugging_face_weights(masked_lm=False)
    weights["classifier.weight"], weights["classifier.bias"] = torch.randn(5, 24), torch.randn(5)
    model = load_hugging_face_bert(write(tmp_path / "model", weights))
    assert type(model) is BertForClassification
    assert torch.equal(model.classifier.weight, weights["classifier.weight"])


def test_weights_that_do_not_fit_are_all_listed(tmp_path):
    weights = hugging_face_weights()
    del weights["bert.encoder.layer.1.output.dense.bias"]
    del weights["cls.predictions.transform.dense.weight"]
    weights["bert.encoder.layer.3.output.dense.bias"] = torch.zeros(24)
    weights["bert.crossattention.weight"] = torch.zeros(3)
    weights["bert.embeddings.position_embeddings.weight"] = torch.zeros(8, 24)
    with pytest.raises(CheckpointError) as refused:
        load_hugging_face_bert(write(tmp_path / "model", weights))
    assert str(refused.value).splitlines()[1:] == [
        "  missing: encoder.layers.1.feedforward.contract.bias",
        "  missing: head.dense.weight",
        "  shape: encoder.embeddings.position.weight is [8, 24], not [16, 24]",
        "  unknown: bert.crossattention.weight",
        "  unknown: encoder.layers.3.feedforward.contract.bias",
    ]


def test_an_untied_decoder_is_refused(tmp_path):
    weights = hugging_face_weights()
    weights["cls.predictions.decoder.weight"] = torch.zeros(50, 24)
    with pytest.raises(CheckpointError, match=r"here they are one parameter.*into=Bert\(config\)"):
        load_hugging_face_bert(write(tmp_path / "model", weights))


@pytest.mark.parametrize(
    "change",
    [
        {"position_embedding_type": "relative_key"},
        {"model_type": "roberta"},
        {"is_decoder": True},
        {"hidden_act": "silu"},
    ],
)
def test_a_config_that_asks_for_another_model_is_refused(change):
    [(name, value)] = change.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        config_from_hugging_face({**hugging_face_config(), **change})


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_hugging_face_bert(tmp_path)
    write(tmp_path / "model", hugging_face_weights())
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        load_hugging_face_bert(tmp_path / "model")


def test_the_file_is_left_as_it_was(tmp_path):
    folder = write(tmp_path / "model", hugging_face_weights())
    model = load_hugging_face_bert(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    kept = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, hugging_face_weights()[name]) for name, tensor in kept.items())


def test_under_autocast_the_three_projections_share_one_narrow_copy():
    config = BertConfig(vocabulary=16, width=64, heads=2, layers=1, feedforward=64, dropout=0.0)
    attention, x = SelfAttention(config), torch.randn(4, 32, 64, requires_grad=True)
    kept = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with keep, torch.autocast("cpu", torch.bfloat16):
        attention(x).sum()
    inputs = {t.untyped_storage().data_ptr() for t in kept if t.shape == (4 * 32, 64) and t.dtype is torch.bfloat16}
    assert len(inputs) == 2  # that of the projections, and what attention gave to the last product
