"""`num_workers=auto`: tried on made-up machines, and in a run whose numbers it does not change."""

import json
import time

import pytest
import torch

from fasttrain import Data
from fasttrain.trainer.workers import GROUPS, Workers
from tests.helpers import QUIET, Mlp, Recorder, points, state
from tests.test_delivery import reads_ahead  # noqa: F401  a fixture


class Machine:
    """Steps and reads of a run, by arithmetic. `on_cpu`: workers take their cores from the training."""

    def __init__(self, cores, read, step, on_cpu=False, evaluates=True):
        self.cores, self.read, self.step, self.on_cpu = cores, read, step, on_cpu
        self.evaluates, self.time, self.steps, self.changes = evaluates, 0.0, 0, []

    def wait(self, num):
        """Seconds that the training process waits for a batch."""
        if not num:
            return self.read
        return max(0.0, self.read / num - self.step_with(num))

    def step_with(self, num):
        # On the CPU all cores train already, and what workers do is added to the work of all.
        return self.step + (self.read / self.cores if self.on_cpu and num else 0.0)

    def run(self, workers, steps):
        for number in range(self.steps, self.steps + steps):
            wait = self.wait(workers.num)
            self.time += wait
            self.time += 5.0 if number == 0 else self.step_with(workers.num)  # the first one compiles
            if self.evaluates and number % 10 == 9:
                self.time += 3.0  # an evaluation
            if workers.read(wait):
                self.changes.append(workers.num)
        self.steps += steps
        return workers


def found(machine, steps=900):
    workers = Workers(machine.cores, now=lambda: machine.time)
    return machine.run(workers, steps), machine.changes


def test_reading_that_takes_little_is_left_to_the_process_that_trains():
    workers, changes = found(Machine(8, read=0.0004, step=0.010))
    assert (workers.num, workers.settled, changes) == (0, True, [])
    assert workers.tried.keys() == {0}


@pytest.mark.parametrize(("read", "takes"), [(0.009, 1), (0.030, 3), (0.055, 6), (0.300, 8)])
def test_as_many_are_taken_as_keep_up_and_never_more_than_the_cores(read, takes):
    workers, changes = found(Machine(8, read=read, step=0.010))
    assert workers.num == takes
    assert changes[0] == takes
    assert workers.settled


def test_more_are_tried_where_the_first_number_still_waits():
    class Slower(Machine):
        def wait(self, num):
            return max(0.0, 1.8 * self.read / num - self.step) if num else self.read

    workers, changes = found(Slower(8, read=0.030, step=0.010))
    assert changes == [3, 6]
    assert workers.num == 6
    assert workers.tried.keys() == {0, 3, 6}


def test_fewer_are_taken_where_steps_turn_out_longer_than_they_seemed():
    class Queueing(Machine):
        """The host launches a step of 10 ms in 1 ms; without workers the device waits for it."""

        def step_with(self, num):
            return 0.001 if num == 0 else 0.010

    workers, changes = found(Queueing(16, read=0.0115, step=0.010))
    assert changes == [12, 2]
    assert workers.num == 2


def test_workers_that_make_steps_slower_are_taken_back():
    class Crowded(Machine):
        def step_with(self, num):
            return self.step + (0.02 if num else 0.0)

    workers, changes = found(Crowded(2, read=0.010, step=0.050))
    assert changes == [1, 0]
    assert (workers.num, workers.settled) == (0, True)
    assert "num_workers=auto: 0 of at most 2" in workers.remark()


def test_workers_that_wait_for_each_other_are_not_tried_in_larger_numbers():
    class Locked(Machine):
        def wait(self, num):
            return self.read

    workers, changes = found(Locked(8, read=0.030, step=0.010))
    assert changes == [3, 0]
    assert workers.num == 0


def test_workers_that_gain_nothing_are_not_kept():
    workers, changes = found(Machine(1, read=0.010, step=0.010, on_cpu=True))
    assert changes == [1, 0]
    assert workers.num == 0


