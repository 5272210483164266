"""What a trainer measures and predicts without training: the part of it that research code gives, and `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fasttrain.lazy import pytree, torch
from fasttrain.trainer.measures import update_all
from fasttrain.trainer.parts import TARGETS, target_of
from fasttrain.trainer.prediction import predict


class Looks:
    """The part of a Trainer that looks at outputs and batches; `Trainer` is its one subclass."""

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Any]:
        """Means over an evaluation batch, by name; averaged over batches and ranks by count."""
        return {}

    def build_metrics(self) -> Any:
        """Metrics of torchmetrics by name, or a MetricCollection: for what is no mean of batches (AUROC, F1)."""
        return {}

    def update_metrics(self, metrics: Any, output: Any, batch: Any) -> None:
        """Feed what `build_metrics` gave with an evaluation batch: the output and the batch's second (or label) entry."""
        update_all(metrics, output, target_of(batch))

    def prediction(self, output: Any, batch: Any) -> Any:
        """What `predict` keeps of an output: all of it, if not overridden. One entry a sample along dim 0."""
        return output

    def predict(self, data: Any = None) -> Any:
        """The outputs of the model for evaluation data (or `data`, of the same forms), one a sample, in the data's order.

        A tree of tensors on the CPU, or of lists where samples differ in shape; all ranks get all of it.
        """
        return predict(self, data)  # pyright: ignore[reportArgumentType]

    def label_of(self, batch: Any) -> Any:
        """The classes of a batch, for `fasttrain data`: its label entry, else its last tensor of whole numbers, `[batch]`.

        `None` where there is none.
        """
        named = [batch[name] for name in TARGETS if name in batch] if isinstance(batch, Mapping) else []
        leaves = named or pytree.tree_leaves(batch)
        whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
        fitting = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim() == 1 and x.dtype in whole]
        return fitting[-1] if fitting else None

    def as_text(self, batch: Any) -> list[str] | None:
        """The samples of a batch as text, for `fasttrain data`; `None` where they are none."""
        return None
