"""torchao's AdamW with moments of 8 bits, so that it obeys a refused step, and compiles only where that pays."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fasttrain.lazy import require
from fasttrain.optim.guarded import loss_of

# Devices on which torchao's update is compiled: a dozen kernels become one. On the CPU compiling takes minutes.
COMPILED_ON = ("cuda", "xpu")


def _parts(moment: Any) -> tuple[Any, ...]:
    """The plain tensors that hold a moment: codes, scales and the value of each code, or the moment itself."""
    return (moment.codes, moment.scale, moment.qmap) if hasattr(moment, "codes") else (moment,)


def update_8bit(
    parameter: Any, grad: Any, step: Any, moments: list[tuple[Any, ...]], group: dict[str, Any], lr: Any, bad: Any
) -> None:
    """torchao's update of one parameter, in place; where `bad`, nothing is changed. `moments`: the parts of both.

    Each tensor is written once, at the end. torchao's own class of 8-bit tensors stays outside, as compiled code takes one
    of these and its parts for different memory: what is written to the one is not seen in the other. torch 2.14.1.
    """
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

    wide = [
        dequant_with_qmap(parts[0], parts[2], parts[1]) if len(parts) == 3 else parts[0].clone() for parts in moments
    ]
    new, steps = parameter.clone(), step + 1.0
    single_param_adam(
        new,
        grad,
        steps,
        wide[0],
        wide[1],
        None,
        lr,
        group["betas"][0],
        group["betas"][1],
        group["weight_decay"],
        group["eps"],
        IS_ADAMW=True,
        BF16_STOCHASTIC_ROUND=False,
    )
    written = [(parameter, new), (step, steps)]
    for parts, moment in zip(moments, wide, strict=True):
        if len(parts) == 3:
            scaled, scale = scale_tensor(moment, parts[0].numel() // parts[1].numel())
            written += [(parts[0], quantize_8bit_with_qmap(scaled, parts[2])), (parts[1], scale)]
        else:
            written.append((parts[0], moment))
    for kept, value in written:
        kept.copy_(value if bad is None else torch.where(bad.bool(), kept, value))


@functools.cache
def adamw_8bit_class() -> Any:
    """The optimizer's class; made when first asked for, since it is a subclass of an optional package's.

    Raises:
        MissingPackage: torchao is not installed.
    """
    torchao: Any = require(
        "torchao.optim", needed_by="optimizer=adamw_8bit", install="pip install 'fasttrain[torchao]'"
    )

    class AdamW8bit(torchao.AdamW8bit):
        """AdamW whose moments are 8 bits each, with a float32 scale for each 256 of them.

        Tensors of fewer than 4,096 elements, or whose number is no multiple of 256, keep float32 moments. The update is
        torchao's. Nothing is read on the host, and a refused step (`found_inf`) changes nothing on the device.
        Source: Dettmers et al. 2022, arXiv:2110.02861; torchao.optim.
        """

        obeys_found_inf = True
        compiles_itself = True

        def __init__(self, params: Any, lr: float, **settings: Any) -> None:
            params = list(params)
            rates = [group.get("lr", lr) if isinstance(group, dict) else lr for group in params]
            super().__init__(params, lr, **settings)
            for group, rate in zip(self.param_groups, rates, strict=False):
                group["lr"] = rate  # torchao makes tensors of them, and float32 is not the rate that was given
            self._compiled: Any = None

        def init_state(self, parameter: Any) -> dict[str, Any]:
            """The state of a parameter before its first step."""
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": self._new_buffer(parameter, True),
                "exp_avg_sq": self._new_buffer(parameter, False),
            }
            return self.state[parameter]

        # torchao does the same: each shape is compiled once, and there are as many as the model has.
        @torch._dynamo.utils.disable_cache_limit()
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """One step."""
            loss = loss_of(closure)
            bad = getattr(self, "found_inf", None)
            for group in self.param_groups:
                lr = group["lr"]
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter] or self.init_state(parameter)
                    update = update_8bit
                    if parameter.device.type in COMPILED_ON:
                        if not isinstance(lr, torch.Tensor):  # a number would be compiled in, anew for each rate
                            lr = torch.full((), lr, dtype=torch.float32, device=parameter.device)
                        self._compiled = self._compiled or torch.compile(update_8bit, fullgraph=True, dynamic=False)
                        update = self._compiled
                    moments = [_parts(state["exp_avg"]), _parts(state["exp_avg_sq"])]
                    update(parameter.detach(), parameter.grad, state["step"], moments, group, lr, bad)
            return loss

    return AdamW8bit
