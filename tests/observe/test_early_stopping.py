from __future__ import annotations

import json
import math
from typing import Any

import pytest

from fasttrain.errors import ConfigError
from fasttrain.observe import EarlyStopping
from tests.observe.helpers import run_info


def watched(stopping: EarlyStopping, values: list[float], first_step: int = 1) -> list[str]:
    """The reasons for which a stop was asked while these values came in."""
    reasons: list[str] = []
    stopping.started(run_info(request_stop=reasons.append))
    for step, value in enumerate(values, start=first_step):
        stopping.evaluated({"step": step, "epoch": 1.0, "metrics": {"loss": value}, "seconds": 0.1})
    return reasons


def test_it_asks_for_a_stop_after_so_many_evaluations_without_a_better_one() -> None:
    assert watched(EarlyStopping("loss", 3), [3.0, 2.0, 2.5, 2.0]) == []
    (reason,) = watched(EarlyStopping("loss", 3), [3.0, 2.0, 2.5, 2.0, 2.1])
    assert "loss was not better in 3 evaluations" in reason
    assert "best 2 at step 2" in reason


def test_a_better_value_starts_the_count_again() -> None:
    assert watched(EarlyStopping("loss", 2), [3.0, 4.0, 2.0, 4.0, 1.0, 4.0]) == []


def test_more_is_better_where_mode_says_so() -> None:
    assert watched(EarlyStopping("loss", 2, mode="max"), [1.0, 2.0, 3.0]) == []
    assert len(watched(EarlyStopping("loss", 2, mode="max"), [3.0, 2.0, 1.0])) == 1


def test_a_gain_of_no_more_than_min_delta_is_no_gain() -> None:
    assert len(watched(EarlyStopping("loss", 2, min_delta=0.5), [3.0, 2.75, 2.5])) == 1
    assert watched(EarlyStopping("loss", 2, min_delta=0.5), [3.0, 2.75, 2.25]) == []


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_better(mode: Any, odd: float) -> None:
    stopping = EarlyStopping("loss", 2, mode=mode)
    assert len(watched(stopping, [odd, odd])) == 1
    assert stopping.best is None
    stopping = EarlyStopping("loss", 3, mode=mode)
    assert watched(stopping, [1.0, odd]) == []
    assert (stopping.best, stopping.worse) == (1.0, 1)


def test_callback_state_1_a_resumed_run_goes_on_counting() -> None:
    first = EarlyStopping("loss", 3)
    assert watched(first, [1.0, 2.0, 3.0]) == []
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    resumed = EarlyStopping("loss", 3)
    resumed.load_state_dict(state)
    assert len(watched(resumed, [4.0], first_step=4)) == 1
    assert len(watched(EarlyStopping("loss", 3), [4.0])) == 0


def test_callback_state_3_the_best_value_survives_a_resume() -> None:
    resumed = EarlyStopping("loss", 5, mode="max")
    resumed.load_state_dict({"best": 0.9, "best_step": 7, "worse": 0})
    watched(resumed, [0.5], first_step=8)
    assert (resumed.best, resumed.best_step) == (0.9, 7)


def test_a_metric_that_the_evaluation_lacks_is_refused_with_a_suggestion() -> None:
    stopping = EarlyStopping("accurate", 3)
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        stopping.evaluated({"step": 1, "metrics": {"accuracy": 1.0, "loss": 2.0}})


@pytest.mark.parametrize("wrong", [{"mode": "less"}, {"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}])
def test_a_setting_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        EarlyStopping(**{"metric": "loss", "patience": 3, **wrong})
