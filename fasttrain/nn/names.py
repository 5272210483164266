"""Names of weights."""

from __future__ import annotations

# What torch.compile and torch's checkpoint wrapper call the module they hold, where a user wraps one by hand.
_HELD = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """The name of a weight as the module has it that a wrapper holds: checkpoints fit with and without the wrapper.

    >>> plain_name("blocks.0._orig_mod.weight"), plain_name("module.weight")
    ('blocks.0.weight', 'module.weight')
    """
    return ".".join(part for part in name.split(".") if part not in _HELD)
