"""Signals, and ranks that stop together."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from fasttrain.distributed.stopping import Stopper
from fasttrain.errors import RunError
from tests.ranks import run_ranks


@pytest.fixture
def stopper():
    stopper = Stopper(0, 1)
    stopper.start(0)
    yield stopper
    stopper.end()


@pytest.mark.parametrize("first", ["max_time", "early stopping", "another rank"])
def test_a_first_signal_while_a_stop_is_under_way_does_not_kill(stopper, first):
    stopper.ask(first)
    os.kill(os.getpid(), signal.SIGTERM)  # the save of the stop may be half done
    time.sleep(0.01)
    assert stopper.boundary(1) == first


PROCESS = """
import os, sys, time
from fasttrain.distributed.stopping import Stopper
stopper = Stopper(0, 1)
stopper.start(0)
apart_s, *numbers = map(float, sys.argv[1:])
for number in numbers:
    os.kill(os.getpid(), int(number))
    time.sleep(apart_s)
sys.exit(7 if stopper.boundary(1) else 1)
"""


def ended_by(*signals, apart_s=0.0):
    """How a process ends that gets these signals; 7: it was left to save."""
    words = [sys.executable, "-c", PROCESS, str(apart_s), *(str(int(number)) for number in signals)]
    return subprocess.run(words, check=False, timeout=30).returncode


@pytest.mark.parametrize("apart_s", [0.0, 1.1])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_that_signals_twice_leaves_time_to_save(second, apart_s):
    assert ended_by(signal.SIGTERM, second, apart_s=apart_s) == 7


def test_a_second_ctrl_c_ends_the_process_at_once_and_an_echo_of_the_first_does_not():
    assert ended_by(signal.SIGINT, signal.SIGINT, apart_s=1.1) == -signal.SIGINT
    assert ended_by(signal.SIGINT, signal.SIGINT) == 7


def test_the_deadline_is_told_as_such():
    stopper = Stopper(0, 1, deadline_s=0.0)
    assert stopper.boundary(1) == "max_time"


def _without_an_answer():
    """Rank 1 looks no more (as if it had been killed), and rank 0 waits for its answer."""
    rank = dist.get_rank()
    stopper = Stopper(rank, 2, answer_s=2.0)
    stopper.start(0)
    dist.barrier()
    told = None
    if rank == 1:
        stopper.end()
        dist.barrier()
    else:
        dist.barrier()
        stopper.ask("test")
        began = time.monotonic()
        try:
            while stopper.boundary(1) is None and time.monotonic() < began + 20:
                time.sleep(0.01)
        except RunError as error:
            told = str(error)
        stopper.end()
    return told


@pytest.mark.ranks
def test_a_rank_that_does_not_answer_a_stop_is_named():
    told, _ = run_ranks(2, _without_an_answer)
    assert told is not None
    assert "rank 1 did not answer" in told
