"""batch_norm: frozen to the bit, and sync against torch's batch norm on one process that sees the whole batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.errors import ConfigError
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.sync_batch_norm import SyncBatchNorm, synchronise_batch_norm
from fasttrain.strategies.batch_norm import Sync
from fasttrain.strategies.data_parallel import Ddp
from tests.helpers import QUIET
from tests.helpers import state as copy_of_state
from tests.ranks import run_ranks
from tests.stack import NormedPictures, Stack

CPU = torch.device("cpu")
# Shares of 12 samples by rank: two even, three uneven, three of which one has none.
SHARES = {"even": [6, 6], "uneven": [2, 7, 3], "one empty": [8, 0, 4]}
# name -> (batch norm, shape of a sample)
LAYERS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "1d flat": (nn.BatchNorm1d, {}, (5,)),
    "1d": (nn.BatchNorm1d, {}, (5, 4)),
    "2d": (nn.BatchNorm2d, {}, (5, 4, 3)),
    "3d": (nn.BatchNorm3d, {}, (5, 4, 3, 2)),
    "without affine": (nn.BatchNorm2d, {"affine": False}, (5, 4, 3)),
    "without bias": (nn.BatchNorm2d, {}, (5, 4, 3)),
    "momentum None": (nn.BatchNorm2d, {"momentum": None}, (5, 4, 3)),
    "without running statistics": (nn.BatchNorm2d, {"track_running_stats": False}, (5, 4, 3)),
    "channels last": (nn.BatchNorm2d, {}, (5, 4, 3)),
    "with an activation": (BatchNormAct2d, {"act_layer": nn.SiLU}, (5, 4, 3)),
}


def layer_of(name: str) -> nn.Module:
    kind, settings, _ = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(5, **settings)
    if name == "without bias":
        layer.register_parameter("bias", None)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return layer


def batch_of(name: str, step: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Samples whose channels differ in mean and width, and what their loss is weighted with."""
    generator = torch.Generator().manual_seed(step)
    shape = LAYERS[name][2]
    along = [1, 5] + [1] * (len(shape) - 1)
    width, mean = torch.arange(1.0, 6.0).view(along), torch.arange(5.0).view(along)
    x = torch.randn(12, *shape, generator=generator) * width + mean
    weight = torch.randn(12, *shape, generator=generator)
    if name == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    return x.to(dtype), weight.to(dtype)


def two_steps(layer: nn.Module, name: str, low: int = 0, high: int = 12, dtype: torch.dtype = torch.float32) -> Any:
    """Two training steps and one evaluation over samples low to high; the loss is a sum, so shares just add."""
    outputs, input_grads = [], []
    for step in range(2):
        x, weight = (tensor[low:high] for tensor in batch_of(name, step, dtype))
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * weight).sum().backward()
        outputs.append(y.detach())
        assert x.grad is not None
        input_grads.append(x.grad)
    grads = {key: parameter.grad for key, parameter in layer.named_parameters()}
    layer.eval()
    if layer.track_running_stats:  # else each rank evaluates its own share, as torch's SyncBatchNorm does
        with torch.no_grad():
            outputs.append(layer(batch_of(name, 2, dtype)[0][low:high]))
    return {"outputs": outputs, "input_grads": input_grads, "grads": grads, "state": layer.state_dict()}


def on_ranks(shares: list[int]) -> dict[str, Any]:
    rank = dist.get_rank()
    low = sum(shares[:rank])
    results: dict[str, Any] = {}
    for name in LAYERS:
        layer = layer_of(name)
        assert synchronise_batch_norm(layer) == 1
        results[name] = two_steps(layer, name, low, low + shares[rank])
    bf16 = layer_of("2d")
    synchronise_batch_norm(bf16)
    results["bf16 input"] = two_steps(bf16, "2d", low, low + shares[rank], torch.bfloat16)
    return results


@pytest.fixture(scope="module", params=list(SHARES))
def shared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    shares = SHARES[request.param]
    return run_ranks(len(shares), on_ranks, shares)


def close(a: Tensor, b: Tensor, rtol: float = 1e-6) -> bool:
    """Within `rtol` of the largest value."""
    return bool((a.double() - b.double()).abs().max() <= rtol * b.double().abs().max())


def differences(shared: list[dict[str, Any]], name: str, whole: Any, rtol: float = 1e-6) -> list[str]:
    """What is not as on one process, of everything two training steps and an evaluation leave behind."""
    wrong = []
    compared = 0
    for what in ("outputs", "input_grads"):
        for step, expected in enumerate(whole[what]):
            together = torch.cat([rank[name][what][step] for rank in shared])
            compared += 1
            if not close(together, expected, rtol):
                wrong.append(f"{what} of step {step}")
    for key, expected in whole["grads"].items():
        compared += 1
        if not close(sum(rank[name]["grads"][key] for rank in shared), expected, rtol):
            wrong.append(f"gradient of {key}")
    for key, expected in whole["state"].items():
        for number, rank in enumerate(shared):
            compared += 1
            if not close(rank[name]["state"][key], expected, rtol):
                wrong.append(f"{key} on rank {number}")
    assert compared >= 5
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_together_normalise_as_one_process_does(shared: list[dict[str, Any]], name: str) -> None:
    assert differences(shared, name, two_steps(layer_of(name), name)) == []


