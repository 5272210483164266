import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Microbatches, RunError, Trainer
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state


def plain_training(steps=6, batch_size=8, lr=0.1):
    """The same training in plain PyTorch."""
    from fasttrain.data.seeds import mix

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    x, y = points()
    losses, step = [], 0
    for epoch in range(100):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(mix(0, "order", epoch)))
        for first in range(0, len(y), batch_size):
            if step == steps:
                return model.state_dict(), losses
            picked = order[first : first + batch_size]
            loss = F.cross_entropy(model(x[picked]), y[picked])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1


def test_a_trainer_equals_plain_pytorch_bit_for_bit():
    watcher = Recorder()
    trainer = Mlp(batch_size=8, steps=6, optimizer={"name": "sgd", "lr": 0.1}, observers=[watcher], **QUIET)
    summary = trainer.fit()
    weights, losses = plain_training()
    assert [record["loss"] for record in watcher.steps] == losses
    assert largest_difference(trainer.model.state_dict(), weights) == 0.0
    assert summary["status"] == "done"
    assert (summary["steps"], summary["samples"], summary["epochs"]) == (6, 48, 2.0)


def test_from_parts_trains_without_a_subclass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    trainer = Trainer.from_parts(
        model, Data(train=points()), F.cross_entropy, batch_size=8, steps=6, optimizer={"name": "sgd"}, **QUIET
    )
    trainer.fit()
    assert trainer.model is model
    assert largest_difference(model.state_dict(), plain_training()[0]) == 0.0


@pytest.mark.parametrize(
    ("data", "held"),
    [
        (torch.zeros(12, 8), "is one tensor"),
        ((torch.zeros(12, 8),), "is a tuple of one"),
        ({"x": torch.zeros(12, 8)}, "has 'x' and none of 'label'"),
    ],
)
def test_from_parts_refuses_a_loss_of_torch_where_the_batch_has_no_target(data, held):
    trainer = Trainer.from_parts(nn.Linear(8, 8), data, nn.MSELoss(), batch_size=12, epochs=1, **QUIET)
    with pytest.raises(ConfigError, match=held):
        trainer.fit()


def test_from_parts_gives_a_function_of_ones_own_the_whole_batch():
    seen = []

    def loss(output, batch):
        seen.append(sorted(batch))
        return F.cross_entropy(output, batch["label"])

    x, y = points()
    data = {"x": x, "label": y}
    Trainer.from_parts(nn.Linear(8, 4), data, loss, batch_size=12, epochs=1, **QUIET).fit()
    assert seen == [["label", "x"]] * 2


def test_an_own_loss_alone_is_enough():
    class Own(Mlp):
        def compute_loss(self, batch):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        loss = Trainer.loss

    trainer = Own(batch_size=8, steps=6, optimizer="sgd", **QUIET)
    trainer.fit()
    assert largest_difference(trainer.model.state_dict(), plain_training()[0]) == 0.0
    assert set(trainer.evaluate()) == {"loss"}


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
def test_microbatches_give_the_gradient_of_the_whole_batch(num):
    whole = Mlp(batch_size=8, steps=5, optimizer={"name": "sgd", "lr": 0.1}, **QUIET)
    cut = Mlp(
        batch_size=8,
        steps=5,
        optimizer={"name": "sgd", "lr": 0.1},
        accumulation={"name": "microbatches", "num": num},
        **QUIET,
    )
    whole.fit()
    cut.fit()
    # float32 sums in another order: 5 steps of rounding at 6e-8 each.
    assert largest_difference(state(whole), state(cut)) < 1e-6


def test_a_ragged_last_batch_is_its_own_mean():
    class Ragged(Mlp):
        n = 21  # 8, 8, 5

    results = {}
    for size in (8, 3):
        trainer = Ragged(
            batch_size=8, epochs=2, optimizer="sgd", accumulation={"name": "microbatches", "size": size}, **QUIET
        )
        assert trainer.fit()["steps"] == 6
        results[size] = state(trainer)
    assert largest_difference(results[8], results[3]) < 1e-6


def test_the_number_of_steps_follows_from_epochs_and_batch_size():
    assert Mlp(batch_size=10, epochs=2, **QUIET).total_steps == 6
    assert Mlp(batch_size=10, steps=7, **QUIET).total_steps == 7
    assert Mlp(batch_size=10, epochs=2, limit_batches=1, **QUIET).total_steps == 2


