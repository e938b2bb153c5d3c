"""A search: candidates until the budget is spent, then a comparison of the best ones on held-out seeds.

One candidate's run, ended early once it falls behind the others.

A step of the search is one run. The next candidate follows from the records of those tried so far, so that a search
that was killed resumes from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedloom.base.errors import ClientError, ConfigError, DataError, first_line, printable
from fedloom.base.rng import torch_seed
from fedloom.experiment import federated
from fedloom.experiment.atomic import refuse_link
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.rundir import Columns, RunDirectory, Status
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.trackers import Tracker
from fedloom.experiment.trainer import Record, Trainer, TrainerTask
from fedloom.metrics import direction
from fedloom_apps.search import results
from fedloom_apps.search.space import SEARCH_SLOTS, Candidate, SearchSettings, Space, effective_candidate, without_part

if TYPE_CHECKING:
    import optuna

MayContinue = Callable[[int, float], bool]
"""Whether a candidate with this score after this round may continue."""


class _EndRun(Exception):
    """Raised to end a run early on purpose."""


@dataclass
class Outcome:
    """The outcome of a candidate's run."""

    label: str
    scores: dict[int, float] = field(default_factory=dict)  # the goal by round
    state: str = "complete"  # or stopped at a comparison, failed (it diverged) or refused (impossible)
    reason: str = ""
    rounds: int = 0
    bytes: int = 0
    minutes: float = 0.0


class Comparisons(Callback):
    """Compares a run with the others at given rounds, and measures what it costs."""

    def __init__(
        self,
        outcome: Outcome,
        goal: str,
        milestones: Sequence[int],
        may_continue: MayContinue | None,
        limit: float = math.inf,
    ) -> None:
        self.outcome, self.goal, self.milestones = outcome, goal, milestones
        self.may_continue, self.limit = may_continue, limit

    def on_round(self, record: Mapping[str, Any]) -> None:
        outcome = self.outcome
        outcome.rounds, outcome.bytes = record["round"], record["comm/bytes"]
        outcome.minutes += record["seconds"] / 60
        is_milestone = outcome.rounds in self.milestones
        if self.goal in record or (is_milestone and outcome.scores):
            self._compare(record.get(self.goal), is_milestone)
        else:
            metrics = [key for key in record if "/" in key and key.split("/")[0] not in ("comm", "train")]
            outcome.reason = f"measured are: {', '.join(metrics)}." if metrics else outcome.reason
        if outcome.bytes * (outcome.rounds + 1) / outcome.rounds > self.limit:
            raise _EndRun

    def _compare(self, score: float | None, is_milestone: bool) -> None:
        """Note the goal, None for NaN; at a milestone, end the run unless it may continue."""
        outcome = self.outcome
        outcome.scores[outcome.rounds] = math.nan if score is None else score
        if is_milestone and score is None:
            outcome.state, outcome.reason = "failed", f"{self.goal} is not a number after round {outcome.rounds}."
            raise _EndRun
        score = outcome.scores[outcome.rounds]
        if is_milestone and self.may_continue is not None and not self.may_continue(outcome.rounds, score):
            outcome.state = "stopped"
            raise _EndRun


def attempt(
    make: Callable[[], Experiment],
    label: str,
    goal: str,
    milestones: Sequence[int],
    may_continue: MayContinue,
    limit: float,
) -> Outcome:
    """Run a candidate in memory; impossible settings and divergence are outcomes, not errors."""
    outcome = Outcome(label)
    try:
        experiment = make()
        outcome.label = experiment.method.name
        federated.run(experiment, callbacks=[Comparisons(outcome, goal, milestones, may_continue, limit)])
    except _EndRun:
        pass
    except (ConfigError, DataError) as error:
        outcome.state, outcome.reason = "refused", str(error)
    except ClientError as error:
        outcome.state, outcome.reason = "failed", str(error)
    return outcome


def in_best(score: float, rivals: Sequence[float], eta: int, maximise: bool) -> bool:
    """Whether a score is among the best 1/η of all scores so far at the same round, itself included.

    The rule of asynchronous successive halving (Li et al., MLSys 2020, algorithm 2); NaN is worst.
    """
    if math.isnan(score):
        return False
    better = sum(other > score if maximise else other < score for other in rivals if not math.isnan(other))
    return better < max((len(rivals) + 1) // eta, 1)


REFERENCE = "fedavg"
FACTORS = (1.0, 1 / 3, 3.0)
"""FedAvg is run in full first, at these multiples of the keys searched in addition to the methods' settings."""
WITHOUT_EFFECT = ("engine", "device", "client_state", "checkpoint", "trackers")  # on results
HOPELESS = 200  # candidates in a row that could not run at all, after which the search ends
RUNS = "runs"
"""Folder of the run directories of the final comparison."""


Maker = Callable[[Candidate, int, bool], Experiment]
"""Makes the experiment of a candidate for a seed; if the last argument is true, the experiment is tested on validation
samples, on which it does not train."""


@dataclass(frozen=True)
class SearchExperiment:
    """A search over compositions."""

    make: Maker
    recipe: Callable[[Candidate], dict[str, Any]]
    space: Space
    settings: SearchSettings
    rounds: int
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)


