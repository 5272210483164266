"""The compiled step of an optimizer: graphs, numbers against the eager step, refused steps, restores."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from fasttrain import ConfigError
from fasttrain.compiler.optimizer_step import CompiledStep, compile_optimizer_step
from fasttrain.optim.chunks import step_in_backward, step_in_chunks
from fasttrain.optim.guarded import obeys_found_inf, step_unless
from fasttrain.strategies import optimizer as rules
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Pictures, Stack, StackModel

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
GRAPHS: list[torch.fx.GraphModule] = []


def counting(graph, inputs):
    """aot_eager, writing down each graph it is given."""
    GRAPHS.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    GRAPHS.clear()


class OfTheUser(torch.optim.Optimizer):
    """As people write them: a new tensor for each state, and a plain number for the count where `counts`."""

    def __init__(self, params, lr=0.05, counts=False):
        super().__init__(params, {"lr": lr, "counts": counts})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                if not held:
                    held["average"] = torch.zeros_like(p)
                    if group["counts"]:
                        held["step"] = 0
                held["average"] = held["average"] * 0.9 + p.grad * 0.1
                rate = group["lr"]
                if group["counts"]:
                    held["step"] += 1
                    rate = rate / (1 - 0.9 ** held["step"])
                p.sub_(held["average"] * rate)


def made_by(cls):
    return lambda model: cls().make(model, list(model.blocks))


KINDS = {
    **{cls.name: made_by(cls) for cls in (rules.Sgd, rules.AdamW, rules.Lamb, rules.Muon, rules.Adafactor)},
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adam, amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, weight_decay=0.1),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9),
    "of the user": lambda model: OfTheUser(model.parameters()),
    "of the user, counting": lambda model: OfTheUser(model.parameters(), counts=True),
}
# The bits of eager code; the others are torch's formulas for eager and for compiled steps, which round apart.
SAME_BITS = {"lamb", "adafactor", "of the user"}
# Trained with a rate of 1e-3 and more: what rounding may add up to in twenty steps.
BOUND = 5e-6


def train(optimizer, model, steps, refused=(), refusable=False, first=0):
    """Some steps under a rate that changes in each; gradients of those in `refused` are no numbers."""
    base = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
    x, y = points()
    for i in range(first, first + steps):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (1 - i / 40)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        bad = torch.zeros(()) if refusable else None
        if i in refused:
            bad = torch.ones(())
            for p in model.parameters():
                p.grad.fill_(float("nan"))
        step_unless(optimizer, bad)
        optimizer.zero_grad()


def pair(kind):
    """The same model with an eager and with a compiled optimizer."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(StackModel())
    optimizers = [KINDS[kind](model) for model in models]
    compile_optimizer_step(optimizers[1], backend=counting)
    return models, optimizers


