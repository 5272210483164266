"""precision: which dtype matrices are multiplied in.

| name | multiplies in | keeps weights in | what it saves | needs |
|---|---|---|---|---|
| fp32 | float32 (IEEE) | float32 | nothing: the reference | |
| tf32 | TensorFloat-32 | float32 | time on Ampere and later | CUDA, compute capability 8.0 |
| bf16 | bfloat16 by autocast | float32 | time and activations | fast on Ampere and later, recent CPUs |
| fp16 | float16 by autocast, scaled loss | float32 | time and activations | fast from Volta on |
| bf16_true | bfloat16 | bfloat16 | half of weights, gradients and activations | updates rounded stochastically |
| auto | bf16, fp16 or fp32: what the device has in hardware | float32 | | |

Source: Micikevicius et al. 2018, arXiv:1710.03740; https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, final

from fasttrain.core import devices
from fasttrain.core.float32 import set_fp32_precision
from fasttrain.core.strategy import Context, DtypePolicy, NoConfig, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.optim.chunks import ChunkedStep, step_in_chunks
from fasttrain.optim.guarded import step_unless
from fasttrain.optim.rounding import shared_generator


@final
class Fp32(Strategy):
    """Everything in float32, exactly as IEEE 754 has it. Saves and costs nothing: the reference of all comparisons."""

    slot, name = "precision", "fp32"
    Config = NoConfig

    def dtypes(self) -> DtypePolicy:
        """float32 throughout."""
        return DtypePolicy(compute=torch.float32, reduce=torch.float32)

    def model(self, model: Any) -> Any:
        """Switch TensorFloat-32 off in this process."""
        set_fp32_precision("ieee")
        return model

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Warn of weights that are no float32."""
        warn_of_narrow_weights(model, self.name, self.context)


@final
class Tf32(Strategy):
    """float32 with TensorFloat-32 matrix products.

    Saves: up to most of the time of matrix products. Costs: 13 of 23 mantissa bits in their inputs.
    Needs: CUDA with compute capability 8.0 or more; refused elsewhere.
    """

    slot, name = "precision", "tf32"
    Config = NoConfig

    def dtypes(self) -> DtypePolicy:
        """float32 outside of the products."""
        return DtypePolicy(compute=torch.float32, reduce=torch.float32)

    def model(self, model: Any) -> Any:
        """Switch TensorFloat-32 on in this process."""
        device = self.context.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError(
                f"precision=tf32: {device} has no TensorFloat-32 (CUDA devices have it from compute capability 8.0 on); "
                "use precision=fp32 or precision=bf16."
            )
        set_fp32_precision("tf32")
        return model


def refuse_half_weights(model: Any, precision: str) -> None:
    """Refuse weights that are float16 already.

    Raises:
        ConfigError: some are; the loss scale cannot be undone on float16 gradients.
    """
    half = [name for name, parameter in model.named_parameters() if parameter.dtype is torch.float16]
    if half:
        raise ConfigError(
            f"precision={precision}: {len(half)} weights are float16 (the first: {half[0]}), but mixed precision keeps "
            "float32 weights and casts inside autocast, else small updates vanish and the loss scale cannot be undone; "
            "leave out model.half()."
        )


@dataclass(frozen=True, kw_only=True)
class ExcludeConfig:
    """`exclude`: modules that run in float32, by patterns on their names (`head`, `layers.*.norm`)."""

    exclude: tuple[str, ...] = ()


def warn_of_narrow_weights(model: Any, precision: str, context: Context) -> None:
    """Warn, on the first rank, of weights that train in 16 bits and are rounded to the nearest."""
    narrow = [
        n for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and p.dtype.itemsize == 2
    ]
    if narrow and context.data_rank == 0:
        warnings.warn(
            f"precision={precision}: {len(narrow)} weights that train have 16 bits themselves (the first: {narrow[0]}), and "
            "updates below 1/256 of a weight are lost; load the model in float32 (model.float()), or use "
            "precision=bf16_true, which rounds updates stochastically.",
            stacklevel=2,
        )


def warn_of_emulation(precision: str, context: Context) -> None:
    """Warn, on the first rank, where bfloat16 products are emulated."""
    if context.device.type == "cuda" and not devices.multiplies_bf16(context.device) and context.data_rank == 0:
        warnings.warn(
            f"precision={precision}: {devices.described(context.device)} has no bfloat16 in hardware (that begins with "
            "8.0), torch emulates it, and it is slower than float32; use precision=fp16, or precision=auto.",
            stacklevel=2,
        )


