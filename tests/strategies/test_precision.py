"""precision against hand-written autocast and GradScaler loops, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.core.float32 import fp32_state, own_fp32_precision, set_fp32_precision
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.optim.fused import give_momentum_buffers
from fasttrain.optim.guarded import step_unless
from fasttrain.strategies.precision import Bf16, Fp16, Fp16Config, Fp32, Tf32
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Stack, StackModel, batches_of

CPU = torch.device("cpu")
CONTEXT = Context(device=CPU)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
LR = {"sgd": {"name": "sgd", "lr": 0.1}, "adamw": {"name": "adamw", "lr": 0.1, "decay_norms": True}}


class Ordered(Stack):
    """The batches of `batches_of`, in order."""

    def build_data(self):
        return Data(train=points(), evaluation=points(), shuffle=False)


def trained(steps=6, **settings):
    watcher = Recorder()
    trainer = Ordered(batch_size=8, steps=steps, observers=[watcher], **settings, **QUIET)
    trainer.fit()
    return trainer, watcher


def plain_loop(dtype, optimizer, steps=6, scaler=None, max_norm=None, first=0):
    """A training loop as torch's documentation writes it; losses and scales after each step."""
    torch.manual_seed(0)
    model = StackModel()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    losses, scales = [], []
    for x, y in (batches_of() * steps)[first:steps]:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, scales


def losses_of(watcher):
    return [record["loss"] for record in watcher.steps]


# ---- fp32 and tf32


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp32_is_plain_torch(optimizer):
    trainer, watcher = trained(precision="fp32", optimizer=LR[optimizer])
    model, losses, _ = plain_loop(None, optimizer)
    assert losses_of(watcher) == losses
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


@pytest.fixture
def flags():
    own_fp32_precision()
    before = fp32_state()
    yield fp32_state
    own_fp32_precision()
    assert fp32_state() == before


MATMUL, CONV = ("cuda", "matmul"), ("cuda", "conv")


def test_fp32_switches_tensorfloat_off_in_its_own_run_alone(flags):
    before = flags()
    Ordered(batch_size=8, steps=1, **QUIET)
    assert flags() == before
    Ordered(batch_size=8, steps=1, precision="fp32", **QUIET)
    assert set(flags().values()) == {"ieee", "none"}
    Ordered(batch_size=8, steps=1, precision="bf16", **QUIET)
    assert flags() == before
    assert before[CONV] == "tf32"  # torch's own default


