"""A backward pass in Python: torch's own engine wants a driver for tensors on CUDA, even for fake ones."""

from __future__ import annotations

import heapq
import itertools

import torch


def backward(outputs):
    """Differentiate the sum of the one tensor in `outputs`, a list that is emptied; `.grad` is written as by torch.

    Nodes run in the order of torch's engine, the latest first, and are freed, with what they saved, as soon as they ran.
    """
    output = outputs.pop()
    root, gradient = output.grad_fn, torch.ones_like(output)
    del output
    waiting = {root: 0}
    found = [root]
    while found:
        for node, _ in found.pop().next_functions:
            if node is not None:
                if node not in waiting:
                    found.append(node)
                waiting[node] = waiting.get(node, 0) + 1
    gradients = {root: {0: gradient}}
    order = itertools.count()
    ready = [(-root._sequence_nr(), next(order), root)]
    del root, gradient, found
    node = None
    with torch.no_grad():
        while ready:
            _, _, node = heapq.heappop(ready)
            del waiting[node]
            given = gradients.pop(node)
            results = node(*(given.get(i) for i in range(max(given) + 1)))
            given = None
            results = list(results) if isinstance(results, tuple) else [results]
            edges = node.next_functions
            node = None
            for i, (following, index) in enumerate(edges):
                result, results[i] = results[i], None
                if following is None:
                    continue
                waiting[following] -= 1
                if result is not None:
                    shape = following._input_metadata[index].shape
                    result = result if result.shape == shape else result.sum_to_size(shape)
                    into = gradients.setdefault(following, {})
                    into[index] = into[index] + result if index in into else result
                result = None
                if waiting[following] == 0 and following in gradients:
                    is_leaf = "AccumulateGrad" in following.name()
                    rank = -(1 << 62) if is_leaf else -following._sequence_nr()
                    heapq.heappush(ready, (rank, next(order), following))
            following = edges = None
