"""Cross-entropy with its extras, and the loss of hidden states in chunks, against torch and against the formulas."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fasttrain.errors import ConfigError
from fasttrain.nn.losses import HALF, cross_entropy, linear_cross_entropy
from tests.live_bytes import LiveBytes

# Each sum over the rows or words is done in another order; float32 rounds at 6e-8.
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def made(rows=50, width=12, words=70, dtype=torch.float32, bias=True, ignored=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g).to(dtype)
    weight = (torch.randn(words, width, generator=g) * 0.5).to(dtype)
    target = torch.randint(words, (rows,), generator=g)
    target[torch.rand(rows, generator=g) < ignored] = -100
    return hidden, weight, torch.randn(words, generator=g).to(dtype) if bias else None, target


def plain(hidden, weight, target, bias=None, **how):
    return cross_entropy(F.linear(hidden, weight, bias), target, **how)


def differentiated(function, hidden, weight, bias, target, upstream=None, autocast=None, **how):
    """The loss and the gradients of hidden states, weight and bias."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = function(leaves[0], leaves[1], target, leaves[2], **how)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_close(ours, theirs, bound):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert (one - other).double().norm() <= bound * other.double().norm()


# ---- cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_without_z_loss_it_is_that_of_torch_bit_for_bit(reduction, label_smoothing):
    scores, target = torch.randn(4, 9, 30), torch.randint(30, (4, 9))
    target[1, 3:] = -100
    ours = cross_entropy(scores, target, label_smoothing=label_smoothing, reduction=reduction)
    theirs = F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), label_smoothing=label_smoothing, reduction=reduction
    )
    assert torch.equal(ours.flatten(), theirs.flatten())
    assert ours.shape == (target.shape if reduction == "none" else ())


def test_the_value_is_that_of_the_formula():
    scores, target = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]), torch.tensor([2, 0, -100])
    log_z = [math.log(math.e + math.e**2 + math.e**4), math.log(3)]
    smoothing, z = 0.3, 0.01
    rows = [
        0.7 * (log_z[0] - 4) + 0.3 * (log_z[0] - 7 / 3) + z * log_z[0] ** 2,
        0.7 * log_z[1] + 0.3 * log_z[1] + z * log_z[1] ** 2,
    ]
    how = {"label_smoothing": smoothing, "z_loss": z}
    assert cross_entropy(scores, target, **how).item() == pytest.approx(sum(rows) / 2, rel=1e-6)
    assert cross_entropy(scores, target, **how, reduction="sum").item() == pytest.approx(sum(rows), rel=1e-6)
    assert cross_entropy(scores, target, **how, reduction="none").tolist() == pytest.approx([*rows, 0.0], rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    classes=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.2]),
    z=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_ignored_rows_are_as_if_they_were_not_there(shape, classes, smoothing, z, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, classes, generator=g, dtype=torch.float64)
    target = torch.randint(classes, shape, generator=g)
    ignored = torch.rand(shape, generator=g) < 0.5
    ignored.view(-1)[0] = False
    how = {"label_smoothing": smoothing, "z_loss": z}
    with_them = cross_entropy(scores, target.masked_fill(ignored, 7777), ignore_index=7777, **how)
    without = cross_entropy(scores[~ignored], target[~ignored], **how)
    assert with_them.item() == pytest.approx(without.item(), rel=1e-13)


@pytest.mark.parametrize("loss", [cross_entropy, linear_cross_entropy])
def test_where_all_rows_are_ignored_the_mean_is_no_number_and_the_gradient_zero_as_with_torch(loss):
    hidden, weight, _, target = made(ignored=2.0)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    if loss is cross_entropy:
        value = cross_entropy(F.linear(hidden, weight), target, z_loss=0.1, label_smoothing=0.1)
    else:
        value = linear_cross_entropy(hidden, weight, target, z_loss=0.1, label_smoothing=0.1, rows=8)
    value.backward()
    assert math.isnan(value.item())
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_one_hot_probabilities_are_classes():
    scores, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    one_hot = F.one_hot(target, 5).double()
    for reduction in ("mean", "sum", "none"):
        how = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction}
        assert torch.allclose(cross_entropy(scores, one_hot, **how), cross_entropy(scores, target, **how), rtol=1e-13)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_computed_in_float32(dtype, autocast):
    scores, target = (torch.randn(20, 40) * 30).to(dtype), torch.randint(40, (20,))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        ours = cross_entropy(scores, target, z_loss=0.1, label_smoothing=0.1)
    assert ours.dtype is torch.float32
    assert torch.equal(ours, cross_entropy(scores.float(), target, z_loss=0.1, label_smoothing=0.1))


