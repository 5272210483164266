"""memory_format: how images lie in memory.

| name | channels | saves | costs |
|---|---|---|---|
| channels_last | innermost | the reordering around the fast kernels of convolutions | nothing where every layer keeps it |

Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, final

from fasttrain.core.batch import map_tensors
from fasttrain.core.strategy import Context, NoConfig, Strategy
from fasttrain.errors import ConfigError

LISTED = 3


@final
class ChannelsLast(Strategy):
    """Weights of convolutions and batches of images with channels innermost (NHWC; NDHWC for 3-D convolutions).

    Saves: time, on tensor cores and with oneDNN. Costs: nothing. The first step is looked at: where a convolution gets
    another layout, one warning names the module that lost it, and `lost` holds the list.
    """

    slot, name = "memory_format", "channels_last"
    Config = NoConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._dims: set[int] = set()
        self._lay_out: Any = None
        self._watch: Any = None
        self._model: Any = None
        self.lost: list[Any] | None = None

    def model(self, model: Any) -> Any:
        """Lay out the weights of convolutions, in place."""
        from fasttrain.nn.layouts import channels_last, spatial_dims, to_channels_last

        self._dims, self._lay_out = spatial_dims(model), to_channels_last
        if not self._dims:
            raise ConfigError(
                f"memory_format=channels_last: {type(model).__name__} has no 2-D or 3-D convolution, and nothing else "
                "gains from it; use memory_format=null."
            )
        channels_last(model)
        # Hooks would be traced, and compiled anew when they go: lost_when_compiled looks there.
        self._model = model if "compile" not in self.context.strategies else None
        return model

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Lay weights out again that a restore by assignment brought in another layout."""
        from fasttrain.nn.layouts import channels_last

        channels_last(model)

    def batch(self, batch: Any) -> Any:
        """Lay out images; the first training batch is watched on its way through the model."""
        if self._model is not None and self._model.training:
            self._look()
        return map_tensors(self._laid_out, batch)

    def _laid_out(self, tensor: Any) -> Any:
        is_image = tensor.dim() in self._dims and not tensor.is_nested and not tensor.is_sparse
        return self._lay_out(tensor) if is_image else tensor

    def _look(self) -> None:
        from fasttrain.nn.layouts import LayoutWatch

        if self._watch is None:
            self._watch = LayoutWatch(self._model)
            return
        self._model, self.lost = None, self._watch.end()
        self._watch = None
        if self.lost and self.context.data_rank == 0:
            shown = "; ".join(f"{module} gets another layout from {where}" for module, where in self.lost[:LISTED])
            more = f"; and {len(self.lost) - LISTED} more" if len(self.lost) > LISTED else ""
            warnings.warn(
                f"memory_format=channels_last: the layout was lost before {len(self.lost)} convolutions, each of which "
                f"copies its input: {shown}{more}. What loses it: reshape, cat of unlike layouts, slices of channels; add "
                ".contiguous(memory_format=torch.channels_last) after it.",
                stacklevel=2,
            )

    def logged(self, figures: Mapping[str, float]) -> None:
        """A run of one step has no second batch: tell at the log point."""
        if self._watch is not None:
            self._look()
