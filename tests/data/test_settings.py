"""Conditions as typed by a user: keys, matching defaults, round trips, and runs."""

from pathlib import Path

import pytest

from fedloom.base.errors import ConfigError
from fedloom.config import build, resolve, to_yaml
from fedloom.data.augment import Cutout, pipeline
from fedloom.experiment.federated import run

pytestmark = pytest.mark.filterwarnings("ignore:partition 'a.id' gives")


def final(*overrides: str) -> dict[str, float]:
    """The last record of a run on the digits."""
    return run(build(resolve(["method=fedavg", "local.lr=0.2", "rounds=10", *overrides]))).history[-1]


def test_conditions_are_keys_and_survive_a_round_trip(tmp_path: Path) -> None:
    words = [
        "method=fedavg",
        "clients=5",
        "unseen=0.2",
        "noise=pair",
        "noise.rate=0.4",
        "target=imbalanced",
        "target.rho=5",
        "augment=[crop,flip,{name: cutout, size: 3}]",
    ]
    config = resolve(words)
    assert config["noise"] == {"name": "pair", "rate": 0.4}
    assert config["target"] == {"name": "imbalanced", "rho": 5.0}
    assert config["augment"] == ["crop", "flip", {"name": "cutout", "size": 3}]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(config))
    assert resolve(base=recipe).values == config.values
    experiment = build(config)
    assert experiment.federation.unseen == 1
    assert experiment.federation.provenance["noise"]["rate"] == 0.4
    assert experiment.federation.unlabelled is not None
    assert pipeline(experiment.augment, experiment.federation.train.arrays).steps[2] == Cutout(3)


def test_a_run_with_all_conditions_goes_on_from_its_directory(tmp_path: Path) -> None:
    words = ["method=fedavg", "clients=5", "unseen=0.2", "noise=pair", "target=skew", "augment=[crop,autoaugment]"]
    full_run = run(build(resolve([*words, "rounds=4"])))
    run(build(resolve([*words, "rounds=2"])), tmp_path / "run")
    config = resolve([f"resume={tmp_path / 'run'}", "rounds=4"])
    again = run(build(config), tmp_path / "run", resume=True)
    for a, b in zip(full_run.history, again.history, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}


@pytest.mark.parametrize(
    ("partition", "clients", "held_out"),
    [("acid", 100, "common"), ("alid", 100, "common"), ("niid1", 5, 0.2), ("niid2", 10, 0.2)],
)
def test_partitions_bring_the_papers_settings(partition: str, clients: int, held_out: object) -> None:
    config = resolve([f"partition={partition}"])
    assert (config["clients"], config["held_out"]) == (clients, held_out)
    assert resolve([f"partition={partition}", "clients=7", "held_out=0.1"])["clients"] == 7


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("augment=[crop,flop]", "unknown augmentation 'flop'; did you mean 'flip'"),
        ("augment=[{name: cutout, side: 3}]", "has no setting 'side'"),
        ("noise=pairs", "unknown label noise 'pairs'; did you mean 'pair'"),
        ("noise.rate=0.4", "label noise 'none' has no setting 'rate'"),
        ("target=skewed", "did you mean 'skew'"),
        ("unseen=1", "unseen must be a fraction"),
    ],
)
def test_mistakes_get_one_sentence(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(resolve([word]))


def test_a_mean_over_unseen_clients_can_have_a_target() -> None:
    words = ["evaluation.metric=unseen/accuracy/mean", "unseen=0.2", "evaluation.target=0.5"]
    assert build(resolve(words)).evaluation.metric == "unseen/accuracy/mean"


@pytest.mark.exhaustive
def test_clients_that_agree_on_names_learn_together_and_others_stay_at_chance() -> None:
    """ACID and ALID on the digits: the same samples, but under ALID one shared model cannot suit anybody."""
    windows = [
        "clients=10",
        "partition.classes=5",
        "partition.samples=140",
        "partition.test_samples=30",
        "participation=1",
    ]
    acid, alid = (final(f"partition={kind}", *windows) for kind in ("acid", "alid"))
    assert acid["clients/accuracy/mean"] > 0.85
    assert (
        alid["clients/accuracy/mean"] < 0.4
    )  # of five clients with a class, the two that agree on a name may be right
    alone = final("partition=alid", *windows, "method=local")
    assert alone["clients/accuracy/mean"] > 0.85  # each client by itself has consistent labels, in training and in test


def test_noise_hurts_and_clean_test_labels_show_it() -> None:
    noises = ([], ["noise=pair", "noise.rate=0.45"], ["noise=symmetric", "noise.rate=0.6"])
    clean, pair, symmetric = (final("partition=iid", *noise) for noise in noises)
    assert clean["global/accuracy"] > 0.85
    assert pair["global/accuracy"] < clean["global/accuracy"]
    assert symmetric["global/accuracy"] > 0.4  # more is learnt than the share of right labels


def test_unseen_clients_profit_from_what_others_learn() -> None:
    record = final("unseen=0.25", "partition=iid")
    assert record["unseen/accuracy/clients"] == 5
    assert record["unseen/accuracy/mean"] > 0.8