def excluded_modules(model: Any, exclude: tuple[str, ...], precision: str) -> dict[str, Any]:
    """The modules that a precision leaves in float32, by name.

    Raises:
        ConfigError: a pattern matches none.
    """
    from fasttrain.nn.patterns import modules_matching

    return modules_matching(model, exclude, f"precision={precision} exclude")


def without_hardware(precision: str, is_fast: bool, device: Any) -> list[str]:
    """What there is to say where a device is slow in a precision."""
    dtype = "float16" if precision == "fp16" else "bfloat16"
    return [] if is_fast else [f"{devices.described(device)} has no {dtype} products in hardware: no time is saved"]


def float32_in(excluded: tuple[str, ...]) -> list[str]:
    """What there is to say of excluded modules."""
    more = f" and {len(excluded) - 6} more" if len(excluded) > 6 else ""
    return [f"float32 in {', '.join(excluded[:6])}{more}"] if excluded else []


class Autocast(Strategy):
    """What mixed precisions share: float32 weights, and autocast around every forward."""

    slot = "precision"
    compute: ClassVar[str]
    _excluded: tuple[str, ...] = ()

    def dtypes(self) -> DtypePolicy:
        """Products in the narrow dtype, gradients reduced in float32."""
        return DtypePolicy(compute=getattr(torch, self.compute), reduce=torch.float32)

    def model(self, model: Any) -> Any:
        """Refuse float16 weights; let excluded modules run in float32."""
        refuse_half_weights(model, self.name)
        if self.config.exclude:
            from fasttrain.nn.full_precision import run_in_float32

            excluded = excluded_modules(model, self.config.exclude, self.name)
            run_in_float32(excluded.values(), self.context.device.type)
            self._excluded = tuple(excluded)
        return model

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Warn of weights that are no float32."""
        warn_of_narrow_weights(model, self.name, self.context)

    def notes(self) -> list[str]:
        """What runs in float32."""
        return float32_in(self._excluded)

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return torch.autocast(self.context.device.type, getattr(torch, self.compute))

    def evaluating(self, model: Any) -> AbstractContextManager[Any]:
        """Autocast."""
        return self.forward()


@final
class Bf16(Autocast):
    """float32 weights, bfloat16 matrix products by autocast. No loss scale: bfloat16 has float32's range.

    Saves: about half of the activations. Costs: 16 of 23 mantissa bits in products.
    """

    name = "bf16"
    compute = "bfloat16"
    Config = ExcludeConfig

    def model(self, model: Any) -> Any:
        """Warn of emulation; else as all of autocast."""
        warn_of_emulation(self.name, self.context)
        return super().model(model)

    def notes(self) -> list[str]:
        """Whether the device is fast in it."""
        device = self.context.device
        return [*without_hardware(self.name, devices.multiplies_bf16(device), device), *super().notes()]


@dataclass(frozen=True, kw_only=True)
class Fp16Config(ExcludeConfig):
    """The loss scale: where it starts, and after how many good steps it doubles. It halves at each overflow.

    `exclude`: modules that run in float32, by patterns on their names.
    """

    init_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5

    def __post_init__(self) -> None:
        ranges = {
            "init_scale": (0 < self.init_scale < float("inf"), "more than 0, usually 65536"),
            "growth_interval": (self.growth_interval >= 1, "1 or more, usually 2000"),
            "growth_factor": (1 < self.growth_factor < float("inf"), "more than 1, usually 2"),
            "backoff_factor": (0 < self.backoff_factor < 1, "more than 0 and less than 1, usually 0.5"),
        }
        for key, (is_right, told) in ranges.items():
            if not is_right:
                raise ConfigError(f"precision.{key}={getattr(self, key)} is out of its range; give {told}.")


@final
class Fp16(Autocast):
    """float32 weights, float16 matrix products by autocast, the loss scaled so that small gradients survive.

    Saves: about half of the activations. Costs: steps whose gradients overflow change nothing and halve the scale.
    The update is refused on the device: nothing is read on the host where the optimizer is fused.
    """

    name = "fp16"
    compute = "float16"
    Config = Fp16Config

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._scaler: Any = None
        self._unscaled = False

    def notes(self) -> list[str]:
        """Whether the device is fast in it."""
        device = self.context.device
        return [*without_hardware(self.name, devices.multiplies_fp16(device), device), *super().notes()]

    @property
    def scaler(self) -> Any:
        """torch's GradScaler, made when first needed and before any state is loaded into it."""
        if self._scaler is None:
            settings = asdict(self.config)
            del settings["exclude"]
            self._scaler = torch.amp.GradScaler(self.context.device.type, **settings)
            self._scaler._lazy_init_scale_growth_tracker(self.context.device)
        return self._scaler

    def scale(self, loss: Any) -> Any:
        """Times the loss scale."""
        return self.scaler.scale(loss)

    def gradients(self, model: Any, optimizer: Any) -> Any:
        """Undo the scale, once a step; the flag says whether anything overflowed."""
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return None  # the scaler would wait for the verdict of such a step
        self.scaler.unscale_(optimizer)
        flags = list(self.scaler._found_inf_per_device(optimizer).values())
        return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).amax(0)

    def update(self, optimizer: Any, bad: Any) -> None:
        """Step unless bad, then move the scale."""
        step_unless(optimizer, bad)
        if self.scaler._found_inf_per_device(optimizer):
            self.scaler.update()

    def report(self) -> dict[str, Any]:
        """The loss scale."""
        return {"loss_scale": self.scaler._scale}

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth tracker."""
        scaler = self.scaler
        return {"scale": scaler._scale.clone(), "growth_tracker": scaler._growth_tracker.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put scale and growth tracker back."""
        self.scaler._scale.copy_(state["scale"])
        self.scaler._growth_tracker.copy_(state["growth_tracker"])