def test_z_loss_draws_log_z_to_zero_and_cross_entropy_alone_does_not():
    ends = {}
    for z in (0.0, 0.1):
        scores = torch.full((1, 4), 5.0, requires_grad=True)
        optimizer = torch.optim.SGD([scores], lr=0.5)
        for _ in range(600):
            optimizer.zero_grad()
            cross_entropy(scores, torch.tensor([1]), z_loss=z, label_smoothing=0.2).backward()
            optimizer.step()
        ends[z] = scores.logsumexp(-1).item()
    assert ends[0.0] > 5
    assert abs(ends[0.1]) < 0.05


# ---- linear_cross_entropy

CUTS = (1, 7, 25, 49)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_give_value_and_gradients_of_the_plain_form(reduction, rows, dtype):
    upstream = torch.linspace(-1, 2, 50, dtype=dtype) if reduction == "none" else torch.tensor(1.7, dtype=dtype)
    for how in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.1, "z_loss": 0.01}):
        for bias in (True, False):
            parts = made(dtype=dtype, bias=bias)
            ours = differentiated(linear_cross_entropy, *parts, upstream, reduction=reduction, rows=rows, **how)
            theirs = differentiated(plain, *parts, upstream, reduction=reduction, **how)
            assert_close(ours, theirs, BOUNDS[dtype])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_few_rows_are_the_plain_form_bit_for_bit(reduction):
    parts = made()
    how = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
    ours = differentiated(linear_cross_entropy, *parts, **how, rows=50)
    theirs = differentiated(plain, *parts, **how)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.integers(1, 6),
    words=st.integers(1, 9),
    rows=st.integers(1, 30),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    seed=st.integers(0, 99),
)
def test_any_shapes_and_any_leaves(leading, width, words, rows, reduction, wanted, seed):
    hidden, weight, bias, target = made(math.prod(leading), width, words, torch.float64, seed=seed)
    target[0] = 0
    hidden, target = hidden.reshape(*leading, width), target.reshape(leading)
    results = []
    for function, more in ((linear_cross_entropy, {"rows": rows}), (plain, {})):
        leaves = [t.clone().requires_grad_(wants) for t, wants in zip((hidden, weight, bias), wanted, strict=True)]
        loss = function(leaves[0], leaves[1], target, leaves[2], reduction=reduction, **more)
        loss.sum().backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == 1 + sum(wanted)
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("autocast", HALF)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_is_heeded_in_forward_and_backward(autocast, reduction):
    parts = made(rows=200, width=32)
    ours = differentiated(linear_cross_entropy, *parts, autocast=autocast, reduction=reduction, rows=64)
    theirs = differentiated(plain, *parts, autocast=autocast, reduction=reduction)
    assert ours[0].dtype is torch.float32
    # Scores and their gradients are rounded alike; sums of several chunks are rounded once each.
    assert_close(ours, theirs, BOUNDS[autocast])
    exact = differentiated(plain, *parts, reduction=reduction)
    assert (ours[1] - exact[1]).norm() > 1e-5 * exact[1].norm()  # products in float32 would be nearer


def test_weights_in_bfloat16_are_summed_in_float32():
    parts = made(rows=2000, ignored=0.0, dtype=torch.bfloat16)
    exact = differentiated(plain, *(part.double() for part in parts[:3]), parts[3])
    errors = []
    for function, how in ((plain, {}), (linear_cross_entropy, {"rows": 20})):
        gradient = differentiated(function, *parts, **how)[2]
        assert gradient.dtype is torch.bfloat16
        errors.append(((gradient.double() - exact[2]).norm() / exact[2].norm()).item())
    assert errors[1] < 1.5 * errors[0]


def test_gradients_of_fp16_keep_what_the_loss_scale_saves():
    """Unlikely words have gradients that are zero in fp16, and are not once they are multiplied by a loss scale."""
    hidden, weight = torch.ones(64, 1), torch.tensor([[17.0]] + [[0.0]] * 15)
    target = torch.zeros(64, dtype=torch.int64)
    unlikely = {}
    for name, function, how in (("plain", plain, {}), ("chunks", linear_cross_entropy, {"rows": 8})):
        for scale in (1.0, 2.0**16):
            upstream = torch.tensor(scale)
            made_by = differentiated(function, hidden, weight, None, target, upstream, torch.float16, **how)
            unlikely[name, scale] = made_by[2][1:]
    assert not unlikely["plain", 1.0].any()
    assert unlikely["plain", 2.0**16].all()
    assert_close([unlikely["chunks", 2.0**16]], [unlikely["plain", 2.0**16]], 5e-3)  # 5 bits below 2**-14 are left


