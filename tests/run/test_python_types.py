"""Wrong types in Python end in one sentence that says what to do, as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from torch import nn

import fedloom as fl
from fedloom.api import _experiment
from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom.data.partitions import Dirichlet

FEDAVG, X, LOGISTIC = fl.methods.fedavg(), np.zeros(3), lambda: nn.Linear(64, 10)
FEDERATION = fl.data.federate("digits", "iid", clients=4)


def go(method: Any = "fedavg", federation: Any = FEDERATION, model: Any = "logistic", **conditions: Any) -> Callable:
    return lambda: fl.run(method, federation, model, **{"rounds": 1, **conditions})


def test_a_generator_by_name_draws_in_the_range_of_normalised_pixels() -> None:
    arrays = FEDERATION.train.arrays
    normalised = replace(arrays, x=(arrays.x - 0.3) / 0.4, mean=(0.3,), std=(0.4,))
    federation = replace(FEDERATION, train=replace(FEDERATION.train, arrays=normalised))
    model: Any = _experiment("fedcvae", federation, "conditional_vae", {"evaluation": {"what": []}}).model()
    assert (model.decoder.low, model.decoder.high) == ((-0.3 / 0.4,), (0.7 / 0.4,))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rounds": (go(rounds="three"), r"rounds is 'three', but it must be a whole number in"),
    "half a round": (go(rounds=1.5), r"rounds is 1\.5, but it must be a whole number in"),
    "participation": (go(participation="half"), r"participation is 'half', but it must be a number\."),
    "participation and cohort": (
        go(participation=0.5, cohort=3),
        r"participation=0\.5 and cohort=3 both set the size of cohorts; leave one out\.",
    ),
    "a setting of local training": (go(lr=0.1), r"run has no argument 'lr'; write local=fl\.Local\(lr=0\.1\)\."),
    "a setting of the evaluation": (go(every=2), r"'every'; write evaluation=fl\.Evaluation\(every=2\)\."),
    "a setting of the method": (go("FedDyn", alpha=0.1), r"a setting of the method; write fl\.methods\.feddyn\(al"),
    "a part": (go(server="adam"), r"slot of the method; write dataclasses\.replace\(method, server=\.\.\.\)\."),
    "an argument of run, misspelt": (go(callback=[]), r"did you mean 'callbacks'\?"),
    "an unknown condition": (go(round=3), r"run has no argument 'round'; did you mean 'rounds'\?"),
    "local": (go(local={"lr": "fast"}), r"local\.lr is 'fast', but it must be a number greater than 0\."),
    "an unknown setting": (go(local={"rate": 0.1}), r"local has no setting 'rate'; "),
    "no settings": (go(local=0.1), r"local is 0\.1, but it must be Local\(\.\.\.\) or a mapping of its settings\."),
    "evaluation": (go(evaluation={"every": "often"}), r"evaluation\.every is 'often', but it must be a whole number"),
    "metrics": (go(evaluation={"metrics": "acuracy"}), r"unknown metric 'acuracy'; did you mean 'accuracy'\?"),
    "a metric without a model": (
        go(evaluation={"metric": "accuracy", "patience": 2}),
        r"'accuracy', which is never measured: .*; choose one like global/accuracy or clients/accuracy/mean\.",
    ),
    "an attack by name": (
        go(attack="sign_flip"),
        r"the attack is 'sign_flip'; give one of fl\.attacks, like Sign",
    ),
    "resume without a folder": (go(resume=True), "resume needs the run directory"),
    "a checkpoint without a folder": (
        go(resume="runs/a/checkpoint/round-000002"),
        r"resume needs the run directory: set out=",
    ),
    "federation": (
        go(federation=np.zeros(3)),
        r"federation is an ndarray of shape \[3\]; make one with fl\.data\.federate",
    ),
    "method": (go(method=7), r"the method is 7; give one of fl\.methods, or its name"),
    "model": (go(model=3), r"the model is 3; give a function that makes a module"),
    "a model that needs more": (
        go(model=nn.Linear),
        r"called without arguments, fails with TypeError: .*missing 2 required",
    ),
    "a model that returns nothing": (go(model=lambda: None), r"returns None; it must return a torch module\."),
    "a callback alone": (go(callbacks=fl.EarlyStopping("global/loss")), r"callbacks must be a list of callbacks"),
    "a function as a callback": (go(callbacks=[print]), r"callbacks must be a list of callbacks"),
    "an experiment's federation": (
        lambda: fl.Experiment(FEDAVG, X, LOGISTIC),
        r"federation is an ndarray of shape .*; make one with",
    ),
    "an experiment's method": (
        lambda: fl.Experiment("fedavg", FEDERATION, LOGISTIC),
        r"the method is 'fedavg'; give one",
    ),
    "an experiment's module": (
        lambda: fl.Experiment(FEDAVG, FEDERATION, nn.Linear(64, 10)),
        r"the model is a module, .* like lambda: Linear\(\.\.\.\)\.",
    ),
    "an array": (
        lambda: fl.data.federate("digits", clients=np.zeros(1000)),
        r"^clients is an ndarray of shape \[1000\], b",
    ),
    "a long list": (
        lambda: fl.data.federate("digits", clients=[0] * 5000),
        r"^clients is a list of 5000, but it must be",
    ),
    "method's setting": (
        lambda: fl.methods.feddyn(alpha="big"),
        r"method 'feddyn': alpha is 'big', .* a number greater than 0\.",
    ),
    "method's name": (
        lambda: fl.methods.feddyn(alfa=1.0),
        r"method 'feddyn' has no setting 'alfa'; did you mean 'alpha'",
    ),
    "partition": (
        lambda: Dirichlet(alpha="skewed"),
        r"partition\.alpha is 'skewed', but it must be a number greater than 0\.",
    ),
    "model's setting": (
        lambda: fl.models.make("mlp", classes=2, inputs=(3,), hidden="wide"),
        r"model 'mlp': hidden is 'wide', but it must be a list of whole numbers\.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_type_is_one_sentence(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(fl.FedLoomError, match=sentence):
        call()


def test_an_error_in_the_models_own_function_is_told_as_it_is() -> None:
    def fails() -> nn.Module:
        raise TypeError("widths are text.\nThe second line.")

    with pytest.raises(ConfigError, match=r"without arguments, fails with TypeError: widths are text\.$") as error:
        go(model=fails)()
    assert isinstance(error.value.__cause__, TypeError)


def test_an_error_of_fedloom_in_the_models_function_stays_one() -> None:
    with pytest.raises(ConfigError, match=r"^model 'mlp': hidden is 'wide'"):
        go(model=lambda: fl.models.make("mlp", classes=2, inputs=(3,), hidden="wide"))()


def test_numbers_of_numpy_and_mappings_are_taken() -> None:
    result = fl.run(
        fl.methods.feddyn(alpha=np.float64(0.1)), FEDERATION, "logistic", rounds=np.int64(1),
        local={"lr": np.float32(0.5), "epochs": 1}, evaluation={"what": "global", "metrics": ["accuracy", "top2"]},
    )  # fmt: skip
    assert {"global/accuracy", "global/top2"} <= result.history[-1].keys()


def test_participation_and_cohort_may_agree_and_a_run_with_both_goes_on(tmp_path) -> None:
    assert len(go(participation=0.5, cohort=2)().history) == 1
    setup = replace(_experiment("fedavg", FEDERATION, "logistic", {"rounds": 1}), participation=0.5, cohort=3)
    fl.run(setup, out=tmp_path / "run")
    conditions = {"participation": 0.5, "cohort": 3, "rounds": 2, "out": tmp_path / "run", "resume": True}
    assert len(go(**conditions)().history) == 2


def test_what_is_imported_on_first_use_can_be_completed() -> None:
    assert {name for name in dir(fl) if not name.startswith("__")} == {*fl.__all__}
    assert "__version__" in dir(fl)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedloom {fl.__version__}\n"
    assert fl.__version__ == version("fedloom")
