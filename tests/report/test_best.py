"""Settings are chosen on validation samples, and become recipes that run together."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Cli

import fedloom as fl
from fedloom.base import yaml
from fedloom.config import resolve

TUNING = ("run", "-q", "-m", "data=digits", "clients=4", "rounds=2", "local.lr=0.01,0.1,1", "seed=8,9",
          "validation=0.2", "evaluation.what=[validation]", "out=tuning")  # fmt: skip


def test_the_best_settings_of_each_method_become_recipes_of_one_sweep(cli: Cli) -> None:
    assert cli(*TUNING, "method=fedavg,scaffold").code == 0
    answer = cli("report", "tuning", "--best", "tuned")
    assert answer.code == 0
    for method in ("fedavg", "scaffold"):
        means = {
            lr: sum(score(Path("tuning") / f"{method}-lr={lr}-{seed}") for seed in (8, 9)) / 2
            for lr in ("0.01", "0.1", "1")
        }
        lr = max(means, key=means.__getitem__)
        recipe = yaml.load(Path("tuned") / f"{method}.yaml")
        words = (f"method={method}", f"local.lr={lr}", "data=digits", "clients=4", "rounds=2", "validation=0.2")
        assert resolve([], Path("tuned") / f"{method}.yaml").values == resolve(words).values
        assert recipe.keys().isdisjoint({"seed", "evaluation", "engine", "machine", "out"})
        end = {"0.01": " (the smallest tried)", "0.1": "", "1": " (the largest tried)"}[lr]
        text = f"tuned/{method}.yaml: local.lr={lr}{end}; validation accuracy {100 * means[lr]:.2f} ±"
        assert text in " ".join(answer.out.split())
    assert (
        cli("run", "-q", "-m", "tuned/fedavg.yaml", "tuned/scaffold.yaml", "seed=1,2", "rounds=1", "out=final").code
        == 0
    )
    assert {path.parent.name for path in Path("final").glob("*/config.yaml")} == {
        "fedavg-1", "fedavg-2", "scaffold-1", "scaffold-2"
    }  # fmt: skip


def score(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["final"]["validation/accuracy/mean"]


def test_settings_of_which_a_run_failed_are_not_chosen_and_updates_left_out_are_told(cli: Cli) -> None:
    assert cli(*TUNING, "method=fedavg", "local.lr=0.1,1e30").code == 0
    answer = cli("report", "tuning", "--best", "tuned")
    assert resolve([], Path("tuned/fedavg.yaml"))["local.lr"] == 0.1
    assert "best of 2." in answer.out
    for seed in (8, 9):
        path = Path(f"tuning/fedavg-lr=0.1-{seed}/summary.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    answer = cli("report", "tuning", "--best", "other")
    assert resolve([], Path("other/fedavg.yaml"))["local.lr"] == 1e30
    assert "best of 2, without 100.00 % of the clients' updates." in " ".join(answer.out.split())
    for seed in (8, 9):
        path = Path(f"tuning/fedavg-lr=1e+30-{seed}/summary.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    answer = cli("report", "tuning", "--best", "none")
    assert "fedavg: no recipe, since none of its settings has a result of all seeds." in answer.out


@pytest.mark.parametrize(
    ("words", "message"),
    [(("evaluation.what=[global,clients]",), "run them with validation=0.2, and"), ((), "'there' exists already")],
)
def test_no_recipe_is_made_of_test_samples_or_over_others(words: tuple[str, ...], message: str, cli: Cli) -> None:
    Path("there").mkdir()
    assert cli(*TUNING, "method=fedavg", "local.lr=0.1,1", "seed=1", *words).code == 0
    answer = cli("report", "tuning", "--best", "there")
    assert (answer.code, message in " ".join(answer.err.split())) == (2, True)
    assert not list(Path("there").iterdir())


def test_runs_from_python_have_no_recipe(cli: Cli) -> None:
    federation = fl.data.federate("digits", "iid", clients=4, validation=0.2)
    fl.run("fedavg", federation, "mlp", rounds=1, evaluation=fl.Evaluation(what=("validation",)), out="one")
    answer = cli("report", "one", "--best", "tuned")
    assert (answer.code, "was started from Python" in answer.err) == (2, True)


def test_runs_of_several_recipes_are_called_after_them(cli: Cli) -> None:
    for name, lr in (("low", 0.01), ("high", 0.1)):
        Path(f"{name}.yaml").write_text(f"method: fedavg\nclients: 4\nrounds: 1\nlocal: {{lr: {lr}}}\n")
    assert cli("run", "-q", "-m", "low.yaml", "high.yaml", "seed=1,2", "out=both").code == 0
    runs = {path.parent.name: yaml.load(path)["local"]["lr"] for path in Path("both").glob("*/config.yaml")}
    assert runs == {
        f"fedavg-recipe={name}-{seed}": lr for name, lr in (("low", 0.01), ("high", 0.1)) for seed in (1, 2)
    }
    answer = cli("run", "-q", "-m", "low.yaml", "high.yaml", "method.alpha=1")
    assert answer.code == 2
    assert answer.err.startswith("fedloom: low.yaml: method 'fedavg' has no setting or slot 'alpha'")


def test_settings_of_a_distillation_are_chosen_on_its_validation_samples(cli: Cli) -> None:
    words = ("method=disk", "method.alpha=0.1,0.9", "epochs=2", "warmup_epochs=1", "teacher_epochs=1", "validation=0.1")
    assert cli("distill", "-q", "-m", *words, "out=tuning").code == 0
    assert cli("report", "tuning", "--best", "tuned").code == 0
    scores = {
        alpha: json.loads(Path(f"tuning/disk-alpha={alpha}-0/summary.json").read_text())["best"]["value"]
        for alpha in (0.1, 0.9)
    }
    assert yaml.load(Path("tuned/disk.yaml"))["method"]["alpha"] == max(scores, key=scores.__getitem__)


@pytest.mark.filterwarnings("ignore:.*config.yaml was cut, altered")
def test_what_a_strangers_settings_hold_does_not_reach_the_terminal_raw(cli: Cli) -> None:
    assert cli(*TUNING, "method=fedavg", "local.lr=0.1,1", "seed=1").code == 0
    for path in Path("tuning").glob("*/config.yaml"):
        path.write_text(re.sub(r"(?m)^  lr: (.*)$", r'  lr: "\\e[31m\1"', path.read_text(), count=1))
    answer = cli("report", "tuning", "--best", "tuned")
    assert (answer.code, "\x1b" in answer.out, "local.lr=[31m" in answer.out.replace(" ", "")) == (0, False, True)


def test_recipes_whose_names_would_be_alike_are_files_of_their_own(cli: Cli) -> None:
    federation = fl.data.federate("digits", "iid", clients=2)
    x, y = federation.train.arrays.x[:80].numpy(), federation.train.arrays.y[:80].numpy()
    for number, name in enumerate(("a-b", "a_b")):
        np.savez(f"{name}.npz", x_train=x + number, y_train=y)
    words = ("clients=2", "rounds=1", "validation=0.2", "evaluation.what=[validation]", "partition=iid", "out=tuning")
    assert cli("run", "-q", "-m", "data=npz", "data.path=a-b.npz,a_b.npz", "method=fedavg", *words).code == 0
    assert cli("report", "tuning", "--best", "tuned").code == 0
    paths = [resolve([], recipe)["data.path"] for recipe in sorted(Path("tuned").iterdir())]
    assert {Path(path).name for path in paths} == {"a-b.npz", "a_b.npz"}