def test_a_number_is_measured_over_whole_bursts():
    machine = Machine(4, read=0.040, step=0.010, evaluates=False)
    workers = Workers(4, now=lambda: machine.time)
    machine.run(workers, 2 + GROUPS)
    assert machine.changes == [4]
    machine.run(workers, 2 * 4 + 2 + GROUPS * 4 - 1)
    assert not workers.settled
    machine.run(workers, 1)
    assert workers.settled


def test_what_was_found_is_told_once():
    workers, _ = found(Machine(8, read=0.030, step=0.010))
    assert workers.remark() == (
        "num_workers=auto: 3 of at most 8 (the cores of this rank); reading a batch takes 30 ms; 40 ms a step with 0, 10 ms "
        "a step with 3"
    )
    assert workers.remark() is None
    summary = json.loads(json.dumps(workers.summary()))
    assert (summary["cores"], summary["settled"]) == (8, True)
    assert summary["measured"]["0"] == {"step_s": pytest.approx(0.040), "read_s": pytest.approx(0.030)}
    assert summary["measured"].keys() == {"0", "3"}


# ---- a run


class Slow(torch.utils.data.Dataset):
    """Points with noise, read from a slow disk."""

    def __init__(self, seconds):
        self.seconds, (self.x, self.y) = seconds, points()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class Found(Mlp):
    num_workers, seconds = 0, 0.002

    def build_data(self):
        return Data(train=Slow(self.seconds), num_workers=self.num_workers, transform=lambda b: (b[0] * 1.5, b[1]))


def trained(num_workers, steps, prefetch=0):
    watcher = Recorder()
    kind = type("Found", (Found,), {"num_workers": num_workers})
    trainer = kind(batch_size=4, steps=steps, observers=[watcher], **QUIET)
    trainer.feed.prefetch = prefetch
    return trainer, trainer.fit(), watcher


@pytest.mark.usefixtures("reads_ahead")
@pytest.mark.parametrize("prefetch", [0, 3])
def test_numbers_do_not_depend_on_how_many_workers_were_found(monkeypatch, prefetch):
    monkeypatch.setattr("fasttrain.trainer.feed.cores_of_rank", lambda: 2)
    plain, _, seen = trained(0, 44)
    trainer, summary, watcher = trained("auto", 44, prefetch)
    assert [record["loss"] for record in watcher.steps] == [record["loss"] for record in seen.steps]
    assert all(torch.equal(a, b) for a, b in zip(state(plain).values(), state(trainer).values(), strict=True))
    assert (trainer.feed.samples, trainer.feed.position) == (plain.feed.samples, plain.feed.position)
    # Reading takes 8 ms, and a step a fraction of that: both cores are tried.
    assert trainer.feed.workers.tried.keys() == {0, 2}
    (told,) = watcher.remarks
    assert told["text"].startswith("data: num_workers=auto: ")
    assert summary["data"]["num_workers"] == trainer.feed.workers.num == trainer.feed.data.num_workers
    assert summary["data"]["auto"]["measured"].keys() == {"0", "2"}
    assert summary["remarks"] == [told]


def test_a_run_that_is_shorter_than_the_measurement_tells_what_it_used():
    _, summary, watcher = trained("auto", 3)
    assert summary["data"]["num_workers"] == 0
    assert summary["data"]["auto"]["settled"] is False
    assert watcher.remarks == []


def test_data_in_memory_and_data_that_cuts_its_own_batches_begin_no_workers():
    for train in (points(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points()), batch_size=4)):
        kind = type("Given", (Mlp,), {"build_data": lambda self, train=train: Data(train=train, num_workers="auto")})
        trainer = kind(batch_size=4, steps=2, **QUIET)
        assert trainer.feed.workers is None
        assert trainer.feed.data.num_workers == 0
        assert "auto" not in trainer.fit()["data"]
