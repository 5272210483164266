"""What `self.log` may be called with, and that no name a user chooses moves the run's own figures."""

import pytest
import torch
from torch.nn import functional as F

from fasttrain import ConfigError, Trainer
from tests.helpers import QUIET, Mlp, Recorder


class Logging(Mlp):
    """Logs a constant under a name in each forward."""

    name = ""

    def loss(self, output, batch):
        self.log(self.name, torch.tensor(100.0))
        return super().loss(output, batch)


def logging(name):
    return type("Logging", (Logging,), {"name": name})


def test_a_logged_part_of_the_loss_leaves_the_evaluated_loss_alone():
    told = logging("loss/kl")(batch_size=8, **QUIET).evaluate()
    assert told["loss"] == Mlp(batch_size=8, **QUIET).evaluate()["loss"]
    assert told["loss/kl"] == pytest.approx(100.0)


def test_a_figure_logged_under_the_name_of_a_metric_leaves_the_metric_alone():
    class Measured(logging("accuracy")):
        def metrics(self, output, batch):
            return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}

    class Plain(Mlp):
        metrics = Measured.metrics

    assert Measured(batch_size=8, **QUIET).evaluate() == Plain(batch_size=8, **QUIET).evaluate()


@pytest.mark.parametrize("name", ["loss", "lr", "step", "epoch", "samples", "grad_norm", "memory", "step_time_s"])
@pytest.mark.parametrize("kind", ["scalar", "histogram"])
def test_a_name_that_the_record_has_itself_is_refused(name, kind):
    class Taken(Mlp):
        def loss(self, output, batch):
            self.log(name, torch.zeros(3).sum(), kind=kind)
            return super().loss(output, batch)

    with pytest.raises(ConfigError, match=rf"log\('{name}'\).*'my/{name}'"):
        Taken(batch_size=8, steps=1, **QUIET).fit()


def test_a_figure_of_a_strategy_is_not_replaced_by_a_logged_one():
    watcher = Recorder()
    logging("refused_in_a_row")(batch_size=8, steps=2, nonfinite="skip", observers=[watcher], **QUIET).fit()
    assert [record["refused_in_a_row"] for record in watcher.steps] == [0.0, 0.0]


def test_metrics_without_an_output_to_measure_are_refused():
    class Unmeasured(Trainer):
        n = 24
        build_data, build_model = Mlp.build_data, Mlp.build_model

        def compute_loss(self, batch):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def metrics(self, output, batch):
            return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}

    with pytest.raises(ConfigError, match=r"metrics\(output, batch\).*loss\(output, batch\)"):
        Unmeasured(batch_size=8, **QUIET)