@pytest.mark.ranks
def test_inputs_in_bfloat16_are_counted_in_float32(shared: list[dict[str, Any]]) -> None:
    whole = two_steps(layer_of("2d"), "2d", dtype=torch.bfloat16)
    assert shared[0]["bf16 input"]["outputs"][0].dtype == torch.bfloat16
    for rank in shared:
        for key in ("running_mean", "running_var"):
            assert close(rank["bf16 input"]["state"][key], whole["state"][key])
    # 2^-8: one rounding of bfloat16.
    assert differences(shared, "bf16 input", whole, rtol=2.0**-8) == []


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*stem, Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return model.double()  # so that rounding, which training amplifies, does not hide a difference


STEPS = 5


def train_resnet(plan: Plan, low: int, high: int, checkpointed: bool = False) -> dict[str, Tensor]:
    model = plan.model(resnet())
    if checkpointed:
        assert checkpoint_blocks([part for part in model if isinstance(part, Block)]) == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(12, 3, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (12,), generator=generator)
        loss = F.cross_entropy(model(x[low:high]), y[low:high], reduction="sum") / 12
        plan.backward(loss * plan.context.data_ranks)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def resnet_on_ranks(is_synced: bool, shares: list[int], checkpointed: bool) -> Any:
    rank = dist.get_rank()
    context = Context(device=CPU, data_rank=rank, data_ranks=len(shares))
    plan = Plan([Ddp(), *([Sync()] if is_synced else [])], context)
    low = sum(shares[:rank])
    return train_resnet(plan, low, low + shares[rank], checkpointed)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max(float((a[key] - b[key]).abs().max()) for key in a)


@pytest.mark.ranks
@pytest.mark.parametrize(("shares", "checkpointed"), [([6, 6], False), ([5, 4, 3], True)])
def test_a_small_resnet_on_ranks_is_the_one_on_one_process(shares: list[int], checkpointed: bool) -> None:
    whole = train_resnet(Plan([], Context(device=CPU)), 0, 12)
    for state in run_ranks(len(shares), resnet_on_ranks, True, shares, checkpointed):
        assert distance(state, whole) < 1e-10
        assert int(state["1.num_batches_tracked"]) == STEPS


@pytest.mark.ranks
def test_without_synchronisation_two_ranks_are_other_mathematics() -> None:
    whole = train_resnet(Plan([], Context(device=CPU)), 0, 12)
    state, _ = run_ranks(2, resnet_on_ranks, False, [6, 6], False)
    assert distance(state, whole) > 1e-2


