"""The recipes against their flat twins: 20 steps, float32, one process, equal bits. And ranks against one process."""

import pytest

from fasttrain.config import load
from recipes.flat import bert as flat_bert
from recipes.flat import resnet as flat_resnet
from tests.commands import ROOT
from tests.helpers import Recorder, largest_difference, loss_and_gradients, state
from tests.ranks import run_ranks

QUIET = ["run.dir=null", "log.every=1", "evaluate.every=1000"]


def trained(config, *overrides):
    """A recipe trained from its config: the trainer, and the loss of each step."""
    watcher = Recorder()
    resolved = load(ROOT / "configs" / config, [*QUIET, *overrides])
    trainer = resolved.trainer(resolved, observers=[watcher])
    # The held-out set is not part of these comparisons.
    object.__setattr__(trainer.data, "evaluation", None)
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


def test_the_resnet_recipe_equals_its_flat_twin_bit_for_bit():
    trainer, losses = trained("resnet_digits.yaml", "steps=20")
    model, expected = flat_resnet.train(20)
    assert losses == expected
    assert len(losses) == 20
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


@pytest.mark.parametrize("loss", ["chunked_loss=false", "chunked_loss=true"])
def test_the_bert_recipe_equals_its_flat_twin_bit_for_bit(loss):
    # A batch hides fewer words than a chunk holds.
    trainer, losses = trained("bert_docstrings.yaml", "limit_batches=20", "epochs=1", "schedule.warmup=10", loss)
    expected, model = flat_bert.train(20, flat_bert.Config(steps=20, warmup=10))
    assert losses == expected
    assert len(losses) == 20
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def gradients_of(config, *overrides):
    """Gradient of the first step of a recipe, by name; float64 copies."""
    resolved = load(ROOT / "configs" / config, [*QUIET, *overrides])
    trainer = resolved.trainer(resolved)
    loss = loss_and_gradients(trainer)
    grads = {name: parameter.grad.double() for name, parameter in trainer.model.named_parameters()}
    return loss, grads


def relative_difference(a, b):
    """Euclidean distance of all gradients together, relative to their norm."""
    assert set(a) == set(b)
    difference = sum((a[name] - b[name]).pow(2).sum() for name in a).sqrt()
    return (difference / sum(b[name].pow(2).sum() for name in b).sqrt()).item()


RECIPES = {
    # Statistics over a batch are other mathematics by nature, so the ResNet has GroupNorm here; dropout is 0.
    "resnet": ("resnet_digits.yaml", "steps=2", "model.norm=group"),
    "resnet with mixup": ("resnet_digits.yaml", "steps=2", "model.norm=group", "mixup=0.4", "label_smoothing=0.1"),
    "resnet with cutmix": ("resnet_digits.yaml", "steps=2", "model.norm=group", "cutmix=1.0"),
    "bert": ("bert_docstrings.yaml", "steps=2", "schedule.warmup=1", "model.dropout=0"),
    # 64 sequences hide about 1,400 words: more than one chunk.
    "bert in chunks": ("bert_docstrings.yaml", "steps=2", "schedule.warmup=1", "batch_size=64", "chunked_loss=true"),
}
# float32 rounds each product and sum at 6e-8 relative; sums over a batch in another order differ by a few times that.
BOUND = 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "cut", ["accumulation.num=1", "accumulation.num=2", "accumulation.num=4", "accumulation.size=7"]
)
def test_microbatches_give_the_gradient_of_the_whole_batch(recipe, cut):
    loss, grads = gradients_of(*RECIPES[recipe])
    cut_loss, cut_grads = gradients_of(*RECIPES[recipe], "accumulation=microbatches", cut)
    assert cut_loss == pytest.approx(loss, rel=BOUND)
    assert relative_difference(cut_grads, grads) < BOUND


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_give_the_gradient_of_one_process(recipe):
    loss, grads = gradients_of(*RECIPES[recipe])
    for more in ([], ["accumulation=microbatches", "accumulation.num=3"]):
        for rank_loss, rank_grads in run_ranks(2, gradients_of, *RECIPES[recipe], *more):
            assert rank_loss == pytest.approx(loss, rel=BOUND)
            assert relative_difference(rank_grads, grads) < BOUND


@pytest.mark.ranks
def test_two_ranks_with_synchronised_batch_norm_equal_one_process():
    settings = ("resnet_digits.yaml", "steps=2")
    loss, grads = gradients_of(*settings)
    together = run_ranks(2, gradients_of, *settings, "batch_norm=sync")
    apart = run_ranks(2, gradients_of, *settings)
    for rank_loss, rank_grads in together:
        assert rank_loss == pytest.approx(loss, rel=BOUND)
        # BatchNorm's backward subtracts means that nearly cancel, which costs about one digit.
        assert relative_difference(rank_grads, grads) < 1e-5
    # Without it each rank takes the statistics of its own share.
    assert relative_difference(apart[0][1], grads) > 1e-2
