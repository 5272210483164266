"""What an observer is, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run as its observers see it at the start. `dir=None`: nothing is written.

    `model` is a class, `blocks` how many blocks of each class it has (empty: none was found). `trainable`: how
    many of its `parameters` train from the start. `start_step` is above 0
    after a resume. `batch_size` is global. `unit` names what `count` counts ("samples", "tokens").
    `request_stop(reason)` asks for a stop after the current step. `notes`: what strategies say of themselves,
    and numerics as they are in effect.
    """

    dir: Path | None
    name: str
    id: str
    config_yaml: str
    explain: str
    environment: dict[str, Any]
    total_steps: int | None
    steps_per_epoch: int | None
    start_step: int
    batch_size: int
    world_size: int
    device: str
    model: str
    parameters: int
    trainable: int
    blocks: Mapping[str, int]
    unit: str
    config_hash: str
    torch_version: str
    request_stop: Callable[[str], None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoggedImage:
    """An image logged by the user: uint8 in 0 to 255 or float in 0 to 1, of shape (H, W), (C, H, W) or (H, W, C)."""

    array: np.ndarray

    @property
    def layout(self) -> str:
        """How the dims read: `HW`, `CHW` or `HWC`; 1, 3 or 4 entries along a dim mean channels, the first dim wins."""
        if self.array.ndim == 2:
            return "HW"
        return "CHW" if self.array.shape[0] in (1, 3, 4) else "HWC"


@dataclass(frozen=True, kw_only=True)
class LoggedHistogram:
    """Values whose distribution the user logged; any shape."""

    array: np.ndarray


class Observer:
    """The base: every method does nothing. An observer looks, and may ask for a stop; it changes no tensor.

    Methods are called between steps, once in a while only, so that they cost the step nothing. Values in a record are
    plain numbers, `None` where there is nothing to tell, or a `LoggedImage` or `LoggedHistogram`.
    """

    def started(self, run: RunInfo) -> None:
        """Before the first step of this process."""

    def stepped(self, record: Mapping[str, Any]) -> None:
        """At a log point: step, total_steps, samples, epoch, loss, lr, grad_norm, speed, memory and logged figures."""

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: step, epoch, metrics (by name), seconds."""

    def remarked(self, record: Mapping[str, Any]) -> None:
        """Something came up that whoever reads the run should know: step, text (a sentence or two)."""

    def saved(self, record: Mapping[str, Any]) -> None:
        """After a checkpoint: step, path, bytes, seconds."""

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """The run ends by an error. `summary`: what is known of it."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended, done or stopped. `summary`: the content of summary.json."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
