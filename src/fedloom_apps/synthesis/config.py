"""The configuration of ``fedloom synthesize``: that of ``fedloom run`` with the keys of the evaluation of a set."""

from __future__ import annotations

from dataclasses import replace

from fedloom.config.keys import RUN, Shared, build, build_method
from fedloom.config.schema import Config, Record
from fedloom.experiment.experiment import Experiment
from fedloom_apps.synthesis.judge import EvalConfig, SyntheticEvaluator
from fedloom_apps.synthesis.take import require_samples

JUDGE = Record(EvalConfig)
SYNTHESIZE = replace(
    RUN,
    kind="synthesis",
    sections={**RUN.sections, "judge": JUDGE},
    defaults={**RUN.defaults, "method": "fedevg"},
    default_sweep=lambda named: (),
)


def build_synthesis(config: Config, shared: Shared | None = None) -> Experiment:
    """Build the experiment of ``fedloom synthesize``."""
    require_samples(build_method(config))
    judge, experiment = JUDGE.instantiate(config["judge"]), build(config, shared)
    SyntheticEvaluator(experiment.federation, judge)  # refuses what it cannot evaluate
    return experiment
