"""What a device computes fast, told by its own kind and not by what torch can emulate on it."""

from __future__ import annotations

from typing import Any

from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import torch

TYPES = ("cpu", "cuda", "mps", "xpu")


def kind_and_index(asked: str) -> tuple[str, int | None]:
    """What a device is called: its kind, and which of them if that is said.

    >>> kind_and_index("cuda:1"), kind_and_index("cpu")
    (('cuda', 1), ('cpu', None))

    Raises:
        ConfigError: there is no such kind.
    """
    kind, colon, number = asked.partition(":")
    if kind in ("gpu", "nvidia", "rocm"):
        raise ConfigError(f"device={asked} is no device; did you mean 'cuda'?")
    if kind not in TYPES or (colon and not number.isdigit()):
        raise ConfigError(f"device={asked} is no device; {did_you_mean(kind, TYPES)}")
    return kind, int(number) if number else None


def capability(device: Any) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device; `None` for all others."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def described(device: Any) -> str:
    """A device in words: `cuda:0 (compute capability 7.5)`."""
    known = capability(device)
    return str(device) if known is None else f"{device} (compute capability {known[0]}.{known[1]})"


def multiplies_bf16(device: Any) -> bool:
    """Whether bfloat16 products are in the hardware.

    Not `torch.cuda.is_bf16_supported()`, which counts emulation.
    """
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    known = capability(device)
    return known >= (8, 0) if known is not None else device.type in ("cuda", "xpu")


def multiplies_fp16(device: Any) -> bool:
    """Whether float16 products are in the hardware, in tensor cores or their like."""
    known = capability(device)
    return known >= (7, 0) if known is not None else device.type in ("cuda", "xpu", "mps")


def multiplies_float8(device: Any) -> bool:
    """Whether float8 products are in the hardware: Ada, Hopper and later; MI300 and later."""
    known = capability(device)
    if known is not None:
        return known >= (8, 9)
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95", "gfx12"))
