"""The Trainer: research code subclasses it."""

from fasttrain.trainer.trainer import StepInfo, Trainer

__all__ = ["StepInfo", "Trainer"]
