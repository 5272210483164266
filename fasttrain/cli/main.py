"""Reading the command line, and turning errors into messages and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from fasttrain import __version__
from fasttrain.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_WRONG_REQUEST,
    BatchError,
    BrokenSample,
    ConfigError,
    ConfigErrors,
    FasttrainError,
    did_you_mean,
)

_BEGAN = time.perf_counter()

COMMANDS: dict[str, str] = {
    "train": "train (also without any command)",
    "validate": "every problem of a config at once; loads no torch",
    "explain": "the resolved config, and who acts on which line of the step; --model, --compile: look at the model",
    "data": "look at the data set: counts, classes, broken files, a sheet of images, samples/s; --out DIR: where to",
    "evaluate": "evaluate the newest checkpoint of a run",
    "predict": "what the newest checkpoint of a run gives for each evaluation sample; --out FILE: where to",
    "status": "how a run stands",
}
# The commands that take --out.
OUT = ("predict", "data")
USAGE = """\
usage: python -m fasttrain [COMMAND] --config FILE [key=value ...]
       torchrun --nproc-per-node N -m fasttrain --config FILE [key=value ...]
       python -m fasttrain status|evaluate|predict RUN
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        option = message.removeprefix("unrecognized arguments: --").partition(" ")[0]
        if option != message.partition(" ")[0]:
            name, _, value = option.partition("=")
            message = f"there is no option --{name}; settings have no dashes: {name}={value or '...'}"
        raise ConfigError(f"{message}\n{USAGE.rstrip()}")


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:10s} {about}" for name, about in COMMANDS.items())
    parser = _Parser(
        prog="fasttrain",
        usage=USAGE.removeprefix("usage: ").rstrip(),
        description="Train PyTorch models fast and in little memory.",
        epilog=f"commands:\n{commands}\n\nexit codes: 0 done, 1 failed, 2 wrong request, 75 stopped and resumable",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )
    parser.add_argument("--config", metavar="FILE", help="the config, YAML")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else there")
    parser.add_argument(
        "--model", action="store_true", help="explain: the model's blocks, parameters and FLOPs instead"
    )
    parser.add_argument(
        "--compile", action="store_true", help="explain: what torch.compile makes of the model, on a batch of the data"
    )
    parser.add_argument("--out", metavar="PATH", help="predict: the file to write; data: the folder of the sheet")
    parser.add_argument("--version", action="version", version=f"fasttrain {__version__}")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings that go before those of the file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = "train"
    if words and not words[0].startswith("-") and "=" not in words[0]:
        command = words.pop(0)
    try:
        if command == "help":
            words, command = ["--help"], "train"
        if command not in COMMANDS:
            is_config = command.endswith((".yaml", ".yml"))
            hint = f"a config goes after --config: --config {command}" if is_config else did_you_mean(command, COMMANDS)
            raise ConfigError(f"there is no command '{command}'; {hint}\n{USAGE.rstrip()}")
        arguments = _parser().parse_intermixed_args(words)
        for option in ("model", "compile"):
            if getattr(arguments, option) and command != "explain":
                raise ConfigError(
                    f"--{option} belongs to explain: python -m fasttrain explain --config FILE --{option}"
                )
        if arguments.out is not None and command not in OUT:
            raise ConfigError(f"--out belongs to {' and '.join(OUT)}; {command} writes where run.dir says.")
        sys.path[:0] = [] if os.getcwd() in sys.path or "" in sys.path else [os.getcwd()]
        return _RUN[command](arguments)
    except ConfigError as error:
        return _tell_wrong_request(error, "--json" in words)
    except FasttrainError as error:
        if isinstance(error, BatchError | BrokenSample) and error.__cause__ is not None:  # raised by code of the user's
            _say("".join(traceback.format_exception(error.__cause__)).rstrip())
        _say(f"{type(error).__name__}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        return EXIT_FAILED


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str) -> None:
    sys.stderr.write((f"rank {_rank()}: " if _rank() else "") + text + "\n")
    sys.stderr.flush()


def _is_first_to_tell(text: str) -> bool:
    """Whether no other rank told this: most mistakes are found by all of them alike, and some by one alone."""
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not launched or "torch" not in sys.modules:  # what is wrong in the config itself is found before torch is needed
        return _rank() == 0
    from fasttrain.distributed.stopping import own_store
    from fasttrain.lazy import dist

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        return own_store().add(f"told/{start}/{text}", 1) == 1
    except dist.DistError:  # the launcher is gone
        return True