def odd_uses() -> dict[str, Any]:
    """What happens in places where a collective is easily forgotten or made twice."""
    seen: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    strategy = Sync(context=Context(device=CPU, data_rank=dist.get_rank(), data_ranks=2))
    strategy.model(model)
    layer = model[1]
    assert isinstance(layer, SyncBatchNorm)
    calls = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["group"])
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    x = torch.arange(12.0).view(4, 3) * (1 + dist.get_rank())
    y = model(x)
    seen["forward"] = len(calls)
    (y**2).sum().backward()
    seen["forward and backward"] = len(calls)
    seen["is a group of its own"] = all(group is not dist.group.WORLD for group in calls)
    before = layer.running_mean.clone()
    with torch.no_grad():
        model(x)
    seen["moves without gradients"] = not torch.equal(before, layer.running_mean)
    calls.clear()
    model.eval()
    model(x)
    seen["evaluation"] = len(calls)
    model.train()
    twice = copy.deepcopy(model)
    assert torch.equal(twice(x), model(x))
    seen["copies share the group"] = twice[1].sync_handle is layer.sync_handle
    # two forwards before one backward, and a forward that runs again in the backward
    (model(x) + model(x + 1)).sum().backward()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((model(inputs) ** 3).sum(), inputs, create_graph=True)
    try:
        slope.pow(2).sum().backward()
    except RuntimeError as error:
        seen["twice differentiated"] = str(error)
    dist.all_reduce = all_reduce
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    twice.load_state_dict(model.state_dict())
    for run, net in (("compiled", compiled), ("eager", model)):
        net.zero_grad()
        net(x).pow(2).sum().backward()
        seen[run] = [p.grad.clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
    nothing = torch.empty(0, 4)
    before = layer.state_dict()["running_mean"].clone()
    assert layer(nothing).shape == (0, 4)
    with pytest.raises(ConfigError) as caught:
        strategy.model(nn.Linear(2, 2))
    seen["no batch norm"] = str(caught.value)
    seen["no sample anywhere moves nothing"] = torch.equal(before, layer.running_mean)
    return seen


@pytest.fixture(scope="module")
def odd() -> list[dict[str, Any]]:
    return run_ranks(2, odd_uses)


@pytest.mark.ranks
def test_there_is_one_sum_a_direction_and_none_in_evaluation(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert seen["forward"] == 1
        assert seen["forward and backward"] == 2
        assert seen["evaluation"] == 0


@pytest.mark.ranks
def test_statistics_travel_in_a_group_of_their_own_that_copies_share(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert seen["is a group of its own"]
        assert seen["copies share the group"]


@pytest.mark.ranks
def test_running_statistics_move_without_gradients_and_not_without_samples(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert seen["moves without gradients"]
        assert seen["no sample anywhere moves nothing"]


@pytest.mark.ranks
def test_one_compiled_graph_holds_the_layer_and_computes_the_same(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert len(seen["compiled"]) == len(seen["eager"]) == 7
        assert all(torch.equal(a, b) for a, b in zip(seen["compiled"], seen["eager"], strict=True))


@pytest.mark.ranks
def test_differentiating_twice_is_refused_loudly(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert "once_differentiable" in seen["twice differentiated"]


@pytest.mark.ranks
def test_a_model_without_batch_norm_is_refused(odd: list[dict[str, Any]]) -> None:
    for seen in odd:
        assert seen["no batch norm"].startswith("batch_norm=sync: Linear has no batch norm")


class Named(nn.BatchNorm2d):
    """A batch norm of the user's own name."""


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_modules_stay_the_objects_and_kinds_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2), Named(2)), nn.SyncBatchNorm(2))
    kinds = [type(module) for module in model.modules()]
    modules, keys = list(model.modules()), list(model.state_dict())
    assert synchronise_batch_norm(model) == 3
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(isinstance(module, kind) for module, kind in zip(modules, kinds, strict=True))
    assert list(model.state_dict()) == keys
    assert synchronise_batch_norm(model) == 0
    assert pickle.loads(pickle.dumps(model[0])).sync_handle.group is None


def test_without_ranks_a_synchronised_layer_is_torchs() -> None:
    plain, synced = layer_of("2d"), layer_of("2d")
    synchronise_batch_norm(synced)
    expected, found = two_steps(plain, "2d"), two_steps(synced, "2d")
    assert all(torch.equal(a, b) for a, b in zip(expected["outputs"], found["outputs"], strict=True))


def test_a_batch_norm_with_its_own_forward_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'1' is a OwnForward with a forward of its own.*batch_norm=null"):
        synchronise_batch_norm(nn.Sequential(nn.ReLU(), OwnForward(2)))


def test_a_batch_norm_without_a_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="run one forward first"):
        synchronise_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))


def test_one_rank_keeps_torchs_batch_norm() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert Plan([Sync()], Context(device=CPU)).model(model) is model
    assert type(model[0]) is nn.BatchNorm1d


# ---- frozen


def frozen_run(**given):
    trainer = NormedPictures(batch_size=8, steps=3, **QUIET, batch_norm={"name": "frozen", **given})
    for norm in norms_of(trainer.model):  # as of a pretrained model
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    before = copy_of_state(trainer)
    trainer.fit()
    return trainer, {name for name, value in copy_of_state(trainer).items() if not torch.equal(value, before[name])}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def test_frozen_norms_keep_the_bits_of_their_statistics_scale_and_shift():
    trainer, changed = frozen_run()
    assert len(norms_of(trainer.model)) == 2
    assert {name for name in trainer.model.state_dict() if "norm" in name} & changed == set()
    assert len(changed) == 12  # all else


def test_scale_and_shift_of_frozen_norms_train_where_that_is_asked_for():
    _, changed = frozen_run(affine=True)
    assert {name for name in changed if "norm" in name} == {
        f"blocks.{i}.norm.{p}" for i in (0, 1) for p in ("weight", "bias")
    }


def test_frozen_norms_compute_in_training_what_they_do_in_evaluation():
    trainer, _ = frozen_run()
    x = torch.randn(8, 2, 2, 2)
    model = trainer.model.train()
    assert model.training
    whole, halves = model(x), torch.cat([model(x[:4]), model(x[4:])])
    assert torch.allclose(whole, halves, atol=1e-6)
    assert torch.equal(whole, model.eval()(x))
    assert torch.equal(copy.deepcopy(model).train()(x), whole)


def test_freezing_norms_where_there_are_none_is_refused():
    with pytest.raises(ConfigError, match=r"batch_norm=frozen: StackModel has no norm.*use batch_norm=null"):
        Stack(batch_size=8, steps=1, batch_norm="frozen", **QUIET)
