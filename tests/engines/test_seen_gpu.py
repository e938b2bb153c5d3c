"""Forked workers on a machine with a GPU, which is not used."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from helpers.federations import FEATURES, SIZES
from helpers.networks import tanh_net
from helpers.runs import assert_same_run, experiment, go
from helpers.seen_gpu import backward, with_gpu_in_sight

from fedloom import engines
from fedloom.base import fork_safety
from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom.compute import computes, resolved
from fedloom.compute.cohort import trial
from fedloom.compute.live import Live
from fedloom.engines import Serial
from fedloom.engines.processes import Processes, reason_against_forking
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask
from fedloom.rounds.engine import Group

SENTENCE = r"engine 'processes' cannot fork its workers: PyTorch, which sees a GPU, .*; leave out engine\.start=fork\."
TWO = {"engine": "processes", "engine_settings": {"workers": 2}, "compute": "auto"}
FORKED = TWO | {"engine_settings": {"workers": 2, "start": "fork"}}


def same_bits() -> None:
    """Moon's clients are stepped together, with autograd; fine-tuned ones are evaluated with it in this process."""
    tests = {"compute": "auto", "evaluation": Evaluation(what=("clients",))}
    forks = go("moon", **TWO)
    assert not forks.failures
    assert fork_safety.backward_works(), "the run has spoilt the process for the next one"
    adapting = go("fedbabu", **tests | TWO)
    assert not adapting.failures
    assert not fork_safety.backward_works(), "nothing was tested: the evaluation was to spoil the process"
    assert_same_run(go("moon", compute="auto"), forks)
    assert_same_run(go("fedbabu", **tests), adapting)


def spoilt() -> None:
    plan = FederatedTask(experiment(compute="auto")).plan
    factory = computes.make("auto")
    engines.WORTH_FORKING = 0
    several = len(os.sched_getaffinity(0)) > 1
    for kind in (Processes if several else Serial, Serial):
        engine = engines.engines.make("auto")(plan, factory)
        assert isinstance(engine, kind)
        engine.close()
        backward()
    assert resolved("auto", plan) == "batched"  # tried in this process
    with pytest.raises(ConfigError, match=SENTENCE):
        go(**FORKED)
    assert not go(engine="auto").failures


def spoilt_between_rounds() -> None:
    task = FederatedTask(experiment())
    down, cohort = task.state.server.broadcast(task.plan), np.arange(len(SIZES))

    def work(engine: Processes) -> None:
        assert len([*engine.run([Group(down, cohort, lambda i: {}, np.ones(len(SIZES)))])]) > 0

    running, measuring, stopped = (Processes(task.plan, Live, workers=1, start="fork") for _ in range(3))
    backward()
    work(running)  # its workers are from before
    os.kill(running.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match=SENTENCE):
        work(running)
    os.kill(measuring.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match=SENTENCE):
        measuring.losses(down, cohort, lambda i: {})
    stopped.close()
    with pytest.raises(ConfigError, match=SENTENCE):
        work(stopped)
    for engine in (running, measuring, stopped):
        engine.close()


def trials() -> None:
    model, x, parent = tanh_net(), torch.zeros(1, FEATURES), os.getpid()
    assert trial.trial_reason(model, "logits", x) is None
    difference = trial._difference

    def compare_outputs(*args: object) -> str:
        return "outputs" if os.getpid() != parent else "outputs here"

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trial._difference = compare_outputs
    assert str(trial.trial_reason(model, "logits", x)).endswith("has other outputs")
    trial._difference = die
    assert str(trial.trial_reason(model, "logits", x)).endswith("cannot be tried (the process that tried it died)")
    trial._difference, fork_safety.LONGEST = lambda *args: time.sleep(60), 0.5
    assert str(trial.trial_reason(model, "logits", x)).endswith("gave no answer within 0.5 seconds)")
    works, fork_safety._backward = fork_safety._backward, lambda: time.sleep(60)
    assert not fork_safety.backward_works()
    trial._difference, fork_safety._backward, fork_safety.LONGEST = difference, works, 600
    worker = mp.get_context("fork").Process(target=lambda: sys.exit(3 + fork_safety.backward_spoils()), daemon=True)
    worker.start()
    worker.join()
    assert worker.exitcode == 3, "a worker forks nothing, so that nothing is spoilt"
    assert reason_against_forking() is None
    with pytest.raises(EOFError):
        fork_safety.run_in_child(lambda: 1 / 0)
    with pytest.raises(ChildProcessError):  # no child is left
        os.waitpid(-1, os.WNOHANG)


def programs() -> None:
    for line, hidden in {
        "device=cpu": True,
        "engine=processes": True,
        "device=cpu,auto -m": False,
        "device=auto": False,
        "device=cpu engine=ray engine.gpus=1": False,
    }.items():
        words = ["run", "method=fedavg", "data=synthetic", "--dry-run", *line.split()]
        assert main(words) == 0  # called from Python, where the process is not the command's own
        assert os.environ.get("CUDA_VISIBLE_DEVICES") != "", line
        sys.argv = ["fedloom", *words]
        assert main() == 0
        assert (os.environ.pop("CUDA_VISIBLE_DEVICES", None) == "") == hidden, line


@pytest.mark.exhaustive
def test_with_a_gpu_in_sight() -> None:
    with_gpu_in_sight(same_bits, spoilt, spoilt_between_rounds, trials, programs)
