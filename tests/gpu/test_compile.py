"""Compiled code on a real GPU. CUDA graphs: right under accumulation, with ranks, evaluations, averages, and fp16.

Optimizer and loss: no waiting, few kernels. A warm start.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn import functional as F

from fasttrain import Data
from fasttrain.compiler.apply import compile_forwards
from fasttrain.compiler.cuda_graphs import Generations, Gradients
from fasttrain.core.strategy import NO_CONTEXT
from fasttrain.distributed import world
from fasttrain.distributed.gradient_buckets import GradientAverager
from tests.gpu.models import DEVICE, BySgd, Rows, Wide, rows, step_without_waiting
from tests.helpers import Recorder, largest_difference, state
from tests.stack import gradients

SETTINGS = {"batch_size": 512, "steps": 6, "run": {"dir": None}, "log": {"every": 1}, "device": "cuda"}
GRAPHS = {"name": "blocks", "mode": "reduce-overhead", "reference_steps": 0, "cache": None}
FOUR = {"name": "microbatches", "num": 4}
STEPS = 6


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    counters.clear()


class Evaluated(BySgd):
    def build_data(self):
        x, y = rows()
        return Data(train=(x, y), evaluation=(x[:1300], y[:1300]), shuffle=False)


def trained(compile, cls=BySgd, **settings):
    torch.compiler.reset()
    trainer = cls(compile=compile, observers=[Recorder()], **{**SETTINGS, **settings})
    trainer.fit()
    watcher = trainer.observers[0]
    evaluations = [record["metrics"]["loss"] for record in watcher.evaluations]
    return state(trainer), [record["loss"] for record in watcher.steps], evaluations, trainer


def replays():
    """Graphs of the trees that were recorded, and what inductor left out."""
    from torch._inductor.cudagraph_trees import get_container

    manager = get_container(torch.cuda.current_device()).tree_manager
    return 0 if manager is None else next(manager.graph_counter), counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("name", ["blocks", "model"])
@pytest.mark.parametrize("settings", [{}, {"accumulation": FOUR}], ids=["whole", "four microbatches"])
def test_training_with_cuda_graphs_is_eager_training(name, settings):
    plain, losses, *_ = trained(None, **settings)
    graphed, told, *_ = trained({**GRAPHS, "name": name}, **settings)
    recorded, skipped = replays()
    assert recorded > 0
    assert skipped == 0
    assert len(told) == STEPS
    assert told == pytest.approx(losses, rel=1e-4)
    assert largest_difference(plain, graphed) < 1e-4


def test_evaluations_in_between_change_nothing():
    settings = {"accumulation": FOUR, "evaluate": {"every": 2}}
    plain, losses, evaluations, _ = trained(None, Evaluated, **settings)
    graphed, told, found, _ = trained(GRAPHS, Evaluated, **settings)
    assert len(found) == 3
    assert told == pytest.approx(losses, rel=1e-4)
    assert found == pytest.approx(evaluations, rel=1e-4)
    assert largest_difference(plain, graphed) < 1e-4


def test_under_fp16_the_loss_scale_and_the_weights_are_those_of_eager_code():
    settings = {"accumulation": FOUR, "precision": {"name": "fp16", "init_scale": 1024.0, "growth_interval": 3}}
    plain, losses, _, eager = trained(None, **settings)
    graphed, told, _, trainer = trained(GRAPHS, **settings)
    assert told == pytest.approx(losses, rel=2e-3)
    assert largest_difference(plain, graphed) < 5e-3
    scales = [t.plan.strategies["precision"].scaler.get_scale() for t in (eager, trainer)]
    assert scales[0] == scales[1] == 4096.0


def test_a_comparison_with_eager_steps_changes_nothing():
    plain, losses, *_ = trained(GRAPHS, accumulation=FOUR)
    compared, told, _, trainer = trained({**GRAPHS, "reference_steps": 3}, accumulation=FOUR)
    assert trainer.plan.summary()["compile"]["eager_step_s"] > 0
    assert told == pytest.approx(losses, rel=1e-5)
    assert largest_difference(plain, compared) < 1e-5


def test_the_peak_of_memory_is_not_that_of_eager_reference_steps():
    peaks = []
    for steps in (0, 3):
        torch.cuda.reset_peak_memory_stats()
        *_, trainer = trained({"name": "blocks", "reference_steps": steps, "cache": None})
        peaks.append(trainer.observers[0].summary["peak_memory_bytes"]["allocated"])
    assert peaks[1] <= peaks[0] * 1.02


def test_losses_and_outputs_that_somebody_keeps_stay_what_they_were():
    kept, copies = [], []

    class Keeps(BySgd):
        def loss(self, output, batch):
            kept.append(output.detach())
            copies.append(output.detach().clone())
            return super().loss(output, batch)

        def train_step(self, batch):
            info = super().train_step(batch)
            kept.append(info.loss)
            copies.append(info.loss.clone())
            return info

    trained({**GRAPHS, "name": "model"}, Keeps)
    if not hasattr(torch._inductor.config.triton, "cudagraph_trees_generation_cloning"):
        kept, copies = kept[1::2], copies[1::2]  # an older torch copies no outputs; losses are always copied
    assert len(kept) >= STEPS
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def microbatches():
    x, y = (tensor[:512].to(DEVICE) for tensor in rows())
    return list(zip(x.chunk(4), y.chunk(4), strict=True))


def test_buckets_of_ranks_get_the_sum_of_all_microbatches(tmp_path):
    """One process that sends to itself, so that the sum is its own."""
    torch.cuda.set_device(0)
    store = (tmp_path / "store").as_uri()
    device = torch.device("cuda", 0)
    dist.init_process_group(world.BACKENDS["cuda"], init_method=store, rank=0, world_size=1, device_id=device)
    try:
        torch.manual_seed(0)
        model = Wide().to(DEVICE)
        for x, y in microbatches():
            F.cross_entropy(model(x), y).backward()
        expected = gradients(model)
        model.zero_grad()
        compile_forwards(model.blocks, mode="reduce-overhead")
        averager = GradientAverager()
        averager.add(model)
        generations = Generations(Gradients(model.parameters()))
        for _ in range(5):  # warmed up, recorded, replayed
            for i, (x, y) in enumerate(microbatches()):
                # `last()` would do nothing on one rank.
                with generations.microbatch(i == 3), averager._last if i == 3 else NO_CONTEXT:
                    with generations.forward():
                        loss = F.cross_entropy(model(x), y)
                    loss.backward()
            found = gradients(model)
            assert all(torch.allclose(found[name], grad, rtol=1e-3, atol=1e-5) for name, grad in expected.items())
            model.zero_grad()
        assert replays()[0] > 0
    finally:
        dist.destroy_process_group()


def test_without_copies_the_sum_is_wrong_which_is_why_they_are_made():
    """When this fails, torch keeps gradients by itself, and `Gradients` may go. pytorch/pytorch#96693."""
    torch.manual_seed(0)
    model = Wide().to(DEVICE)
    for x, y in microbatches():
        F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    compile_forwards(model.blocks, mode="reduce-overhead")
    generations = Generations()
    right = True
    try:
        for _ in range(5):
            for i, (x, y) in enumerate(microbatches()):
                with generations.microbatch(i == 3):
                    with generations.forward():
                        loss = F.cross_entropy(model(x), y)
                    loss.backward()
            found = gradients(model)
            right &= all(torch.allclose(found[name], grad, rtol=1e-3, atol=1e-5) for name, grad in expected.items())
            model.zero_grad()
    except RuntimeError as error:
        if "overwritten" not in str(error):
            raise
        right = False
    assert not right


