"""The compiled loss function: graphs over different batches, values and gradients against eager code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Trainer
from fasttrain.compiler.functions import compile_loss
from fasttrain.nn.losses import cross_entropy, linear_cross_entropy
from tests.compiler.counting import GRAPHS, counting, fresh_compiler  # noqa: F401
from tests.helpers import QUIET, Recorder, Weight, largest_difference, points, state
from tests.stack import Stack

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LOSS = {"compile": {"name": "blocks", "backend": "aot_eager", "loss": True}}
BLOCKS = {"compile": {"name": "blocks", "backend": "aot_eager"}}


def with_gradients(loss, output, batch):
    """The loss, or losses, and the gradient of the output."""
    output = output.clone().requires_grad_()
    given = loss(output, batch)
    parts = given if isinstance(given, dict) else {"loss": given}
    sum(parts.values()).backward()
    return {**{name: part.detach() for name, part in parts.items()}, "gradient": output.grad}


HEAD = nn.Parameter(torch.randn(11, 7, generator=torch.Generator().manual_seed(5)))
SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1)


def in_chunks(output, batch):
    return linear_cross_entropy(output, HEAD, batch[1])


LOSSES = {
    "torch": lambda output, batch: F.cross_entropy(output, batch[1]),
    "smoothed": lambda output, batch: cross_entropy(output, batch[1], label_smoothing=0.1, z_loss=1e-3),
    "ignoring": lambda output, batch: cross_entropy(output, batch[1], ignore_index=3),
    "parts": lambda output, batch: {"a": F.cross_entropy(output, batch[1]), "b": output.square().mean()},
    "in chunks": in_chunks,
    "a module": lambda output, batch: SMOOTHED(output, batch[1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_batches_of_every_size_take_two_graphs_and_give_the_eager_loss_and_gradient(name):
    compiled = compile_loss(LOSSES[name], backend=counting)
    made = []
    for size in (8, 8, 5, 7, 3, 12):
        output, target = torch.randn(size, 7), torch.randint(7, (size,))
        ours, eager = (with_gradients(loss, output, (None, target)) for loss in (compiled, LOSSES[name]))
        assert largest_difference(ours, eager) < 1e-6
        made.append(len(GRAPHS))
    each = made[0]
    assert each >= 1
    assert made == [each, each, 2 * each, 2 * each, 2 * each, 2 * each]


def test_what_the_loss_does_not_look_at_costs_no_graph_and_numbers_become_symbols():
    def scaled(output, batch):
        return F.cross_entropy(output, batch["y"]) * batch["scale"]

    compiled = compile_loss(scaled, backend=counting)
    output, target = torch.randn(8, 7), torch.randint(7, (8,))
    for i in range(20):
        batch = {"y": target, "scale": i + 2, "file": f"{i}.png", "ids": [i] * (i + 1), "names": [str(i)] * 8}
        assert compiled(output, batch).item() == pytest.approx(scaled(output, batch).item(), rel=1e-6)
    assert len(GRAPHS) == 2


def test_two_losses_of_one_code_have_graphs_of_their_own_and_do_not_use_up_each_others_limit():
    def of(weight):
        return lambda output, batch: F.cross_entropy(output, batch[1]) * weight

    output, target = torch.randn(8, 7), torch.randint(7, (8,))
    plain = F.cross_entropy(output, target).item()
    for weight in range(1, 13):
        assert compile_loss(of(weight), backend=counting)(output, (None, target)).item() == pytest.approx(
            plain * weight
        )
    assert len(GRAPHS) == 12


# ---- in a run


class Counted(Stack):
    """A loss that logs, and looks at the trainer."""

    def build_data(self):
        return Data(train=points(21), evaluation=points(10, seed=4), shuffle=False)

    def loss(self, output, batch):
        loss = F.cross_entropy(output, batch[1])
        self.log("accuracy", (output.argmax(-1) == batch[1]).float().mean())
        return loss * (1 + self.step / 100)


def run(kind, log=1, **settings):
    torch.compiler.reset()
    watcher = Recorder()
    given = {"batch_size": 8, "steps": 6, "optimizer": "sgd", "run": {"dir": None}, "log": {"every": log}, **settings}
    trainer = kind(**given, observers=[watcher])
    trainer.fit()
    return trainer, watcher


@pytest.mark.parametrize("more", [{}, {"accumulation": {"name": "microbatches", "num": 2}}])
def test_a_loss_that_logs_logs_the_same_figures_and_trains_the_same(more):
    (eager, without), (trainer, watcher) = (run(Counted, **more, **compile) for compile in (BLOCKS, LOSS))
    assert largest_difference(state(eager), state(trainer)) < 1e-6
    for key in ("loss", "accuracy"):
        told = [record[key] for record in watcher.steps]
        assert told == pytest.approx([record[key] for record in without.steps], rel=1e-6)
        assert len(told) == 6
    assert eager.evaluate() == pytest.approx(trainer.evaluate(), rel=1e-6)
    assert "accuracy" in trainer.evaluate()


def test_log_points_change_no_bit_of_a_compiled_loss():
    (often, _), (seldom, _) = run(Counted, log=1, **LOSS), run(Counted, log=1000, **LOSS)
    assert largest_difference(state(often), state(seldom)) == 0.0


def test_training_and_evaluation_use_the_compiled_loss(monkeypatch):
    calls = []

    class Told(Stack):
        def build_data(self):
            return Data(train=points(), evaluation=points(16, seed=4))

        def loss(self, output, batch):
            if not torch.compiler.is_compiling():
                calls.append("eager")
            return F.cross_entropy(output, batch[1])

    on = {"compile": {"name": "blocks", "backend": "counting", "loss": True}}
    trainer, _ = run(Told, **on)
    trainer.evaluate()
    assert calls == []
    assert trainer.task.loss is trainer.loss
    losses = [g for g in GRAPHS if any("cross_entropy" in str(n.target) for n in g.graph.nodes)]
    assert len(losses) == 2  # in training and in evaluation
    run(Told, **BLOCKS)
    assert calls


def test_a_trainer_from_parts_has_its_loss_compiled():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    on = {"compile": {"name": "model", "backend": "counting", "loss": True}}
    trainer = Trainer.from_parts(model, points(), nn.CrossEntropyLoss(), batch_size=8, steps=3, **on, **QUIET)
    trainer.fit()
    assert sum(any("cross_entropy" in str(n.target) for n in g.graph.nodes) for g in GRAPHS) == 1


def test_a_trainer_with_compute_loss_alone_is_refused_before_its_model_is_built():
    class Never(Weight):
        def build_model(self):
            raise AssertionError("built")

    with pytest.raises(ConfigError, match=r"compile=blocks is set to change loss.*or set compile\.loss=false"):
        Never(batch_size=2, steps=1, **LOSS, **QUIET)


def test_a_loss_that_draws_has_the_mask_of_its_forward_in_its_backward():
    def dropped(output, batch):
        return (F.dropout(output, 0.5) * output).sum()

    compiled = compile_loss(dropped, backend=counting)
    output = torch.ones(1000, requires_grad=True)
    value = compiled(output, None)
    torch.rand(7)
    value.backward()
    kept = output.grad != 0
    assert value.item() == pytest.approx(2.0 * kept.sum().item())
    assert 400 < kept.sum() < 600
