"""What a run says of compilation: on the screen, in summary.json, as an error under compile.strict."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from torch import nn

from fasttrain import Data, Trainer
from fasttrain.errors import CompileError, ConfigError
from tests.compiler import planted
from tests.compiler.counting import fresh_compiler  # noqa: F401
from tests.helpers import QUIET, Recorder, points

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
EAGER = {"name": "blocks", "backend": "aot_eager", "reference_steps": 0}


class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.outer = nn.Linear(8, 4)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


class Runs(Trainer):
    kinds = (planted.Whole, planted.Whole)
    samples = 64

    def build_model(self):
        return Net(self.kinds)

    def build_data(self):
        return Data(train=points(self.samples), shuffle=False)

    def blocks(self, model):
        return list(model.blocks)

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])


def run(*kinds, evaluation=False, slot=EAGER, **settings):
    """What is told in a run, as (step, text), and its summary."""

    class Made(Runs):
        def build_data(self):
            return Data(train=points(64), evaluation=points(16, seed=4) if evaluation else None, shuffle=False)

    Made.kinds = kinds or Runs.kinds
    watcher = Recorder()
    settings = {"batch_size": 8, "steps": 4, "log": {"every": 1}, "run": {"dir": None}, **settings}
    summary = Made(**settings, compile=slot, observers=[watcher]).fit()
    told = [(record["step"], record["text"].removeprefix(f"compile={slot['name']}: ")) for record in watcher.remarks]
    return told, summary


def where(mark):
    return f"tests/compiler/planted.py:{planted.line_of(mark)}"


def test_a_good_run_says_one_sentence_after_its_first_step():
    (told,), summary = run()
    step, text = told
    assert step == 1
    assert text.startswith("1 graph of 2 Whole, no graph breaks, ")
    assert text.endswith(" s to compile.")
    assert summary["compile"]["graphs"] == 1
    assert summary["compile"]["breaks"] == summary["compile"]["fallbacks"] == []
    assert summary["compile_s"] == pytest.approx(summary["compile"]["seconds"], rel=0.05)


def test_a_planted_break_is_told_once_with_line_and_reason_for_blocks_and_model():
    for name in ("blocks", "model"):
        torch.compiler.reset()
        told, summary = run(planted.Branches, planted.Branches, slot={**EAGER, "name": name})
        (step, text) = told[1]
        assert step == 1
        assert text.startswith(f"graph break at {where('branch')} `if x.sum() > 0:")
        assert "a branch on a tensor's values" in text
        # In a loop over blocks torch cannot go on after a break: it gives the loop up, and compiles the blocks.
        assert [text.partition(" (")[0] for _, text in told[2:]] == ([] if name == "blocks" else ["forward"])
        assert summary["compile"]["breaks"][0]["line"] == planted.line_of("branch")


def test_a_planted_unsupported_operation_is_told_with_its_line():
    told, _ = run(planted.Looks)
    assert f"graph break at {where('unsupported')} `positive = x.nonzero()" in told[1][1]


def test_a_function_that_torch_gives_up_is_told_with_its_line_and_the_run_says_that_nothing_else_was_lost():
    told, summary = run(planted.Loops)
    ((step, text),) = told
    assert step == 1
    assert re.match(r"forward \(tests/compiler/planted.py:\d+\) runs uncompiled, as torch gives it up at ", text)
    assert f"at {where('loop')} `" in text
    assert summary["compile"]["graphs"] == 0
    assert summary["compile"]["fallbacks"][0]["times"] == 1


def test_a_planted_storm_is_told_while_it_goes_on_and_when_torch_gives_up():
    told, summary = run(planted.Counts, steps=12, epochs=None)
    steps = [step for step, _ in told]
    assert steps == [1, 2, 3, 5, 9]
    assert [text.partition(",")[0] for _, text in told[1:3]] == ["1 graph more in a later step"] * 2
    again, limit = told[3][1], told[4][1]
    assert ") is compiled again and again, 4 times by now, as a guard does not hold: self.calls ==" in again
    assert where("storm") in again
    assert ") has as many graphs as torch makes of a function" in limit
    assert where("storm") in limit
    assert "keep what changes from call to call in a tensor" in limit
    assert summary["compile"]["graphs"] == 8
    assert summary["compile"]["fallbacks"][0]["limit"] is True


def test_kinds_of_blocks_and_the_first_evaluation_are_no_storm():
    class Wider(planted._Block):
        def __init__(self, width):
            super().__init__(8)
            self.wide = nn.Linear(8, width)

        def forward(self, x):
            return x + self.wide(x).sum(-1, keepdim=True)

    kinds = [lambda width=width: Wider(width) for width in (3, 4, 5, 6, 7, 9)]
    told, summary = run(*kinds, evaluation=True, steps=4, evaluate={"every": 2})
    assert summary["compile"]["graphs"] >= 7
    assert len(summary["compile"]["recompilations"]) >= 6
    assert [text.partition(",")[0] for _, text in told] == ["6 graphs of 6 Wider", "6 graphs more in an evaluation"]
    assert "gradients are off in evaluation" in told[1][1]


@pytest.mark.parametrize(("kind", "mark"), [(planted.Branches, "branch"), (planted.Loops, "loop")])
def test_under_strict_what_runs_uncompiled_ends_the_run_in_its_first_step(kind, mark):
    with pytest.raises(CompileError, match=r"^compile\.strict: .*compile\.strict=false") as error:
        run(kind, slot={**EAGER, "strict": True})
    assert where(mark) in str(error.value)


def test_under_strict_the_recompile_limit_ends_the_run():
    with pytest.raises(CompileError, match="has as many graphs as torch makes") as error:
        run(planted.Counts, steps=12, slot={**EAGER, "strict": True})
    assert where("storm") in str(error.value)


def test_under_strict_a_break_in_an_evaluation_ends_the_run_too():
    class Evaluates(planted._Block):
        def forward(self, x):
            if not self.training:
                torch._dynamo.graph_break()
            return self.linear(x)

    with pytest.raises(CompileError, match="graph break"):
        run(Evaluates, slot={**EAGER, "strict": True}, evaluation=True, evaluate={"every": 2})


def test_what_its_author_left_out_of_compilation_is_told_and_no_fault_under_strict():
    told, _ = run(planted.Apart, slot={**EAGER, "strict": True})
    assert f"graph break at {where('apart')}" in told[1][1]


def test_a_block_that_is_never_called_is_told():
    class Around(Runs):
        def compute_loss(self, batch):
            model = self.model
            return nn.functional.cross_entropy(model.outer(model.blocks[0](model.inner(batch[0]))), batch[1])

    settings = {"batch_size": 8, "steps": 2, "log": {"every": 1}, "run": {"dir": None}}
    watcher = Recorder()
    Around(**settings, compile=EAGER, observers=[watcher]).fit()
    assert "1 of 2 compiled forwards (2 Whole) were not called in the first step" in watcher.remarks[1]["text"]
    watcher = Recorder()
    Around(**settings, compile={**EAGER, "name": "model"}, observers=[watcher]).fit()
    assert "1 of 1 compiled forwards (Net) were not called in the first step" in watcher.remarks[0]["text"]
    with pytest.raises(CompileError, match="not called in the first step"):
        Around(**settings, compile={**EAGER, "name": "model", "strict": True}).fit()


def test_no_hook_stays_on_the_model_after_the_first_step():
    trainer = Runs(batch_size=8, steps=2, compile=EAGER, **QUIET)
    trainer.fit()
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_of_many_breaks_the_first_five_are_told_and_the_rest_counted():
    body = "        x = x + 1\n        torch._dynamo.graph_break()\n" * 9
    code = f"class Many(_Block):\n    def forward(self, x):\n{body}        return self.linear(x)"
    space = {"_Block": planted._Block, "torch": torch}
    exec(compile(code, "many.py", "exec"), space)
    told, summary = run(space["Many"])
    assert len(summary["compile"]["breaks"]) == 9
    assert sum("graph break at" in text for _, text in told) == 5
    assert told[-1] == (1, "4 more graph breaks by now: summary.json has them all.")


def test_steps_that_compile_are_in_no_average_and_their_seconds_stand_apart():
    made = []

    def backend(graph, inputs):
        made.append(graph)
        time.sleep(0.5)
        return graph.forward

    torch._dynamo.register_backend(backend, name="slow_for_report")
    try:
        slot = {"name": "blocks", "backend": "slow_for_report", "reference_steps": 0}
        _, summary = run(planted.Counts, steps=12, slot=slot)
    finally:
        del torch._dynamo.backends.registry._COMPILER_FNS["slow_for_report"]
    assert len(made) == 8
    assert summary["warmup"]["seconds"] > 0.5
    assert summary["apart_s"]["compilation"] > 7 * 0.5
    assert summary["step_time_s"]["p95"] < 0.5


def test_the_summary_of_the_run_folder_holds_figures_and_remarks(tmp_path):
    run(planted.Branches, run={"dir": str(tmp_path), "name": "a", "id": "b"})
    summary = json.loads((tmp_path / "a" / "b" / "summary.json").read_text())
    assert summary["compile"]["breaks"][0]["code"].startswith("if x.sum() > 0:")
    assert len(summary["remarks"]) == 2
    assert summary["remarks"][1]["text"].startswith("compile=blocks: graph break at ")


def test_a_second_run_in_one_process_finds_and_tells_the_same_again():
    told = [run(planted.Branches) for _ in range(2)]
    for sentences, summary in told:
        assert [text.partition(" (")[0][:24] for _, text in sentences] == [
            "2 graphs of Branches, 1 ",
            "graph break at tests/com",
        ]
        assert summary["compile"]["graphs"] == 2
        assert summary["compile_s"] == pytest.approx(summary["compile"]["seconds"], rel=0.05)
    with pytest.raises(CompileError):
        run(planted.Branches, slot={**EAGER, "strict": True})


def test_what_is_told_stands_in_what_fit_returns():
    told, summary = run(planted.Branches)
    assert [(remark["step"], remark["text"].removeprefix("compile=blocks: ")) for remark in summary["remarks"]] == told


def test_the_sentence_comes_after_the_first_step_wherever_the_log_points_are():
    told, _ = run(log={"every": 100})
    assert [step for step, _ in told] == [1]


def test_a_model_without_blocks_is_told_of_the_other_name():
    with pytest.raises(ConfigError, match="compile=model, which needs none"):
        Trainer.from_parts(nn.Linear(8, 4), points(16), nn.functional.cross_entropy, batch_size=8, compile=EAGER)
