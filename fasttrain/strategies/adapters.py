"""adapters: train a small part of a model and keep the rest as it is.

| name | what trains | what it saves | costs |
|---|---|---|---|
| lora | low-rank corrections of layers | gradients and optimizer states of the rest | two thin products a layer |
| qlora | the same, over weights in 4 bits | also three quarters of their bytes in 16 bits | widening them twice a step |
| freeze | what is not frozen of the model | gradients, optimizer states, part of backward | |

Checkpoints, averages and optimizers hold what trains alone.
Source: Hu et al. 2021, arXiv:2106.09685; Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

from fasttrain.core.strategy import Clash, Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import require
from fasttrain.nn.frozen import FrozenWeights, names_of_weights
from fasttrain.nn.patterns import select

if TYPE_CHECKING:
    from torch import Tensor, nn

INSTALL = "pip install 'fasttrain[adapters]'"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of lora.

    `rank` and `alpha`: corrections have this rank and are scaled by alpha / rank (`rslora`: by alpha / sqrt(rank)).
    `targets`: names or patterns of the layers (`q_proj`, `blocks.*.fc`); null: all linear layers in the repeated blocks.
    `train`: patterns of parameters of the model that train as well, such as a new head. `dora`: the length of each row
    of a weight trains apart from its direction. `save_frozen`: checkpoints hold the frozen weights, too.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] | None = None
    train: list[str] = field(default_factory=list)
    rslora: bool = False
    dora: bool = False
    save_frozen: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank} is no rank of a matrix; give 1 or more, often 8 to 64.")
        if not self.alpha > 0:
            raise ConfigError(f"alpha={self.alpha} would leave the adapters out; give more than 0, often 2 x rank.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1; write for example 0.1.")
        if self.targets is not None and not self.targets:
            raise ConfigError(
                "targets=[] adapts nothing; name layers, or leave it out for all linear ones in the blocks."
            )


@dataclass(frozen=True, kw_only=True)
class QloraConfig(LoraConfig):
    """Settings of qlora: those of lora. `double_quant`: the scales of the 4-bit weights are kept in 8 bits."""

    double_quant: bool = True


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Settings of freeze: patterns of what is frozen (`freeze`), or of what alone trains (`train`).

    `statistics`: running statistics of frozen norms move on. `unfreeze`: patterns of frozen parts and when they begin to
    train, after so many steps (`500`) or epochs (`2ep`). `save_frozen`: checkpoints hold the frozen weights, too.
    """

    freeze: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    statistics: bool = False
    unfreeze: dict[str, int | str] = field(default_factory=dict)
    save_frozen: bool = False

    def __post_init__(self) -> None:
        if bool(self.freeze) == bool(self.train):
            given = "both are given" if self.freeze else "neither is given"
            raise ConfigError(
                f"freeze={self.freeze} train={self.train}: {given}; name what is frozen, freeze=[backbone], or what alone "
                "trains, train=[head]."
            )
        for pattern, when in self.unfreeze.items():
            if _duration(when) is None:
                raise ConfigError(
                    f"unfreeze: '{pattern}' at '{when}' is no time; write steps, 500, or epochs, 2ep (more than 0)."
                )


