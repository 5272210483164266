"""Small trainings on ranks, and what they send and read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context, DtypePolicy
from fasttrain.strategies.data_parallel import Ddp, DdpConfig


def wide(width: int = 64, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def batch(step: int, rank: int | None = None, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, width, generator=generator)
    return x if rank is None else x[rank * 8 : rank * 8 + 8]


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return (output - x.roll(1, dims=1)).pow(2).mean()


def steps(model: nn.Module, around: Any, low: int = 0, high: int = 4) -> list[Tensor]:
    """Gradients of each step, of a training that follows them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(low, high):
        x = batch(step, dist.get_rank())
        with around():
            loss_of(model(x), x).backward()
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


class nothing:  # noqa: N801 (stands where a context is made)
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Counted:
    """Counts collectives and reads of tensors by the host."""

    READS = ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy")

    def __enter__(self) -> Counted:
        self.sums, self.reads = 0, 0
        self.kept = {name: getattr(Tensor, name) for name in self.READS}
        # As the class holds it: fetched from the class, the method would no longer bind when it is put back.
        self.all_reduce = vars(dist.ProcessGroup)["allreduce"]
        all_reduce = dist.ProcessGroup.allreduce

        def sums(*args: Any, **kwargs: Any) -> Any:
            self.sums += 1
            return all_reduce(*args, **kwargs)

        def reading(name: str) -> Any:
            def read(*args: Any, **kwargs: Any) -> Any:
                self.reads += 1
                return self.kept[name](*args, **kwargs)

            return read

        dist.ProcessGroup.allreduce = sums
        for name in self.READS:
            setattr(Tensor, name, reading(name))
        return self

    def __exit__(self, *error: object) -> None:
        dist.ProcessGroup.allreduce = self.all_reduce
        for name, method in self.kept.items():
            setattr(Tensor, name, method)


def plan_on_ranks(config: DdpConfig | None = None, reduce: torch.dtype | None = None) -> tuple[Plan, Any]:
    strategy = Ddp(config)
    context = Context(
        device=torch.device("cpu"), data_rank=dist.get_rank(), data_ranks=2, dtypes=DtypePolicy(reduce=reduce)
    )
    plan = Plan([strategy], context)
    return plan, strategy
