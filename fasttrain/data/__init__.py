"""Data: what a trainer trains on, in which order, and how it gets to the device."""

from fasttrain.data.data import Data
from fasttrain.data.packed import PackedStrings
from fasttrain.data.seeds import StepSeed, mix

__all__ = ["Data", "PackedStrings", "StepSeed", "mix"]
