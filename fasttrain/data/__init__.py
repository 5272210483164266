"""Data: what a trainer trains on, in which order, and how it gets to the device."""

from fasttrain.data.data import Data
from fasttrain.data.packed import PackedStrings
from fasttrain.data.seeds import StepSeed, mix
from fasttrain.data.shards import Shards
from fasttrain.data.tars import TarSamples, tar_shards
from fasttrain.data.token_streams import TokenStream

__all__ = ["Data", "PackedStrings", "Shards", "StepSeed", "TarSamples", "TokenStream", "mix", "tar_shards"]