def test_what_the_user_set_is_left_as_it_was_and_given_back(flags):
    torch.set_float32_matmul_precision("high")
    try:
        Ordered(batch_size=8, steps=1, **QUIET)
        assert flags()[MATMUL] == "tf32"
        Ordered(batch_size=8, steps=1, precision="fp32", **QUIET)
        assert flags()[MATMUL] == "ieee"
        Ordered(batch_size=8, steps=1, **QUIET)
        assert flags()[MATMUL] == "tf32"
        assert torch.get_float32_matmul_precision() == "high"
        set_fp32_precision("ieee")
        torch.set_float32_matmul_precision("medium")
        Ordered(batch_size=8, steps=1, **QUIET)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torchs_older_switches_stay_readable_as_inductor_reads_them(flags, precision):
    set_fp32_precision(precision)
    is_tf32 = precision == "tf32"
    assert torch.get_float32_matmul_precision() == ("high" if is_tf32 else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is is_tf32
    assert torch.backends.cudnn.allow_tf32 is is_tf32
    assert (flags()[MATMUL] == "tf32") is is_tf32
    assert (flags()[CONV] == "tf32") is is_tf32


def test_tf32_without_such_a_device_says_what_to_use(flags):
    before = flags()
    with pytest.raises(ConfigError) as caught:
        Ordered(batch_size=8, steps=1, precision="tf32", **QUIET)
    assert str(caught.value) == (
        "precision=tf32: cpu has no TensorFloat-32 (CUDA devices have it from compute capability 8.0 on); "
        "use precision=fp32 or precision=bf16."
    )
    assert flags() == before


def test_importing_everything_leaves_torchs_flags_alone():
    code = """
import importlib, pkgutil, warnings, torch
import sympy, torchvision  # which add a filter of their own

def flags():
    return (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.benchmark, torch.get_default_dtype(),
            torch.initial_seed(), torch.get_rng_state().sum().item(), torch.get_num_threads(), list(warnings.filters))

before = flags()
import fasttrain
names = [m.name for m in pkgutil.walk_packages(fasttrain.__path__, "fasttrain.") if "__main__" not in m.name]
for name in names:
    importlib.import_module(name)
assert flags() == before, (before, flags())
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60


# ---- bf16


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bf16_is_hand_written_autocast(optimizer):
    trainer, watcher = trained(precision="bf16", optimizer=LR[optimizer])
    model, losses, _ = plain_loop(torch.bfloat16, optimizer)
    assert losses_of(watcher) == losses
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    assert losses != plain_loop(None, optimizer)[1]  # and other numbers than float32


def test_weights_and_gradients_stay_float32_and_products_are_in_half_precision():
    for strategy, dtype in ((Bf16(None, CONTEXT), torch.bfloat16), (Fp16(None, CONTEXT), torch.float16)):
        assert strategy.dtypes().compute == dtype
        assert strategy.dtypes().reduce == torch.float32
        model = StackModel()
        with strategy.forward():
            output = model(points()[0])
            with strategy.evaluating(model):
                assert model(points()[0]).dtype == dtype
        assert output.dtype == dtype
        strategy.scale(output.float().sum()).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_evaluation_is_under_the_same_autocast(precision, dtype):
    trainer, _ = trained(steps=2, precision=precision)
    x, y = points()
    trainer.model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = [F.cross_entropy(trainer.model(x[i : i + 8]), y[i : i + 8]).double() * 8 for i in (0, 8, 16)]
    assert trainer.evaluate()["loss"] == (sum(expected) / 24).item()


def test_autocast_casts_a_weight_once_for_all_its_uses_in_a_step():
    """Its cache lives as long as the context: around the forward, not around each layer."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with Bf16(None, CONTEXT).forward():
        first, second = torch.mm(weight, weight), torch.mm(weight, weight)
    casts = {edge[0] for out in (first, second) for edge in out.grad_fn.next_functions}
    assert len(casts) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_that_are_float16_already_are_refused(precision):
    class Halved(Stack):
        def build_model(self):
            return super().build_model().half()

    with pytest.raises(ConfigError, match=r"16 weights are float16.*leave out model\.half"):
        Halved(batch_size=8, steps=1, precision=precision, **QUIET)


# ---- fp16


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_fp16_is_a_hand_written_grad_scaler_loop(optimizer, max_norm):
    config = {"init_scale": 4096.0, "growth_interval": 2}
    clipping = None if max_norm is None else {"name": "norm", "max_norm": max_norm}
    fp16 = {"name": "fp16", **config}
    trainer, watcher = trained(precision=fp16, optimizer=LR[optimizer], gradient_clipping=clipping)
    scaler = torch.amp.GradScaler("cpu", **config)
    model, losses, scales = plain_loop(torch.float16, optimizer, scaler=scaler, max_norm=max_norm)
    assert losses_of(watcher) == losses
    assert [record["loss_scale"] for record in watcher.steps] == scales == [4096, 8192, 8192, 16384, 16384, 32768]
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_a_step_that_overflows_changes_nothing_halves_the_scale_and_is_counted_apart():
    fp16 = {"name": "fp16", "init_scale": 2.0**24, "growth_interval": 100, "backoff_factor": 2.0**-6}
    trainer, watcher = trained(precision=fp16, optimizer=LR["adamw"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100, backoff_factor=2.0**-6)
    model, losses, scales = plain_loop(torch.float16, "adamw", scaler=scaler)
    refused = [record.get("refused_steps", 0) for record in watcher.steps]
    assert scales[0] == 2.0**18
    assert refused[0] == 1
    assert 1 <= refused[-1] < 6
    assert losses_of(watcher) == losses
    assert [record["loss_scale"] for record in watcher.steps] == scales
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


@pytest.fixture
def fresh_memory_is_nan():
    """torch fills what it leaves uninitialised with nan."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def test_a_first_step_that_overflows_leaves_the_momentum_of_plain_torch_uninitialised_and_ours_zero(
    fresh_memory_is_nan,
):
    results = {}
    for name in ("plain", "ours"):
        torch.manual_seed(0)
        model = StackModel()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if name == "ours":
            give_momentum_buffers(optimizer)
        x, y = batches_of()[0]
        for bad in (1.0, 0.0):
            F.cross_entropy(model(x), y).backward()
            step_unless(optimizer, torch.tensor(bad))
            optimizer.zero_grad()
        results[name] = model
    torch.manual_seed(0)
    expected = StackModel()
    optimizer = OPTIMIZERS["sgd"](expected.parameters())
    F.cross_entropy(expected(x), y).backward()
    optimizer.step()
    assert any(p.isnan().any() for p in results["plain"].parameters()), "torch fills the buffers now: drop the cure"
    assert largest_difference(results["ours"].state_dict(), expected.state_dict()) == 0.0


def test_momentum_buffers_of_zero_leave_the_first_step_as_it_was():
    models = []
    for give in (False, True):
        torch.manual_seed(0)
        model = StackModel()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
        )
        if give:
            give_momentum_buffers(optimizer)
            assert len(optimizer.state) == 16
        for x, y in batches_of():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) == 0.0


def test_training_that_overflows_at_its_first_step_is_finite(fresh_memory_is_nan):
    fp16 = {"name": "fp16", "init_scale": 2.0**24, "backoff_factor": 2.0**-14}
    trainer, watcher = trained(precision=fp16, optimizer=LR["sgd"], deterministic=True)
    assert watcher.steps[-1]["refused_steps"] == 1
    assert watcher.steps[0]["loss_scale"] == 1024.0
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    # As if the first batch had not been there.
    model, losses, _ = plain_loop(torch.float16, "sgd", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), first=1)
    assert losses_of(watcher)[1:] == losses
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_a_scale_goes_on_after_a_restore():
    first, second = Fp16(Fp16Config(growth_interval=2), CONTEXT), Fp16(None, CONTEXT)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    plan = Plan([first], CONTEXT)
    for value in (float("inf"), 1.0, 1.0, 1.0):
        parameter.grad = torch.full((2,), value)
        plan.update(optimizer, plan.gradients(None, optimizer))
    saved = copy.deepcopy(first.state_dict())
    assert (saved["scale"].item(), saved["growth_tracker"].item()) == (65536.0, 1)
    second.load_state_dict(saved)
    assert second.report()["loss_scale"].item() == 65536.0
    assert second.state_dict()["growth_tracker"].item() == 1


def test_a_step_without_any_gradient_moves_neither_weights_nor_scale():
    fp16 = Fp16(Fp16Config(growth_interval=1), CONTEXT)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    plan = Plan([fp16], CONTEXT)
    bad = plan.gradients(None, optimizer)
    plan.update(optimizer, bad)
    assert bad is None
    assert fp16.report()["loss_scale"].item() == 65536.0
    assert torch.equal(parameter.detach(), torch.ones(2))
    parameter.grad = torch.full((2,), 65536.0)
    plan.update(optimizer, plan.gradients(None, optimizer))
    assert torch.equal(parameter.detach(), torch.zeros(2))
    assert fp16.report()["loss_scale"].item() == 131072.0


def test_each_precision_declares_its_numerics():
    assert Fp32(None, CONTEXT).dtypes() == Tf32(None, CONTEXT).dtypes()
    assert Fp32(None, CONTEXT).dtypes().compute == torch.float32
    trainer = Ordered(batch_size=8, precision="bf16", **QUIET)
    assert trainer.plan.strategies["optimizer"].context.dtypes.compute == torch.bfloat16