def search(
    experiment: SearchExperiment,
    out: Path | str | None = None,
    *,
    resume: bool | Path | str = False,
    checkpoint_every: int = 1,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    other_searches: Sequence[Sequence[Record]] = (),
) -> dict[str, Any]:
    """Run a search, from the start or where it stopped; returns its summary.

    Settings of the run directory are those of ``fedloom.experiment.federated.run``, with runs in place of rounds.
    Trackers among the callbacks log each run of the final comparison by itself, once the search has finished.
    ``other_searches`` are the records of searches with the same data, conditions and seed, which differ in sampler,
    slots or budget: the runs with which both begin, and comparisons of the same candidates, are reused, not repeated.
    """
    was_finished = out is not None and RunDirectory(out).status is Status.FINISHED
    with reproducible():
        task = SearchTask(experiment, None if out is None else Path(out), other_searches)
        summary = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks).run(resume)
    if out is not None and summary["status"] == Status.FINISHED.value and not was_finished:
        final_runs = [run for run in map(RunDirectory, sorted(Path(out).glob(f"{RUNS}/*"))) if run.summary()]
        for tracker in (callback for callback in callbacks if isinstance(callback, Tracker)):
            for run in final_runs:
                tracker.replay(run)
    return summary


def load(path: Path | str) -> NoReturn:
    """What ``fl.load`` says of a search."""
    raise ConfigError(f"{path} is a run of fedloom search; load one of the runs that it compared, in its folder runs.")


