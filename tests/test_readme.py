"""Every block of the README runs: its Python, its commands by name, its links."""

import re
import subprocess
import sys

import pytest

from fasttrain.cli.main import COMMANDS
from fasttrain.registry import BUILT_IN
from tests.commands import ROOT, environment

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_python_example_runs_and_learns(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "example.py").write_text(blocks[0])
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.95


def test_every_command_line_names_what_exists():
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        for word in line.split():
            if word.startswith(("scripts/", "configs/")):
                assert (ROOT / word).exists(), word
    assert all(f"`... {name}" in README for name in COMMANDS if name != "train")


def test_the_table_of_slots_is_that_of_the_registry():
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(docs/strategies/\w+\.md\) \| (.*?) \|$", README, re.MULTILINE))
    assert list(rows) == list(BUILT_IN)
    for slot, names in BUILT_IN.items():
        assert re.sub(r" \(.*?\)", "", rows[slot]).split(", ") == list(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
