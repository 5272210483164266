"""Observers of the user's own: their state over a resume, and their own mistakes."""

import pytest

from tests.helpers import QUIET, Mlp, Recorder


class Counting(Recorder):
    """Counts log points, also over a resume; stops the run at one of them."""

    def __init__(self, stop=None):
        super().__init__()
        self.seen, self.stop = 0, stop

    def stepped(self, record):
        self.seen += 1
        if record["step"] == self.stop:
            self.run.request_stop("test")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Another(Recorder):
    """Stands before the others in the second process alone."""


def test_states_of_observers_find_their_own_whatever_stands_beside_them(tmp_path):
    settings = {"batch_size": 8, "steps": 6, "log": {"every": 1}, "run": {"dir": str(tmp_path), "id": "one"}}
    Mlp(**settings, observers=[Counting(stop=4), Counting()]).fit()
    first, second = Counting(), Counting()
    second.seen = 100
    Mlp(**settings, resume="auto", observers=[Another(), first, second]).fit()
    assert (first.seen, second.seen) == (6, 6)


def test_remarks_of_strategies_come_once_each_with_the_step(monkeypatch):
    from fasttrain.strategies.gradient_clipping import Norm

    # After the first step, three log points, an evaluation, the end.
    said = iter([["a."], [], [], ["a.", "b."], ["c."], []])
    monkeypatch.setattr(Norm, "remarks", lambda self: next(said), raising=True)
    watcher = Recorder()
    settings = {"batch_size": 8, "steps": 3, "log": {"every": 1}, "gradient_clipping": "norm", "run": {"dir": None}}
    Mlp(**settings, observers=[watcher]).fit()
    told = [(record["step"], record["text"]) for record in watcher.remarks]
    assert told == [(step, f"gradient_clipping=norm: {text}") for step, text in ((1, "a."), (3, "b."), (3, "c."))]


def test_an_observer_that_fails_at_a_failure_does_not_hide_it():
    class Broken(Recorder):
        def failed(self, error, summary):
            raise KeyError("its own mistake")

    class Fails(Mlp):
        def loss(self, output, batch):
            raise ArithmeticError("the mistake")

    watcher = Recorder()
    with pytest.raises(ArithmeticError, match="the mistake") as told:
        Fails(batch_size=8, steps=1, observers=[Broken(), watcher], **QUIET).fit()
    assert isinstance(watcher.error, ArithmeticError)
    of_the_batch, of_the_observer = told.value.__notes__
    assert of_the_batch.startswith("The batch of this step: sample ")
    assert of_the_observer == "Broken.failed raised, too: KeyError: 'its own mistake'"
