"""Low-rank adapters beneath the layers they correct. Layers stay the objects they are; names of weights stay.

A layer gets the modules `lora_A` and `lora_B` and a forward hook that adds what they compute. torch then leaves its fused
encoder path, which reads weights and would leave the adapters out, and whoever copies the layer copies all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fasttrain.lazy import require

ADAPTER = "default"


def peft() -> Any:
    """The package that makes adapters."""
    return require("peft", needed_by="adapters=lora", install="pip install 'fasttrain[adapters]'")


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer keeps its weight as (in, out): the Conv1D of GPT-2, which is a linear layer."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is linear and its forward is called: that within nn.MultiheadAttention never is."""
    return is_transposed(module) or (
        isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def can_adapt(module: nn.Module) -> bool:
    """Whether a layer can get an adapter: linear layers, and 2d convolutions in one group."""
    own_weight = module._parameters.get("weight") is not None
    return own_weight and (is_linear(module) or (isinstance(module, nn.Conv2d) and module.groups == 1))


def _correct(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
    """The forward hook: `output + scaling × B(A(dropout(x)))`."""
    parts: Any = module
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    x = parts.lora_dropout(x)
    weight = parts.lora_A.weight
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    if "lora_magnitude_vector" in module._modules:
        # The base's output can be used again where both saw the same input.
        base_result = output if isinstance(parts.lora_dropout, nn.Identity) or not module.training else None
        added = parts.lora_magnitude_vector(
            x,
            lora_A=parts.lora_A,
            lora_B=parts.lora_B,
            scaling=parts.lora_scaling,
            base_layer=module,
            base_result=base_result,
        )
    else:
        added = parts.lora_B(parts.lora_A(x)) * parts.lora_scaling
    return output + added.to(output.dtype)


def attach_adapters(
    layers: Iterable[nn.Module],
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    *,
    rslora: bool = False,
    dora: bool = False,
) -> int:
    """Give each layer an adapter of peft's, in place; the layer then computes W x + scaling × B A x.

    `scaling` is alpha / rank, or alpha / sqrt(rank) with `rslora`. B starts at zero, so that nothing changes at first;
    A is drawn from torch's generator as peft draws it. Adapters of float16 and bfloat16 layers are float32. With `dora`
    the length of each row of the weight is trained apart from its direction. Returns the number of layers.

    Saves: gradients and optimizer states of the layers' weights. Costs: 2 × rank × (in + out) FLOPs a position more.
    Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024, arXiv:2402.09353.
    """
    package = peft()
    found = list(dict.fromkeys(layers))
    for transposed in (False, True):
        some = [layer for layer in found if is_transposed(layer) is transposed]
        # peft puts its layers around those of a holder; the model is never touched.
        holder = nn.ModuleDict({str(i): layer for i, layer in enumerate(some)})
        if not some:
            continue
        config = package.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=r"\d+",
            use_rslora=rslora,
            use_dora=dora,
            fan_in_fan_out=transposed,
        )
        package.inject_adapter_in_model(config, holder, adapter_name=ADAPTER)
        for i, layer in enumerate(some):
            _attach(layer, holder[str(i)], transposed)
    return len(found)


def _attach(layer: nn.Module, made: Any, transposed: bool) -> None:
    layer.add_module("lora_dropout", made.lora_dropout[ADAPTER])
    layer.add_module("lora_A", made.lora_A[ADAPTER])
    layer.add_module("lora_B", made.lora_B[ADAPTER])
    if ADAPTER in made.lora_magnitude_vector:
        layer.add_module("lora_magnitude_vector", made.lora_magnitude_vector[ADAPTER])
    for part in (made.lora_A, made.lora_B, made.lora_magnitude_vector):
        if ADAPTER in part and part[ADAPTER].weight.dtype in (torch.float16, torch.bfloat16):
            part[ADAPTER].to(torch.float32)  # their updates are small beside what sixteen bits resolve
    vars(layer)["lora_scaling"] = made.scaling[ADAPTER]
    vars(layer)["lora_transposed"] = transposed
    layer.register_forward_hook(_correct, with_kwargs=True)


def is_adapter(name: str) -> bool:
    """Whether a weight's name is that of an adapter.

    >>> is_adapter("blocks.0.fc.lora_A.weight"), is_adapter("blocks.0.fc.weight")
    (True, False)
    """
    return re.search(r"(^|\.)lora_(A|B|magnitude_vector)\.", name) is not None


def _whole_weight(layer: Any) -> Tensor:
    """The weight of an adapted layer with its adapter added, in the layer's own layout."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        base = layer.weight.detach()
    else:
        base = _bitsandbytes().functional.dequantize_4bit(layer.weight.data, state)
    a, b = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
    added = (b.flatten(1) @ a.flatten(1)) * layer.lora_scaling  # (out, in × kernel)
    added = added.T if layer.lora_transposed else added.view(base.shape)
    whole = base.to(added.dtype) + added
    if "lora_magnitude_vector" in layer._modules:
        length = layer.lora_magnitude_vector.weight.detach()
        norm = whole.norm(dim=0 if layer.lora_transposed else 1)
        whole = whole * ((length / norm) if layer.lora_transposed else (length / norm)[:, None])
    return (whole.T if vars(layer).get("was_transposed") else whole).to(base.dtype)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model as if its weights themselves had been trained: the model's own names, adapters added in.

    The model stays. 4-bit weights come out in the dtype they had. Load it into the model as it was before adapters.
    """
    adapted = {name: module for name, module in model.named_modules() if "lora_A" in module._modules}
    held = {f"{name}.weight" if name else "weight": module for name, module in adapted.items()}
    state = {}
    for name, value in model.state_dict().items():
        if is_adapter(name) or any(name.startswith(f"{weight}.") for weight in _quantised(held, name)):
            continue
        state[name] = _whole_weight(held[name]) if name in held else value
    return state


def _quantised(held: Mapping[str, Any], name: str) -> list[str]:
    """The weight, of those held, that an entry such as `fc.weight.absmax` belongs to."""
    parts = name.split(".")
    return [weight for i in range(1, len(parts)) if (weight := ".".join(parts[:i])) in held]


def _bitsandbytes() -> Any:
    return require("bitsandbytes", needed_by="adapters=qlora", install="pip install 'fasttrain[adapters]'")


def quantise_linears(
    model: nn.Module, layers: Iterable[nn.Module], compute: torch.dtype | None = None, double_quant: bool = True
) -> list[nn.Module]:
    """Keep the weights of linear layers in 4-bit NormalFloat (NF4): each layer is exchanged for one of bitsandbytes.

    Blocks of 64 weights share a scale; `double_quant` keeps the scales in 8 bits. `compute`: the dtype they are widened
    to in each forward and backward (`None`: that of the layer). Biases take it, too. Returns the new layers.

    Saves: 0.26 instead of 1 of the bytes of a weight in 16 bits (0.28 without `double_quant`). Costs: widening, twice
    a step. Names stay, and weights are no longer trained. Source: Dettmers et al. 2023, arXiv:2305.14314.
    """
    bnb = _bitsandbytes()
    made: dict[nn.Module, nn.Module] = {}
    for old in dict.fromkeys(layers):
        layer: Any = old
        weight = layer.weight.detach()
        weight = weight.T.contiguous() if is_transposed(old) else weight
        dtype = weight.dtype if compute is None else compute
        with torch.device("meta"):
            new = bnb.nn.Linear4bit(
                weight.shape[1],
                weight.shape[0],
                bias=layer.bias is not None,
                compute_dtype=dtype,
                compress_statistics=double_quant,
                quant_type="nf4",
            )
        new.weight = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=double_quant,
            quant_type="nf4",
            module=new,
        )
        # The layer would convert a bias of another dtype in passing, and that would move frozen bits after the start.
        if layer.bias is not None:
            new.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        # Its forward would lay the weights out anew at the first evaluation on some CPUs.
        new.support_avx512bf16_for_cpu = False
        new.to(weight.device)
        new.train(old.training)
        vars(new)["was_transposed"] = is_transposed(old)
        made[old] = new
    for holder in list(model.modules()):
        for name, child in list(holder._modules.items()):
            if child in made:
                holder._modules[name] = made[child]
    return list(made.values())
