"""precision: which dtype matrices are multiplied in.

| name | multiplies in | keeps weights in | what it saves | needs |
|---|---|---|---|---|
| fp32 | float32 (IEEE) | float32 | nothing: the reference | |
| tf32 | TensorFloat-32 | float32 | time on Ampere and later | CUDA, compute capability 8.0 |
| bf16 | bfloat16 by autocast | float32 | time and activations | fast on Ampere and later, recent CPUs |
| fp16 | float16 by autocast, scaled loss | float32 | time and activations | fast from Volta on |

Source: Micikevicius et al. 2018, arXiv:1710.03740; https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, final

from fasttrain.core.float32 import set_fp32_precision
from fasttrain.core.strategy import Context, DtypePolicy, NoConfig, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.optim.guarded import step_unless


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


class Autocast(Strategy):
    """What mixed precisions share: float32 weights, and autocast around every forward."""

    slot = "precision"
    compute: ClassVar[str]

    def dtypes(self) -> DtypePolicy:
        """Products in the narrow dtype, gradients reduced in float32."""
        return DtypePolicy(compute=getattr(torch, self.compute), reduce=torch.float32)

    def model(self, model: Any) -> Any:
        """Refuse float16 weights."""
        refuse_half_weights(model, self.name)
        return model

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
    Config = NoConfig


@dataclass(frozen=True, kw_only=True)
class Fp16Config:
    """The loss scale: where it starts, and after how many good steps it doubles. It halves at each overflow."""

    init_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5


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

    @property
    def scaler(self) -> Any:
        """torch's GradScaler, made when first needed and before any state is loaded into it."""
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.context.device.type, **asdict(self.config))
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
