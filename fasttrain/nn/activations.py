"""Count the bytes that stand between forward and backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def kept_bytes(function: Callable[[], Any]) -> int:
    """Bytes held when `function`, a forward, is done and its result is still there: activations and the result itself.

    Every storage made inside counts once, whoever holds it: autograd, a checkpoint, a cache. What was there before
    (parameters, buffers, inputs) does not. Works on real, meta and fake tensors, where it takes no memory:

        with FakeTensorMode():
            model, x = resnet50(), torch.empty(16, 3, 224, 224)
            kept_bytes(lambda: model(x))
    """
    with LiveStorages() as live:
        result = function()
        gc.collect()  # or the figure would depend on when Python last looked for cycles
        held = live.bytes()
    del result
    return held


class LiveStorages(TorchDispatchMode):
    """The storages that were made while this was entered and have not been freed. `device`: of this type alone.

    `peak`: the most bytes there were at once, seen after each operation.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device, self.peak = device, 0
        # A weak reference keeps the small head of a storage, so that no address stands for two of them.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled. With aot_eager it is counted; inductor's code allocates without telling."""
        return True

    def bytes(self) -> int:
        """Bytes of those that are still there."""
        freed = [key for key, (reference, _) in self._made.items() if reference.expired()]
        for key in freed:
            self._bytes -= self._made.pop(key)[1]
        return self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = None
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or (self.device is not None and tensor.device.type != self.device):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._made:
                continue
            if given is None:  # views and results in place are no new storages
                given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes())
        return result
