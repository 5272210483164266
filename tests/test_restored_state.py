"""What a checkpoint holds beside plain weights, and checkpoints of something else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, StepInfo
from fasttrain.errors import CheckpointError
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, state


class Stop(Recorder):
    """Stops after four steps."""

    def stepped(self, record):
        if record["step"] == 4:
            self.run.request_stop("test")


SETTINGS = {"batch_size": 8, "log": {"every": 1}}


def stopped_and_resumed(tmp_path, cls, then=None):
    """A trainer that ran through, and one that was stopped and taken up (by another class, if given)."""
    run = {"dir": str(tmp_path), "id": "one", "name": "run"}
    whole = cls(**SETTINGS, steps=9, run={"dir": None})
    whole.fit()
    assert cls(**SETTINGS, steps=9, run=run, observers=[Stop()]).fit()["status"] == "stopped"
    resumed = (then or cls)(**SETTINGS, steps=9, run=run, resume="auto")
    resumed.fit()
    return whole, resumed


class Growing(nn.Linear):
    """Its output grows with the number of forwards in training, which it keeps outside of buffers."""

    forwards, kind = 0, staticmethod(torch.tensor)

    def forward(self, x):
        self.forwards += self.training
        return super().forward(x) * (1 + 0.1 * self.forwards)

    def get_extra_state(self):
        return self.kind(self.forwards)

    def set_extra_state(self, state):
        self.forwards = int(state["forwards"] if isinstance(state, dict) else state)


KINDS = {"tensor": torch.tensor, "vector": lambda n: torch.full((n + 1,), n)[-1:], "json": lambda n: {"forwards": n}}


@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_state_of_a_module_is_taken_back(tmp_path, kind):
    class Extra(Mlp):
        def build_model(self):
            layer = Growing(8, 4)
            layer.kind = KINDS[kind]
            return nn.Sequential(layer)

    whole, resumed = stopped_and_resumed(tmp_path, Extra)
    assert whole.model[0].forwards == resumed.model[0].forwards == 9
    assert torch.equal(whole.model[0].weight, resumed.model[0].weight)


def test_an_extra_state_that_no_checkpoint_can_hold_is_told_before_the_first_step(tmp_path):
    class Odd(Mlp):
        def build_model(self):
            layer = Growing(8, 4)
            layer.kind = lambda n: object()
            return nn.Sequential(layer)

    watcher = Recorder()
    with pytest.raises(CheckpointError, match=r"0\._extra_state is a object, .*JSON"):
        Odd(**SETTINGS, steps=2, run={"dir": str(tmp_path)}, observers=[watcher]).fit()
    assert watcher.steps == []
    assert Odd(**SETTINGS, steps=2, run={"dir": None}).fit()["steps"] == 2


def with_optimizer(make):
    return type("Own", (Mlp,), {"build_optimizer": lambda self, model: make(model.parameters())})


@pytest.mark.parametrize("order", [1, -1])
def test_the_state_of_another_optimizer_is_refused(tmp_path, order):
    sgd = with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    adam = with_optimizer(torch.optim.Adam)
    first, then = (sgd, adam)[::order]
    with pytest.raises(CheckpointError, match=r"model=(SGD|Adam), this run has model=(SGD|Adam); .* same optimizer"):
        stopped_and_resumed(tmp_path, first, then)


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path):
    class Larger(Mlp):
        def build_model(self):
            model = super().build_model()
            model[2].extra = nn.Parameter(torch.zeros(3))
            return model

    with pytest.raises(CheckpointError, match=r"holds 1 tensors of the model that this run has not .*2\.extra"):
        stopped_and_resumed(tmp_path, Larger, Mlp)


def test_an_optimizer_over_what_is_no_parameter_of_the_model_is_refused():
    class Foreign(Mlp):
        def build_optimizer(self, model):
            self.temperature = nn.Parameter(torch.ones(3))
            return torch.optim.AdamW([*model.parameters(), self.temperature])

    with pytest.raises(ConfigError, match=r"shape \(3,\) that is no parameter of the model.*register"):
        Foreign(batch_size=8, **QUIET)


def test_an_optimizer_that_needs_a_closure_is_refused_unless_the_step_is_ones_own():
    lbfgs = with_optimizer(torch.optim.LBFGS)
    with pytest.raises(ConfigError, match=r"LBFGS\.step needs a closure.*train_step"):
        lbfgs(batch_size=8, run={"dir": None})

    class OwnStep(lbfgs):
        def train_step(self, batch):
            def closure():
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(batch[0]), batch[1])
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            self.step += 1
            return StepInfo(self.step, loss.detach())

    assert OwnStep(batch_size=8, steps=2, run={"dir": None}).fit()["steps"] == 2


def test_equal_optimizers_and_models_are_taken_up(tmp_path):
    whole, resumed = stopped_and_resumed(tmp_path, with_optimizer(torch.optim.Adagrad))
    assert largest_difference(state(whole), state(resumed)) == 0


def test_weights_that_share_memory_and_expanded_buffers_are_saved_and_taken_back(tmp_path):
    class Shared(Mlp):
        def build_model(self):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
            model[1].weight.data = model[0].weight.data  # two parameters, one memory
            model.register_buffer("scale", torch.rand(1, 2).t().expand(2, 3))
            return model

    whole, resumed = stopped_and_resumed(tmp_path, type("Shared", (Shared,), {}))
    assert largest_difference(state(whole), state(resumed)) == 0
    assert resumed.model[0].weight.data_ptr() == resumed.model[1].weight.data_ptr()
