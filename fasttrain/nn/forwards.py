"""Put another forward into a module, in place."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any


def replace_forward(module: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let a module's forward be `change(forward)`, both as functions whose first argument is the module.

    It is put in as a method: `copy.deepcopy` binds that to the copy. A plain function or closure over the module would
    be shared, and the copy would compute with the weights of the original, without a word.
    """
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        function = forward.__func__
    else:
        # Someone else's replacement, which may hold another module; it is called as it is.
        def function(_: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    module.forward = MethodType(change(function), module)
