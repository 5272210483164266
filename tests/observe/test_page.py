from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fasttrain.observe.files import json_line
from tests.observe.helpers import record, run_info

PAGE = (Path(__file__).parents[2] / "docs" / "watching_a_run.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_observer_of_the_page_works_as_it_says() -> None:
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(code, names)
    worst, stopping = names["observers"]
    stops: list[str] = []
    for observer in (worst, stopping):
        observer.started(run_info(request_stop=stops.append))
    for step, loss in enumerate((1.0, 5.0, None, 2.0), start=1):
        worst.stepped(record(step, loss=loss))
        stopping.evaluated({"step": step, "metrics": {"accuracy": 1 / step}})
    assert worst.state_dict() == {"loss": 5.0, "step": 2}
    assert len(stops) == 1
    again = names["Worst"]()
    again.load_state_dict(worst.state_dict())
    assert again.loss == 5.0


def test_the_line_of_the_page_is_what_is_written() -> None:
    (line,) = blocks("json")
    assert line.strip() == json_line({"step": 30, "loss": math.nan, "lr": 0.1})
