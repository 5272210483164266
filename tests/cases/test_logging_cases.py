"""Reported faults of curves, progress, throughput, timing and host reads, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import contextlib
import functools
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fasttrain.trainer.session as session
from fasttrain import Data, Trainer, lazy
from fasttrain.checkpoint import checkpoints_in
from fasttrain.errors import NonFinite
from fasttrain.observe import StepClock
from tests.helpers import QUIET, Mlp, Recorder, Weight, points
from tests.observe.helpers import Clock
from tests.ranks import run_ranks


def events(folder: Path, tag: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what tensorboard itself imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    held = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in held.Scalars(tag)]


# ---- TB-AXIS


class OneToEight(Weight):
    """Eight samples whose losses are 1 to 8 while the weight is 1."""

    values = tuple(float(i) for i in range(1, 9))

    def build_data(self):
        return Data(train=super().build_data().train, evaluation=(torch.ones(3),), shuffle=False)


STILL = {"name": "sgd", "lr": 0.0}


@pytest.mark.parametrize("accumulation", [None, *({"name": "microbatches", "num": num} for num in (1, 2, 4))], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_TB_AXIS_1_a_step_of_four_microbatches_is_one_point(tmp_path, accumulation, precision):
    OneToEight(
        batch_size=4,
        epochs=1,
        accumulation=accumulation,
        precision=precision,
        optimizer=STILL,
        log={"every": 1},
        run={"dir": str(tmp_path), "name": "a", "id": "b"},
    ).fit()
    assert events(tmp_path / "a" / "b", "train/loss") == [(1, 2.5), (2, 6.5)]
    lines = [json.loads(line) for line in (tmp_path / "a" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [(1, 2.5), (2, 6.5)]


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_TB_AXIS_2_curves_evaluations_checkpoints_and_the_counter_count_optimizer_steps(tmp_path, num, resumed):
    settings = {
        "batch_size": 2,
        "accumulation": {"name": "microbatches", "num": num},
        "optimizer": STILL,
        "log": {"every": 1},
        "evaluate": {"every": 2},
        "checkpoint": {"every": 2, "keep": None},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    folder = tmp_path / "a" / "b"
    if resumed:
        OneToEight(**settings, steps=2).fit()
        # Longer than planned at first.
        trainer = OneToEight(**settings, steps=4, resume=str(folder))
    else:
        trainer = OneToEight(**settings, epochs=1)
    summary = trainer.fit()
    assert events(folder, "train/loss") == [(1, 1.5), (2, 3.5), (3, 5.5), (4, 7.5)]
    assert events(folder, "evaluation/loss") == [(2, 1.0), (4, 1.0)]
    assert [checkpoint.step for checkpoint in checkpoints_in(folder)] == [2, 4]
    assert (trainer.step, summary["steps"], summary["samples"]) == (4, 4, 8)


# ---- PROGRESS


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("run_dir", [True, False])
def test_PROGRESS_1_a_file_gets_a_line_a_log_point_and_no_carriage_return(tmp_path, num, run_dir):
    path = tmp_path / "out"
    with path.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        Mlp(
            batch_size=8,
            steps=100,
            accumulation={"name": "microbatches", "num": num},
            log={"every": 10},
            checkpoint={"every": 25},
            run={"dir": str(tmp_path) if run_dir else None, "name": "a"},
        ).fit()
    text = path.read_bytes()
    lines = text.decode().splitlines()
    assert b"\r" not in text
    assert b"\x1b" not in text
    assert [line.split()[0] for line in lines] == ["start", *["step"] * 10, "end"]
    assert [line.split()[1] for line in lines[1:-1]] == [f"{step}/100" for step in range(10, 101, 10)]


class Flushes(io.StringIO):
    """A pipe: what was flushed can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_PROGRESS_3_a_pipe_can_be_read_while_the_run_goes_on():
    pipe, seen = Flushes(), []

    class Watched(Mlp):
        def train_step(self, batch):
            seen.append(pipe.flushed.splitlines()[-1])
            return super().train_step(batch)

    with contextlib.redirect_stdout(pipe):
        Watched(batch_size=8, steps=12, log={"every": 4}, run={"dir": None}).fit()
    assert len(seen) == 12
    assert [line.split()[0] for line in seen] == ["start"] * 4 + ["step"] * 8
    for line, step in zip(seen[4:], [4] * 4 + [8] * 4, strict=True):
        words = line.split()
        assert words[:2] == ["step", f"{step}/12"]
        assert float(words[words.index("loss") + 1]) > 0
        assert words[words.index("left") + 1] == "0:00"


