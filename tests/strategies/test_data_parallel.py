"""data_parallel=ddp under odd user code, against one process that goes through the shares of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain.core.plan import Plan
from fasttrain.core.strategy import NO_CONTEXT, Context
from fasttrain.errors import ConfigError, SyncError
from fasttrain.strategies.data_parallel import Ddp, DdpConfig, PowerSgd
from tests.ranks import run_ranks
from tests.strategies.odd_code import CODE, Net, branch_nowhere, cross_entropy, one_forward, share_of

CPU = torch.device("cpu")
STEPS = 4
CONFIGS = {
    "default": DdpConfig(),
    "small buckets": DdpConfig(bucket_mb=0.0005),
    "copied back": DdpConfig(bucket_mb=0.0005, bucket_view=False),
    "static graph": DdpConfig(bucket_mb=0.0005, static_graph=True),
}
# The two phases of a GAN give gradients to other parameters, which is what static_graph excludes.
CHANGING = [("static graph", "GAN")]


def train(name: str, plan: Plan, ranks: list[int]) -> tuple[dict[str, Tensor], list[str]]:
    """Final weights, and after each phase the parameters without a gradient. Goes through the shares of `ranks`."""
    build, phases = CODE[name]
    torch.manual_seed(0)
    built = build()
    model = plan.model(built)
    assert model is built
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    without = []
    for step in range(STEPS):
        for phase, part in phases:
            for rank in ranks:
                phase(model, share_of(rank, step), plan)
            for key, parameter in model.named_parameters():
                if parameter.grad is None:
                    without.append(f"{step} {phase.__name__} {key}")
                elif not key.startswith(part):
                    parameter.grad = None
                elif len(ranks) > 1:
                    parameter.grad /= len(ranks)
            optimizer.step()
            optimizer.zero_grad()
    # Running statistics of BatchNorm are each rank's own by nature.
    return {key: parameter.detach() for key, parameter in model.named_parameters()}, without


def on_ranks(n: int, configs: list[str]) -> dict[tuple[str, str], Any]:
    rank = dist.get_rank()
    results = {}
    for config in configs:
        for name in CODE:
            if (config, name) in CHANGING:
                continue
            plan = Plan([Ddp(CONFIGS[config])], Context(device=CPU, data_rank=rank, data_ranks=n))
            results[config, name] = train(name, plan, [rank])
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[tuple[str, str], Any]]:
    return run_ranks(2, on_ranks, 2, list(CONFIGS))


@pytest.fixture(scope="module")
def three() -> list[dict[tuple[str, str], Any]]:
    return run_ranks(3, on_ranks, 3, ["small buckets"])


def check(results: list[dict[tuple[str, str], Any]], config: str, name: str) -> None:
    expected, expected_without = train(name, Plan([], Context(device=CPU)), list(range(len(results))))
    for result in results:
        state, without = result[config, name]
        assert list(state) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-6, msg=f"{key} is wrong")
        assert without == expected_without
        for key, value in results[0][config, name][0].items():
            assert torch.equal(state[key], value), f"{key} differs between ranks"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("config", "name"), [(config, name) for config in CONFIGS for name in CODE if (config, name) not in CHANGING]
)
def test_two_ranks_train_as_one_process_does(two: list[dict[tuple[str, str], Any]], config: str, name: str) -> None:
    check(two, config, name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CODE)
def test_three_ranks_train_as_one_process_does(three: list[dict[tuple[str, str], Any]], name: str) -> None:
    check(three, "small buckets", name)


def test_some_code_leaves_a_gradient_out_and_some_does_not() -> None:
    """The comparison of missing gradients above compares something."""
    without = {name: train(name, Plan([], Context(device=CPU)), [0, 1])[1] for name in CODE}
    assert without["one forward"] == []
    assert without["a branch unused on one rank"] == []
    assert len(without["a branch unused everywhere"]) == 2 * STEPS


# ---- loud rows


def raw_plan(rank: int, **config: Any) -> Plan:
    return Plan([Ddp(DdpConfig(**config))], Context(device=CPU, data_rank=rank, data_ranks=2))


def loud() -> dict[str, Any]:
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    torch.manual_seed(0)
    plan, model = raw_plan(rank), Net()
    plan.model(model)
    averager = plan.strategies["data_parallel"].averager
    share = share_of(rank, 0)

    def caught(name: str, code: Callable[[], None], kind: type[Exception] = SyncError) -> None:
        with pytest.raises(kind) as error:
            code()
        seen[name] = str(error.value)
        model.zero_grad()

    def two_backwards() -> None:
        with plan.microbatch(True):
            for loss in (cross_entropy(model(share["x"]), share), model(share["x"]).pow(2).mean()):
                loss.backward()

    def breaks_off() -> None:
        with plan.microbatch(True):
            cross_entropy(model.head(model.encoder(share["x"])), share).backward()  # `extra` holds its bucket back
            raise ValueError("of the user")

    def begins_to_train() -> None:
        model.extra.requires_grad_(False)
        with plan.microbatch(True):
            model.extra.requires_grad_(True)
            cross_entropy(model(share["x"]), share).backward()

    caught("two backwards", two_backwards)
    before = averager.traffic.reductions
    caught("an error of the user", breaks_off, ValueError)
    seen["sums after an error of the user"] = averager.traffic.reductions - before
    caught("begins to train", begins_to_train)
    one_forward(model, share, plan)
    seen["gradients after all that"] = [parameter.grad for parameter in model.parameters()]

    sparse = nn.Embedding(3, 2, sparse=True)
    plan = raw_plan(rank)
    plan.model(sparse)
    caught("sparse", lambda: plan.backward(sparse(torch.tensor([1])).sum()))

    plan, model = raw_plan(rank, static_graph=True), Net()
    plan.model(model)
    branch_nowhere(model, share, plan)
    model.zero_grad()
    caught("static: one more is used", lambda: one_forward(model, share, plan))
    plan, model = raw_plan(rank, static_graph=True), Net()
    plan.model(model)
    one_forward(model, share, plan)
    model.zero_grad()
    # On one rank alone: the other must not hang, and notices nothing.
    if rank == 1:
        caught("static: one fewer is used", lambda: branch_nowhere(model, share, plan))
    else:
        one_forward(model, share, plan)

    for name, build in {
        "a shape": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)),
        "a dtype": lambda: nn.Linear(2, 2).to(torch.float64 if rank else torch.float32),
        "a name": lambda: nn.ModuleDict({"ab"[rank]: nn.Linear(2, 2)}),
        "frozen on one": lambda: nn.Linear(2, 2).requires_grad_(rank == 0),
        "one more": lambda: nn.Linear(2, 2, bias=rank == 0),
    }.items():
        caught(name, lambda build=build: raw_plan(rank).model(build()))
    caught("no shape", lambda: raw_plan(rank).model(nn.LazyLinear(2)), ConfigError)
    return seen


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return run_ranks(2, loud)


@pytest.mark.ranks
def test_two_backwards_in_one_raw_context_say_what_to_write(told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert "two backward passes of one synchronised microbatch reached '" in seen["two backwards"]
        assert "plan.backward(loss, is_last=False) for all but the last" in seen["two backwards"]


@pytest.mark.ranks
def test_an_error_within_the_context_sends_nothing_and_the_next_step_is_right(told: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model, plan = Net(), Plan([], Context(device=CPU))
    for rank in range(2):
        one_forward(model, share_of(rank, 0), plan)
    expected = [parameter.grad / 2 for parameter in model.parameters() if parameter.grad is not None]
    for seen in told:
        assert seen["an error of the user"] == "of the user"
        assert seen["sums after an error of the user"] == 0
        torch.testing.assert_close(seen["gradients after all that"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.ranks
def test_training_begun_within_the_context_is_refused(told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert "set requires_grad before the microbatch" in seen["begins to train"]


@pytest.mark.ranks
def test_sparse_gradients_are_refused(told: list[dict[str, Any]]) -> None:
    for seen in told:
        assert seen["sparse"].endswith("use nn.Embedding(..., sparse=False).")


@pytest.mark.ranks
def test_a_static_graph_that_changes_is_told_where_it_changes(told: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(told):
        assert f"changed on rank {rank} for 'extra.weight', 'extra.bias'" in seen["static: one more is used"]
    assert "changed on rank 1 for 'extra.weight', 'extra.bias'" in told[1]["static: one fewer is used"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "a shape",
            "'1.weight' is a parameter of shape (4, 2), float32, trained on rank 1 and a parameter of shape (3, 2)",
        ),
        ("a dtype", "'weight' is a parameter of shape (2, 2), float64, trained on rank 1"),
        ("a name", "rank 1 has 'b.weight' where rank 0 has 'a.weight'"),
        ("frozen on one", "'weight' is a parameter of shape (2, 2), float32, frozen on rank 1"),
        ("one more", "'bias' is there on rank 0 and missing on rank 1"),
        ("no shape", "run one forward first"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(told: list[dict[str, Any]], name: str, words: str) -> None:
    for seen in told:
        assert words in seen[name]


def test_one_rank_needs_no_averaging() -> None:
    strategy = Ddp()
    plan, model = Plan([strategy], Context(device=CPU)), nn.Linear(2, 2)
    assert plan.model(model) is model
    assert strategy.averager is None
    assert plan._microbatch(True) is plan._microbatch(False) is plan.evaluating(model) is NO_CONTEXT
    assert strategy.state_dict() == {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DdpConfig(bucket_mb=0), "bucket_mb=0"),
        (lambda: PowerSgd(rank=0), r"powersgd.rank=0"),
        (lambda: PowerSgd(start_step=1), r"powersgd.start_step=1.*give 2 or more"),
    ],
)
def test_settings_without_sense_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