class Averaged(Rows):
    def build_data(self):
        x, y = rows()
        return Data(train=(x, y), evaluation=(x[:1024], y[:1024]), shuffle=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16_true"])
def test_evaluations_of_averages_record_no_graph_anew(precision):
    """Averages have addresses of their own where they are of the weights' dtype, and take the weights' where not."""
    settings = {"optimizer": "sgd", "precision": precision, "weight_averaging": "ema", "evaluate": {"every": 1}}
    recorded = []
    for steps in (6, 12):
        _, _, evaluations, _ = trained(GRAPHS, Averaged, steps=steps, **settings)
        assert len(evaluations) == steps
        number, skipped = replays()
        assert skipped == 0
        recorded.append(number)
    assert recorded[0] == recorded[1] > 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "muon"])
def test_a_compiled_step_and_loss_do_not_wait_for_the_device(optimizer):
    compile = {"name": "blocks", "optimizer": True, "loss": True, "reference_steps": 0, "cache": None}
    step_without_waiting(Rows(compile=compile, optimizer=optimizer, **SETTINGS), warm_up=4)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_compiled_step_is_far_fewer_kernels_than_parameters(optimizer, tmp_path):
    from torch._inductor import metrics

    metrics.reset()
    compile = {"name": "blocks", "optimizer": True, "reference_steps": 0, "cache": str(tmp_path)}
    *_, trainer = trained(compile, Rows, optimizer=optimizer)
    assert 0 < metrics.generated_kernel_count < len(list(trainer.model.parameters())) / 2


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_second_start_takes_every_graph_from_the_cache(mode, tmp_path):
    compile = {"name": "blocks", "mode": mode, "reference_steps": 0, "cache": str(tmp_path)}
    cold, warm = (trained(compile)[-1].plan.summary()["compile"] for _ in range(2))
    assert cold["from_cache"] == 0 < cold["graphs"]
    assert warm["from_cache"] == warm["graphs"] == cold["graphs"]
