"""How fasttrain is installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_an_editable_install_puts_the_folder_on_the_path():
    """An import hook comes after the path, where a clone named fasttrain beside the script is a namespace package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}