class SearchTask(TrainerTask):
    """A search as a task of the trainer; a round is one run."""

    kind, name, headline = "search", "search", "score"

    def __init__(
        self, experiment: SearchExperiment, out: Path | None = None, other_searches: Sequence[Sequence[Record]] = ()
    ) -> None:
        super().__init__()
        self.other_searches = other_searches
        self.experiment, self.settings, self.out = experiment, experiment.settings, out
        self.seed, self.config, self.citations = experiment.seed, experiment.config, ""
        self.maximise = direction(self.settings.goal) == "max"
        self.milestones = self.settings.milestones(experiment.rounds)

    @property
    def rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One more than the completed runs, until there is nothing left to run."""
        return self.round + (self._next() is not None)

    def identity(self) -> dict[str, Any]:
        return {"config": {key: value for key, value in self.config.items() if key not in WITHOUT_EFFECT}}

    # --- what is run next

    @property
    def candidates(self) -> list[Record]:
        """The records of the candidates so far."""
        return [record for record in self.history if record["stage"] == "search"]

    @property
    def used_budget(self) -> float:
        """The part of the budget that the candidates have used, in its unit."""
        return sum(record[self.settings.unit] for record in self.candidates)

    def _next(self) -> tuple[str, Candidate, int] | None:
        """Role, candidate and seed of the next run; a candidate of the search is only proposed when it runs."""
        candidates, last = self.candidates, self.history[-HOPELESS:]
        is_hopeless = len(last) == HOPELESS and all(record["rounds"] == 0 for record in last)
        if self.used_budget < self.settings.budget and len(candidates) == len(self.history) and not is_hopeless:
            return "candidate", {}, self.seed
        finished_runs = {(record["role"], record["seed"]) for record in self.history if record["stage"] == "compare"}
        for role, candidate in self._final_comparison():
            for seed in range(self.seed + 1, self.seed + 1 + self.settings.seeds):
                if (role, seed) not in finished_runs:
                    return role, candidate, seed
        return None

    def _final_comparison(self) -> list[tuple[str, Candidate]]:
        """The final comparison by role: finalists, FedAvg, and the best of them without each of its parts."""
        finalists = results.finalists(self.candidates, self.settings.finalists, self.maximise, REFERENCE)
        entries = [*((f"finalist {k}", candidate) for k, candidate in enumerate(finalists, 1))]
        reference = results.best_of_method(self.candidates, REFERENCE, self.maximise)
        if reference is not None:
            entries.append((REFERENCE, reference))
        roles = sorted((role for role, _ in entries), key=lambda role: role != REFERENCE)  # it wins if means are equal
        winner = results.winner(self.history, roles, self.settings.seeds, self.maximise)
        if winner is None or winner == REFERENCE:
            return entries
        candidate = dict(entries)[winner]
        method = self.experiment.make(candidate, self.seed, True).method
        fixed_slot = "mixing" if method.only_sums else ""  # which must be uniform
        for slot in (slot for slot in SEARCH_SLOTS if slot != fixed_slot):
            part = getattr(method, slot)
            if len(part) > 1 if isinstance(part, tuple) else not part.is_identity:
                ablation = effective_candidate(self.experiment.space.registry, without_part(candidate, slot))
                entries.append((f"without {slot}", ablation))
        return entries

    # --- running it

    def step(self) -> Record:
        next_run = self._next()
        assert next_run is not None
        role, candidate, seed = next_run
        return self._candidate() if role == "candidate" else self._compare(role, candidate, seed)

    def _candidate(self) -> Record:
        """Propose a candidate and run it for as long as it keeps up with the others."""
        from optuna.distributions import distribution_to_json

        number, also = len(self.candidates), self.experiment.space.also
        study = self._study()
        if number < len(FACTORS):
            factor = FACTORS[number]
            start = self.experiment.space.start(REFERENCE, {key: factor * span.centre for key, span in also.items()})
            study.enqueue_trial(start)
        elif number - len(FACTORS) < len(self.experiment.space.names) - 1:
            names = [name for name in self.experiment.space.names if name != REFERENCE]
            best = results.best_of_method(self.candidates, REFERENCE, self.maximise) or {}
            further_values = {key: best.get(key, span.centre) for key, span in also.items()}
            study.enqueue_trial(self.experiment.space.start(names[number - len(FACTORS)], further_values))
        trial = study.ask()
        candidate = self.experiment.space.suggest(trial)

        def may_continue(round: int, score: float) -> bool:
            rivals = [r["scores"][str(round)] for r in self.candidates if str(round) in r["scores"]]
            rivals = [math.nan if other is None else other for other in rivals]
            return number < len(FACTORS) or in_best(score, rivals, self.settings.eta, self.maximise)

        limit = math.inf
        if self.settings.equal == "bytes" and self.candidates and self.candidates[0]["rounds"]:
            limit = self.experiment.rounds * self.candidates[0]["bytes"] / self.candidates[0]["rounds"]

        def make() -> Experiment:
            return self.experiment.make(candidate, self.seed, True)

        outcome = self._reused_outcome(candidate)
        if outcome is None:
            outcome = attempt(make, candidate["method"], self.settings.goal, self.milestones, may_continue, limit)
        if outcome.state == "complete" and not outcome.scores:
            missing = f"search.goal is {self.settings.goal!r}, which is not measured"
            if candidate["method"] == REFERENCE:
                raise ConfigError(f"{missing}; {outcome.reason}")
            outcome.state, outcome.reason = "failed", f"{missing} for this candidate"
        ranges = {name: distribution_to_json(distribution) for name, distribution in trial.distributions.items()}
        record = _record("search", f"candidate {number + 1}", self.seed, candidate, outcome)
        return record | {"params": trial.params, "ranges": ranges}

    def _reused_outcome(self, candidate: Candidate) -> Outcome | None:
        """Another search's outcome for the next candidate, if its earlier candidates were the same."""
        candidates = [*(record["candidate"] for record in self.candidates), candidate]
        for records in self.other_searches:
            other_records = [record for record in records if record["stage"] == "search"][: len(candidates)]
            if [record["candidate"] for record in other_records] == candidates:
                return _outcome(other_records[-1])
        return None

    def _compare(self, role: str, candidate: Candidate, seed: int) -> Record:
        """Run a candidate to its end on a held-out seed, tested on test samples."""
        for record in chain.from_iterable(self.other_searches):
            if (record["stage"], record["candidate"], record["seed"]) == ("compare", candidate, seed):
                return _record("compare", role, seed, candidate, _outcome(record))
        outcome = Outcome(candidate["method"])
        try:
            experiment = self.experiment.make(candidate, seed, False)
            outcome.label = experiment.method.name
            folder = None if self.out is None else self.out / RUNS / f"{role.replace(' ', '-')}-{seed}"
            if folder is not None:
                refuse_link(folder, "a run")
            resume = folder is not None and RunDirectory(folder).is_begun
            last = federated.run(experiment, folder, resume=resume, checkpoint_every=experiment.rounds).history[-1]
            outcome.rounds, outcome.bytes = last["round"], last["comm/bytes"]
            score = last.get(self.settings.goal)
            outcome.scores[last["round"]] = math.nan if score is None else score
        except (ConfigError, DataError, ClientError) as error:  # a partition may be impossible with this seed alone
            outcome.state, outcome.reason = "failed", str(error)
        return _record("compare", role, seed, candidate, outcome)

    def _study(self) -> optuna.Study:
        """The Optuna study of all candidates so far; its sampler depends on their number alone."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = torch_seed(self.seed, "search", len(self.candidates)) % 2**32
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        sampler = samplers[self.settings.sampler](seed=seed)
        study = optuna.create_study(sampler=sampler, direction="maximize" if self.maximise else "minimize")
        study.add_trials([_trial(record) for record in self.candidates])
        return study

    # --- the trainer's side

    def commit(self, step: Record) -> tuple[Record, dict[str, Columns]]:
        self.round += 1
        used_budget = self.used_budget + (step[self.settings.unit] if step["stage"] == "search" else 0)
        records = [record for record in (*self.candidates, step) if record["stage"] == "search"]
        ranking = results.rank_candidates(records, self.maximise)
        best = ranking[0]["score"] if ranking else None
        percent = min(int(100 * used_budget / self.settings.budget), 100)
        return {"round": self.round, **step, "spent": used_budget, "percent": percent, "best": best}, {}

    def snapshot(self) -> Checkpoint:
        return Checkpoint(self.round, {}, {})

    def restore(self, checkpoint: Checkpoint) -> None:
        self.round = checkpoint.round
        assert self.out is not None
        for record in RunDirectory(self.out).metrics()[: self.round]:  # maybe a stranger's, whose candidates are run
            stage, role, seed, candidate = (record[key] for key in ("stage", "role", "seed", "candidate"))
            expected = _record(stage, role, seed, candidate, _outcome(record))
            if expected != {key: record[key] for key in expected} or not math.isfinite(record[self.settings.unit]):
                raise ValueError(f"round {record['round']} of metrics.jsonl is not a record of a search")
            if stage == "search":
                _trial(record)
            for key in candidate:
                if key.partition(".")[0] != "method" and key not in self.experiment.space.also:
                    raise ValueError(f"a candidate in metrics.jsonl sets {printable(key)!r}, which is not searched")

    def summarise(self, status: Status) -> dict[str, Any]:
        return {
            "spent": self.used_budget,
            "candidates": len(self.candidates),
            "misfits": dict(self.experiment.misfits),
            **results.summary(self.history, self.settings, self.maximise, REFERENCE),
        }

    def write(self, directory: RunDirectory, status: Status) -> None:
        if status.ended:
            results.write(directory.path, self.history, self.settings, self.maximise, REFERENCE, self.experiment.recipe)
            self._export(directory.path / "study.db")

    def _export(self, path: Path) -> None:
        """Write the study as a database that Optuna's dashboard opens."""
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        path.unlink(missing_ok=True)
        study = self._study()
        try:
            copy = optuna.create_study(storage=f"sqlite:///{path}", study_name="fedloom", direction=study.direction)
            copy.add_trials(study.get_trials(deepcopy=False))
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:  # a full disk
            raise OSError(f"{path}: {first_line(error)}") from error