@final
class Bf16True(Strategy):
    """Weights, activations and gradients in bfloat16; norms, softmax and loss computed in float32.

    Saves: half of weights, gradients and activations. Costs: 16 of 23 mantissa bits in all of them.
    Needs: an optimizer that rounds stochastically, which it is told by `DtypePolicy.parameters`.
    Source: Zamirai et al. 2020, arXiv:2010.06192.
    """

    slot, name = "precision", "bf16_true"
    Config = ExcludeConfig
    _excluded: tuple[str, ...] = ()
    _generator: Any = None

    def dtypes(self) -> DtypePolicy:
        """bfloat16 throughout, gradients reduced in float32."""
        return DtypePolicy(compute=torch.bfloat16, reduce=torch.float32, parameters=torch.bfloat16)

    def model(self, model: Any) -> Any:
        """Cast the weights, in place."""
        from fasttrain.nn.narrow_weights import narrow_weights

        warn_of_emulation(self.name, self.context)
        excluded = excluded_modules(model, self.config.exclude, self.name)
        narrow_weights(model, torch.bfloat16, excluded.values(), self.context.device.type)
        self._excluded = tuple(excluded)
        return model

    def optimizer(self, factory: Any) -> Any:
        """Let an optimizer of the user's round stochastically; those of the slot do so by themselves."""
        return None if factory is None else partial(self._rounding, factory)

    def _rounding(self, factory: Any, model: Any) -> Any:
        optimizer = factory(model)
        if not isinstance(optimizer.step, ChunkedStep):
            self._generator = self._generator or shared_generator(self.context.device)
            step_in_chunks(optimizer, narrow=True, generator=self._generator)
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers of rounding stand."""
        return {} if self._generator is None else {"rounding": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        if self._generator is not None and "rounding" in state:
            self._generator.set_state(state["rounding"].cpu())

    def notes(self) -> list[str]:
        """Whether the device is fast in it, and what runs in float32."""
        device = self.context.device
        fast = devices.multiplies_bf16(device)
        return [*without_hardware(self.name, fast, device), *float32_in(self._excluded)]


@final
class Auto(Strategy):
    """The precision that a device has in hardware: bf16, else fp16 with its loss scale, else fp32.

    Emulated bfloat16 does not count. Settled before anything is built, so that clashes, the lines of the step and the
    config in the run folder are those of the precision taken. The head of the run says which, and why.
    """

    slot, name = "precision", "auto"
    Config = ExcludeConfig

    @classmethod
    def stands_for(cls, device: Any) -> tuple[str, str]:
        """bf16, fp16 or fp32, and why."""
        where = devices.described(device)
        if devices.multiplies_bf16(device):
            return "bf16", f"{where} multiplies bfloat16 in hardware"
        if device.type == "cuda" and devices.multiplies_fp16(device):
            return "fp16", f"{where} has float16 in hardware, and no bfloat16"
        return "fp32", f"{where} has neither bfloat16 nor float16 in hardware"

    def dtypes(self) -> DtypePolicy:
        """Refuse: a plan made by hand names the precision.

        Raises:
            ConfigError: always.
        """
        self._unsettled()

    def model(self, model: Any) -> Any:
        """Refuse, as `dtypes` does."""
        self._unsettled()

    def _unsettled(self) -> NoReturn:
        raise ConfigError(
            "precision=auto is settled by the Trainer, from its device; in a plan of your own, use the strategy that "
            "Auto.stands_for(device) names."
        )
