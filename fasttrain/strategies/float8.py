"""float8: linear layers multiply in float8, by torchao.

| name | a scale for | what it saves | costs |
|---|---|---|---|
| tensorwise | each tensor | most of the time | outliers push small values of their tensor to zero |
| rowwise | each row | some less time | nearer to bfloat16 |

Source: Micikevicius et al. 2022, arXiv:2209.05433; https://github.com/pytorch/ao/tree/main/torchao/float8
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

from fasttrain.core import devices
from fasttrain.core.strategy import Clash, Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import require, torch

# Kernels of float8 take dims that are a multiple of this.
MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Which linear layers are swapped, and how.

    `within`: those of the repeated blocks (so that embeddings and heads stay), or of the whole model. `exclude`: patterns on
    names of modules that stay, with what is under them. `min_features`: layers with fewer inputs or outputs stay, as
    casting costs more than it saves. `multiple_of`: so do those whose features are no multiple. `emulate`: compute as if
    in float8, on any device and slowly, to see what it does to a loss.
    """

    exclude: tuple[str, ...] = ()
    within: Literal["blocks", "model"] = "blocks"
    min_features: int = 512
    multiple_of: int = MULTIPLE
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.min_features < 1 or self.multiple_of < 1:
            raise ConfigError(
                f"float8: min_features={self.min_features} and multiple_of={self.multiple_of} must be 1 or more."
            )
        if not self.emulate and self.multiple_of % MULTIPLE:
            raise ConfigError(
                f"float8.multiple_of={self.multiple_of}: float8 kernels take features that are a multiple of {MULTIPLE}; "
                f"use {MULTIPLE}, or emulate=true."
            )


def linears_to_swap(
    parts: Iterable[tuple[str, Any]], config: Float8Config, left: Iterable[Any] = ()
) -> tuple[dict[str, Any], Counter[str]]:
    """The linear layers among named modules that fit, by name; and how many do not, by the reason.

    `left`: modules that stay.
    """
    stays = set(left)
    chosen: dict[str, Any] = {}
    reasons: Counter[str] = Counter()
    for name, module in parts:
        if not isinstance(module, torch.nn.Linear):
            continue
        features = module.in_features, module.out_features
        if module in stays:
            reasons["excluded"] += 1
        elif type(module) is not torch.nn.Linear or "forward" in vars(module):
            reasons["with a forward of their own"] += 1
        elif min(features) < config.min_features:
            reasons[f"with fewer than {config.min_features} features"] += 1
        elif any(size % config.multiple_of for size in features):
            reasons[f"whose features are no multiple of {config.multiple_of}"] += 1
        else:
            chosen[name] = module
    return chosen, reasons


def swap_linears(linears: Iterable[Any], recipe: str, emulate: bool = False) -> int:
    """Let linear layers multiply in float8, by a recipe of torchao (`tensorwise`, `rowwise`).

    In place: the module objects stay with their weights, hooks and names; their class becomes torchao's Float8Linear.
    Inputs, weights and gradients are scaled and cast on the fly; weights are kept as they are. Returns their number.
    """
    torchao = require("torchao.float8", needed_by=f"float8={recipe}", install="pip install 'fasttrain[float8]'")
    # Inner dims that are no multiple of 16 (those of the batch, in the gradient of a weight) are padded.
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    linears = list(linears)
    for linear in linears:
        # torchao puts a new module in the old one's place, which loses hooks, and whoever holds the old one keeps it.
        holder = torch.nn.ModuleList([linear])
        swapped = torchao.convert_to_float8_training(holder, config=config)[0]
        own = {key: value for key, value in vars(swapped).items() if key not in vars(linear)}
        linear.__class__ = type(swapped)
        vars(linear).update(own)
    return len(linears)


class Float8(Strategy):
    """What both scalings share."""

    slot = "float8"
    recipe: ClassVar[str]
    Config = Float8Config

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self.swapped: tuple[str, ...] = ()
        self._left: Counter[str] = Counter()

    def model(self, model: Any) -> Any:
        """Swap the linear layers that fit, in place.

        Raises:
            ConfigError: the device has no float8, or no layer fits.
        """
        from fasttrain.nn.full_precision import in_float32
        from fasttrain.nn.patterns import modules_matching

        config = self.config
        self._refuse_device()
        outside = in_float32(model)
        for module in modules_matching(model, config.exclude, f"float8={self.name} exclude").values():
            outside |= set(module.modules())
        named = list(model.named_modules())
        if config.within == "blocks":
            blocks = self.context.blocks(model, f"float8={self.name} (or write within: model)")
            inside = {part for block in blocks for part in block.modules()}
            self._left["outside of the blocks"] = sum(
                isinstance(part, torch.nn.Linear) and part not in inside for _, part in named
            )
            named = [(name, part) for name, part in named if part in inside]
        linears, reasons = linears_to_swap(named, config, outside)
        self._left += reasons
        if not linears:
            raise ConfigError(
                f"float8={self.name}: no linear layer of {type(model).__name__} can be swapped "
                f"({self._stay() or 'it has none'}); use float8=null, or look at exclude, within and min_features."
            )
        swap_linears(linears.values(), self.recipe, config.emulate)
        self.swapped = tuple(linears)
        return model

    def _refuse_device(self) -> None:
        device = self.context.device
        if self.config.emulate or devices.multiplies_float8(device):
            return
        raise ConfigError(
            f"float8={self.name}: {devices.described(device)} has no float8 products (CUDA devices have them from compute "
            "capability 8.9 on); use float8=null, or emulate=true to see what float8 does to a loss, slowly."
        )

    def _stay(self) -> str:
        return ", ".join(f"{number} {why}" for why, number in self._left.items() if number)

    def notes(self) -> list[str]:
        """Which layers were swapped, how many, and which stay."""
        shown = ", ".join(self.swapped[:4]) + (f" and {len(self.swapped) - 4} more" if len(self.swapped) > 4 else "")
        stay = f"; {self._stay()} stay" if self._stay() else ""
        told = [f"{len(self.swapped)} linear layers in float8 ({shown}){stay}"]
        if self.config.emulate:
            told.append("emulated: the numbers are float8's, the time is not")
        elif "compile" not in self.context.strategies:
            told.append("casts are not fused without compile, and cost more than is saved; use compile=blocks")
        return told


@final
class Tensorwise(Float8):
    """Linear layers in float8 with one scale a tensor: e4m3 for inputs and weights, e5m2 for gradients.

    Saves: time of large products, up to half of bfloat16's. Costs: 3 (gradients: 2) bits of mantissa in products.
    Needs: compute capability 8.9, `compile` to pay, the package torchao.
    """

    name = recipe = "tensorwise"


@final
class Rowwise(Float8):
    """Linear layers in float8 with one scale a row, a power of two: e4m3 throughout.

    Saves: less time than tensorwise. Costs: 3 bits of mantissa in products; outliers spoil their own row alone.
    Needs: as tensorwise; bfloat16 around it.
    """

    name = recipe = "rowwise"
    clashes = tuple(
        Clash(
            slot="precision",
            name=name,
            why="kernels with a scale for each row give bfloat16 alone",
            instead="use precision=bf16 or bf16_true, or float8=tensorwise",
        )
        for name in ("null", "fp32", "tf32", "fp16", "auto")
    )