def states(optimizer):
    """All tensors of the states of an optimizer, by parameter and name."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": value
        for i, p in enumerate(params)
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refusable", [False, True])
def test_twenty_steps_under_a_changing_rate_are_one_graph_and_the_numbers_of_the_eager_step(kind, refusable):
    models, optimizers = pair(kind)
    rate = max(group["lr"] for group in optimizers[0].param_groups)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(optimizer, model, 20, refused=(0, 7) if refusable else (), refusable=refusable)
    # A plain number in a state is compiled in once, and becomes a symbol when it changes.
    assert len(GRAPHS) == (2 if kind == "of the user, counting" else 1)
    assert not torch._dynamo.utils.counters["graph_break"]
    bound = 0.0 if kind in SAME_BITS else BOUND
    if kind == "muon" and refusable:
        # Newton-Schulz in bfloat16 carries a last bit on, by the kernels of some processors: 20 steps, off both ways.
        bound = 20 * 2 * rate * torch.finfo(torch.bfloat16).eps
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) <= bound
    eager, compiled = states(optimizers[0]), states(optimizers[1])
    assert {k: (v.dtype, v.shape) for k, v in eager.items()} == {k: (v.dtype, v.shape) for k, v in compiled.items()}
    assert all(isinstance(group["lr"], float) for group in optimizers[1].param_groups)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "of the user, counting"])
def test_a_refused_step_is_refused_on_the_device_and_changes_no_bit(kind, monkeypatch):
    models, optimizers = pair(kind)
    model, optimizer = models[1], optimizers[1]
    train(optimizer, model, 3, refusable=True)
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(self))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(self))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    held = {key: value.clone() for key, value in states(optimizer).items()}
    assert obeys_found_inf(optimizer)
    train(optimizer, model, 2, refused=(3, 4), refusable=True, first=3)
    assert reads == []
    monkeypatch.undo()
    assert largest_difference(weights, model.state_dict()) == 0.0
    assert largest_difference({"": torch.zeros(1)} | held, {"": torch.zeros(1)} | states(optimizer)) == 0.0
    train(optimizer, model, 1, refusable=True, first=5)
    assert largest_difference(weights, model.state_dict()) > 0.0
    assert len(GRAPHS) == 1


def test_a_state_that_is_a_plain_number_lets_the_host_decide():
    models, optimizers = pair("of the user, counting")
    train(optimizers[1], models[1], 1)
    assert not obeys_found_inf(optimizers[1])
    weights = {name: value.clone() for name, value in models[1].state_dict().items()}
    train(optimizers[1], models[1], 1, refused=(1,), first=1)
    assert largest_difference(weights, models[1].state_dict()) == 0.0
    assert {held["step"] for held in optimizers[1].state.values()} == {1}


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb", "muon", "plain sgd"])
def test_states_that_are_loaded_go_on_with_the_bits_of_an_uninterrupted_run(kind, tmp_path):
    models, optimizers = pair(kind)
    train(optimizers[1], models[1], 3, refusable=True)
    kept = {name: value.clone() for name, value in models[1].state_dict().items()}
    torch.save(optimizers[1].state_dict(), tmp_path / "states.pt")
    train(optimizers[1], models[1], 3, refused=(4,), refusable=True, first=3)
    (_, model), (_, fresh) = pair(kind)
    model.load_state_dict(kept)
    fresh.load_state_dict(torch.load(tmp_path / "states.pt"))
    train(fresh, model, 3, refused=(4,), refusable=True, first=3)
    assert largest_difference(model.state_dict(), models[1].state_dict()) == 0.0
    assert largest_difference(states(fresh) | kept, states(optimizers[1]) | kept) == 0.0


def test_a_parameter_that_first_gets_a_gradient_later_is_stepped_from_then_on():
    models, optimizers = pair("adamw")
    for model, optimizer in zip(models, optimizers, strict=True):
        for i in range(6):
            model.head.requires_grad_(i >= 3)
            model(points()[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) <= BOUND
    assert len(GRAPHS) == 2


def test_hooks_of_the_optimizer_run_once_a_step():
    models, optimizers = pair("adamw")
    seen = []
    optimizers[1].register_step_pre_hook(lambda *given: seen.append("before"))
    optimizers[1].register_step_post_hook(lambda *given: seen.append("after"))
    train(optimizers[1], models[1], 3)
    assert seen == ["before", "after"] * 3


def test_a_second_call_changes_nothing_and_a_closure_gives_its_loss():
    _, (_, optimizer) = pair("adamw")
    step = optimizer.step
    assert isinstance(step, CompiledStep)
    assert compile_optimizer_step(optimizer, backend=counting) is step
    assert optimizer.step(lambda: torch.tensor(3.0)).item() == 3.0


@pytest.mark.parametrize(
    ("wrap", "where"), [(step_in_chunks, "a few parameters at a time"), (step_in_backward, "inside of the backward")]
)
def test_a_step_in_parts_is_refused(wrap, where):
    optimizer = torch.optim.AdamW(StackModel().parameters())
    wrap(optimizer)
    with pytest.raises(ConfigError, match=where) as caught:
        compile_optimizer_step(optimizer, backend=counting)
    assert "; use compile.optimizer=false" in str(caught.value)


# ---- in a run


def on(**more):
    return {"compile": {"name": "blocks", "backend": "aot_eager", "optimizer": True, **more}}


@pytest.mark.parametrize(
    "settings",
    [{"in_backward": True}, {"offload": True}, {"state_dtype": "bf16"}],
    ids=["in_backward", "offload", "state_dtype"],
)
def test_a_run_whose_optimizer_cannot_be_compiled_is_refused_before_the_first_step(settings):
    with pytest.raises(ConfigError, match=r"compile\.optimizer=true .*; use compile\.optimizer=false"):
        Stack(batch_size=8, steps=1, optimizer={"name": "adamw", **settings}, **on(), **QUIET)


@pytest.mark.parametrize("other", [{"precision": "bf16_true"}, {"optimizer": "adamw_8bit"}])
def test_what_goes_with_no_compiled_step_is_a_clash_and_stands_in_the_config(other):
    with pytest.raises(ConfigError, match=r"compile\.optimizer=false"):
        Stack(batch_size=8, steps=1, **other, **on(), **QUIET)
    assert Stack(batch_size=8, steps=1, **other, **on(optimizer=False), **QUIET).fit()["steps"] == 1


@pytest.mark.parametrize("more", [{}, {"precision": "fp16"}, {"nonfinite": "skip", "gradient_clipping": "norm"}])
def test_a_run_reads_nothing_on_the_host_once_it_is_compiled(more, monkeypatch):
    trainer = Pictures(
        batch_size=8,
        steps=9,
        optimizer="adamw",
        schedule="cosine",
        **more,
        **on(),
        run={"dir": None},
        log={"every": 99},
    )
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(3):
        trainer.train_step(next(batches))
    reads = []
    for method in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, method, lambda self, *args, method=method: reads.append(method))
    for _ in range(3):
        trainer.train_step(next(batches))
    assert reads == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "muon", "adafactor", {"name": "sgd", "momentum": 0.0}])
def test_a_run_taken_up_again_has_the_bits_of_one_that_never_stopped(tmp_path, optimizer):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 4:
                self.run.request_stop("test")

    fp16 = {"name": "fp16", "init_scale": 2.0**20, "growth_interval": 3}  # so that first steps are refused, too
    settings = {"batch_size": 8, "steps": 8, "optimizer": optimizer, "precision": fp16, "schedule": "cosine", **on()}
    straight = Stack(**settings, observers=[watcher := Recorder()], **QUIET)
    straight.fit()
    folder = {"run": {"dir": str(tmp_path), "name": "a", "id": "b"}, "log": {"every": 1}}
    Stack(**settings, observers=[first := Stop()], **folder).fit()
    resumed = Stack(**settings, resume="auto", observers=[second := Recorder()], **folder)
    resumed.fit()
    lines = [(r["loss"], str(r["lr"])) for r in first.steps + second.steps]
    assert lines == [(r["loss"], str(r["lr"])) for r in watcher.steps]
    assert len({rate for _, rate in lines}) > 3
    assert largest_difference(state(straight), state(resumed)) == 0.0
    plain = {**settings, "compile": None}
    eager = Stack(**plain, **QUIET)
    eager.fit()
    assert straight.plan.refused(straight.optimizer).item() >= 1
    assert eager.plan.refused(eager.optimizer).item() == straight.plan.refused(straight.optimizer).item()
    assert largest_difference(state(straight), state(eager)) < 2e-3  # of fp16


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adam, amsgrad", "radam", "rmsprop", "muon"])
@pytest.mark.parametrize("refusable", [False, True])
def test_where_torch_takes_lists_of_tensors_by_itself_the_graph_does(kind, refusable, monkeypatch):
    """As on a GPU, where the graph would be a kernel a parameter without them. Here the CPU passes for one."""
    modules = [importlib.import_module(f"torch.optim.{name}") for name in ("adam", "radam", "rmsprop", "optimizer")]
    for module in modules:
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])
    monkeypatch.setattr(modules[-1], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    monkeypatch.setattr("fasttrain.compiler.optimizer_step.CAPTURABLE_ON", ("cpu",))
    models, optimizers = pair(kind)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(optimizer, model, 6, refused=(0, 3) if refusable else (), refusable=refusable)
    assert len(GRAPHS) == 1
    called = [node.target.__name__ for node in GRAPHS[0].graph.nodes if node.op == "call_function"]
    lists = [name for name in called if name.startswith("_foreach_")]
    assert len(lists) >= 1
    # Of each parameter by itself nothing is left of the rule: matrices of muon aside, and what a refusal takes back.
    if kind != "muon" and not refusable:
        assert not {"sqrt", "addcdiv_", "lerp_", "sub_", "add_"} & set(called)
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) <= BOUND
