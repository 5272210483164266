"""The step on CUDA: equal to plain torch, without a wait of the host, timed by its own events, in less memory."""

from __future__ import annotations

import pytest
import torch

from benchmarks.overhead import trainer_block
from fasttrain.config import load
from fasttrain.trainer.session import Session
from recipes.flat import bert as flat_bert
from recipes.flat import resnet as flat_resnet
from tests.commands import ROOT
from tests.gpu.models import Rows, step_bytes
from tests.helpers import Recorder, largest_difference, state
from tests.stack import Restless, setting

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

QUIET = ["run.dir=null", "log.every=1", "evaluate.every=1000", "device=cuda"]
FLAT = {
    "resnet": lambda: flat_resnet.train(20),
    "bert": lambda: tuple(reversed(flat_bert.train(20, flat_bert.Config(steps=20, warmup=10)))),
}
RECIPES = {
    "resnet": ("resnet_digits.yaml", "steps=20"),
    "bert": ("bert_docstrings.yaml", "limit_batches=20", "epochs=1", "schedule.warmup=10"),
}


def trained(config, *overrides):
    watcher = Recorder()
    resolved = load(ROOT / "configs" / config, [*QUIET, *overrides])
    trainer = resolved.trainer(resolved, observers=[watcher])
    object.__setattr__(trainer.data, "evaluation", None)  # the held-out set is not part of these comparisons
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_equals_its_flat_twin_bit_for_bit_where_kernels_are_deterministic(recipe):
    trainer, losses = trained(*RECIPES[recipe], "deterministic=true")
    torch.use_deterministic_algorithms(True)
    model, expected = FLAT[recipe]()
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    assert losses == expected
    assert len(losses) == 20
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_equals_its_flat_twin_within_rounding(recipe):
    _, losses = trained(*RECIPES[recipe])
    _, expected = FLAT[recipe]()
    # Sums in another order, carried over 20 steps.
    assert losses == pytest.approx(expected, rel=1e-2)


STEPS = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp16 with everything that can refuse": {
        "precision": "fp16",
        "gradient_clipping": "norm",
        "nonfinite": "skip",
        "schedule": "cosine",
    },
    "accumulation": setting("accumulation", "microbatches"),
    "nonfinite=raise": {"nonfinite": "raise"},
    "checkpointing": {"activation_checkpointing": "full"},
    "sgd": {"optimizer": "sgd", "nonfinite": "skip", "schedule": "one_cycle"},
    "fp16, clipped by value, averaged": {
        "precision": "fp16",
        "gradient_clipping": "value",
        "nonfinite": "skip",
        "weight_averaging": {"name": "ema", "warmup": True, "every": 2},
    },
    "fp16, clipped adaptively, averaged alike": {
        "precision": "fp16",
        "gradient_clipping": "adaptive",
        "nonfinite": "skip",
        "weight_averaging": {"name": "swa", "start": 5},
    },
    "bf16_true, averaged": {"precision": "bf16_true", "nonfinite": "skip", "weight_averaging": "ema"},
    "plateau": {"schedule": {"name": "plateau", "warmup": 5}, "nonfinite": "skip", "evaluate": {"every": 1000}},
    "selective": {"activation_checkpointing": "selective", "precision": "bf16"},
    "lora": {"adapters": "lora", "precision": "bf16"},
    "qlora": {"adapters": "qlora", "precision": "bf16"},
    "freeze": {"adapters": {"name": "freeze", "freeze": ["blocks.0"], "unfreeze": {"blocks.0": 10}}},
}


class Counting(Restless):
    def count(self, batch):
        return (batch[1] > 0).sum()


@pytest.mark.parametrize("kind", [Restless, Counting])
@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_for_the_device_at_log_points_alone(name, kind):
    settings = {"batch_size": 8, "steps": 50, "run": {"dir": None}, "log": {"every": 20}, "device": "cuda"}
    block = trainer_block(kind(**settings, **STEPS[name]))
    block(1)  # the clock waits for the end of the first step
    torch.cuda.set_sync_debug_mode("error")
    block(18)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        block(1)  # step 20 is read
    torch.cuda.set_sync_debug_mode("default")


def test_step_times_are_those_of_cuda_events():
    trainer = Rows(batch_size=4096, steps=60, run={"dir": None}, log={"every": 1000}, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with Session(trainer) as session:
        batches = trainer.feed.training(trainer.task, trainer.plan)
        trainer.model.train()
        session.clock.start()
        for step in range(40):
            if step == 20:
                session.clock.window()
                begin.record()
            trainer.train_step(next(batches))
            session.count(session.clock)
        end.record()
        figures = session.clock.window()
        end.synchronize()
    assert figures["measured"]["steps"] == 20
    assert figures["measured"]["seconds"] == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.05)


def test_checkpointing_and_bf16_save_the_activations_they_say():
    plain = step_bytes()
    # A block keeps ten times its input: two of its width in float32, eight (twice the inner width) that can be bf16.
    assert plain > 10 * 10 * 16384 * 256 * 4
    assert step_bytes(activation_checkpointing="full") < 0.4 * plain
    assert 0.4 * plain < step_bytes(precision="bf16") < 0.75 * plain
    assert step_bytes(precision="bf16", activation_checkpointing="full") < 0.4 * plain


def test_a_run_resumes_bit_for_bit(tmp_path):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 4:
                self.run.request_stop("test")

    settings = {
        "batch_size": 8,
        "steps": 9,
        "log": {"every": 1},
        "device": "cuda",
        "deterministic": True,
        **STEPS["fp16 with everything that can refuse"],
    }
    watcher, first, second = Recorder(), Stop(), Recorder()
    straight = Restless(**settings, run={"dir": None}, observers=[watcher])
    straight.fit()
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    assert Restless(**settings, run=run, observers=[first]).fit()["steps"] == 4
    torch.cuda.manual_seed(12345)  # what the dropout draws must come from the checkpoint
    resumed = Restless(**settings, run=run, resume="auto", observers=[second])
    resumed.fit()
    losses = [[record["loss"] for record in records.steps] for records in (watcher, first, second)]
    assert losses[1] + losses[2] == losses[0]
    assert len(set(losses[0])) == 9
    assert largest_difference(state(straight), state(resumed)) == 0.0


def test_compiled_blocks_train_as_eager_ones():
    from fasttrain.trainer.session import compile_seconds

    def losses(**settings):
        watcher = Recorder()
        shown = {"run": {"dir": None}, "log": {"every": 1}}
        Rows(batch_size=4096, steps=8, device="cuda", observers=[watcher], **shown, **settings).fit()
        return [record["loss"] for record in watcher.steps]

    eager, before = losses(precision="fp32"), compile_seconds()
    assert losses(precision="fp32", compile="blocks") == pytest.approx(eager, rel=1e-4)
    assert compile_seconds() > before
    # torch's own settings of TensorFloat-32 must stay readable for inductor.
    if torch.cuda.get_device_capability() >= (8, 0):
        assert losses(precision="tf32", compile="blocks") == pytest.approx(eager, rel=1e-2)