# ---- TPUT-COUNT and TIMER-SYNC


def with_clock(monkeypatch: pytest.MonkeyPatch, now: Any, **more: Any) -> None:
    monkeypatch.setattr(session, "StepClock", lambda device_type: StepClock(device_type, now, **more))


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("n", [64, 72])
def test_TPUT_COUNT_1_sixteen_samples_a_second_whatever_the_microbatches(monkeypatch, num, n):
    clock = Clock()
    with_clock(monkeypatch, clock)

    class OneSecond(Mlp):
        def train_step(self, batch):
            clock.wait(1.0)
            return super().train_step(batch)

    OneSecond.n = n
    watcher = Recorder()
    trainer = OneSecond(
        batch_size=16, epochs=1, accumulation={"name": "microbatches", "num": num}, observers=[watcher], **QUIET
    )
    summary = trainer.fit()
    speeds = [record["samples_per_s"] for record in watcher.steps]
    assert speeds == [None, 16.0, 16.0, 16.0, *([8.0] if n == 72 else [])]
    assert summary["samples_per_s"] == (16.0 if n == 64 else 14.0)


class Labelled(Trainer):
    """Ten samples of four tokens; labels of -100 do not count. The last step has two samples."""

    unit = "tokens"
    clock = Clock()

    def build_data(self):
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(10, 4, 8, generator=g), torch.randint(4, (10, 4), generator=g)
        y[torch.rand(10, 4, generator=g) < 0.4] = -100
        return Data(train=(x, y), evaluation=(x[:3], y[:3]))

    def build_model(self):
        return torch.nn.Linear(8, 4)

    def count(self, batch):
        return (batch[1] != -100).sum()

    def loss(self, output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    def train_step(self, batch):
        self.clock.wait(1.0)
        return super().train_step(batch)

    def evaluate(self):
        self.clock.wait(5.0)
        return super().evaluate()


def tokens(folder: str, num: int, every: int) -> dict[str, Any]:
    Labelled.clock, watcher = Clock(), Recorder()
    former = session.StepClock, session.save_state
    session.StepClock = lambda device_type: StepClock(device_type, Labelled.clock)

    def save_slowly(*args: Any) -> int:
        Labelled.clock.wait(7.0)
        return former[1](*args)

    session.save_state = save_slowly
    try:
        trainer = Labelled(
            batch_size=4,
            epochs=1,
            accumulation={"name": "microbatches", "num": num},
            evaluate={"every": 2},
            checkpoint={"every": 2},
            log={"every": every},
            run={"dir": folder, "name": f"{num}-{every}", "id": "b"},
            observers=[watcher],
        )
        summary = trainer.fit()
    finally:
        session.StepClock, session.save_state = former
    return {"steps": watcher.steps, "summary": summary}


def tokens_on_two_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{num} {every}": tokens(folder, num, every) for num in (1, 2) for every in (1, 3)}
    found["traffic"] = {num: traffic(num) for num in (1, 2, 3, 4)}
    found["several"] = traffic_of_parts()
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, tokens_on_two_ranks, str(tmp_path_factory.mktemp("runs")), timeout_s=120)


