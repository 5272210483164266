"""batch_norm: over which samples batch statistics are taken.

| name | statistics of | what it saves | costs |
|---|---|---|---|
| sync | the microbatch on all ranks together | the mathematics: n ranks train as one does | two small sums a layer |

Left out, each rank takes statistics of its own share: faster, and other mathematics the smaller the share is.
Source: Peng et al. 2018 (MegDet), arXiv:1711.07240.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from fasttrain.core.strategy import NoConfig, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import dist

if TYPE_CHECKING:
    from torch import nn


def private_group(group: Any = None) -> Any:
    """A process group of the same ranks that nobody else uses; every rank of `group` calls this.

    Statistics are exchanged in the middle of forward and backward, where gradients travel too. On one group both would
    have to come in the same order on all ranks, which a branch unused on one rank upsets.
    """
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=group is not None)


@final
class Sync(Strategy):
    """Batch norms take their training statistics over all data ranks. Does nothing on one rank.

    Saves: nothing; keeps the loss curve of one process. Costs: an all-reduce a layer in forward and one in backward.
    Needs: a model with batch norms, and a forward on every rank. Statistics span ranks, not microbatches.
    Source: Peng et al. 2018 (MegDet), arXiv:1711.07240.
    """

    slot, name = "batch_norm", "sync"
    forwards_together = True
    Config = NoConfig

    def model(self, model: nn.Module) -> nn.Module:
        """Change the class of each batch norm, in place; names stay."""
        if self.context.data_ranks == 1:
            return model
        from fasttrain.nn.sync_batch_norm import synchronise_batch_norm

        if not synchronise_batch_norm(model, private_group(self.context.data_group)):
            raise ConfigError(
                f"batch_norm=sync: {type(model).__name__} has no batch norm whose statistics could be taken over "
                "ranks; use batch_norm=null."
            )
        return model
