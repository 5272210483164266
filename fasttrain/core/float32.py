"""How float32 matrices are multiplied: a state of the process, which a run sets for itself and gives back.

torch has two interfaces to it, and reading the older one (as inductor does) is an error after a change through the newer
one alone. So changes go through the older one, which moves both. Checked with torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any

from fasttrain.lazy import torch

_PLACES = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))

# What was there before, what of it the older interface said (None: it could not), and what was set in its place.
_found: dict[Any, str] = {}
_found_matmul: str | None = None
_set: dict[Any, str] | None = None


def fp32_state() -> dict[Any, str]:
    """What is set now, by backend and kind of product; `none` is IEEE."""
    return {place: torch._C._get_fp32_precision_getter(*place) for place in _PLACES}


def tensorfloat() -> dict[str, bool]:
    """Whether TensorFloat-32 is in effect on CUDA, in `matmul` and in `cuDNN`: what torch does, whoever set it."""
    now = fp32_state()

    def effective(products: str) -> str:
        chain = (now["cuda", products], torch._C._get_fp32_precision_getter("cuda", "all"), now["generic", "all"])
        return next((precision for precision in chain if precision != "none"), "ieee")

    return {"matmul": effective("matmul") == "tf32", "cuDNN": effective("conv") == "tf32"}


def set_fp32_precision(precision: str) -> None:
    """Multiply float32 as IEEE 754 has it (`ieee`), or on CUDA with 10 mantissa bits (`tf32`), in this process.

    `own_fp32_precision` takes it back.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
    """
    global _found, _found_matmul, _set
    now = fp32_state()
    if now != _set:
        _found, _found_matmul = now, _matmul_precision()
    backends: Any = torch.backends
    backends.fp32_precision = "none"  # else it would decide wherever nothing else is set
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    backends.cudnn.allow_tf32 = precision == "tf32"
    _set = fp32_state()


def own_fp32_precision() -> None:
    """Take back what `set_fp32_precision` changed, unless someone else changed it since."""
    global _set
    if _set is None or fp32_state() != _set:
        return
    if _found_matmul is not None:
        torch.set_float32_matmul_precision(_found_matmul)
    torch.backends.cudnn.allow_tf32 = _found["cuda", "conv"] == "tf32"
    for place, precision in _found.items():
        if fp32_state()[place] != precision:
            backend, products = place
            torch._C._set_fp32_precision_setter(backend, products, precision)
    _set = None


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # someone changed it through the newer interface alone
        return None