def check_tokens(found: dict[str, Any], every: int) -> None:
    trainer = Labelled(batch_size=4, epochs=1, **QUIET)
    order = trainer.feed.order.epoch(0)
    labels = trainer.data.train[1][order]
    total = int((labels != -100).sum())
    first = int((labels[:4] != -100).sum())
    assert 0 < first < total < 40
    steps, summary = found["steps"], found["summary"]
    rest = sum(r["tokens_per_s"] * r["step_time_s"] * every for r in steps if r["step_time_s"] and every == 1)
    if every == 1:
        assert rest + first == total
    assert summary["warmup"]["counts"] == {"tokens": first}
    assert summary["tokens_per_s"] * summary["step_time_s"]["mean"] * 2 + first == total
    assert summary["samples_per_s"] * summary["step_time_s"]["mean"] * 2 + 4 == summary["samples"] == 10
    assert summary["apart_s"] == {"evaluation": 10.0, "saving": 14.0}
    assert (summary["step_time_s"]["mean"], summary["warmup"]["seconds"]) == (1.0, 1.0)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_TPUT_COUNT_3_token_speed_times_time_is_the_sum_of_tokens(tmp_path, num, every):
    check_tokens(tokens(str(tmp_path), num, every), every)


@pytest.mark.ranks
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_TPUT_COUNT_3_tokens_of_two_ranks_are_counted_together(two_ranks, num, every):
    for found in two_ranks:
        check_tokens(found[f"{num} {every}"], every)


class Device:
    """Submitting returns at once; the work takes as long as it says; waiting blocks."""

    def __init__(self) -> None:
        self.clock, self.free_at = Clock(), 0.0

    def submit(self, seconds: float) -> None:
        self.clock.wait(1e-5)
        self.free_at = max(self.free_at, self.clock.time) + seconds

    def wait(self) -> None:
        self.clock.time = max(self.clock.time, self.free_at)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("evaluated", [False, True])
def test_TIMER_SYNC_1_and_3_steps_of_a_device_that_returns_at_once_take_as_long_as_its_work(
    monkeypatch, num, evaluated
):
    device = Device()
    with_clock(monkeypatch, device.clock, synchronize=device.wait)

    class Queued(Mlp):
        def train_step(self, batch):
            info = super().train_step(batch)
            device.submit(0.5 if self.step == 1 else 0.01)
            return info

        def evaluate(self):
            device.submit(3.0)
            return super().evaluate()

    watcher = Recorder()
    trainer = Queued(
        batch_size=8,
        steps=20,
        accumulation={"name": "microbatches", "num": num},
        log={"every": 10},
        evaluate={"every": 5 if evaluated else 1000},
        run={"dir": None},
        observers=[watcher],
    )
    summary = trainer.fit()
    assert [r["step_time_s"] for r in watcher.steps] == pytest.approx([0.01, 0.01], rel=0.01)
    assert [r["samples_per_s"] for r in watcher.steps] == pytest.approx([800, 800], rel=0.01)
    assert [r.get("warmup_s") for r in watcher.steps] == [pytest.approx(0.5, rel=0.01), None]
    assert summary["samples_per_s"] == pytest.approx(800, rel=0.01)
    assert summary["step_time_s"] == pytest.approx({"mean": 0.01, "p50": 0.01, "p95": 0.01}, rel=0.01)
    assert summary["warmup"]["seconds"] == pytest.approx(0.5, rel=0.01)
    assert summary["apart_s"] == {"evaluation": pytest.approx(12.0 if evaluated else 3.0, rel=0.01)}


# ---- NO-SYNC


class EightAndTwo(Weight):
    """Gradients of 8 on rank 0 and 2 on rank 1."""

    def build_data(self):
        return Data(train=(torch.tensor([8.0] * 6 + [2.0] * 6),), shuffle=False)


def traffic(num: int) -> dict[str, Any]:
    trainer = EightAndTwo(
        batch_size=12,
        steps=3,
        optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0},
        accumulation={"name": "microbatches", "num": num},
        **QUIET,
    )
    calls: list[str] = []
    with counted_collectives(calls):
        trainer.train_step(next(trainer.feed.training(trainer.task, trainer.plan)))
    averager = trainer.plan.strategies["data_parallel"].averager
    return {
        "moved": 1.0 - trainer.model.weight.item(),
        "rounds": averager.traffic.rounds,
        "reductions": averager.traffic.reductions,
        "collectives": dict(Counter(calls)),
    }


