"""The Trainer: research code subclasses it."""

from fasttrain.core.task import StepInfo
from fasttrain.trainer.trainer import Trainer

__all__ = ["StepInfo", "Trainer"]
