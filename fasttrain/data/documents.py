"""Where text comes from: docstrings of installed Python packages, or a folder of text files.

A document is a string. Documents come deduplicated and in an order of their own (by their hash), so that neither the
order of files nor a new file among them moves the others, and a bound on the size takes an even sample.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fasttrain.errors import ConfigError

PACKAGES = ("stdlib", "torch", "numpy")
SHORTEST = 40  # characters; below, a docstring says little more than the name it stands under
_NOT_THE_PACKAGE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_UNDERLINE = re.compile(r"[^\w\s]{3,}")


def python_files(package: str) -> list[Path]:
    """The source files of an installed package, or of the standard library for 'stdlib'; sorted, without tests.

    The package is found, not imported.

    Raises:
        ConfigError: no such package is installed.
    """
    if package == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"data.packages: docstrings of '{package}' were asked for, but no package of that name is installed; "
                f"install it, or name others (for example {', '.join(PACKAGES)})."
            )
        root = Path(next(iter(spec.submodule_search_locations)))
    return sorted(p for p in root.rglob("*.py") if not _NOT_THE_PACKAGE & set(p.relative_to(root).parts[:-1]))


def text_files(folder: str | Path) -> list[Path]:
    """The `.txt` files under a folder, sorted.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(Path(folder).expanduser().rglob("*.txt"))
    if not files:
        raise ConfigError(
            f"data.files={folder}: no .txt file is there; name a folder that holds some, or write data.files=null to "
            "read docstrings."
        )
    return files


def docstrings_of(source: bytes) -> Iterator[str]:
    """Every docstring of a module, its classes and functions, and the texts given to `add_docstr` and its like.

    A source that does not parse (a template, another Python) has none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Call):
            # Functions written in C get theirs by a call: torch.add_docstr(f, "..."), numpy's add_newdoc(..., "...").
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if re.fullmatch(r"add_(new)?doc\w*", name):
                for part in (part for argument in node.args for part in ast.walk(argument)):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield inspect.cleandoc(part.value)


def clean(text: str) -> str:
    """One line of prose: no doctest input, no underlines and table rules, single spaces.

    >>> clean("Sum of a list.\\n\\n    Example\\n    -------\\n    >>> total([1, 2])\\n    3")
    'Sum of a list. Example 3'
    """
    lines = (line.strip() for line in text.splitlines())
    kept = (line for line in lines if not line.startswith((">>>", "...")) and not _UNDERLINE.fullmatch(line))
    return " ".join(" ".join(kept).split())


def docstrings(packages: Sequence[str] = PACKAGES, *, max_bytes: int | None = None) -> list[str]:
    """Cleaned docstrings of installed packages, each once; `max_bytes` of UTF-8 at most.

    About 20 s for the default packages (9 MB); nothing is imported, nothing leaves the machine. The text depends on
    the versions installed.

    Raises:
        ConfigError: a package is not installed.
    """
    files = [file for package in packages for file in python_files(package)]
    return arrange((clean(text) for file in files for text in docstrings_of(file.read_bytes())), max_bytes)


def paragraphs(files: Iterable[Path], *, max_bytes: int | None = None) -> list[str]:
    """The documents of text files, each once: pieces between blank lines, as BERT's own input format has them."""
    texts = (
        piece for file in files for piece in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace"))
    )
    return arrange((" ".join(text.split()) for text in texts), max_bytes)


def arrange(texts: Iterable[str], max_bytes: int | None = None) -> list[str]:
    """Texts of some length, each once, ordered by their hash and cut off after `max_bytes` of UTF-8."""
    unique = sorted({text for text in texts if len(text) >= SHORTEST}, key=lambda text: digest("order", text))
    if max_bytes is None:
        return unique
    taken, size = [], 0
    for text in unique:
        size += len(text.encode())
        if size > max_bytes:
            break
        taken.append(text)
    return taken


def is_held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the held-out part; decided by its own hash, so it never changes sides."""
    return digest("split", text) < share * 2**64


def digest(purpose: str, text: str) -> int:
    """64 bits of a text's hash, different for each purpose."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}/{text}".encode(), digest_size=8).digest(), "little")
