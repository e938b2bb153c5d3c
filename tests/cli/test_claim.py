"""``fedloom claim``: tiny runs decide a tiny claim; what does not fit, or was altered, is no evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Cli

from fedloom.base import yaml
from fedloom.base.errors import CheckpointError, ConfigError, DataError
from fedloom.experiment.rundir import RunDirectory, checksums
from fedloom_apps.claims.comparisons import Figure
from fedloom_apps.claims.register import fit, merged, of_run, open_work, read_claim, read_claims, store
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
            "compare": "fast",
            "figures": {"slow": 50, "fast": 90},
            "unit": 100,
            "digits": 0,
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


def rewrite(run: Path, records: list[dict[str, Any]]) -> None:
    """Put other records into a run directory, with a summary and checksums that fit them."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    final = {key: value for key, value in records[-1].items() if key not in ("round", "seconds")}
    summary = json.loads((run / "summary.json").read_text()) | {"rounds": len(records), "final": final}
    (run / "summary.json").write_text(json.dumps(summary | {"checksums": checksums(run)}))


def test_runs_that_fit_decide_and_are_stored(cli: Cli, claims: Path) -> None:
    for run in ("fast", "slow"):
        train(cli, claims, run, "0,1,2", f"runs/{run}", "-m", "checkpoint.every=1")  # computed otherwise, still fits
    code, out, _ = cli("claim", "check", "runs", "--claims", "claims", "--replay", "1", "--store")
    assert code == 0
    assert out.count("evidence for steps, fast, seed ") == 3
    assert "fast is more accurate than slow (published 90 : 50): reproduced" in out
    assert "3 seeds" in out
    assert json.loads((claims / "results/steps.json").read_text())["runs"].keys() == {"fast", "slow"}
    assert (
        cli("claim", "list", "--claims", "claims").out
        == "steps: A small step learns more slowly (tests): 1 reproduced\n"
    )
    assert (
        "fast is more accurate than slow (published 90 : 50): rep"
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
    out = cli("claim", "next", "takes_5", "--claims", "claims", "--import", "json").out  # any module that is there
    assert all(line.endswith(" --import json") for line in out.splitlines() if line[0] == " ")


def test_next_names_what_is_missing_by_worth_for_the_time(cli: Cli, tmp_path: Path, claims: Path) -> None:
    dear = write(tmp_path, "dear", minutes={"fast": 200, "slow": 100})
    train(cli, claims, "fast", 0, "runs/a")
    assert (
        "; 1 of 1 rounds reproduced bit for bit"
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
    train(cli, claims, "slow", 0, "runs/a")
    run = Path("runs/a")
    rewrite(run, [json.loads((run / "metrics.jsonl").read_text()) | {"global/accuracy": 0.99}])
    code, out, _ = cli("claim", "check", "runs/a", "--claims", "claims", "--replay", "0")
    assert (code, "rounds reproduced bit for bit" in out) == (0, False)
    code, out, _ = cli("claim", "check", "runs/a", "--claims", "claims")
    assert code == 1
    assert "round 1 comes out differently, first in global/accuracy" in out


def claimed(**fields: Any) -> dict[str, Any]:
    return {"claims": [CLAIM["claims"][0] | fields]}


MANY = {f"r{number}": number for number in range(110)}
WRONG = {
    "data that open a file": ({"settings": {"data": "npz", "data.path": "/etc/passwd"}}, "data=npz reads what its"),
    "a model that is downloaded": ({"settings": {"model": "distilbert"}}, "model=distilbert reads what its settings"),
    "a place of data": ({"settings": {"data": "mnist", "data.download": True}}, "data.download is not for a claim"),
    "two settings under one key": (
        {"settings": {"data": "mnist", "data.root=/x.y": 1}},
        "'data.root=/x.y' is not a key; keys are words and dots.",
    ),
    "a sweep for a key": ({"settings": {"local.lr=1,x.y": 1}}, "'local.lr=1,x.y' is not a key"),
    "a title that is a list": ({"title": ["x"]}, "title must be a text."),
    "a key that names a file": ({"settings": {"client_local": "x"}}, "client_local is not for a claim to set"),
    "a free text": ({"settings": {"partition": "iid", "partition.x": "notes"}}, "partition.x is 'notes', but a claim"),
    "a path for a name": ({"settings": {"method.topology": "../x"}}, "method.topology is '../x', but a claim sets"),
    "a path for a target": ({"settings": {"target": "../x"}}, "target is '../x', but a claim sets"),
    "a text for a number": ({"settings": {"noise": "pair", "noise.rate": "x"}}, "noise.rate is 'x', but a claim"),
    "scripts that are a text": ({"scripts": "no"}, "scripts must be true or false"),
    "a setting out of range": ({"settings": {"local.momentum": 2}}, "local.momentum must lie in"),
    "a run that there is not": (claimed(compare="slwo"), "claims[0]: it compares 'slwo'; did you mean 'slow'?"),
    "another run that there is not": (claimed(compare={"fast": ["slwo"]}), "it compares 'slwo'; did you mean 'slow'"),
    "a figure of a run that there is not": (claimed(figures={"fast": 1, "slwo": 2}), "figures name 'slwo'; did you "),
    "a figure that is true": (claimed(figures={"fast": 1, "slow": True}), "the figure of slow must be a number"),
    "a figure that is no number": (
        claimed(figures={"fast": 1, "slow": float("nan")}),
        "the figure of slow must be a n",
    ),
    "a figure that is a text": (claimed(figures={"fast": 1, "slow": "2 of 3"}), "slow must be a number, a bound like"),
    "figures that are one": (claimed(figures=5), "figures must be a mapping of runs to at most 200 figures"),
    "figures and rows of them": (claimed(figures={"fast": 1, "slow": {"fast": 2}}), "the figure of slow must be a"),
    "no figures": ({"claims": [{"table": "1", "says": "{} {}", "compare": "fast"}]}, "claims[0]: it lacks figures."),
    "a run and itself": (claimed(compare={"slow": "slow"}, figures={"fast": 1, "slow": None}), "no two runs that it"),
    "equal figures": (claimed(figures={"fast": 1, "slow": "1+"}), "claims[0]: no two runs that it compares have"),
    "a claim that is none": ({"claims": ["fast"]}, "claims[0]: it must be a mapping."),
    "claims that are none": ({"claims": {"fast": "slow"}}, "claims must be a list of 1 to 200 entries."),
    "no further claims": (claimed(claims=[]), "claims[0]: claims must be a list of 1 to 200 entries."),
    "an unknown key of a claim": (
        claimed(claims=[{}, {"figure": "best", "metrics": "x"}]),
        "claims[0]: claims[1]: unknown key 'metrics'; did you mean 'metric'?",
    ),
    "a digit too many": (claimed(digits=7), "claims[0]: digits must lie in [0, 6], not 7"),
    "many pairs": (
        {"claims": [CLAIM["claims"][0] | {"claims": [{}] * 200}] * 6},
        "compare more than 1,000 pairs of ru",
    ),
    "many runs": (
        {
            "runs": {run: {"method": "fedavg"} for run in MANY},
            "cases": {"x": {}, "y": {}},
            "claims": [CLAIM["claims"][0] | {"compare": "r0", "figures": {case: MANY}} for case in ("x", "y")],
        },
        "or more than 200 runs.",
    ),
    "many figures": (
        {
            "runs": {run: {"method": "fedavg"} for run in MANY},
            "cases": {"x": {}, "y": {}},
            **claimed(figures=dict.fromkeys(("x", "y"), MANY)),
        },
        "figures must be a mapping of runs to at most 200",
    ),
    "many to compare": (claimed(compare={"fast": ["slow"] * 200}), "it compares more than 200 runs."),
    "a run that no claim compares": (
        {"runs": CLAIM["runs"] | {"x": {"method": "fedavg"}}},
        "its claims never compare 'x'.",
    ),
    "a case that no claim compares": (
        {"cases": {"x": {"rounds": 2}, "y": {"rounds": 3}}, **claimed(figures={"x": {"fast": 2, "slow": 1}})},
        "its claims never compare 'y'.",
    ),
    "a case without settings": ({"cases": {"x": 3}}, "cases.x must be a mapping of settings under a name."),
    "a case that opens a file": (
        {"cases": {"x": {"data": "npz"}}, **claimed(figures={"x": {"fast": 2, "slow": 1}})},
        "data=npz reads what its",
    ),
    "no cases": ({"cases": {}}, "cases must be a mapping of 1 to 200 entries."),
    "a run without its case": ({"cases": {"x": {"rounds": 2}}}, "figures name 'slow'; did you mean 'slow, x'?"),
    "a long name with its case": (
        {"cases": {"x" * 40: {}}, **claimed(figures={"x" * 40: {"fast": 2, "slow": 1}})},
        "needs a name of at most 40 letters",
    ),
    "a target in percent": (claimed(figure="rounds", target=85), "a target of global/accuracy is a fraction, not 85."),
    "percent taken for fractions": (claimed(unit=1), "claims[0]: figures of global/accuracy above 1 are in percent"),
    "a target without rounds": (
        claimed(target=0.5),
        "claims[0]: rounds and transmissions need a target, and other fig",
    ),
    "minutes of no run": ({"minutes": CLAIM["minutes"] | {"slwo": 1}}, "minutes of a run 'slwo'; did you mean 'slow'?"),
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
    with pytest.raises(ConfigError) as error:
        _ = read_claim(write(tmp_path, **changes)).complete
    assert says in str(error.value)
    assert str(error.value).count("\n") == 0


def test_figures_stand_once_by_run_and_case_and_what_claims_share_stands_above_them(tmp_path: Path) -> None:
    runs = {name: {"method": "fedavg", "local.lr": lr} for name, lr in (("A", 0.1), ("B", 0.2), ("C", 0.3), ("D", 0.4))}
    cases = {"IID": {}, "Dirichlet .3": {"partition": "dirichlet", "partition.alpha": 0.3, "local.lr": 0.5}}
    to_target = {"says": "{}, {} to {target}", "figure": "rounds", "metric": "global/loss", "digits": 0, "claims": [
        {"target": 0.982, "figures": {"IID": {"A": 100, "B": "300+", "C": 99.6}}},
        {"target": 0.5, "importance": 3, "compare": {"C": ["A", "D"], "B": "A"}, "figures": {
            "Dirichlet .3": {"A": "90+", "B": 90, "C": 7}}},
    ]}  # fmt: skip
    figures = {"IID": {"B": 55.555, "A": 60, "D": 60}, "Dirichlet .3": {"A": 1.5, "B": 2, "D": 3}}
    twice = {"figures": figures, "claims": [
        {"says": "{case}: {} beats {}", "unit": 100, "compare": ["A", "B"], "digits": 2},
        {"says": "{} has less than {}", "metric": "global/loss", "compare": {"D": "B"}, "differs": "x"},
    ]}  # fmt: skip
    across = {
        "says": "{} or {}",
        "compare": "C, IID",
        "figures": {"C, IID": None, "A, Dirichlet .3": 1, "B, IID": None},
    }
    shared = {"table": "table 1", "compare": "A", "claims": [to_target, twice, across]}
    file = read_claim(write(tmp_path, runs=runs, cases=cases, claims=[shared],
                            minutes={"A": 1, "B": 2, "C": 3, "D": 4, "A, Dirichlet .3": 9}))  # fmt: skip
    assert [(claim.says, claim.ours, claim.other, claim.published) for claim in file.claims] == [
        ("{}, {} to 98.2 %", "A, IID", "B, IID", "100 : 300+"),
        ("{}, {} to 98.2 %", "C, IID", "A, IID", "100 : 100"),
        ("{}, {} to 50.0 %", "C, Dirichlet .3", "A, Dirichlet .3", "7 : 90+"),
        ("IID: {} beats {}", "D, IID", "B, IID", "60.00 : 55.55"),
        ("Dirichlet .3: {} beats {}", "D, Dirichlet .3", "A, Dirichlet .3", "3.00 : 1.50"),
        ("Dirichlet .3: {} beats {}", "D, Dirichlet .3", "B, Dirichlet .3", "3.00 : 2.00"),
        ("{} has less than {}", "B, IID", "D, IID", "55.6 : 60.0"),
        ("{} has less than {}", "B, Dirichlet .3", "D, Dirichlet .3", "2.0 : 3.0"),
        ("{} or {}", "C, IID", "A, Dirichlet .3", "-"),
        ("{} or {}", "C, IID", "B, IID", "-"),
    ]
    assert {claim.table for claim in file.claims} == {"table 1"}
    assert [claim.importance for claim in file.claims[:3]] == [1, 1, 3]
    assert [claim.differs for claim in file.claims[5:8]] == ["", "x", "x"]
    assert [*file.runs] == ["A, IID", "B, IID", "C, IID", "D, IID", *(f"{run}, Dirichlet .3" for run in "ABCD")]
    assert (file.complete["B, IID"]["local.lr"], file.complete["B, Dirichlet .3"]["local.lr"]) == (0.2, 0.5)
    assert (file.minutes["A, IID"], file.minutes["A, Dirichlet .3"], file.minutes["B, Dirichlet .3"]) == (1, 9, 2)
    assert file.judged({"runs": {}})[0][0].says == "A, IID, B, IID to 98.2 %"


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
        run: {str(s): RECORD | {"curves": {published: [value], deployed: [value]}} for s, value in enumerate(values)}
        for run, values in runs.items()
    }}  # fmt: skip
    judgements = [(judgement.verdict, judgement.reason) for _, judgement in file.judged(results) if judgement]
    assert [verdict for verdict, _ in judgements] == [Verdict.ON_TEST, Verdict.SCRIPTS, Verdict.OTHERWISE]
    assert judgements[2][1] == "λ .5; holds here"


def test_a_claim_that_is_a_pipe_or_large_is_not_read(tmp_path: Path, cli: Cli) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert cli("claim", "list", "--claims", "pipe.yaml").code == 2
    (tmp_path / "large.yaml").write_text("a: 1\n" * 20_000)
    assert "more than 65,536 bytes" in cli("claim", "list", "--claims", "large.yaml").err
    write(tmp_path).write_text(yaml.dump(CLAIM).replace("slow: 50", f"slow: 0x{'f' * 5000}"))  # too long to be printed
    code, _, err = cli("claim", "list", "--claims", "claims")
    assert (code, "its content: ValueError: Exceeds the limit" in err) == (2, True)
    assert "there are no claims at 'recipes/claims'" in cli("claim").err
    assert "did you mean 'check'" in cli("claim", "chekc", "--claims", "large.yaml").err


RECORD = {"rounds": 1, "cost": 1, "left_out": 0, "minutes": 0.0, "curves": {"global/accuracy": [0.5]}}
MALFORMED = {
    "a list": [],
    "runs of another kind": {"runs": {"fast": 5}},
    "no minutes": {"runs": {"fast": {"0": {key: RECORD[key] for key in RECORD if key != "minutes"}}}},
    "a text for a number": {"runs": {"fast": {"0": RECORD | {"curves": {"global/accuracy": ["high"]}}}}},
    "no such curve": {"runs": {"fast": {"0": RECORD | {"curves": {}}}}},
    "looks without bound": {"runs": {}, "looks": 10**9},
    "looks of another kind": {"runs": {}, "looks": "two"},
    "a part of a look": {"runs": {}, "looks": 1.5},
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
    results = {"steps": {"runs": {"fast": {"0": RECORD}, "slow": {"0": RECORD}}}}
    assert open_work([read_claim(claims / "steps.yaml")], results)[0].minutes == 0


def test_names_of_files_and_runs_are_safe_to_paste(tmp_path: Path, cli: Cli) -> None:
    with pytest.raises(ConfigError, match="its name is part of commands"):
        read_claim(write(tmp_path, "steps;reboot").rename(tmp_path / "steps;reboot.yaml"))
    runs = {"FedAvg (E=1, lr=.1)": CLAIM["runs"]["fast"], "..": CLAIM["runs"]["slow"]}
    comparison = CLAIM["claims"][0] | {"compare": "..", "figures": dict.fromkeys(runs)}
    write(tmp_path, runs=runs, claims=[comparison], minutes=dict.fromkeys(runs, 1))
    out = cli("claim", "next", "--claims", "claims").out
    assert "out=runs/claims/steps/FedAvg__E_1__lr__1_\n" in out
    assert "out=runs/claims/steps/__\n" in out


def test_a_run_that_was_cut_and_one_that_lacks_records_are_no_evidence(cli: Cli, tmp_path: Path, claims: Path) -> None:
    write(tmp_path, settings=CLAIM["settings"] | {"rounds": 2})
    train(cli, claims, "fast", 0, "runs/a")
    run = Path("runs/a")
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lacking = {key: value for key, value in second.items() if key != "cohort"}
    for records, says in (([first], "has 1 of 2 rounds"), ([first, lacking], "KeyError: 'cohort'")):
        rewrite(run, records)
        code, out, _ = cli("claim", "check", "runs", "--claims", "claims", "--replay", "0")
        assert (code, says in out) == (1, True)


def test_a_strangers_settings_and_seconds_are_data(cli: Cli, claims: Path) -> None:
    train(cli, claims, "fast", 0, "runs/a")
    run, check = Path("runs/a"), ("claim", "check", "runs", "--claims", "claims", "--replay", "0")
    record = json.loads((run / "metrics.jsonl").read_text())
    for seconds in (-1e9, float("nan"), float("inf")):
        rewrite(run, [record | {"seconds": seconds}])
        code, out, _ = cli(*check)
        assert (code, out) == (
            1,
            "runs/a: no evidence: the seconds of its rounds are not finite numbers of at least 0.\n",
        )
    settings = yaml.load(run / "config.yaml")
    (run / "config.yaml").write_text(yaml.dump(settings | {"\x1b[2Jx\nruns/b: evidence for steps": "y" * 10**5}))
    code, out, _ = cli(*check)
    assert (code, out.count("\n"), "\x1b" in out, len(out) < 2000) == (1, 1, False, True)


def test_a_run_that_diverged_has_no_last_figure_and_costs_may_be_less_than_fedavgs(cli: Cli, claims: Path) -> None:
    train(cli, claims, "fast", 0, "runs/a")
    path = Path("runs/a/metrics.jsonl")
    record = json.loads(path.read_text())
    sent = {key: record[key] / 10 for key in ("comm/down_params", "comm/up_params")}
    path.write_text(json.dumps(record | sent | {"global/accuracy": None}) + "\n")
    result = of_run(RunDirectory("runs/a"), ["global/accuracy"])
    assert result["cost"] == 0.1
    (diverged,) = result["curves"]["global/accuracy"]
    run = RECORD | {"curves": {"global/accuracy": [0.5, None, diverged, None]}}
    assert (isnan(Figure()(run, {})), Figure("best")(run, {})) == (True, 0.5)


def test_a_seed_is_a_whole_number(cli: Cli, claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """True is equal to 1, and would be counted beside it."""
    train(cli, claims, "fast", 1, "runs/a")
    directory, files = RunDirectory("runs/a"), read_claims(claims)
    assert fit(directory, files).seed == "1"
    config = directory.config()
    monkeypatch.setattr(RunDirectory, "config", lambda self: config | {"seed": True})
    with pytest.raises(CheckpointError, match="fits no claim"):
        fit(directory, files)


def seeds(**accuracies: list[float]) -> dict[str, Any]:
    """Results of runs, a seed for each accuracy."""
    return {"runs": {
        run: {str(seed): RECORD | {"curves": {"global/accuracy": [value]}} for seed, value in enumerate(values)}
        for run, values in accuracies.items()
    }}  # fmt: skip


def test_seeds_added_for_want_of_a_verdict_are_a_further_look(cli: Cli, tmp_path: Path) -> None:
    unknown = {"slow": None, "fast": None}
    file = read_claim(write(tmp_path, claims=[CLAIM["claims"][0] | {"figures": unknown, "digits": 1}]))
    claims = file.path.parent

    def verdict() -> tuple[int, Verdict, str]:
        ((_, judged),) = file.judged(file.results())
        assert judged is not None
        return file.results()["looks"], judged.verdict, judged.reason

    fast = [0.9, 0.88, 0.83, 0.93]
    store(file, seeds(fast=fast[:2], slow=[0.8, 0.8]))
    store(file, seeds(fast=fast[:3], slow=[0.8] * 3))  # two seeds were too few to be judged
    assert verdict() == (1, Verdict.SEEDS, "the interval contains 0; about 5 seeds would decide")
    store(file, seeds(fast=fast[:3], slow=[0.8] * 3))  # nothing new
    assert verdict()[0] == 1
    train(cli, claims, "fast", 3, "runs/a")
    out = cli("claim", "check", "runs/a", "--claims", "claims", "--replay", "0").out
    assert "needs more seeds" in out
    store(file, seeds(fast=fast, slow=[0.8] * 3))  # the fourth seed has nothing to be compared with yet
    assert verdict()[0] == 1
    store(file, seeds(fast=fast, slow=[0.8] * 4))  # +1.8 to +15.2 at 95 %, -0.3 to +17.3 at 97.5 %
    assert verdict()[:2] == (2, Verdict.SEEDS)
    assert "interval for 2 looks contains 0" in verdict()[2]
    assert "for 2 looks" in cli("claim", "list", "steps", "--claims", "claims").out


def test_a_run_that_diverged_is_evidence_without_a_figure(cli: Cli, claims: Path) -> None:
    for run in ("fast", "slow"):
        train(cli, claims, run, 0, f"runs/{run}")
    run = Path("runs/fast")
    rewrite(run, [json.loads((run / "metrics.jsonl").read_text()) | {"global/accuracy": None}])
    for _ in range(2):  # the second time its figures are known
        code, out, _ = cli("claim", "check", "runs", "--claims", "claims", "--replay", "0", "--store")
        assert (code, "in place of other" in out) == (0, False)
        assert "0 seeds, gain -: 1 of 1 seeds cannot be compared (no number, or neither" in out


def test_results_are_stored_though_nobody_reads_what_is_printed(cli: Cli, claims: Path) -> None:
    train(cli, claims, "fast", 0, "runs/a")
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-c", "import sys; from fedloom.cli import main; sys.exit(main())"]
    words = ["claim", "check", "runs/a", "--claims", "claims", "--replay", "0", "--store"]
    process = subprocess.run([*program, *words], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")
    assert (claims / "results/steps.json").is_file()


def test_what_others_store_meanwhile_stays(cli: Cli, claims: Path) -> None:
    train(cli, claims, "fast", 0, "runs/a")
    file = read_claim(claims / "steps.yaml")
    before = file.results()
    assert cli("claim", "check", "runs/a", "--claims", "claims", "--replay", "0", "--store").code == 0
    store(file, merged(before, "fast", "1", file.results()["runs"]["fast"]["0"]))
    assert [*file.results()["runs"]["fast"]] == ["0", "1"]
    assert [path.name for path in file.stored.parent.iterdir()] == ["steps.json"]


def test_results_are_written_through_no_link(cli: Cli, claims: Path, tmp_path: Path) -> None:
    train(cli, claims, "fast", 0, "runs/a")
    (claims / "results").symlink_to(tmp_path)
    answer = cli("claim", "check", "runs/a", "--claims", "claims", "--replay", "0", "--store")
    assert answer.code == 2
    assert "results is a symbolic link, through which" in answer.err
    assert not (tmp_path / "steps.json").exists()