def _duration(when: int | str) -> tuple[float, str] | None:
    """`500` -> (500, "steps"), `2ep` -> (2, "epochs")."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ep)?", str(when).strip())
    if match is None or float(match[1]) <= 0 or (match[2] is None and "." in match[1]):
        return None
    return float(match[1]), "epochs" if match[2] else "steps"


def layers_to_adapt(
    model: nn.Module, targets: Iterable[str] | None, context: Context, name: str, dora: bool
) -> list[Any]:
    """The layers that `targets` means; `None`: all linear layers in the repeated blocks, so that heads are left out.

    Raises:
        ConfigError: there are none, or one cannot be adapted.
    """
    from fasttrain.nn.low_rank import can_adapt, is_linear

    layers = {layer: module for layer, module in model.named_modules() if can_adapt(module)}
    if targets is None:
        try:
            blocks = context.blocks(model, f"adapters={name}")
        except ConfigError as error:
            raise ConfigError(
                f"adapters={name}: targets=null means the linear layers of the repeated blocks, and {type(model).__name__} "
                f"has no such blocks; name the layers, adapters.targets=[{', '.join(list(layers)[:2])}]."
            ) from error
        within = {id(part) for block in blocks for part in block.modules()}
        chosen = {layer: module for layer, module in layers.items() if id(module) in within and is_linear(module)}
        if not chosen:
            raise ConfigError(
                f"adapters={name}: the blocks of {type(model).__name__} hold no linear layer; name the layers with "
                "adapters.targets."
            )
    else:
        what = "no layer that can be adapted (linear, or a 2d convolution in one group)"
        chosen = {
            layer: layers[layer]
            for layer in select(layers, targets, f"adapters={name} targets", anywhere=True, what=what)
        }
    _refuse_shared(model, chosen, name)
    if dora and (other := next((layer for layer, module in chosen.items() if not is_linear(module)), None)):
        raise ConfigError(f"adapters={name} dora=true: '{other}' is no linear layer; use dora=false, or other targets.")
    return list(chosen.values())


def _refuse_shared(model: nn.Module, chosen: Mapping[str, Any], name: str) -> None:
    owners: dict[int, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(owner)
    for layer, module in chosen.items():
        others = [owner for owner in owners[id(module.weight)] if owner != layer]
        if others:
            raise ConfigError(
                f"adapters={name}: '{layer}' shares its weight with '{others[0]}', so a correction of it alone could not be "
                f"merged; use other targets, or adapters.train=[{others[0]}.weight] to train both."
            )


def freeze_the_rest(model: nn.Module, train: Iterable[str], setting: str) -> FrozenWeights:
    """Freeze all but adapters and the parameters that the patterns `train` mean; statistics of frozen norms are held.

    Raises:
        ConfigError: a pattern means nothing; the message begins with `setting`.
    """
    from fasttrain.nn.low_rank import is_adapter

    own = [name for name in names_of_weights(model) if not is_adapter(name)]
    trained = set(select(own, train, setting))
    frozen = FrozenWeights(model, lambda name: not is_adapter(name) and name not in trained)
    frozen.freeze()
    return frozen


class _Frozen(Strategy):
    """What every strategy of this slot does: it freezes, and tells which weights a checkpoint can leave out."""

    slot = "adapters"
    frozen: FrozenWeights | None = None

    def started(self, model: nn.Module, optimizer: Any, step: int | Tensor) -> None:
        """From here on a frozen weight that is written is kept in checkpoints."""
        if self.frozen is not None:
            self.frozen.started(model)

    def left_out(self, model: nn.Module) -> set[str]:
        """What is frozen and as the model was built."""
        return set() if self.frozen is None or self.config.save_frozen else self.frozen.untouched(model)


_SWAPPED = Clash(
    slot="float8",
    why="it exchanges the linear layers that the adapters correct",
    instead="use float8=null, or train all weights",
)
_CUT = Clash(
    slot="tensor_parallel",
    why="it would cut the layers and leave the adapters beneath them whole",
    instead="use data_parallel, or train all weights",
)


@final
class Lora(_Frozen):
    """Train low-rank corrections of linear layers; all other weights stay as they are.

    Saves: gradients and optimizer states of the frozen weights, and nearly all of a checkpoint. Costs: two small
    products a layer. Needs: peft. Names of weights stay; `fc` gets `fc.lora_A.weight` and `fc.lora_B.weight`.
    Source: Hu et al. 2021, arXiv:2106.09685; docs/decisions/0005-adapters-beneath-their-layers.md.
    """

    name = "lora"
    Config = LoraConfig
    clashes = (_SWAPPED, _CUT)

    def model(self, model: nn.Module) -> nn.Module:
        """Put the adapters in, and freeze the rest."""
        from fasttrain.nn.low_rank import attach_adapters

        config = self.config
        layers = layers_to_adapt(model, config.targets, self.context, "lora", config.dora)
        attach_adapters(layers, config.rank, config.alpha, config.dropout, rslora=config.rslora, dora=config.dora)
        self.frozen = freeze_the_rest(model, config.train, "adapters=lora train")
        return model


@final
class Qlora(_Frozen):
    """lora over weights that are kept in 4 bits (NF4) by bitsandbytes, and widened in each forward and backward.

    Saves: what lora saves, and 72 to 74 % of the bytes of the corrected layers' weights in 16 bits. Costs: rounding of
    those weights, and widening them twice a step. Needs: peft, bitsandbytes, a CPU, CUDA or XPU device.
    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """

    name = "qlora"
    Config = QloraConfig
    clashes = (
        _SWAPPED,
        _CUT,
        *(
            Clash(
                slot="data_parallel",
                name=name,
                why="4-bit weights and their scales cannot be cut over ranks",
                instead="use data_parallel=ddp, or adapters=lora",
            )
            for name in ("fsdp", "hsdp", "deepspeed")
        ),
    )

    def model(self, model: nn.Module) -> nn.Module:
        """Quantise the layers, put the adapters in, and freeze the rest."""
        from fasttrain.distributed.replicas import broadcast_tensors
        from fasttrain.nn.low_rank import attach_adapters, is_linear, quantise_linears

        config, context = self.config, self.context
        bitsandbytes = require("bitsandbytes", needed_by="adapters=qlora", install=INSTALL)
        able = set(getattr(bitsandbytes, "supported_torch_devices", ("cpu", "cuda", "xpu")))
        if context.device.type not in able:
            raise ConfigError(
                f"adapters=qlora: bitsandbytes has no 4-bit weights on {context.device.type} (it has on "
                f"{', '.join(sorted(able))}); use adapters=lora."
            )
        layers = layers_to_adapt(model, config.targets, context, "qlora", config.dora)
        if any(not is_linear(layer) for layer in layers):
            raise ConfigError("adapters=qlora keeps linear layers in 4 bits, no convolutions; use adapters=lora.")
        if context.data_ranks > 1:
            # The scales are no tensors of the model, so ranks must be equal before they are taken.
            broadcast_tensors([*model.parameters(), *model.buffers()], context.data_group, context.host_group)
        # Those of transformers name layers whose weight's dtype their code reads, as T5 does of `wo`; these stay whole.
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        whole = [part for name, part in model.named_modules() if part in layers and kept & set(name.split("."))]
        narrow = [layer for layer in layers if layer not in whole]
        quantised = quantise_linears(model, narrow, context.dtypes.compute, config.double_quant)
        attach_adapters(
            [*quantised, *whole], config.rank, config.alpha, config.dropout, rslora=config.rslora, dora=config.dora
        )
        self.frozen = freeze_the_rest(model, config.train, "adapters=qlora train")
        return model


@final
class Freeze(_Frozen):
    """Keep parts of the model as they are, for the whole run or until a given time.

    Saves: gradients and optimizer states of what is frozen, the backward pass of what lies before the first trained
    part, and its share of checkpoints. Needs: something that trains from the first step on.
    Running statistics of frozen norms are held; dropout stays as the model has it.
    Source: Howard and Ruder 2018 (gradual unfreezing), arXiv:1801.06146.
    """

    name = "freeze"
    Config = FreezeConfig
    _late: ClassVar = tuple(
        Clash(
            slot="data_parallel",
            name=name,
            why="its shards fix at the start what trains, so unfreeze would change nothing",
            instead="use data_parallel=ddp, or two runs",
        )
        for name in ("fsdp", "hsdp", "deepspeed")
    )

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self.due: list[tuple[int, set[str]]] = []  # steps, and what trains from then on; the next one first
        self._steps, self._is_loaded, self._counts_by = 0, False, None

    @classmethod
    def limits(cls, config: Any) -> tuple[Clash, ...]:
        """Sharding cannot change what trains in the middle of a run."""
        return cls._late if config.unfreeze else ()

    def model(self, model: nn.Module) -> nn.Module:
        """Freeze what is frozen to the end; what trains later is frozen when the optimizer has taken it in."""
        config = self.config
        names = names_of_weights(model)
        if config.freeze:
            chosen = set(select(names, config.freeze, "adapters=freeze freeze"))
        else:
            trained = set(select(names, config.train, "adapters=freeze train"))
            chosen = {name for name in names if name not in trained}
        self.frozen = FrozenWeights(model, chosen.__contains__, config.statistics)
        self.due = self._times([name for name in names if name in self.frozen.names])
        if all(name in self.frozen.parameters or not p.requires_grad for name, p in model.named_parameters()):
            raise ConfigError("adapters=freeze leaves nothing that trains from the first step on; freeze less.")
        self.frozen.freeze(self.frozen.names - self._later())
        return model

    def _later(self) -> set[str]:
        return set().union(*(names for _, names in self.due))

    def _times(self, frozen: list[str]) -> list[tuple[int, set[str]]]:
        times: dict[str, int] = {}
        for pattern, when in self.config.unfreeze.items():
            amount, unit = _duration(when) or (0.0, "")
            if unit == "epochs":
                if self.context.steps_per_epoch is None:
                    raise ConfigError(
                        f"adapters=freeze unfreeze: '{pattern}' at {when}, but the length of an epoch is not known; give "
                        "steps."
                    )
                amount *= self.context.steps_per_epoch
            for name in select(frozen, [pattern], "adapters=freeze unfreeze", what="nothing that is frozen"):
                times[name] = min(round(amount), times.get(name, round(amount)))
        return [(steps, {n for n, when in times.items() if when == steps}) for steps in sorted(set(times.values()))]

    def started(self, model: nn.Module, optimizer: Any, step: int | Tensor) -> None:
        """Freeze what trains later, unless its time has come."""
        super().started(model, optimizer, step)
        if not self.due:
            return
        if self._counts_by is None:
            self._counts_by = optimizer
        if not self._is_loaded:
            self._steps = int(step)
        assert self.frozen is not None
        for steps, names in self.due:
            if self._steps < steps:
                self.frozen.freeze(names)
            else:
                self.frozen.thaw(names, model.training)

    def updated(self, model: nn.Module, optimizer: Any, step: int | Tensor) -> None:
        """After a step, refused or not: let train what is due. Steps are counted here, as `step` may be on the device."""
        if optimizer is not self._counts_by:
            return
        self._steps += 1
        for steps, names in self.due:
            if steps == self._steps:
                assert self.frozen is not None
                self.frozen.thaw(names, model.training)

    def left_out(self, model: nn.Module) -> set[str]:
        """What is frozen to the end; what trains later is kept from the start."""
        return super().left_out(model) - self._later()

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, which say what trains by now."""
        return {"steps": self._steps} if self.due else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._steps, self._is_loaded = state["steps"], True