def test_two_means_in_one_loss_are_weighted_apart():
    class TwoMeans(Mlp):
        def loss(self, output, batch):
            first = batch[1] == 0
            some = F.cross_entropy(output[first], batch[1][first]) if first.any() else output.sum() * float("nan")
            return {"all": F.cross_entropy(output, batch[1]), "first": some}

        def count(self, batch):
            return {"all": len(batch[1]), "first": int((batch[1] == 0).sum())}

    results = []
    for num in (1, 2, 4):
        trainer = TwoMeans(
            batch_size=24, steps=4, optimizer="sgd", accumulation={"name": "microbatches", "num": num}, **QUIET
        )
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(results[0], results[1]) < 1e-6
    assert largest_difference(results[0], results[2]) < 1e-6


def test_a_loss_and_a_count_that_disagree_are_refused():
    class Disagree(Mlp):
        def count(self, batch):
            return {"a": 1, "b": 2}

    with pytest.raises(ConfigError, match="return dicts of the same keys"):
        Disagree(batch_size=8, steps=1, **QUIET).fit()


def test_figures_logged_by_user_code_are_means_by_count():
    class Logs(Mlp):
        def loss(self, output, batch):
            self.log("first_class", (batch[1] == 0).float().mean())
            return super().loss(output, batch)

    watcher = Recorder()
    accumulation = {"name": "microbatches", "num": 3}
    trainer = Logs(batch_size=24, steps=1, optimizer="sgd", accumulation=accumulation, observers=[watcher], **QUIET)
    trainer.fit()
    expected = (points()[1] == 0).float().mean().item()
    assert watcher.steps[0]["first_class"] == pytest.approx(expected, rel=1e-6)
    expected = (points(10, seed=4)[1] == 0).float().mean().item()
    assert trainer.evaluate()["first_class"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("counted", [float, torch.tensor])
def test_figures_over_nothing_are_left_out_of_the_mean(counted):
    class Logging(Mlp):
        def count(self, batch):
            return counted(len(batch[1]))

        def loss(self, output, batch):
            self.log("largest", batch[0].mean())
            return F.cross_entropy(output, batch[1])

    # 10 samples in evaluation batches of 9: the last one, cut in two, leaves an empty piece.
    trainer = Logging(batch_size=9, steps=1, accumulation={"name": "microbatches", "num": 2}, **QUIET)
    assert trainer.evaluate()["largest"] == pytest.approx(points(10, seed=4)[0].mean().item(), rel=1e-5)


def test_evaluation_counts_every_sample_once_and_restores_the_mode():
    trainer = Mlp(batch_size=4, steps=1, evaluate={"batch_size": 3}, **QUIET)
    trainer.model.train()
    measured = trainer.evaluate()["loss"]
    x, y = points(10, seed=4)
    assert measured == pytest.approx(F.cross_entropy(trainer.model(x), y).item(), rel=1e-6)
    assert trainer.model.training


def test_whole_batch_losses_are_not_cut():
    class Whole(Mlp):
        whole_batch_loss = True

    with pytest.raises(RunError, match="whole_batch_loss"):
        Whole(batch_size=8, steps=1, accumulation={"name": "microbatches", "num": 2}, **QUIET).fit()


def test_a_loader_may_cut_by_itself():
    x, y = points(8)

    class Cut(Mlp):
        def build_data(self):
            return Data(train=[Microbatches([(x[:2], y[:2]), (x[2:], y[2:])])] * 3)

    class Listed(Mlp):
        def build_data(self):
            return Data(train=iter([Microbatches([(x[:2], y[:2]), (x[2:], y[2:])])]))

    class Whole(Mlp):
        def build_data(self):
            return Data(train=iter([(x, y)]))

    cut = Listed(batch_size=8, steps=1, optimizer="sgd", accumulation={"name": "microbatches", "num": 2}, **QUIET)
    whole = Whole(batch_size=8, steps=1, optimizer="sgd", **QUIET)
    cut.fit()
    whole.fit()
    assert largest_difference(state(cut), state(whole)) < 1e-6


def test_an_own_train_step_keeps_every_strategy():
    class Twice(Mlp):
        def train_step(self, batch):
            info = super().train_step(batch)
            self.seen = getattr(self, "seen", 0) + 1
            return info

    trainer = Twice(batch_size=8, steps=4, precision="bf16", gradient_clipping="norm", schedule="cosine", **QUIET)
    assert trainer.fit()["steps"] == trainer.seen == 4


def test_missing_methods_say_what_to_write():
    with pytest.raises(NotImplementedError, match="override build_data"):
        Trainer(batch_size=1)

    class NoLoss(Mlp):
        loss = Trainer.loss

    with pytest.raises(NotImplementedError, match=r"override loss\(self, output, batch\)"):
        NoLoss(batch_size=8, steps=1, **QUIET).fit()


def test_a_run_folder_holds_all_that_a_run_is(tmp_path):
    Mlp(batch_size=8, steps=4, run={"dir": str(tmp_path), "name": "a", "id": "b"}, log={"every": 2}).fit()
    run = tmp_path / "a" / "b"
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "explain.txt", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"} <= names
    assert any(name.startswith("events.") for name in names)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-4"]
    summary = json.loads((run / "summary.json").read_text())
    wanted = {
        *("status", "steps", "epochs", "samples", "final_loss", "metrics", "wall_s", "startup_s", "compile_s"),
        *("step_time_s", "samples_per_s", "data_wait_fraction", "peak_memory_bytes", "world_size", "device", "torch"),
        "config_hash",
    }
    assert wanted <= set(summary)
    assert set(summary["peak_memory_bytes"]) == {"allocated", "reserved", "rss"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [2, 4]
    for line in steps:
        assert {
            "samples",
            "epoch",
            "loss",
            "lr",
            "grad_norm",
            "step_time_s",
            "data_wait_s",
            "samples_per_s",
            "memory",
        } <= set(line)


def test_a_run_id_is_not_written_over(tmp_path):
    settings = {"batch_size": 8, "steps": 1, "run": {"dir": str(tmp_path), "name": "a", "id": "b"}}
    Mlp(**settings).fit()
    with pytest.raises(ConfigError, match="holds a run already"):
        Mlp(**settings).fit()


def test_a_run_folder_that_cannot_be_made_is_told_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no run folder can be made in it \(Not a directory.*choose another"):
        Mlp(batch_size=8, steps=1, run={"dir": str(tmp_path / "file"), "name": "a"}).fit()


def test_observers_change_nothing():
    with_one = Mlp(batch_size=8, steps=4, observers=[Recorder()], **QUIET)
    without = Mlp(batch_size=8, steps=4, run={"dir": None}, log={"every": 100})
    with_one.fit()
    without.fit()
    assert largest_difference(state(with_one), state(without)) == 0.0


def test_an_observer_may_ask_for_a_stop():
    class Enough(Recorder):
        def stepped(self, record):
            if record["step"] == 2:
                self.run.request_stop("enough")

    summary = Mlp(batch_size=8, steps=9, observers=[Enough()], **QUIET).fit()
    assert (summary["status"], summary["reason"]) == ("stopped", "enough")
    assert summary["steps"] == 2


def test_a_profile_is_written_once_and_changes_nothing(tmp_path):
    place = {"dir": str(tmp_path), "name": "a", "id": "b"}
    profiled = Mlp(batch_size=8, steps=15, profile=True, evaluate={"every": 1000}, run=place)
    plain = Mlp(batch_size=8, steps=15, **QUIET)
    profiled.fit()
    plain.fit()
    folder = tmp_path / "a" / "b" / "profile"
    assert {path.name for path in folder.iterdir()} == {"trace.json", "operations.txt"}
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    # Three steps of two linear layers are kept.
    assert len([event for event in events if event.get("name") == "aten::addmm"]) == 6
    assert "aten::addmm" in (folder / "operations.txt").read_text()
    assert largest_difference(state(profiled), state(plain)) == 0.0


def test_a_loss_that_is_no_number_is_told_once_where_nothing_watches_for_it(capsys):
    class Bad(Mlp):
        def loss(self, output, batch):
            return super().loss(output, batch) * float("nan")

    summary = Bad(batch_size=8, steps=4, **QUIET).fit()
    assert summary["status"] == "done"
    told = capsys.readouterr().err
    assert told.count("the loss is nan") == 1
    assert "nonfinite=raise" in told


def test_start_up_is_counted_from_the_making_of_the_trainer():
    trainer = Mlp(batch_size=8, steps=1, **QUIET)
    trainer.created_at -= 1000  # as if it had been made so long before
    assert 1000 < trainer.fit()["startup_s"] < 2000