def test_without_gradients_none_are_made():
    hidden, weight, bias, target = made(512, 256, 300)
    weight.requires_grad_()
    with torch.no_grad(), LiveBytes(hidden, weight, bias, target) as live:
        value = linear_cross_entropy(hidden, weight, target, bias, rows=16)
    assert live.peak < weight.nbytes / 2
    assert value.item() == pytest.approx(plain(hidden, weight, target, bias).item(), rel=1e-6)


def test_what_is_kept_and_what_is_there_at_most():
    """Sizes in which scores outweigh all else, as in BERT: 1,024 rows of 64, 8,192 words."""
    rows, width, words, chunk = 1024, 64, 8192, 128
    parts = made(rows, width, words)
    kept, peaks = {}, {}
    for name, function, how in (("plain", plain, {}), ("chunks", linear_cross_entropy, {"rows": chunk})):
        leaves = [part.clone().requires_grad_() for part in parts[:3]]
        with LiveBytes(*leaves, parts[3]) as live:
            loss = function(leaves[0], leaves[1], parts[3], leaves[2], **how)
            kept[name] = live.now
            loss.backward()
        peaks[name] = live.peak
        assert ((rows, words) in live.shapes) == (name == "plain")
    scores, gradients = 4 * rows * words, 4 * (rows * width + words * width + words)
    few = 4 * 8 * rows  # values, targets and masks of the rows
    assert scores <= kept["plain"] <= scores + few
    assert gradients <= kept["chunks"] <= gradients + few
    assert peaks["plain"] >= 3 * scores
    assert peaks["chunks"] <= gradients + 4 * words * width + 4 * scores * chunk // rows + few


def test_with_none_hidden_states_alone_are_kept():
    parts = made(1024, 64, 8192)
    leaves = [part.clone().requires_grad_() for part in parts[:3]]
    with LiveBytes(*leaves, parts[3]) as live:
        loss = linear_cross_entropy(leaves[0], leaves[1], parts[3], leaves[2], reduction="none", rows=128)
        kept = live.now
    assert kept <= 3 * loss.nbytes


def test_a_second_backward_pass_is_refused_with_what_to_do():
    hidden, weight, _, target = made()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target, rows=7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='reduction="none"'):
        loss.backward()
    many = linear_cross_entropy(hidden, weight, target, reduction="none", rows=7).sum()
    hidden.grad = None
    many.backward(retain_graph=True)
    first = hidden.grad.clone()
    many.backward()
    assert torch.equal(hidden.grad, 2 * first)


def test_a_weight_that_is_the_embedding_too_gets_both_gradients():
    _, weight, _, target = made(ignored=0.0)
    tokens = torch.randint(70, (50,))
    gradients = []
    for function, how in ((linear_cross_entropy, {"rows": 7}), (plain, {})):
        leaf = weight.clone().requires_grad_()
        function(F.embedding(tokens, leaf), leaf, target, **how).backward()
        gradients.append(leaf.grad)
    assert_close(gradients[:1], gradients[1:], BOUNDS[torch.float32])


def test_in_a_compiled_graph_it_is_the_plain_form():
    hidden, weight, bias, target = made()
    direct = differentiated(plain, hidden, weight, bias, target)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    in_graph = differentiated(compiled, hidden, weight, bias, target, rows=7)
    assert_close(in_graph, direct, BOUNDS[torch.float32])


@pytest.mark.parametrize(
    ("target", "how", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, "hidden [...,"),
        (torch.zeros(50, 70), {}, "for probabilities"),
        (torch.zeros(50, dtype=torch.int64), {"reduction": "batchmean"}, "use one of mean, sum, none"),
        (torch.zeros(50, dtype=torch.int64), {"rows": 0}, "use 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(target, how, words):
    hidden, weight, _, _ = made()
    with pytest.raises(ConfigError) as error:
        linear_cross_entropy(hidden, weight, target, **how)
    assert words in str(error.value)
    with pytest.raises(ConfigError, match="use one of mean, sum, none"):
        cross_entropy(hidden, torch.zeros(50, dtype=torch.int64), reduction="batchmean")


def test_the_examples_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/losses.md", "exec"), {})
