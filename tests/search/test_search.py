"""A search: its rules against independent implementations, the data it may see, resuming, and its output."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("optuna")

import optuna
from sqlalchemy.exc import OperationalError

from fedloom.base.errors import CheckpointError, ConfigError, DataError
from fedloom.cli import main
from fedloom.core.slots import SLOTS
from fedloom.data import federate
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.rundir import RunDirectory
from fedloom.methods import methods
from fedloom_apps.search import results
from fedloom_apps.search.command import SEARCH, build, remarks, validation_federation
from fedloom_apps.search.space import Range, SearchSettings, Space, effective_candidate, search_ranges, without_part
from fedloom_apps.search.task import Comparisons, Outcome, SearchExperiment, SearchTask, _EndRun, in_best, search

MISSING = -1.0
WORDS = (
    "clients=6", "rounds=4", "model=logistic", "local.epochs=1", "partition.alpha=0.3", "engine=serial",
    "search.methods=[fedavg,feddyn,fedrep,term]", "search.budget=40", "search.rungs=1", "search.eta=2",
    "search.finalists=1", "search.seeds=2",
)  # fmt: skip


def build_search(*words: str):
    return build(SEARCH.resolve([*WORDS, *words]))


class Ctrl(Callback):
    """Ctrl-C after so many runs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, step):
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return {}


