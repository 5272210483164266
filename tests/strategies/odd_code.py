"""Training steps as research code writes them, odd ones among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttrain.core.plan import Plan

Share = dict[str, Any]
Phase = Callable[[nn.Module, Share, Plan], None]


class Net(nn.Module):
    """An encoder, a head and a branch; `norm` makes the encoder's norm."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), norm(16), nn.GELU(), nn.Linear(16, 16))
        self.head, self.extra = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return self.head(h) + 0.1 * self.extra(h)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def cross_entropy(output: Tensor, share: Share) -> Tensor:
    return F.cross_entropy(output, share["y"])


def one_forward(model: Any, share: Share, plan: Plan) -> None:
    with plan.microbatch(True):
        cross_entropy(model(share["x"]), share).backward()


def two_forwards(model: Any, share: Share, plan: Plan) -> None:
    with plan.microbatch(True):
        loss = cross_entropy(model(share["x"]), share) + F.mse_loss(model(share["x"]), model(share["x"].flip(1)))
        loss.backward()


def bypass(model: Any, share: Share, plan: Plan) -> None:
    """Calls submodules, never the model."""
    output = model.head(model.encoder(share["x"])) + model.extra(share["x"].repeat(1, 2))
    plan.backward(cross_entropy(output, share))


def branch_on_one_rank(model: Any, share: Share, plan: Plan) -> None:
    h = model.encoder(share["x"])
    output = model.head(h) + model.extra(h) if share["rank"] == 0 else model.head(h)
    plan.backward(cross_entropy(output, share))


def branch_nowhere(model: Any, share: Share, plan: Plan) -> None:
    plan.backward(cross_entropy(model.head(model.encoder(share["x"])), share))


def gradient_penalty(model: Any, share: Share, plan: Plan) -> None:
    with plan.microbatch(True):
        x = share["x"].clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (cross_entropy(y, share) + slope.pow(2).sum(1).mean()).backward()


def two_backwards_last_synchronised(model: Any, share: Share, plan: Plan) -> None:
    plan.backward(cross_entropy(model(share["x"]), share), is_last=False)
    plan.backward(model(share["x"]).pow(2).mean())


def accumulated(model: Any, share: Share, plan: Plan) -> None:
    for i in range(4):
        with plan.microbatch(i == 3), plan.forward():
            loss = F.cross_entropy(model(share["x"][i : i + 1]), share["y"][i : i + 1]) / 4
            loss.backward()


def only_earlier_microbatches_use_the_branch(model: Any, share: Share, plan: Plan) -> None:
    plan.backward(cross_entropy(model(share["x"]), share), is_last=False)
    plan.backward(cross_entropy(model.head(model.encoder(share["x"])), share))


def nested(model: Any, share: Share, plan: Plan) -> None:
    """A synchronised backward within a synchronised microbatch is a part of it."""
    with plan.microbatch(True):
        plan.backward(cross_entropy(model(share["x"]), share))


def checkpointed(model: Any, share: Share, plan: Plan) -> None:
    """The same layers twice, each time run again in backward."""
    with plan.microbatch(True):
        h = checkpoint(model.encoder, share["x"], use_reentrant=False)
        h = h + checkpoint(model.encoder, share["x"].flip(1), use_reentrant=False)
        cross_entropy(model.head(h), share).backward()


def empty_share(model: Any, share: Share, plan: Plan) -> None:
    """One rank has nothing to compute, and still takes part."""
    with plan.microbatch(True):
        if share["rank"] == 1:
            return
        cross_entropy(model(share["x"]), share).backward()


def discriminator(model: Any, share: Share, plan: Plan) -> None:
    with plan.microbatch(True):
        fake = model.g(share["x"]).detach()
        (F.softplus(model.d(fake)) + F.softplus(-model.d(share["x"].flip(0)))).mean().backward()


def generator(model: Any, share: Share, plan: Plan) -> None:
    with plan.microbatch(True):
        F.softplus(-model.d(model.g(share["x"]))).mean().backward()


def freeze(*parts: str) -> Phase:
    def frozen(model: Any, share: Share, plan: Plan) -> None:
        for name, part in model.named_children():
            part.requires_grad_(name not in parts)
        one_forward(model, share, plan)

    return frozen


# name -> (model, phases of a step: code, and which part of the model is then updated)
CODE: dict[str, tuple[Callable[[], nn.Module], list[tuple[Phase, str]]]] = {
    "one forward": (Net, [(one_forward, "")]),
    "two forwards": (Net, [(two_forwards, "")]),
    "two forwards with BatchNorm": (lambda: Net(nn.BatchNorm1d), [(two_forwards, "")]),
    "model.encoder(x)": (Net, [(bypass, "")]),
    "a branch unused on one rank": (Net, [(branch_on_one_rank, "")]),
    "a branch unused everywhere": (Net, [(branch_nowhere, "")]),
    "gradient penalty": (Net, [(gradient_penalty, "")]),
    "two backwards, the last synchronised": (Net, [(two_backwards_last_synchronised, "")]),
    "four microbatches": (Net, [(accumulated, "")]),
    "a branch in an earlier microbatch": (Net, [(only_earlier_microbatches_use_the_branch, "")]),
    "nested": (Net, [(nested, "")]),
    "checkpointed twice": (Net, [(checkpointed, "")]),
    "an empty share": (Net, [(empty_share, "")]),
    "GAN": (Gan, [(discriminator, "d."), (generator, "g.")]),
    "frozen now and then": (Net, [(freeze(), ""), (freeze("encoder"), ""), (freeze("extra", "head"), "")]),
}


def share_of(rank: int, step: int) -> Share:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 8, generator=generator)
    return {"x": x, "y": torch.randint(4, (4,), generator=generator), "rank": rank}
