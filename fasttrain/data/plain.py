"""States of loaders as plain JSON and back: a checkpoint holds tensors and JSON, and nothing that runs code when read."""

from __future__ import annotations

import base64
from typing import Any

from fasttrain.errors import CheckpointError
from fasttrain.lazy import np, torch

KIND = "~kind"


def to_plain(value: Any, what: str) -> Any:
    """A tree of plain values, tensors, arrays, bytes, tuples and dicts with any plain keys, as JSON can hold it.

    Raises:
        CheckpointError: it holds an object of another kind; the message begins with `what`.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {KIND: "tensor", "array": to_plain(value.detach().cpu().numpy(), what)}
    array: Any = value
    if isinstance(value, np.ndarray | np.generic) and array.dtype.kind in "biufSU":
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {KIND: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    if type(value) in (list, tuple):
        items = [to_plain(item, what) for item in array]
        return items if type(value) is list else {KIND: "tuple", "items": items}
    if isinstance(value, dict):
        return {KIND: "dict", "items": [[to_plain(k, what), to_plain(v, what)] for k, v in value.items()]}
    raise CheckpointError(
        f"{what} holds a {type(value).__name__}, and a checkpoint keeps numbers, text, bytes, lists, tuples, dicts, arrays "
        "and tensors; let its state_dict() give these."
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value[KIND]:
        case "bytes":
            return base64.b64decode(value["data"])
        case "tensor":
            return torch.from_numpy(from_plain(value["array"]))
        case "array":
            data = np.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"])
            return data.reshape(value["shape"]).copy()
        case "tuple":
            return tuple(from_plain(item) for item in value["items"])
        case _:
            return {from_plain(k): from_plain(v) for k, v in value["items"]}