def _tell_wrong_request(error: ConfigError, as_json: bool) -> int:
    if _is_first_to_tell(str(error)):
        problems = error.problems if isinstance(error, ConfigErrors) else []
        if as_json:
            told: list[Any] = [p.as_dict() for p in problems] or [{"key": "", "message": str(error)}]
            sys.stdout.write(json.dumps({"ok": False, "problems": told}) + "\n")
        elif len(problems) > 1:
            lines = "\n".join(f"  {problem}" for problem in problems)
            sys.stderr.write(f"{len(problems)} problems:\n{lines}\n")
        else:
            sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    return EXIT_WRONG_REQUEST


def _needs_config(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    if arguments.config is None:
        raise ConfigError(f"--config FILE is missing.\n{USAGE.rstrip()}")
    wrong = [word for word in arguments.words if "=" not in word]
    if wrong:
        word = wrong[0]
        hint = f"a command goes first: {word} --config FILE" if word in COMMANDS else f"write it as {word}=..."
        raise ConfigError(f"'{word}' is no key=value; {hint}\n{USAGE.rstrip()}")
    beside = str(Path(arguments.config).resolve().parent)
    if beside not in sys.path:  # modules that stand beside the config are found from any folder
        sys.path.append(beside)
    return arguments.config, arguments.words


def _train(arguments: argparse.Namespace) -> int:
    from fasttrain.config import load, peek
    from fasttrain.config.text import to_bool
    from fasttrain.trainer.setup import CUBLAS_FIXED, CUBLAS_WORKSPACE

    config, overrides = _needs_config(arguments)
    asked = peek(config, overrides, "deterministic") or ""
    if to_bool(asked) or asked == "warn":  # before anything imports torch; the user's own value stays
        os.environ.setdefault(CUBLAS_WORKSPACE, CUBLAS_FIXED)
    resolved = load(config, overrides)
    if resolved.trainer is None:
        raise ConfigError(f"{config}: trainer is not set; name the class, for example trainer: recipes.resnet:ResNet.")
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    shown = sys.stderr if arguments.json else sys.stdout  # standard output is for the one object alone
    try:
        with contextlib.redirect_stdout(shown):
            trainer = resolved.trainer(_named(resolved, Path(config).stem))
            trainer.created_at = _BEGAN
            summary = trainer.fit()
    except FasttrainError:
        raise
    except Exception as error:
        return _tell_crash(error)
    finally:
        _leave()
    if arguments.json and _rank() == 0:
        sys.stdout.write(json.dumps(summary) + "\n")
    # A launcher counts 75 as a crash and would start again at once: a planned stop under it ends with 0.
    return EXIT_STOPPED if summary["status"] == "stopped" and not launched else EXIT_DONE


def _named(resolved: Any, name: str) -> Any:
    """The config with the file's name as the run's, unless it has one."""
    settings = resolved.settings
    if settings.run.name is not None:
        return resolved
    return replace(resolved, settings=replace(settings, run=replace(settings.run, name=name)))


def _tell_crash(error: Exception) -> int:
    """Print the traceback of the rank that failed; the others, which lost it in a collective, say one line."""
    from fasttrain.distributed.world import lost_a_rank

    if lost_a_rank(error):
        _say("another rank is gone; this one ends too.")
    else:
        _say("".join(traceback.format_exception(error)).rstrip())
    return EXIT_FAILED


def _leave() -> None:
    from fasttrain.distributed.world import leave

    leave()


def _validate(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.validate import validate

    return validate(*_needs_config(arguments), as_json=arguments.json)


def _explain(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.explain import explain

    wanted = {"as_json": arguments.json, "with_model": arguments.model, "with_compilation": arguments.compile}
    return explain(*_needs_config(arguments), **wanted)


def _data(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.data import data

    return data(*_needs_config(arguments), as_json=arguments.json, out=arguments.out)


def _run_word(arguments: argparse.Namespace, command: str) -> tuple[Path, list[str]]:
    runs = [word for word in arguments.words if "=" not in word]
    if len(runs) != 1:
        raise ConfigError(f"{command} takes one run folder, for example: {command} runs/NAME/ID")
    return Path(runs[0]), [word for word in arguments.words if "=" in word]


def _status(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.status import status

    return status(_run_word(arguments, "status")[0], arguments.json)


def _evaluate(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.evaluate import evaluate

    return evaluate(*_run_word(arguments, "evaluate"), as_json=arguments.json)


def _predict(arguments: argparse.Namespace) -> int:
    from fasttrain.cli.predict import predict

    return predict(*_run_word(arguments, "predict"), as_json=arguments.json, out=arguments.out)


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "validate": _validate,
    "explain": _explain,
    "data": _data,
    "evaluate": _evaluate,
    "predict": _predict,
    "status": _status,
}
