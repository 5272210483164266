"""optimizer: the update rule, what of the model it acts on, and where its states are kept.

| name | states a parameter | what it is for |
|---|---|---|
| sgd | 1 | convolutional networks |
| adamw | 2 | transformers |
| lamb | 2 | large batches |
| muon | 1 of matrices, 2 of the rest | fewer steps |
| adamw_8bit | 2 of 1 byte each | memory |
| adafactor | a row and a column | memory |

A step that is refused is refused on the device: nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, final

from fasttrain.core.strategy import NO_CONTEXT, Clash, Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.optim.chunks import StepInBackward, step_in_backward, step_in_chunks
from fasttrain.optim.fused import fused_here, give_momentum_buffers
from fasttrain.optim.groups import Grouping, embedding_weights, norm_weights, parameter_groups, refuse_complex
from fasttrain.optim.ranges import check_ranges
from fasttrain.optim.rounding import shared_generator

Factory = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class InBackward(Grouping):
    """`in_backward`: step each parameter in the backward pass, as soon as its gradient is complete, and free that."""

    in_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class States(InBackward):
    """`state_dtype`: of the moments (null: that of the weights). `offload`: moments are on the host between steps."""

    state_dtype: Literal["fp32", "bf16"] | None = None
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class SgdConfig(States):
    """Settings of torch.optim.SGD. `fused=None`: where the device has it."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "optimizer.nesterov=true needs a momentum; give optimizer.momentum=0.9, or nesterov=false."
            )


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(States):
    """Settings of torch.optim.AdamW. `fused=None`: where the device has it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    fused: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LambConfig(States):
    """`always_adapt`: scale the update of what does not decay (norms, biases), too."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    always_adapt: bool = False


@dataclass(frozen=True, kw_only=True)
class Rest:
    """AdamW for what is no matrix of a hidden layer; `lr=None`: that of the matrices."""

    lr: float | None = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_ranges(self, "adamw.")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(States):
    """`adjust`: the rate by a matrix's shape; `match_rms_adamw` makes updates as large as AdamW's. `adamw`: the rest."""

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    ns_steps: int = 5
    adjust: Literal["original", "match_rms_adamw"] = "original"
    adamw: Rest = field(default_factory=Rest)


@dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig(InBackward):
    """Settings of torchao.optim.AdamW8bit."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(InBackward):
    """Settings of torch.optim.Adafactor. `lr`: the largest relative step; `d`: updates are clipped at this RMS."""

    lr: float = 0.01
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0


_NOT_OF_THE_RULE = frozenset(f.name for f in fields(States)) | {"weight_decay"}


def of_the_rule(config: Any) -> dict[str, Any]:
    """The settings that torch's own constructor takes."""
    return {name: value for name, value in asdict(config).items() if name not in _NOT_OF_THE_RULE}


def groups_of(model: Any, config: Any, blocks: list[Any] | None) -> list[dict[str, Any]]:
    """Parameter groups as a config has them."""
    return parameter_groups(model, lr=config.lr, weight_decay=config.weight_decay, settings=config, blocks=blocks)


def sgd(model: Any, config: SgdConfig, blocks: list[Any] | None = None) -> Any:
    """torch.optim.SGD over what trains in a model."""
    fused = fused_here(config.fused, model, "sgd")
    optimizer = torch.optim.SGD(groups_of(model, config, blocks), **{**of_the_rule(config), "fused": fused})
    if fused:
        give_momentum_buffers(optimizer)
    return optimizer


