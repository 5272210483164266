"""How many bytes of tensors are alive, now and at most: each storage counted once, from its making to its end."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operations inside make; storages of `known` tensors are not theirs."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.held: dict[int, int] = {}
        self.now = self.peak = self.operations = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor):
        self.shapes.add(tuple(tensor.shape))
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or key in self.held or not storage.nbytes():
            return
        self.held[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, key)

    def _end(self, key):
        self.now -= self.held.pop(key)