@contextlib.contextmanager
def counted_collectives(calls: list[str]) -> Iterator[None]:
    """Sums that travel, as torch is asked for them."""
    names = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "all_gather_object")
    former = {name: getattr(lazy.dist, name) for name in names}

    def count(name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return former[name](*args, **kwargs)

    for name in names:
        setattr(lazy.dist, name, functools.partial(count, name))
    try:
        yield
    finally:
        for name in names:
            setattr(lazy.dist, name, former[name])


class Several(Mlp):
    """Two parts with weights, and one without between them, each part with an optimizer of its own."""

    def build_model(self):
        return torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "between": torch.nn.ReLU(), "b": torch.nn.Linear(8, 4)})

    def parts(self):
        return {"a": self.model["a"], "b": self.model["b"]}

    def whole(self, batch):
        return F.cross_entropy(self.model["b"](self.model["between"](self.model["a"](batch[0]))), batch[1])

    def train_step(self, batch):
        from fasttrain.trainer import StepInfo

        self.step_part("a", self.whole, batch)
        loss = self.step_part("b", self.whole, batch)
        self.step += 1
        return StepInfo(self.step, loss)


class Together(Several):
    """The same three modules under one optimizer."""

    parts = Mlp.parts
    train_step = Mlp.train_step
    compute_loss = Several.whole


def traffic_of_parts() -> dict[str, Any]:
    found = {}
    for cls in (Several, Together):
        for num in (1, 2):
            trainer = cls(batch_size=8, steps=1, accumulation={"name": "microbatches", "num": num}, **QUIET)
            calls: list[str] = []
            with counted_collectives(calls):
                trainer.train_step(next(trainer.feed.training(trainer.task, trainer.plan)))
            averager = trainer.plan.strategies["data_parallel"].averager
            found[cls.__name__, num] = (averager.traffic.rounds, averager.traffic.reductions, len(calls))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_NO_SYNC_1_a_window_reduces_once(two_ranks, num):
    for found in two_ranks:
        seen = found["traffic"][num]
        assert seen["moved"] == 5.0
        assert (seen["rounds"], seen["reductions"], seen["collectives"]) == (1, 1, {"all_reduce": 1})


@pytest.mark.ranks
@pytest.mark.parametrize("num", [1, 2])
def test_NO_SYNC_3_each_module_reduces_once_a_window(two_ranks, num):
    for found in two_ranks:
        assert found["several"]["Several", num] == (2, 2, 2)
        assert found["several"]["Together", num] == (1, 1, 1)


# ---- SYNC-ITEM

# What makes the host wait for the device.
READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy", "__array__")


