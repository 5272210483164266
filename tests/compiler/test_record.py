"""The record tells what torch.compile did, with the line and the reason."""

from __future__ import annotations

import re

import pytest
import torch

from fasttrain.compiler.record import AT_RUN_TIME, Break, Place, Record, gist, guard_of
from tests.compiler import planted
from tests.compiler.counting import fresh_compiler  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def recorded(block, inputs, **settings):
    record = Record()
    compiled = torch.compile(block.forward, backend="aot_eager", **settings)
    for x in inputs:
        compiled(x).sum().backward()
    return record.take(), record


def ones(*sizes):
    return [torch.ones(size, 8) for size in sizes]


def here(mark):
    return "planted.py", planted.line_of(mark)


def at(place):
    return place.file.rpartition("/")[2], place.line


def test_a_graph_is_counted_once_with_the_time_it_took_and_nothing_is_taken_twice():
    taken, record = recorded(planted.Whole(), ones(4, 4, 4))
    assert (taken.graphs, taken.from_cache) == (1, 0)
    assert taken.seconds > 0
    assert taken.breaks.total() + taken.recompilations.total() + taken.fallbacks.total() == 0
    assert record.take() is None


def test_graphs_of_another_record_are_not_counted():
    recorded(planted.Whole(), ones(4))
    assert Record().take() is None
    taken, _ = recorded(planted.Branches(), ones(4))
    assert taken.graphs == 2


def test_a_graph_break_is_told_with_its_line_and_reason():
    taken, _ = recorded(planted.Branches(), ones(4, 4))
    (entry,) = taken.breaks
    assert at(entry.place) == here("branch")
    assert entry.place.text.startswith("if x.sum() > 0:")
    assert entry.reason == "a branch on a tensor's values (if, while, assert)"
    assert taken.graphs == 2
    assert not taken.fallbacks


def test_an_unsupported_operation_is_told_with_its_line():
    taken, _ = recorded(planted.Looks(), ones(4))
    (entry,) = taken.breaks
    assert at(entry.place) == here("unsupported")
    assert "nonzero" in entry.reason


def test_an_operator_of_unknown_shapes_is_torchs_own_error_and_names_the_line():
    with pytest.raises(RuntimeError, match=rf'planted.py", line {planted.line_of("unknown")}'):
        recorded(planted.Unknown(), ones(4))


def test_a_function_that_torch_gives_up_is_told_with_the_line_that_made_it():
    taken, _ = recorded(planted.Loops(), ones(4))
    assert taken.graphs == 0
    (entry,) = taken.fallbacks
    assert (at(entry.place), entry.limit) == (here("loop"), False)
    assert re.fullmatch(r"forward \(tests/compiler/planted.py:\d+\)", entry.function)


def test_a_recompilation_names_the_guard_and_the_line_it_rests_on():
    taken, _ = recorded(planted.Counts(), ones(4, 4, 4))
    assert taken.graphs == 3
    assert [entry.guard for entry in taken.recompilations] == ["self.calls == 0", "self.calls == 1"]
    assert {at(entry.place) for entry in taken.recompilations} == {here("storm")}


def test_a_recompilation_for_a_size_names_both_sizes():
    taken, _ = recorded(planted.Whole(), ones(8, 5), dynamic=False)
    (entry,) = taken.recompilations
    assert "size mismatch at index 0. expected 8, actual 5" in entry.guard
    assert entry.function.startswith("forward (tests/compiler/planted.py:")


def test_the_recompile_limit_is_a_fallback_with_the_last_guard_and_its_line():
    taken, record = recorded(planted.Counts(), ones(*[4] * 12))
    assert (taken.graphs, len(taken.recompilations)) == (8, 7)
    (entry,) = taken.fallbacks
    assert (at(entry.place), entry.limit) == (here("storm"), True)
    assert entry.function.startswith("forward (")
    assert entry.reason == "self.calls == 7"
    assert record.take() is None


def test_what_torch_forgets_in_a_reset_is_not_counted_again():
    _, record = recorded(planted.Branches(), ones(4))
    torch.compiler.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    assert record.take() is None
    torch.compile(planted.Whole().forward, backend="aot_eager")(ones(4)[0])
    assert record.take().graphs == 1


def test_sums_keep_how_often_each_thing_came():
    first, _ = recorded(planted.Branches(), ones(4))
    torch.compiler.reset()
    second, _ = recorded(planted.Branches(), ones(4))
    seconds = first.seconds + second.seconds
    first.add(second)
    assert first.graphs == 4
    assert first.seconds == pytest.approx(seconds)
    (told,) = first.as_dict()["breaks"]
    assert (told["times"], told["line"], told["code"][:14]) == (2, planted.line_of("branch"), "if x.sum() > 0")


def test_a_break_without_a_place_is_told_all_the_same():
    from collections import Counter

    from fasttrain.compiler.record import Compilations

    told = Compilations(breaks=Counter({Break(place=None, reason="why"): 1})).as_dict()["breaks"]
    assert told == [{"file": None, "line": None, "code": None, "reason": "why", "times": 1}]
    assert str(Place(file="a.py", line=3)) == "a.py:3"


def test_reasons_are_cut_to_their_gist():
    long = "Unsupported context manager\n  Explanation: Dynamo cannot enter a lock. And so on.\n  Hint: do not.\n"
    assert gist(long) == "Unsupported context manager: Dynamo cannot enter a lock"
    assert gist("") == ""
    assert guard_of(None)[0] == "no guard is named"
    assert guard_of("0/12: tensor 'x' size mismatch at index 1. expected 3,   actual 4")[0] == (
        "tensor 'x' size mismatch at index 1. expected 3, actual 4"
    )


def test_cuda_graphs_that_are_left_out_as_a_function_runs_are_counted_once():
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    _, record = recorded(planted.Whole(), ones(4))
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (1 instances)")
    log_cudagraph_skip_and_bump_counter("skipping cudagraph due to function 0 exceeding max re-recording limit (=128)")
    taken = record.take()
    assert taken.as_dict()["cuda_graphs_skipped"] == {AT_RUN_TIME: 2}
    assert record.take() is None
    torch._dynamo.utils.counters.clear()
    assert record.take() is None
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to cpu device (arg0_1)")
    assert record.take().graphs_skipped.total() == 1


def test_a_reason_that_a_compilation_gives_is_not_told_twice():
    record = Record()
    with torch._dynamo.utils.get_metrics_context() as metrics:
        assert metrics.in_progress()
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += 1
        metrics.set("cudagraph_skip_reason", "skipping cudagraphs due to cpu device (arg0_1)")
        metrics.update({"is_forward": True, "graph_op_count": 1})
        metrics.set("compile_id", "0/0")
    taken = record.take()
    assert list(taken.graphs_skipped.elements()) == ["skipping cudagraphs due to cpu device (arg0_1)"]
