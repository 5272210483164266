"""Every slot has a page, which names its strategies and their settings, and whose examples are valid."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import fasttrain
from benchmarks import strategies as benchmark
from benchmarks.strategies import BEGIN, END
from fasttrain.config import load
from fasttrain.registry import BUILT_IN, find

PAGES = Path(fasttrain.__file__).parents[1] / "docs" / "strategies"


@pytest.mark.parametrize("slot", BUILT_IN)
def test_a_page_names_every_strategy_and_setting_of_its_slot(slot):
    page = (PAGES / f"{slot}.md").read_text()
    assert page.startswith(f"# {slot}\n")
    written, _, rest = page.partition(BEGIN)
    assert len((written + rest.partition(END)[2]).splitlines()) <= 70  # the table of figures comes on top
    for name in BUILT_IN[slot]:
        assert re.search(rf"\b{name}\b", page)
        settings = [field.name for field in dataclasses.fields(find(slot, name).Config)]
        assert [setting for setting in settings if not re.search(rf"\b{setting}\b", page)] == []


@pytest.mark.parametrize("slot", BUILT_IN)
def test_the_examples_of_a_page_are_valid(slot, tmp_path):
    examples = re.findall(r"```yaml\n(.*?)```", (PAGES / f"{slot}.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        start = "trainer: tests.stack:Stack\n" + ("" if "batch_size" in example else "batch_size: 8\n")
        (tmp_path / "config.yaml").write_text(start + example)
        assert slot in load(tmp_path / "config.yaml").names


def test_links_between_pages_lead_somewhere():
    links = [
        (page, link) for page in PAGES.glob("*.md") for link in re.findall(r"\]\(([\w/.]+\.md)\)", page.read_text())
    ]
    assert len(links) >= 3
    assert [link for page, link in links if not (page.parent / link).exists()] == []


def test_every_slot_has_figures_or_a_reason_for_having_none():
    assert {*benchmark.ROWS, *benchmark.WITHOUT_ROWS} == set(BUILT_IN)
    known = {f"{slot}.{label}" for slot, rows in benchmark.ROWS.items() for label in rows}
    assert known >= benchmark.REAL
    assert {name for name in benchmark.NOT_COUNTED if "." in name} <= known


@pytest.mark.parametrize("slot", benchmark.ROWS)
def test_the_figures_of_a_page_are_the_newest_measured(slot):
    rows = benchmark.newest()
    page = (PAGES / f"{slot}.md").read_text()
    assert page == benchmark.with_table(page, slot, rows), "python benchmarks/strategies.py --pages"
    counted = [label for label in benchmark.ROWS[slot] if not {slot, f"{slot}.{label}"} & set(benchmark.NOT_COUNTED)]
    for label in counted:
        for model in benchmark.COUNTED:
            assert rows[slot, label, model].keys() & {"kept_mib", "refused"}, (label, model)