class Scalars(TorchDispatchMode):
    """Notes reads of single values by whatever way, torch's own code included."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            self.note(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


class Reads:
    """Counts reads within steps and outside of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        self.in_step: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.now = self.outside
        self.depth = 0
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self.watched(name, getattr(torch.Tensor, name)))
        step, feed = trainer.train_step, trainer.feed.training

        def train_step(batch: Any) -> Any:
            with self.inside(), Scalars(self.note):
                return step(batch)

        def training(*args: Any) -> Iterator[Any]:
            batches = feed(*args)
            while True:
                with self.inside():
                    batch = next(batches)
                yield batch

        monkeypatch.setattr(trainer, "train_step", train_step)
        monkeypatch.setattr(trainer.feed, "training", training)

    def note(self, name: str) -> None:
        self.now[name] += 1

    def watched(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.depth == 0:
                self.note(name)
            self.depth += 1
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self.depth -= 1

        return read

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.now = self.in_step
        try:
            yield
        finally:
            self.now = self.outside


FP16 = {"name": "fp16", "init_scale": 1024.0}
QUICK: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": "sgd"},
    "sgd, unfused": {"optimizer": {"name": "sgd", "fused": False}, "schedule": "cosine", "gradient_clipping": "norm"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": FP16},
    "schedule": {"schedule": {"name": "cosine", "warmup": 5}},
    "fp16, clipping, skip, schedule": {
        "precision": FP16,
        "gradient_clipping": "norm",
        "nonfinite": "skip",
        "schedule": {"name": "linear", "warmup": 5},
    },
    "accumulation": {"accumulation": {"name": "microbatches", "num": 3}},
    "raise": {"nonfinite": "raise"},
    "all at once": {
        "precision": "bf16",
        "gradient_clipping": "norm",
        "nonfinite": "skip",
        "schedule": "one_cycle",
        "accumulation": {"name": "microbatches", "size": 2},
        "optimizer": "sgd",
    },
}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return tuple(tensor[index] for tensor in points())


class FromDataset(Mlp):
    def build_data(self):
        return Data(train=Samples())


class Logging(Mlp):
    """Logs figures of its own in each microbatch."""

    def loss(self, output, batch):
        self.log("accuracy", (output.argmax(1) == batch[1]).float().mean())
        self.log("weights", self.model[0].weight, kind="histogram")
        return super().loss(output, batch)


class CountedOnHost(Mlp):
    def count(self, batch):
        return len(batch[1])


@pytest.mark.parametrize("variant", QUICK)
@pytest.mark.parametrize("cls", [Mlp, Logging, CountedOnHost])
def test_SYNC_ITEM_1_nothing_is_read_between_log_points(monkeypatch, variant, cls):
    watcher = Recorder()
    trainer = cls(
        batch_size=8,
        steps=100,
        log={"every": 10},
        evaluate={"every": 1000},
        run={"dir": None},
        observers=[watcher],
        **QUICK[variant],
    )
    reads = Reads(monkeypatch, trainer)
    trainer.fit()
    assert len(watcher.steps) == 10
    assert reads.in_step == {}
    # Figures of the ten log points and of the evaluation at the end, here on the host (a device is asked once for all of
    # them: tests/test_device_rules.py); the summary reads the count of refused steps.
    assert reads.outside["numpy"] >= 11
    assert reads.outside["cpu"] == (10 if cls is Logging else 0)
    assert set(reads.outside) <= {"cpu", "numpy", "__float__"}
    assert reads.outside["__float__"] <= 1


@pytest.mark.parametrize("variant", ["plain", "fp16, clipping, skip, schedule"])
def test_SYNC_ITEM_1_a_data_set_is_read_without_reading_the_device(monkeypatch, variant):
    """What remains is the host's own: the numbers of the samples of each batch."""
    trainer = FromDataset(batch_size=8, steps=100, log={"every": 10}, run={"dir": None}, **QUICK[variant])
    reads = Reads(monkeypatch, trainer)
    trainer.fit()
    assert reads.in_step == {"tolist": 100}


def test_SYNC_ITEM_1_the_counters_see_reads(monkeypatch):
    class Reading(Mlp):
        def loss(self, output, batch):
            loss = super().loss(output, batch)
            value = loss.detach()
            float(value), bool(value > 0), value.item(), int(value), value.tolist(), value.numpy(), value.cpu()
            return loss

    trainer = Reading(batch_size=8, steps=3, evaluate={"every": 1000}, run={"dir": None})
    reads = Reads(monkeypatch, trainer)
    trainer.fit()
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy", "cpu"):
        assert reads.in_step[name] == 3
    assert reads.in_step["aten._local_scalar_dense"] >= 4 * 3


class BadAtSeven(Mlp):
    def loss(self, output, batch):
        loss = super().loss(output, batch)
        # On the device: nothing is read to plant it.
        return loss * torch.full((), float("nan")) if self.step + 1 == 7 and self.model.training else loss


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "more",
    [{}, {"precision": "bf16"}, {"gradient_clipping": "norm"}, {"accumulation": {"name": "microbatches", "num": 2}}],
    ids=str,
)
@pytest.mark.parametrize("every", [5, 3, 100])
def test_SYNC_ITEM_3_a_bad_step_is_named_at_the_next_log_point_without_reading_before(
    monkeypatch, optimizer, more, every
):
    trainer = BadAtSeven(
        batch_size=8,
        steps=100,
        nonfinite="raise",
        optimizer=optimizer,
        log={"every": every},
        evaluate={"every": 1000},
        run={"dir": None},
        **more,
    )
    reads = Reads(monkeypatch, trainer)
    with pytest.raises(NonFinite, match="a gradient of step 7 was infinite or not a number"):
        trainer.fit()
    assert trainer.step == {5: 10, 3: 9, 100: 100}[every]
    assert reads.in_step == {}