def adamw(model: Any, config: AdamWConfig, blocks: list[Any] | None = None) -> Any:
    """torch.optim.AdamW over what trains in a model. Source: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    fused = fused_here(config.fused, model, "adamw")
    return torch.optim.AdamW(groups_of(model, config, blocks), **{**of_the_rule(config), "fused": fused})


def lamb(model: Any, config: LambConfig, blocks: list[Any] | None = None) -> Any:
    """LAMB over what trains in a model. Source: You et al. 2020, arXiv:1904.00962."""
    from fasttrain.optim.lamb import Lamb

    return Lamb(groups_of(model, config, blocks), **of_the_rule(config))


def muon(model: Any, config: MuonConfig, blocks: list[Any]) -> Any:
    """Muon over the matrices and convolutions inside of `blocks`, AdamW over all else that trains in a model.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    from fasttrain.optim.muon import Muon

    hidden = {id(p) for block in blocks for p in block.parameters() if p.dim() > 1 and not p.is_complex()}
    hidden -= embedding_weights(model) | norm_weights(model)
    rest = config.adamw
    groups = []
    for is_hidden, own in ((True, config), (False, rest)):
        lr = config.lr if own.lr is None else own.lr
        parts = parameter_groups(model, lr=lr, weight_decay=own.weight_decay, settings=config, blocks=blocks)
        for group in parts:
            pairs = zip(group["params"], group["param_names"], strict=True)
            kept = [(p, name) for p, name in pairs if (id(p) in hidden) is is_hidden]
            if kept:
                of_rest = {"betas": rest.betas, "eps": rest.eps, "fused": fused_here(None, model, "muon")}
                more = {"muon": True} if is_hidden else {"muon": False, **of_rest}
                groups.append({**group, "params": [p for p, _ in kept], "param_names": [n for _, n in kept], **more})
    settings = {k: v for k, v in of_the_rule(config).items() if k != "adamw"}
    return Muon(groups, **settings)


def adamw_8bit(model: Any, config: AdamW8bitConfig, blocks: list[Any] | None = None) -> Any:
    """torchao.optim.AdamW8bit over what trains in a model. Source: Dettmers et al. 2022, arXiv:2110.02861."""
    from fasttrain.optim.adamw_8bit import adamw_8bit_class

    return adamw_8bit_class()(groups_of(model, config, blocks), **of_the_rule(config))


def adafactor(model: Any, config: AdafactorConfig, blocks: list[Any] | None = None) -> Any:
    """torch.optim.Adafactor over what trains in a model. Source: Shazeer and Stern 2018, arXiv:1804.04235."""
    from fasttrain.optim.adafactor import Adafactor

    return Adafactor(groups_of(model, config, blocks), **of_the_rule(config))


_ALL_AT_ONCE = "it needs all gradients before the first update, and in_backward=true steps and frees each as it comes"
_OFF = "optimizer.in_backward=false"
IN_BACKWARD = (
    Clash(slot="precision", name="fp16", why=f"{_ALL_AT_ONCE}; a scaled loss", instead=f"use precision=bf16 or {_OFF}"),
    Clash(slot="gradient_clipping", why=_ALL_AT_ONCE, instead=f"use gradient_clipping=null or {_OFF}"),
    Clash(slot="nonfinite", why=_ALL_AT_ONCE, instead=f"use nonfinite=null or {_OFF}"),
    Clash(
        slot="data_parallel",
        why="gradients are averaged over ranks after the hook that steps has run",
        instead=f"use one process with data_parallel=null, or {_OFF}",
    ),
    Clash(
        slot="pipeline_parallel",
        why="each stage has a backward pass for every microbatch, in an order of its own",
        instead=f"use pipeline_parallel=null or {_OFF}",
    ),
    Clash(
        slot="accumulation",
        name="auto",
        why="a step that runs out of memory is done again, and in_backward=true has changed some weights by then",
        instead=f"use accumulation=microbatches or {_OFF}",
    ),
)


