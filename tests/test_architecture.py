"""Floors, sizes, and what importing loads. A module may import lower floors only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fasttrain"
FLOORS = {
    # Within a floor, what stands to the right of the point may use what stands left of it.
    "errors": 0,
    "lazy": 0.1,
    "optim": 0.2,
    "nn": 0.2,
    "compiler": 0.3,
    "core": 1,
    "registry": 1.1,
    "distributed": 2,
    "strategies": 3,
    "data": 3,
    "checkpoint": 3,
    "observe": 3,
    "models": 3,
    "config": 4,
    "trainer": 5,
    "cli": 6,
    "__main__": 6.1,
    "__init__": 6.1,
}
MODULES = sorted(PACKAGE.rglob("*.py"))
LARGEST = 400
LARGEST_TRAINER = 300


def part_of(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path):
    """Parts of fasttrain that a module imports, anywhere in it but for type checking."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            skipped |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fasttrain":
            names = node.module.split(".")
            found |= {names[1]} if len(names) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fasttrain.")}
    return found & set(FLOORS)


def test_every_module_stands_on_a_floor():
    assert len(MODULES) > 60
    assert {part_of(path) for path in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem != "__init__" or p.parent != PACKAGE], ids=str)
def test_a_module_imports_lower_floors_only(path):
    own = part_of(path)
    for other in imported(path):
        assert other == own or FLOORS[other] < FLOORS[own], f"{path} (floor {FLOORS[own]}) imports {other}"


def test_the_trainer_names_no_strategy():
    from fasttrain.registry import BUILT_IN

    # "model" is a strategy of compile, and the name of the trainer's one part.
    names = {name for slot in BUILT_IN.values() for name in slot} - {"model"}
    tree = ast.parse((PACKAGE / "trainer" / "trainer.py").read_text())
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module)
    }
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & (texts - docstrings)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_files_stay_small(path):
    lines = len(path.read_text().splitlines())
    assert lines <= (LARGEST_TRAINER if path.name == "trainer.py" else LARGEST)


def test_importing_every_strategy_config_data_and_recipe_module_loads_no_torch():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for part in ("strategies", "core", "data", "config", "observe", "trainer", "distributed", "checkpoint", "cli")
        for path in (PACKAGE / part).glob("*.py")
    ]
    modules += [
        "recipes.resnet",
        "recipes.bert",
        "recipes.sentences",
        "recipes.sets",
        "recipes.fetch",
        "fasttrain",
        "fasttrain.registry",
    ]
    assert len(modules) > 60
    assert loaded_by(modules, "torch._C", "torch", "numpy", "tensorboard") == []
    assert loaded_by(["fasttrain.cli", "fasttrain.trainer", "fasttrain.observe", "fasttrain.config"], "rich") == []


def loaded_by(modules, *heavy):
    """Which heavy packages importing modules loads, in a fresh interpreter."""
    code = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print(*(m for m in {heavy!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()