def _record(stage: str, role: str, seed: int, candidate: Candidate, outcome: Outcome) -> Record:
    """The record of a run: the last score is under ``score``, NaN is null."""
    scores = {str(round): None if math.isnan(x) else x for round, x in outcome.scores.items()}
    about = {"stage": stage, "role": role, "seed": seed, "candidate": candidate}
    return {**about, **asdict(outcome), "scores": scores, "score": next(reversed(scores.values()), None)}


def _outcome(record: Record) -> Outcome:
    """The outcome in a record."""
    scores = {int(round): math.nan if x is None else x for round, x in record["scores"].items()}
    return Outcome(
        **{field.name: record[field.name] for field in fields(Outcome) if field.name != "scores"}, scores=scores
    )


def _trial(record: Record) -> optuna.trial.FrozenTrial:
    """A record of a candidate as an Optuna trial."""
    from optuna.distributions import json_to_distribution
    from optuna.trial import TrialState, create_trial

    scores = {int(round): x for round, x in record["scores"].items() if x is not None}
    complete = record["state"] == "complete" and record["score"] is not None
    return create_trial(
        state=TrialState.COMPLETE if complete else TrialState.PRUNED,
        value=record["score"] if complete else None,
        params=record["params"],
        distributions={name: json_to_distribution(text) for name, text in record["ranges"].items()},
        intermediate_values=scores,
    )