def history(folder: Path) -> list[dict]:
    records = RunDirectory(folder).metrics()
    return [{key: value for key, value in record.items() if key not in ("seconds", "minutes")} for record in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("search") / "run"
    search(build_search(), folder)
    return folder


def test_a_search_starts_with_fedavg_and_the_named_methods(finished: Path) -> None:
    records = history(finished)
    assert [r["label"] for r in records[:6]] == ["fedavg", "fedavg", "fedavg", "feddyn", "fedrep", "term"]
    assert [r["candidate"]["local.lr"] for r in records[:3]] == pytest.approx([0.1, 0.1 / 3, 0.3], rel=1e-3)
    best = max(records[:3], key=lambda r: r["score"])["candidate"]["local.lr"]
    assert all(r["candidate"]["local.lr"] == best for r in records[3:6])


def test_the_budget_is_kept_up_to_one_run(finished: Path) -> None:
    records = [r for r in history(finished) if r["stage"] == "search"]
    rounds = np.cumsum([r["rounds"] for r in records])
    assert rounds[-2] < 40 <= rounds[-1] < 40 + 4
    assert all(r["state"] != "complete" or r["rounds"] == 4 for r in records)


def test_finalists_fedavg_and_ablations_run_on_held_out_seeds(finished: Path) -> None:
    records = [r for r in history(finished) if r["stage"] == "compare"]
    roles = {r["role"] for r in records}
    assert {"finalist 1", "fedavg"} <= roles
    assert all({r["seed"] for r in records if r["role"] == role} == {1, 2} for role in roles)
    for r in records:
        stored = RunDirectory(finished / "runs" / f"{r['role'].replace(' ', '-')}-{r['seed']}")
        assert stored.metrics()[-1]["clients/accuracy/mean"] == r["score"]
        assert stored.config()["method"]["name"] == r["candidate"]["method"]


def test_the_recipe_of_the_winner_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    ranking = json.loads((finished / "summary.json").read_text())["ranking"]
    role = ranking[0]["role"].replace(" ", "-")
    words = ["evaluation.what=[clients]", "seed=1", f"out={tmp_path / 'again'}", "-q"]
    assert main(["run", str(finished / "winner.yaml"), *words]) == 0
    before, after = (RunDirectory(p).metrics()[-1] for p in (finished / "runs" / f"{role}-1", tmp_path / "again"))
    assert before["clients/accuracy/mean"] == after["clients/accuracy/mean"]
    assert before["comm/bytes"] == after["comm/bytes"]


def test_interrupted_anywhere_and_resumed_it_tries_and_finds_the_same(finished: Path, tmp_path: Path) -> None:
    folder, stages = tmp_path / "run", []
    for number, after in enumerate((0, 2, 5, 7)):  # runs since the interruption before
        with pytest.raises(KeyboardInterrupt):
            search(build_search(), folder, resume=number > 0, callbacks=[Ctrl(after)])
        stages += [record["stage"] for record in history(folder)[-1:]]
    assert stages == ["search", "search", "compare"]
    search(build_search(), folder, resume=True)
    assert history(folder) == history(finished)


def test_a_search_without_room_for_its_database_is_not_finished(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And its database is written without Optuna's notes, also where nothing is left to run."""
    folder, create = Path(shutil.copytree(finished, tmp_path / "run")), optuna.create_study
    (folder / "summary.json").unlink()

    def full(**settings) -> optuna.Study:
        if "storage" in settings:
            raise OperationalError("INSERT", {}, Exception("database or disk is full"))
        return create(**settings)

    with monkeypatch.context() as patch:
        patch.setattr(optuna, "create_study", full)
        messages = search(build_search(), folder, resume=True)["warnings"]
    assert "database or disk is full" in messages[-1]
    assert not RunDirectory(folder).status.ended
    optuna.logging.set_verbosity(optuna.logging.INFO)  # as in a new process
    search(build_search(), folder, resume=True)
    assert RunDirectory(folder).status.ended
    assert "new study" not in capfd.readouterr().err


def test_what_another_search_ran_is_taken_over_and_changes_nothing(finished: Path, tmp_path: Path) -> None:
    finished_records, shared, alone = RunDirectory(finished).metrics(), tmp_path / "told", tmp_path / "alone"
    other = build_search("search.sampler=random", "search.budget=26")
    search(other, shared, other_searches=[[], finished_records])
    search(other, alone)
    assert history(shared) == history(alone)
    shared_records, alone_records = (RunDirectory(folder).metrics() for folder in (shared, alone))
    # the last that both searches begin with
    last = [record["candidate"]["method"] for record in shared_records].index("term")
    minutes = [
        [record["minutes"] for record in records[: last + 1]]
        for records in (finished_records, shared_records, alone_records)
    ]
    assert minutes[0] == minutes[1] != minutes[2]


def test_another_search_is_not_continued(finished: Path) -> None:
    with pytest.raises(CheckpointError, match="another experiment"):
        search(build_search("search.eta=3"), finished, resume=True)


def test_candidates_never_see_test_samples() -> None:
    federation = federate("digits", "dirichlet", clients=5, validation=0.25)
    inside = validation_federation(federation)
    for client in range(5):
        samples = set(inside.train.index[client]) | set(inside.held_out.index[client])
        assert not samples & set(federation.held_out.index[client])
        assert not set(inside.train.index[client]) & set(inside.held_out.index[client])
        assert list(inside.held_out.index[client]) == list(federation.validation.index[client])
    assert not len(inside.validation.index.rows)
    rows = federation.validation.index.rows
    assert np.array_equal(inside.test.x.numpy(), federation.train.arrays.x[rows].numpy())


def test_candidates_that_deal_the_data_otherwise_get_these_data() -> None:
    experiment = build_search("search.also=[partition.alpha]")
    few, many = (experiment.make({"method": "fedavg", "partition.alpha": a}, 0, True).federation for a in (0.1, 100.0))
    assert few.train.index.sizes.std() > many.train.index.sizes.std()


def test_parts_given_to_all_candidates_are_never_replaced() -> None:
    experiment = build_search("method.uplink=[top_k]", "method.server=adam")
    assert "server" not in experiment.space.slots
    for number in range(12):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
        try:
            method = experiment.make(experiment.space.suggest(study.ask()), 0, True).method
        except ConfigError:
            continue
        assert type(method.server) is SLOTS["server"]["adam"].factory
        assert [type(u) for u in method.uplink] == [SLOTS["uplink"]["top_k"].factory]


def test_proposals_are_compositions_or_refused_in_a_sentence() -> None:
    names = tuple(n for n in methods.names() if not methods.make(n).pooled)
    space, good = Space(methods, names, SearchSettings().slots, {"local.lr": Range(0.1)}), 0
    refused: list[str] = []
    experiment = build_search()
    for number in range(60):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
        try:
            experiment.make(space.suggest(study.ask()), 0, True)
            good += 1
        except ConfigError as error:
            refused.append(str(error))
    assert good > 20
    assert all(sentence.endswith(".") for sentence in refused)


def test_ranges_hold_their_centre_and_stay_possible() -> None:
    for name in methods.names():
        for span in search_ranges(methods[name].parameters).values():
            low, high = span.limits
            assert low < high
            assert span.value(span.inverse(span.centre)) == pytest.approx(span.centre, rel=1e-3)
            if span.centre < 1:
                assert 0 <= span.value(low) <= 1
                assert 0 <= span.value(high) <= 1


def test_without_every_part_a_candidate_is_fedavg() -> None:
    experiment = build_search()
    candidate = {"method": "feddyn", "method.mixing": "uniform", "method.drift.alpha": 0.1, "local.lr": 0.1}
    for slot in ("drift", "mixing"):
        candidate = without_part(candidate, slot)
    reduced, plain = (experiment.make(c, 0, True).method for c in (candidate, {"method": "fedavg"}))
    assert replace(reduced, name="", citation="") == replace(plain, name="", citation="")


def test_halving_keeps_the_best_fraction() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rivals, score, eta = rng.random(rng.integers(0, 12)), rng.random(), int(rng.integers(2, 5))
        ranked = sorted([*rivals, score], reverse=True)
        assert in_best(score, rivals.tolist(), eta, True) == (ranked.index(score) < max(len(ranked) // eta, 1))
        assert in_best(-score, (-rivals).tolist(), eta, False) == in_best(score, rivals.tolist(), eta, True)
    assert not in_best(float("nan"), [], 3, True)


def test_paired_intervals_are_those_of_scipy() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.random(5), rng.random(5)
    gain = results.paired(dict(enumerate(a)), dict(enumerate(b)))
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (gain["low"], gain["high"]) == pytest.approx((interval.low, interval.high))
    wide = results.paired(dict(enumerate(a)), dict(enumerate(b)), 3)
    interval = stats.ttest_rel(a, b).confidence_interval(1 - 0.05 / 3)
    assert (wide["low"], wide["high"]) == pytest.approx((interval.low, interval.high))


def test_a_search_that_a_callback_stops_decides_nothing(tmp_path: Path) -> None:
    class Enough(Callback):
        def should_stop(self, history):
            return "enough" if len(history) == 3 else None

    summary = search(build_search("search.methods=[fedavg]"), tmp_path / "run", callbacks=[Enough()])
    assert (summary["status"], summary["candidates"], summary["ranking"]) == ("stopped", 3, [])
    assert summary["verdict"] == results.PENDING


def test_a_partition_that_a_held_out_seed_makes_impossible_fails_that_run_alone() -> None:
    def impossible(candidate: dict, seed: int, validate: bool):
        raise DataError("partition 'dirichlet' left a client with too few samples.")

    task = SearchTask(SearchExperiment(impossible, dict, Space(methods, (), (), {}), SearchSettings(), 2, 0))
    record = task._compare("finalist 1", {"method": "fedavg"}, 1)
    assert (record["state"], record["score"], record["reason"][:22]) == ("failed", None, "partition 'dirichlet' ")


def test_candidates_without_the_goal_fail_alone(tmp_path: Path) -> None:
    """Clients of ``local`` share nothing, so that there is no model of the server to be measured."""
    words = ("search.goal=global/accuracy", "search.methods=[fedavg,local]", "search.budget=13")
    search(build_search(*words), tmp_path / "run")
    by_label = {r["label"]: r for r in history(tmp_path / "run") if r["stage"] == "search"}
    assert by_label["fedavg"]["state"] == "complete"
    assert (by_label["local"]["state"], by_label["local"]["score"]) == ("failed", None)
    assert "is not measured for this candidate" in by_label["local"]["reason"]


def test_methods_without_a_loss_to_compare_are_left_out_of_a_search_for_the_least_loss() -> None:
    experiment = build_search("search.goal=clients/loss/mean", "search.methods=[fedavg,fedlc]")
    assert experiment.misfits == {"fedlc": "the loss of 'fedlc' cannot be computed outside training."}


def test_the_front_is_what_nothing_beats() -> None:
    points = [tuple(p) for p in np.random.default_rng(2).random((40, 2))]
    beaten = {i for i, j in itertools.permutations(range(40), 2)
              if points[j][0] <= points[i][0] and points[j][1] >= points[i][1]}  # fmt: skip
    assert set(results.front(points, True)) == set(range(40)) - beaten
    assert set(results.front([(c, -s) for c, s in points], False)) == set(range(40)) - beaten


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("evaluation.patience=3", "ends the others by search.eta; leave out evaluation.patience"),
        ("search.goal=clients/acuracy/mean", "which is not measured; measured are: clients/"),
        ("search.also=[local.epochs]", "a positive real number is needed"),
        ("search.also=[nothing]", "there is no such key"),
        ("search.slots=[mixin]", "did you mean 'mixing'"),
        ("held_out=0", "the clients hold out no test samples on which finalists would be compared"),
        ("search.budget=0", "search.budget must be a finite number greater than 0"),
        ("search.methods=[fedavgg]", "did you mean 'fedavg'"),
    ],
)
def test_mistakes_are_one_sentence(word: str, sentence: str, tmp_path: Path, capsys) -> None:
    assert main(["search", *WORDS, word, f"out={tmp_path / 'run'}", "-q"]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_a_goal_by_which_finalists_cannot_be_compared_is_refused_before_anything_runs(tmp_path: Path) -> None:
    rows = "".join(f"{n % 7},{n % 3},{n % 2}\n" for n in range(120))
    (tmp_path / "visits.csv").write_text("age,town,ill\n" + rows)
    words = (f"data=table:{tmp_path}/visits.csv", "data.label=ill", "data.client=town", "rounds=4")
    with pytest.raises(ConfigError, match="no common test set on which finalists would be compared"):
        build(SEARCH.resolve([*words, "search.goal=global/accuracy"]))
    build(SEARCH.resolve([*words, "search.methods=[fedavg]"]))


def test_a_model_that_no_method_could_train_is_refused_before_anything_runs(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(9, size=(60, 4))
    np.savez(tmp_path / "tokens.npz", x_train=rows, y_train=rows[:, 0] % 2)
    words = (f"data=npz:{tmp_path}/tokens.npz", "model=stacked_lstm", "model.hidden=4", "search.methods=[fedavg]")
    with pytest.raises(ConfigError, match="the data have tokens up to 8: give the model a vocabulary of 9"):
        build(SEARCH.resolve([*WORDS, *words]))
    build(SEARCH.resolve([*WORDS, *words, "model.vocabulary=9"]))


@pytest.mark.exhaustive
def test_where_clients_share_nothing_the_search_finds_a_personal_method(tmp_path: Path) -> None:
    words = ["clients=10", "rounds=6", "partition=pathological", "partition.classes=2", "search.budget=36",
             "search.methods=[fedavg,feddyn,fedrep]", "search.finalists=1", "search.seeds=5", "model=mlp"]  # fmt: skip
    summary = search(build(SEARCH.resolve([*words, "engine=serial"])), tmp_path / "run")
    assert summary["ranking"][0]["gain"]["low"] > 0.05
    assert "is better than fedavg" in summary["verdict"]


def test_a_goal_that_is_not_a_number_at_a_milestone_ends_the_candidate() -> None:
    def compare(values: Sequence[float | None]) -> Outcome:
        outcome = Outcome("x")
        comparisons = Comparisons(outcome, "global/auroc", [2, 3], lambda round, score: True)
        with suppress(_EndRun):
            for round, value in enumerate(values, start=1):
                goal = {} if value == MISSING else {"global/auroc": value}
                comparisons.on_round({"round": round, "comm/bytes": 1, "seconds": 1.0, "global/loss": 1.0, **goal})
        return outcome

    assert compare([0.5, 0.6, 0.7]).state == "complete"
    for values, last in (([0.5, None, 0.7], 2), ([0.5, 0.6, MISSING], 3)):
        outcome = compare(values)
        assert (outcome.state, outcome.rounds) == ("failed", last)
        assert np.isnan(outcome.scores[last])
        assert outcome.reason == f"global/auroc is not a number after round {last}."


def step_record(state: str, score: float | None, lr: float) -> dict:
    """What a step of the search gives."""
    outcome = {"label": "fedavg", "rounds": 2, "bytes": 10, "minutes": 0.1, "reason": "", "scores": {}, "params": {}}
    return {"stage": "search", "role": f"candidate {lr}", "seed": 0, "candidate": {"method": "fedavg", "local.lr": lr},
            "state": state, "score": score, "ranges": {}, **outcome}  # fmt: skip


@pytest.mark.parametrize(("goal", "best"), [("global/accuracy", 0.5), ("global/loss", 0.4)])
def test_the_best_so_far_ran_to_its_end(goal: str, best: float) -> None:
    def nothing(candidate: dict, seed: int, validate: bool):
        raise AssertionError

    task = SearchTask(SearchExperiment(nothing, dict, Space(methods, (), (), {}), SearchSettings(goal=goal), 2, 0))
    steps = [("stopped", 0.9), ("failed", 0.1), ("complete", 0.5), ("complete", 0.4), ("complete", None)]
    for number, (state, score) in enumerate(steps):
        record, _ = task.commit(step_record(state, score, number))
        task.history.append(record)
        assert record["best"] is None or state == "complete"
    assert task.history[-1]["best"] == best


def test_where_uploads_are_summed_mixing_is_no_part_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = build_search("search.methods=[fedavg,dp_fedavg]", "search.slots=[drift]")
    task = SearchTask(experiment)
    candidate = {"method": "dp_fedavg", "method.drift": "dynamic", "method.drift.alpha": 0.1, "local.lr": 0.1}
    task.history = [{**step_record("complete", 0.5, 0.1), "candidate": candidate, "label": "dp_fedavg+dynamic"}]
    monkeypatch.setattr(results, "winner", lambda *_: "finalist 1")
    comparisons = dict(task._final_comparison())
    assert [role for role in comparisons if role.startswith("without")] == ["without drift"]
    assert experiment.make(comparisons["without drift"], 0, True).method.mixing.is_uniform


@pytest.mark.parametrize(("goal", "sign"), [("global/accuracy", 1), ("global/loss", -1)])
def test_a_gain_is_positive_where_less_is_better_too(goal: str, sign: int) -> None:
    def record(role: str, seed: int, score: float) -> dict:
        return {**step_record("complete", score, 0.1), "stage": "compare", "role": role, "seed": seed, "label": role}

    better = {1: 0.5, 2: 0.51, 3: 0.52}
    worse = {seed: score - sign * (0.2 + 0.01 * seed) for seed, score in better.items()}
    history = [step_record("complete", 0.5, 0.1) | {"label": "finalist"}]
    for role, scores in (("finalist 1", better), ("fedavg", worse), ("without drift", worse)):
        history += [record(role, seed, score) for seed, score in scores.items()]
    summary = results.summary(history, SearchSettings(goal=goal), sign > 0, "fedavg")
    assert summary["ranking"][0]["gain"]["mean"] == pytest.approx(0.22)
    assert summary["parts"][0]["mean"] == pytest.approx(0.22)
    assert summary["verdict"].startswith("finalist 1 is better than fedavg: a gain of +0.2200, 95 % interval +0.")
    assert remarks([("", summary)])[1] == "its drift contributes +0.2200 ± 0.0058 (s.e.)."


def test_no_setting_of_a_replaced_part_is_left(finished: Path) -> None:
    experiment, messages = build_search("search.slots=[drift,mixing,objective]"), []
    for number in range(60):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number))
        candidate = experiment.space.suggest(study.ask())
        try:
            experiment.make(candidate, 0, True)
        except ConfigError as error:
            messages.append(str(error))
    messages += [record["reason"] for record in history(finished)]
    assert not any("no effect" in reason for reason in messages)
    settings = {"method": "feddyn", "method.alpha": 0.3, "method.mixing": "uniform"}
    assert effective_candidate(methods, settings) == settings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"candidate": {"method": "fedavg", "engine.address": "evil:1"}},
            "sets 'engine.address', which is not searched",
        ),
        ({"score": "x"}, "round 1 of metrics.jsonl is not a record of a search"),
        ({"minutes": float("nan")}, "round 1 of metrics.jsonl is not a record of a search"),
        ({"params": {"x": 1}}, "Inconsistent parameters"),
        ({}, ""),
    ],
)
def test_records_of_a_strangers_search_run_what_is_searched_alone(changes: dict, says: str, tmp_path: Path) -> None:
    """A candidate is settings of a run: with others it would join the stranger's cluster, or open any file."""
    words = ("search.methods=[fedavg]", "search.unit=minutes", "search.budget=1")
    with suppress(KeyboardInterrupt):
        search(build_search(*words), tmp_path / "s", callbacks=[Ctrl(2)])
    records = RunDirectory(tmp_path / "s").metrics()
    records[0] |= changes
    (tmp_path / "s" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    task = SearchTask(build_search(*words), tmp_path / "s")
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) if says else nullcontext():
        task.restore(Checkpoint(2, {}, {}))


def test_runs_of_a_comparison_are_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "s" / "runs").mkdir(parents=True)
    (tmp_path / "s" / "runs" / "finalist-1-1").symlink_to(tmp_path / "there")
    with pytest.raises(CheckpointError, match="finalist-1-1 is a symbolic link"):
        SearchTask(build_search(), tmp_path / "s")._compare("finalist 1", {"method": "fedavg"}, 1)
    assert not [*(tmp_path / "there").iterdir()]