class Rule(Strategy):
    """What all optimizers share: groups, and a step in chunks where weights or states are narrow or elsewhere."""

    slot = "optimizer"
    takes_complex: ClassVar[bool] = False

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._generator: Any = None
        self._in_backward: StepInBackward | None = None
        self._offloads = False

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """The optimizer of a model; `blocks` where `needs_blocks`."""
        raise NotImplementedError

    def needs_blocks(self) -> str | None:
        """The setting that needs the blocks of a model."""
        return None if self.config.layer_decay is None else "optimizer.layer_decay"

    @classmethod
    def limits(cls, config: Any) -> tuple[Clash, ...]:
        """What cannot be had together with steps in the backward pass."""
        return (*cls.clashes, *IN_BACKWARD) if config.in_backward else cls.clashes

    @classmethod
    def idle(cls, config: Any) -> tuple[str, ...]:
        """Microbatches matter to steps in the backward pass alone."""
        return () if config.in_backward else ("microbatch",)

    def optimizer(self, factory: Factory | None) -> Factory:
        """The factory."""
        return self._build

    def _build(self, model: Any) -> Any:
        needed_by = self.needs_blocks()
        blocks = None if needed_by is None else self.context.blocks(model, needed_by=needed_by)
        if not self.takes_complex:
            refuse_complex(model, f"optimizer={self.name}")
        optimizer = self.make(model, blocks)
        config = self.config
        asked, offload = getattr(config, "state_dtype", None), getattr(config, "offload", False)
        narrow = self._context is not None and self._context.dtypes.parameters is not None
        if not (narrow or asked or offload or config.in_backward):
            return optimizer
        # States that are small already stay as their optimizer made them.
        kept = torch.float32 if narrow and not isinstance(config, States) else None
        step = step_in_chunks(
            optimizer,
            narrow=narrow,
            state_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, None: kept}[asked],
            offload=offload,
            generator=self.generator if narrow or asked == "bf16" else None,
        )
        self._offloads = self._offloads or offload
        if config.in_backward:
            if self._in_backward is not None:
                raise ConfigError(
                    f"optimizer={self.name} in_backward=true: with several optimizers, the backward pass for one would "
                    "step what another has to keep; use optimizer.in_backward=false."
                )
            self._in_backward = step_in_backward(optimizer, step)
        return optimizer

    @property
    def generator(self) -> Any:
        """What rounds stochastically: the same numbers on every rank, or replicas would drift apart."""
        if self._generator is None:
            self._generator = shared_generator(self.context.device)
        return self._generator

    def microbatch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Steps are taken in the last microbatch alone; gradients of earlier ones are kept until then."""
        return self._in_backward.last() if is_last and self._in_backward is not None else NO_CONTEXT

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers of rounding stand. Waits for states on their way to the host."""
        if self._offloads and self.context.device.type != "cpu":
            torch.accelerator.synchronize()
        return {} if self._generator is None else {"rounding": self._generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        """Put it back."""
        if self._generator is not None and "rounding" in state:
            self._generator.set_state(state["rounding"].cpu())


@final
class Sgd(Rule):
    """Stochastic gradient descent with momentum. Keeps one state a parameter."""

    name = "sgd"
    takes_complex = True
    Config = SgdConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `sgd`."""
        return sgd(model, self.config, blocks)


@final
class AdamW(Rule):
    """Adam with decoupled weight decay. Keeps two states a parameter."""

    name = "adamw"
    takes_complex = True
    Config = AdamWConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `adamw`."""
        return adamw(model, self.config, blocks)


@final
class Lamb(Rule):
    """Adam whose updates are scaled to the size of each tensor. Keeps two states a parameter."""

    name = "lamb"
    Config = LambConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `lamb`."""
        return lamb(model, self.config, blocks)


@final
class Muon(Rule):
    """Orthogonalised momentum for matrices of hidden layers, AdamW for the rest. Keeps one state of a matrix."""

    name = "muon"
    takes_complex = True  # by AdamW
    Config = MuonConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `muon`."""
        assert blocks is not None
        return muon(model, self.config, blocks)

    def needs_blocks(self) -> str:
        """Hidden layers are those inside of blocks."""
        return "optimizer=muon"


@final
class AdamW8bit(Rule):
    """AdamW with moments of 8 bits. Keeps 2 bytes a parameter, and a float32 for each 256 elements of a moment."""

    name = "adamw_8bit"
    Config = AdamW8bitConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `adamw_8bit`."""
        return adamw_8bit(model, self.config, blocks)


@final
class Adafactor(Rule):
    """The variance of a matrix as the product of a row and a column. Keeps next to nothing."""

    name = "adafactor"
    Config = AdafactorConfig

    def make(self, model: Any, blocks: list[Any] | None) -> Any:
        """See `adafactor`."""
        return adafactor(model, self.config, blocks)
