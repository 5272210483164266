"""A GAN: two parts, two optimizers, a train_step of its own, and every strategy in force."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Trainer
from fasttrain.trainer import StepInfo
from tests.helpers import QUIET, Recorder, by_dimension, largest_difference, state
from tests.ranks import run_ranks


def samples(n=32):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(1))


class Gan(Trainer):
    def build_data(self):
        return Data(train=(samples(),), shuffle=False)

    def build_model(self):
        generator = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        critic = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def parts(self):
        return dict(self.model.items())

    def critic_loss(self, batch):
        made = self.model["generator"](batch[0].flip(1)).detach()
        critic = self.model["critic"]
        return F.softplus(critic(made)).mean() + F.softplus(-critic(batch[0])).mean()

    def generator_loss(self, batch):
        return F.softplus(-self.model["critic"](self.model["generator"](batch[0].flip(1)))).mean()

    def train_step(self, batch):
        self.step_part("critic", self.critic_loss, batch)
        loss = self.step_part("generator", self.generator_loss, batch)
        self.step += 1
        return StepInfo(self.step, loss)


SETTINGS = {
    "batch_size": 16,
    "steps": 6,
    "optimizer": {"name": "adamw", "lr": 0.01},
    "schedule": {"name": "linear"},
    "gradient_clipping": {"name": "norm", "max_norm": 0.1},
    **QUIET,
}


def plain():
    """The same in plain PyTorch."""
    torch.manual_seed(0)
    model = Gan.build_model(None)
    optimizers = {name: torch.optim.AdamW(by_dimension(part), lr=0.01, fused=True) for name, part in model.items()}
    x = samples()
    trainer = type("Losses", (), {"model": model})()
    for step in range(6):
        batch = (x[16 * (step % 2) : 16 * (step % 2) + 16],)
        for name, loss in (("critic", Gan.critic_loss), ("generator", Gan.generator_loss)):
            for group in optimizers[name].param_groups:
                group["lr"] = 0.01 * (6 - step) / 6
            model.zero_grad()
            loss(trainer, batch).backward()
            nn.utils.clip_grad_norm_([p for g in optimizers[name].param_groups for p in g["params"]], 0.1)
            optimizers[name].step()
    return model.state_dict()


def trained(**more):
    trainer = Gan(**{**SETTINGS, **more})
    trainer.fit()
    return state(trainer)


def test_a_gan_with_two_optimizers_equals_plain_pytorch():
    assert largest_difference(trained(), plain()) == 0.0


@pytest.mark.parametrize(
    "tricks",
    [
        {"accumulation": {"name": "microbatches", "num": 4}},
        {"nonfinite": "skip"},
        {"nonfinite": "raise"},
    ],
    ids=str,
)
def test_tricks_leave_its_numbers_alone(tricks):
    # Adam divides by the root of squares, so float32 rounding of a sum shows up to a few times larger.
    assert largest_difference(trained(**tricks), plain()) < 1e-5


def test_mixed_precision_trains_it():
    # The scale is low enough that no step overflows.
    for precision in ("bf16", {"name": "fp16", "init_scale": 1024.0}):
        assert largest_difference(trained(precision=precision), plain()) < 0.05


@pytest.mark.ranks
def test_two_ranks_equal_one_process():
    for weights in run_ranks(2, trained):
        assert largest_difference(weights, plain()) < 1e-5


def test_it_resumes_with_equal_bits(tmp_path):
    class Stop(Recorder):
        def stepped(self, record):
            if record["step"] == 3:
                self.run.request_stop("test")

    place = {"run": {"dir": str(tmp_path), "name": "gan", "id": "a"}}
    Gan(**{**SETTINGS, **place}, observers=[Stop()]).fit()
    again = Gan(**{**SETTINGS, **place}, resume="auto")
    assert again.fit()["steps"] == 6
    assert largest_difference(state(again), plain()) == 0.0


def test_the_default_step_says_what_to_do_with_several_optimizers():
    class NoStep(Gan):
        train_step = Trainer.train_step
        compute_loss = Gan.critic_loss

    with pytest.raises(ConfigError, match="step_part"):
        NoStep(**SETTINGS).fit()


def test_the_other_part_does_not_move():
    trainer = Gan(**SETTINGS)
    before = copy.deepcopy(trainer.model["generator"].state_dict())
    trainer.step_part("critic", trainer.critic_loss, (samples()[:16],))
    assert largest_difference(trainer.model["generator"].state_dict(), before) == 0.0
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())
