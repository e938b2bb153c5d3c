"""``fedloom claim``: tiny runs decide a tiny claim; what does not fit, or was altered, is no evidence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Cli

from fedloom.core import yaml
from fedloom.core.errors import ConfigError, DataError
from fedloom_apps.claims.register import open_work, read_claim
from fedloom_apps.claims.rule import Verdict

CLAIM: dict[str, Any] = {
    "title": "A small step learns more slowly (tests)",
    "settings": {"data": "digits", "model": "mlp", "partition": "iid", "clients": 3, "participation": 1.0, "rounds": 1},
    "runs": {
        "fast": {"method": "fedavg", "local.lr": 0.1},
        "slow": {"method": "fedavg", "local.lr": 0.0001},
    },
    "claims": [
        {
            "table": "table 1",
            "says": "{} is more accurate than {}",
            "ours": "fast",
            "against": {"slow": "+40"},
            "unit": 100,
            "seeds": 3,
        }
    ],
    "minutes": {"fast": 2, "slow": 1},
}


def write(folder: Path, name: str = "steps", **changes: Any) -> Path:
    path = folder / "claims" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.dump(CLAIM | changes))
    return path


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    return write(tmp_path).parent


def train(cli: Cli, claims: Path, run: str, seed: object, out: str, *more: str) -> None:
    words = read_claim(claims / "steps.yaml").words(run)
    assert cli("run", "-q", *words, f"seed={seed}", f"out={out}", *more).code == 0


def test_runs_that_fit_decide_and_are_stored(cli: Cli, claims: Path) -> None:
    for run in ("fast", "slow"):
        train(cli, claims, run, "0,1,2", f"runs/{run}", "-m", "checkpoint.every=1")  # computed otherwise, still fits
    code, out, _ = cli("claim", "check", "runs", "--claims", "claims", "--replay", "1", "--store")
    assert code == 0
    assert out.count("evidence for steps, fast, seed ") == 3
    assert "fast is more accurate than slow (published +40): reproduced" in out
    assert "3 seeds" in out
    assert json.loads((claims / "results/steps.json").read_text())["runs"].keys() == {"fast", "slow"}
    assert (
        cli("claim", "list", "--claims", "claims").out
        == "steps: A small step learns more slowly (tests): 1 reproduced\n"
    )
    assert (
        "fast is more accurate than slow (published +40): rep"
        in cli("claim", "list", "steps", "--claims", "claims").out
    )
    assert cli("claim", "next", "--claims", "claims").out == ""


def test_next_shows_the_commands_of_the_first_files_and_of_those_that_are_named(cli: Cli, tmp_path: Path) -> None:
    for minutes in (5, 3, 1, 2, 4):
        write(tmp_path, f"takes_{minutes}", minutes={"fast": minutes, "slow": minutes})
    out = cli("claim", "next", "--claims", "claims").out
    assert [line.split(":")[0] for line in out.splitlines() if line[0] != " "] == [
        "takes_1",
        "takes_2",
        "takes_3",
        "then",
    ]
    assert out.endswith("\nthen: takes_4, takes_5\n")
    out = cli("claim", "next", "takes_5", "takes_2", "--claims", "claims").out
    assert [line.split(":")[0] for line in out.splitlines() if line[0] != " "] == ["takes_2", "takes_5"]
    assert "did you mean 'takes_5'?" in cli("claim", "list", "take_5", "--claims", "claims").err


def test_next_names_what_is_missing_by_worth_for_the_time(cli: Cli, tmp_path: Path, claims: Path) -> None:
    dear = write(tmp_path, "dear", minutes={"fast": 200, "slow": 100})
    train(cli, claims, "fast", 0, "runs/a")
    assert (
        "; 1 of 1 rounds came out again"
        in cli("claim", "check", "runs/a", "--claims", "claims/steps.yaml", "--store").out
    )
    stored = json.loads((claims / "results/steps.json").read_text())
    stored["runs"]["fast"]["0"]["minutes"] = 3.0  # measured, instead of the estimate
    forged = json.dumps(stored).replace('"global/accuracy": [0.', '"global/accuracy": [0.9')
    (claims / "results/steps.json").write_text(forged)
    again = cli("claim", "check", "runs/a", "--claims", "claims/steps.yaml", "--store").out
    assert "in place of other figures of this seed" in again
    first, second = open_work([read_claim(dear), read_claim(claims / "steps.yaml")], {"steps": stored})
    assert [(work.run, work.seeds, work.minutes) for work in first.works] == [
        ("fast", (1, 2), 6.0),
        ("slow", (0, 1, 2), 3),
    ]
    assert (second.file.name, second.minutes) == ("dear", 900)
    out = cli("claim", "next", "--claims", "claims").out
    assert "seed=0,1,2 out=runs/claims/steps/slow" in out
    command = next(line for line in out.splitlines() if "steps/slow" in line).split()
    assert cli(*command[1:], "-q").code == 0
    assert "slow/" in cli("claim", "check", "runs/claims/steps", "--claims", "claims").out


def test_other_settings_and_altered_runs_are_no_evidence(cli: Cli, claims: Path) -> None:
    train(cli, claims, "fast", 0, "runs/other", "local.batch_size=7")
    code, out, _ = cli("claim", "check", "runs/other", "--claims", "claims", "--replay", "0")
    assert code == 1
    assert "no evidence: fits no claim; it is nearest to steps, fast: local.batch_size 7 ≠ " in out
    train(cli, claims, "fast", 0, "runs/a")
    records = Path("runs/a/metrics.jsonl")
    records.write_text(records.read_text().replace('"global/accuracy":', '"global/accuracy": 0.99, "was":'))
    code, out, _ = cli("claim", "check", "runs/a", "--claims", "claims")
    assert code == 1
    assert "metrics.jsonl was cut, altered or lost after the run had ended" in out


def test_a_run_whose_checksums_were_rewritten_is_told_by_its_replay(cli: Cli, claims: Path) -> None:
    from fedloom.experiment.rundir import checksums

    train(cli, claims, "slow", 0, "runs/a")
    run = Path("runs/a")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["global/accuracy"] = 0.99
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = json.loads((run / "summary.json").read_text())
    summary["final"]["global/accuracy"] = 0.99
    summary["checksums"] = checksums(run)
    (run / "summary.json").write_text(json.dumps(summary))
    code, out, _ = cli("claim", "check", "runs/a", "--claims", "claims", "--replay", "0")
    assert (code, "seed 0; 0 of 1 rounds came out again" in out) == (0, True)
    code, out, _ = cli("claim", "check", "runs/a", "--claims", "claims")
    assert code == 1
    assert "round 1 comes out differently, first in global/accuracy" in out


WRONG = {
    "data that open a file": ({"settings": {"data": "npz", "data.path": "/etc/passwd"}}, "data=npz reads what its"),
    "a model that is downloaded": ({"settings": {"model": "distilbert"}}, "model=distilbert reads what its settings"),
    "a place of data": ({"settings": {"data": "mnist", "data.download": True}}, "data.download is not for a claim"),
    "a key that names a file": ({"settings": {"client_local": "x"}}, "client_local is not for a claim to set"),
    "a free text": ({"settings": {"partition": "iid", "partition.x": "notes"}}, "partition.x is 'notes', but a claim"),
    "a path for a name": ({"settings": {"method.topology": "../x"}}, "method.topology is '../x', but a claim sets"),
    "a path for a target": ({"settings": {"target": "../x"}}, "target is '../x', but a claim sets"),
    "a text for a number": ({"settings": {"noise": "pair", "noise.rate": "x"}}, "noise.rate is 'x', but a claim"),
    "scripts that are a text": ({"scripts": "no"}, "scripts must be true or false"),
    "a setting out of range": ({"settings": {"local.momentum": 2}}, "local.momentum must lie in"),
    "a run that there is not": (
        {"claims": [CLAIM["claims"][0] | {"against": {"slwo": "-"}}]},
        "claims[0] compares 'slwo'; did you mean 'slow'?",
    ),
    "a target without rounds": ({"claims": [CLAIM["claims"][0] | {"target": 0.5}]}, "need a target, and other figures"),
    "no method": ({"runs": {"fast": {}, "slow": {"method": "fedavg"}}}, "runs.fast names no method"),
    "an unknown key": ({"clams": []}, "unknown key 'clams'; did you mean 'claims'?"),
    "no minutes": ({"minutes": {"fast": 1}}, "minutes.slow must be the minutes"),
    "a long text": ({"title": "x" * 500}, "a text has more than 400 characters"),
    "a tag": ({"note": "<script>"}, "or one of < "),
    "a further cell": ({"title": "x | **reproduced**"}, "or one of < "),
    "a link": ({"differs": "[x](http://x)"}, "or one of < "),
}


@pytest.mark.parametrize(("changes", "says"), WRONG.values(), ids=WRONG)
def test_a_claim_file_is_data(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        read_claim(write(tmp_path, **changes))
    assert says in str(told.value)
    assert str(told.value).count("\n") == 0


def test_label_noise_and_targets_are_settings_of_claims(tmp_path: Path) -> None:
    labels = {"noise": "pair", "noise.rate": 0.1, "target": "imbalanced", "target.rho": 50}
    complete = read_claim(write(tmp_path, settings=CLAIM["settings"] | labels)).complete["fast"]
    assert (complete["noise.rate"], complete["target.name"], complete["target.rho"]) == (0.1, "imbalanced", 50)


def test_a_lambda_chosen_on_test_samples_is_never_called_reproduced(tmp_path: Path, cli: Cli) -> None:
    """Methods without a λ have what clients deploy beside it; scripts and differences of one comparison are said."""
    published, deployed = "as_published/accuracy/mean", "clients/accuracy/mean"
    claims = [
        CLAIM["claims"][0] | {"metric": published},
        CLAIM["claims"][0] | {"metric": deployed},
        CLAIM["claims"][0] | {"metric": deployed, "differs": "λ .5"},
    ]
    file = read_claim(write(tmp_path, settings=CLAIM["settings"] | {"evaluation.what": ["clients"]}, claims=claims,
                            scripts=True))  # fmt: skip
    train(cli, file.path.parent, "fast", 0, "runs/fast")
    assert cli("claim", "check", "runs", "--claims", "claims", "--replay", "0", "--store").code == 0
    curves = file.results()["runs"]["fast"]["0"]["curves"]
    assert curves[published] == curves[deployed]
    runs = {"fast": (0.9, 0.91, 0.92), "slow": (0.1, 0.1, 0.1)}
    results = {"runs": {
        run: {str(s): RECORD | {"curves": {published: [value], deployed: [value]}} for s, value in enumerate(seen)}
        for run, seen in runs.items()
    }}  # fmt: skip
    said = [(found.verdict, found.reason) for _, found in file.judged(results) if found]
    assert [verdict for verdict, _ in said] == [Verdict.ON_TEST, Verdict.SCRIPTS, Verdict.OTHERWISE]
    assert said[2][1] == "λ .5; holds here"


def test_a_claim_that_is_a_pipe_or_large_is_not_read(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert cli("claim", "list", "--claims", "pipe.yaml").code == 2
    (tmp_path / "large.yaml").write_text("a: 1\n" * 20_000)
    assert "more than 65,536 bytes" in cli("claim", "list", "--claims", "large.yaml").err
    assert "there are no claims at 'recipes/claims'" in cli("claim").err
    assert "did you mean 'check'" in cli("claim", "chekc", "--claims", "large.yaml").err


RECORD = {"rounds": 1, "cost": 1, "left_out": 0, "minutes": 0.0, "curves": {"global/accuracy": [0.5]}}
MALFORMED = {
    "a list": [],
    "runs of another kind": {"runs": {"fast": 5}},
    "no minutes": {"runs": {"fast": {"0": {key: RECORD[key] for key in RECORD if key != "minutes"}}}},
    "a text for a number": {"runs": {"fast": {"0": RECORD | {"curves": {"global/accuracy": ["high"]}}}}},
    "no such curve": {"runs": {"fast": {"0": RECORD | {"curves": {}}}}},
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_results_of_strangers_are_data(content: Any, claims: Path) -> None:
    (claims / "results").mkdir()
    (claims / "results/steps.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="cannot be read as results"):
        read_claim(claims / "steps.yaml").results()


def test_results_that_are_a_pipe_are_not_read_and_runs_may_take_no_time(claims: Path) -> None:
    (claims / "results").mkdir()
    os.mkfifo(claims / "results/steps.json")
    with pytest.raises(DataError, match="is a pipe"):
        read_claim(claims / "steps.yaml").results()
    measured = {"steps": {"runs": {"fast": {"0": RECORD}, "slow": {"0": RECORD}}}}
    assert open_work([read_claim(claims / "steps.yaml")], measured)[0].minutes == 0


def test_names_of_files_and_runs_are_safe_to_paste(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(ConfigError, match="its name is part of commands"):
        read_claim(write(tmp_path, "steps;reboot").rename(tmp_path / "steps;reboot.yaml"))
    runs = {"FedAvg (E=1, lr=.1)": CLAIM["runs"]["fast"], "..": CLAIM["runs"]["slow"]}
    comparison = CLAIM["claims"][0] | {"ours": "FedAvg (E=1, lr=.1)", "against": {"..": "-"}}
    write(tmp_path, runs=runs, claims=[comparison], minutes=dict.fromkeys(runs, 1))
    out = cli("claim", "next", "--claims", "claims").out
    assert "out=runs/claims/steps/FedAvg__E_1__lr__1_\n" in out
    assert "out=runs/claims/steps/__\n" in out


def test_a_run_that_was_cut_and_one_that_lacks_records_are_no_evidence(cli: Cli, tmp_path: Path, claims: Path) -> None:
    from fedloom.experiment.rundir import checksums

    write(tmp_path, settings=CLAIM["settings"] | {"rounds": 2})
    train(cli, claims, "fast", 0, "runs/a")
    run = Path("runs/a")
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    whole = json.loads((run / "summary.json").read_text())
    lacking = {key: value for key, value in second.items() if key != "cohort"}
    for records, says in (([first], "has 1 of 2 rounds"), ([first, lacking], "KeyError: 'cohort'")):
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        final = {key: value for key, value in records[-1].items() if key not in ("round", "seconds")}
        summary = whole | {"rounds": len(records), "final": final, "checksums": checksums(run)}
        (run / "summary.json").write_text(json.dumps(summary))
        code, out, _ = cli("claim", "check", "runs", "--claims", "claims", "--replay", "0")
        assert (code, says in out) == (1, True)
