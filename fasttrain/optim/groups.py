"""Parameter groups: what decays, and at which rate each part of a model learns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import nn
from fasttrain.optim.ranges import check_ranges

# Names of last layers, for models that register them before their blocks.
HEADS = frozenset({"head", "heads", "lm_head", "classifier", "fc", "cls", "score"})


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters by a pattern of their names (`head.*`), with a rate and a weight decay of their own.

    What is left out stays as for all others.
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What decays, and which parts have a rate of their own.

    `decay_norms`: also decay parameters of fewer than two dims (norms, biases), whatever class they are of, and those
    of torch's norms.
    `decay_embeddings`: also decay the weights of `nn.Embedding` and `nn.EmbeddingBag`. `layer_decay`: the rate is
    multiplied by it once for each block that lies above. `groups`: by name; the first that matches wins.
    """

    decay_norms: bool = False
    decay_embeddings: bool = False
    layer_decay: float | None = None
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        for i, group in enumerate(self.groups):
            check_ranges(group, f"groups[{i}].")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"layer_decay={self.layer_decay} must be above 0 and at most 1; often 0.65 to 0.9, null for one rate."
            )


def trained_parameters(model: Any) -> dict[str, Any]:
    """What trains, by name, in order of registration; a parameter with two names stands once, under the first.

    Raises:
        ConfigError: nothing trains.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(f"{type(model).__name__} has no parameter that trains; set requires_grad on some.")
    return trained


def refuse_complex(model: Any, asked: str) -> None:
    """Refuse complex weights that train.

    Raises:
        ConfigError: there is one; the message begins with `asked`.
    """
    name = next((name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad), None)
    if name is not None:
        raise ConfigError(
            f"{asked}: '{name}' is complex, and this rule is for real numbers; use optimizer=adamw or optimizer=sgd, or "
            "keep real and imaginary parts in one real weight (torch.view_as_complex in the forward)."
        )


def embedding_weights(model: Any) -> set[int]:
    """Identities of the weights of embeddings. A head that is tied to one is the same parameter, so it counts too."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


def norm_weights(model: Any) -> set[int]:
    """Identities of the weights and biases of norms, which have two dims and more where a norm is over images."""
    kinds = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


def layer_factors(model: Any, blocks: list[Any], layer_decay: float) -> dict[int, float]:
    """The factor of the rate of each parameter, by identity.

    With n blocks: what follows them has 1, block i (from 0) has d^(n-i), what comes before has d^(n+1). A parameter
    outside of the blocks follows those that are registered before it, or all of them if it belongs to a head by name.
    Source: Bao et al. 2022, arXiv:2106.08254 (BEiT).
    """
    count = len(blocks)
    block_of = {id(p): i for i, block in reversed(list(enumerate(blocks))) for p in block.parameters()}
    factors: dict[int, float] = {}
    begun = 0  # blocks that were met so far
    for name, parameter in model.named_parameters():
        if id(parameter) in block_of:
            depth = block_of[id(parameter)] + 1
            begun = max(begun, depth)
        elif HEADS & set(name.split(".")[:-1]):
            depth = count + 1
        else:
            depth = begun if begun < count else count + 1
        factors[id(parameter)] = layer_decay ** (count + 1 - depth)
    return factors


def parameter_groups(
    model: Any,
    *,
    lr: float,
    weight_decay: float,
    settings: Grouping | None = None,
    blocks: list[Any] | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, with `param_names`: one for each pair of rate and weight decay that occurs.

    Every trained parameter is in exactly one of them. `blocks`: for `layer_decay`.

    Raises:
        ConfigError: nothing trains, or a pattern matches no parameter.
    """
    settings = Grouping() if settings is None else settings
    trained = trained_parameters(model)
    embeddings = set() if settings.decay_embeddings else embedding_weights(model)
    norms = norm_weights(model)
    factors: dict[int, float] = {}
    if settings.layer_decay is not None:
        assert blocks is not None, "layer_decay needs the blocks of the model"
        factors = layer_factors(model, blocks, settings.layer_decay)
    given = _matched(model, settings.groups)
    parts: dict[tuple[float, float], list[str]] = {}
    for name, parameter in trained.items():
        is_matrix = parameter.dim() > 1 and id(parameter) not in norms
        decays = (settings.decay_norms or is_matrix) and id(parameter) not in embeddings
        own_lr, own_decay = lr * factors.get(id(parameter), 1.0), weight_decay if decays else 0.0
        group = given.get(id(parameter))
        if group is not None:
            own_lr = own_lr if group.lr is None else group.lr
            own_decay = own_decay if group.weight_decay is None else group.weight_decay
        parts.setdefault((own_lr, own_decay), []).append(name)
    groups = [
        {"params": [trained[name] for name in names], "param_names": names, "lr": own_lr, "weight_decay": own_decay}
        for (own_lr, own_decay), names in parts.items()
    ]
    assert sum(len(group["params"]) for group in groups) == len(trained)
    return groups


def _matched(model: Any, groups: Iterable[Group]) -> dict[int, Group]:
    """The group of each parameter that a pattern matches, by identity; any of its names may match."""
    matched: dict[int, Group] = {}
    names = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for i, group in enumerate(groups):
        hits = [identity for name, identity in names if fnmatchcase(name, group.match)]
        if not hits:
            raise ConfigError(f"optimizer.groups[{i}].match={group.match} matches no parameter; {_near(group, names)}.")
        for identity in hits:
            matched.setdefault(identity, group)
    return matched


def _near(group: Group, names: list[tuple[str, int]]) -> str:
    plain = re.sub(r"[*?\[\]]+", "", group.match).strip(".")
    # A pattern is most often the name of a module with a star behind it, so modules are looked through as well.
    known = dict.fromkeys(
        part for name, _ in names for part in (name, name.rpartition(".")[0], name.split(".")[0]) if part
    )
    near = difflib.get_close_matches(plain, known, n=3, cutoff=0.4) or list(known)[:3]
    return "names here are for example " + ", ".join(near)
