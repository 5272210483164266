"""Observers: what watches a run (terminal, TensorBoard, files, early stopping) and the meters that feed it.

An observer sees plain numbers at log points. It never touches a tensor, so a run computes the same with and without it.
"""

from fasttrain.observe.defaults import default_observers
from fasttrain.observe.early_stopping import EarlyStopping
from fasttrain.observe.memory import current_memory, peak_memory, reset_peak_memory
from fasttrain.observe.meter import StepClock
from fasttrain.observe.metrics_file import MetricsFile
from fasttrain.observe.observer import LoggedHistogram, LoggedImage, Observer, RunInfo
from fasttrain.observe.plain import PlainProgress
from fasttrain.observe.summary_file import SummaryFile
from fasttrain.observe.tensorboard import TensorBoard
from fasttrain.observe.terminal import TerminalProgress

__all__ = [
    "EarlyStopping",
    "LoggedHistogram",
    "LoggedImage",
    "MetricsFile",
    "Observer",
    "PlainProgress",
    "RunInfo",
    "StepClock",
    "SummaryFile",
    "TensorBoard",
    "TerminalProgress",
    "current_memory",
    "default_observers",
    "peak_memory",
    "reset_peak_memory",
]
