"""channels_last: strides, equal numbers, and where a layout is lost."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Trainer
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.nn.layouts import LostLayout, channels_last, is_channels_last, lost_layouts, to_channels_last
from fasttrain.strategies.memory_format import ChannelsLast
from tests.helpers import QUIET, Recorder, largest_difference, state
from tests.ranks import run_ranks
from tests.stack import Stack


class GroupNorm(nn.GroupNorm):
    """Statistics of a sample alone, so that ranks and one process compute the same."""

    def __init__(self, channels):
        super().__init__(2, channels)


class Contiguous(nn.Module):
    """Loses the layout, as reshapes do."""

    def forward(self, x):
        return x.contiguous()


class Picture(nn.Module):
    """A stem and three residual blocks of a norm, an activation, something, and a convolution."""

    def __init__(self, loses=None, conv=nn.Conv2d, norm=nn.BatchNorm2d):
        super().__init__()
        self.loses = loses
        self.stem, self.head = conv(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                norm(8),
                nn.ReLU(),
                Contiguous() if loses == "module" and i == 1 else nn.Identity(),
                conv(8, 8, 3, padding=1),
            )
            for i in range(3)
        )

    def forward(self, x):
        x = self.stem(x)
        if self.loses == "code":
            x = x.contiguous()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(2).mean(2))


def images(n=24, channels=3, *, dims=2):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, channels, *[6] * dims, generator=g), torch.randint(4, (n,), generator=g)


class Pictures(Trainer):
    """A classifier of images."""

    loses = None

    def build_data(self):
        return Data(train=images())

    def build_model(self):
        return Picture(self.loses)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


class LosesInAModule(Pictures):
    loses = "module"


class LosesInCode(Pictures):
    loses = "code"


SETTINGS = {"batch_size": 8, "steps": 6, "optimizer": {"name": "sgd", "lr": 0.05}, **QUIET}


def trained(cls=Pictures, **settings):
    watcher = Recorder()
    trainer = cls(**{**SETTINGS, **settings}, observers=[watcher])
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


@pytest.mark.parametrize("precision", [None, "bf16_true"])
@pytest.mark.parametrize("accumulation", [None, {"name": "microbatches", "num": 2}])
def test_weights_gradients_optimizer_state_and_inputs_are_channels_last(accumulation, precision):
    seen, gradients = [], []

    class Looks(Pictures):
        def inputs(self, batch):
            seen.append(is_channels_last(batch[0]))
            return (batch[0],)

    trainer = Looks(**SETTINGS, memory_format="channels_last", accumulation=accumulation, precision=precision)
    step = trainer.optimizer.step
    convolutions = [m for m in trainer.model.modules() if isinstance(m, nn.Conv2d)]
    trainer.optimizer.step = lambda *a: (
        gradients.extend(is_channels_last(c.weight.grad) for c in convolutions),
        step(*a),
    )
    trainer.fit()
    assert len(convolutions) == 4
    assert seen == [True] * (12 if accumulation else 6)
    assert gradients == [True] * 24
    assert all(is_channels_last(c.weight) for c in convolutions)
    assert all(is_channels_last(trainer.optimizer.state[c.weight]["momentum_buffer"]) for c in convolutions)
    assert not any(c.weight.is_contiguous() for c in convolutions)


def test_numbers_are_those_of_the_plain_layout_within_1e_6():
    trainer, losses = trained(memory_format="channels_last")
    plain, expected = trained()
    assert largest_difference(state(trainer), state(plain)) <= 1e-6
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(losses) == 6


def test_volumes_are_laid_out_too_and_what_is_no_image_stays():
    class Volumes(Pictures):
        def build_data(self):
            return Data(train=(*images(dims=3), torch.randn(24, 5, 4, 3)))

        def build_model(self):
            return Picture(conv=nn.Conv3d, norm=nn.BatchNorm3d)

        def inputs(self, batch):
            seen.append((is_channels_last(batch[0]), batch[2].is_contiguous()))
            return (batch[0],)

    seen = []
    trainer, losses = trained(Volumes, memory_format="channels_last")
    assert seen == [(True, True)] * 6
    plain, expected = trained(Volumes)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert largest_difference(state(trainer), state(plain)) <= 1e-6
    assert trainer.model.stem.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not trainer.model.stem.weight.is_contiguous()
    assert trainer.plan.strategies["memory_format"].lost == []
    assert len(losses) == 6


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(
        ConfigError, match=r"memory_format=channels_last: StackModel has no 2-D or 3-D convolution.*; use "
    ):
        Stack(batch_size=8, memory_format="channels_last", **QUIET)


@pytest.mark.parametrize("loses", ["module", "code"])
def test_what_loses_the_layout_is_named_once(loses):
    cls, lost = {
        "module": (LosesInAModule, [LostLayout("blocks.1.3", "blocks.1.2")]),
        "code": (
            LosesInCode,
            [
                LostLayout("blocks.0.3", "the code of the model between stem and blocks.0"),
                LostLayout("blocks.1.3", "the code of the model between blocks.0 and blocks.1"),
                LostLayout("blocks.2.3", "the code of the model between blocks.1 and blocks.2"),
            ],
        ),
    }[loses]
    with pytest.warns(UserWarning, match="the layout was lost") as told:
        trainer, losses = trained(cls, memory_format="channels_last")
    assert len(told) == 1
    assert f"{lost[0].module} gets another layout from {lost[0].where}" in str(told[0].message)
    assert trainer.plan.strategies["memory_format"].lost == lost
    assert lost_layouts(trainer.model, to_channels_last(images()[0])) == lost
    assert losses == pytest.approx(trained(cls)[1], rel=1e-6)


def test_the_hooks_of_the_first_step_are_gone_after_it_and_a_run_of_one_step_is_told_too():
    trainer, _ = trained(memory_format="channels_last")
    assert trainer.plan.strategies["memory_format"].lost == []
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in trainer.model.modules())
    with pytest.warns(UserWarning, match=r"blocks\.1\.3"):
        trained(LosesInAModule, memory_format="channels_last", steps=1)


def test_an_input_that_is_not_channels_last_is_told_as_that():
    model = Picture()
    channels_last(model)
    assert lost_layouts(model, images()[0]) == [LostLayout("stem", "the input of the model")]


def test_looking_leaves_statistics_generators_and_hooks_as_they_were():
    model = Picture()
    channels_last(model)
    before, rng = {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
    lost_layouts(model, to_channels_last(images()[0]))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_nothing_is_compiled_anew():
    from torch._dynamo.utils import counters

    graphs = []
    for memory_format in (None, "channels_last"):
        torch.compiler.reset()
        counters.clear()
        trained(memory_format=memory_format, compile={"name": "blocks", "backend": "aot_eager", "fullgraph": True})
        graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert graphs[0] == graphs[1] >= 1


def test_checkpointing_runs_hooks_twice_and_finds_the_same():
    with pytest.warns(UserWarning, match="lost before 1 convolutions"):
        trainer, _ = trained(LosesInAModule, memory_format="channels_last", activation_checkpointing="full")
    assert trainer.plan.strategies["memory_format"].lost == [LostLayout("blocks.1.3", "blocks.1.2")]


def test_without_a_trainer():
    context = Context(device=torch.device("cpu"))
    plan = Plan([ChannelsLast(None, context)], context)
    model = plan.model(Picture())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = plan.batch({"image": images()[0], "mask": torch.ones(24, 6, 6)})
    assert is_channels_last(batch["image"])
    assert batch["mask"].is_contiguous()
    assert is_channels_last(model.stem.weight)
    assert channels_last(Picture()) == 4


def test_of_one_channel_or_one_pixel_both_layouts_are_the_same():
    assert is_channels_last(torch.zeros(2, 1, 3, 3))
    assert is_channels_last(torch.zeros(2, 5, 1, 1))
    assert not is_channels_last(torch.zeros(2, 5, 3, 3))
    assert not is_channels_last(torch.zeros(5, 3))


class NormedPictures(Pictures):
    def build_model(self):
        return Picture(norm=GroupNorm)


def losses_and_strides():
    trainer, _ = trained(NormedPictures, memory_format="channels_last", steps=3)
    kept = [is_channels_last(m.weight) for m in trainer.model.modules() if isinstance(m, nn.Conv2d)]
    return {name: value.tolist() for name, value in state(trainer).items()}, kept


@pytest.mark.ranks
def test_two_ranks_train_as_one_and_keep_the_layout():
    (first, kept), (second, _) = run_ranks(2, losses_and_strides)
    plain, _ = trained(NormedPictures, steps=3)
    assert first == second
    assert kept == [True] * 4
    ours = {name: torch.tensor(value) for name, value in first.items()}
    assert largest_difference(ours, state(plain)) <= 1e-6
