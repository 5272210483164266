"""The slots: kinds of decision, in the order of composition. Decided here, never by the order of a file."""

from __future__ import annotations

SLOTS: dict[str, str] = {
    "precision": "dtypes, forward, loss scale, gradients: its context is outermost, every later slot reads its dtypes",
    "memory_format": "layout of the plain model and of each batch",
    "adapters": "which parameters exist and train",
    "batch_norm": "how batch statistics are taken",
    "pipeline_parallel": "cuts the model into stages; all below act per stage",
    "float8": "swaps linear layers",
    "tensor_parallel": "spreads single layers over ranks",
    "context_parallel": "spreads the sequence over ranks",
    "activation_checkpointing": "recomputes blocks in the backward pass",
    "activation_offload": "moves what checkpointing still saves to the host",
    "compile": "compiles blocks as the checkpointing left them",
    "data_parallel": "spreads the batch over ranks; the last structural change",
    "accumulation": "cuts a batch into microbatches",
    "optimizer": "the update rule, over the final parameters",
    "schedule": "the learning rate, by optimizer steps",
    "gradient_clipping": "bounds gradients after the loss scale is undone",
    "nonfinite": "one verdict on infinite and undefined gradients",
    "weight_averaging": "copies of the final weights",
}


def position(slot: str) -> int:
    """Where a slot stands in the order of composition."""
    return list(SLOTS).index(slot)
