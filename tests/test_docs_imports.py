"""What the pages import is there."""

import ast
import importlib
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_what_the_examples_import_exists():
    found = 0
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fasttrain"):
                    module = importlib.import_module(str(node.module))
                    for name in node.names:
                        assert hasattr(module, name.name), f"{page.name}: {node.module} has no {name.name}"
                        found += 1
    assert found >= 8
