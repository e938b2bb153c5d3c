"""Files of claims: published comparisons, the runs that decide them, and which run directories fit.

A claim file is data from outside: a YAML mapping of numbers and short texts. Its settings are numbers and words of
closed lists, so that none names a file, an address or code, and data and models are those that open none::

    title: FedDyn on CIFAR-10, all clients in every round (Acar)
    settings: {data: cifar10, clients: 100, …}                     # of fedloom run, for all of its runs
    runs:
      FedDyn: {method: feddyn, method.alpha: 0.01}
      FedAvg: {method: fedavg}
    cases:                                                         # if runs are repeated with other settings
      IID: {partition: iid}                                        # this makes FedDyn, IID and FedAvg, IID
      Dirichlet .3: {partition: dirichlet_balanced, partition.alpha: 0.3}
    claims:                                                        # see ``comparisons``
      - {table: table 2.2, says: "{} needs fewer transmissions than {} to reach {target}", figure: transmissions,
         metric: average/accuracy, target: 0.85, compare: FedDyn, figures: {IID: {FedDyn: 198, FedAvg: 1000+}, …}}
    minutes: {FedDyn: 2700, FedAvg: 9000}                          # of one core, for one seed
    differs: which α was chosen is not published                   # if anything does; also scripts: true, and note

Results lie beside the claims, in ``results/NAME.json``: of each run that counts as evidence its curves, by seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from math import inf, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedloom.base.checks import one_of
from fedloom.base.errors import CheckpointError, ConfigError, DataError, FedLoomError, nearest
from fedloom.base.files import readable_path
from fedloom.base.ranges import Words, elements, range_of
from fedloom.base.settings import flatten, format_unquoted, signature
from fedloom.config import resolve
from fedloom.config.keys import METHOD, RUN, build_method
from fedloom.config.schema import read
from fedloom.config.sections import Choice, Record
from fedloom.core.slots import SEVERAL, SLOTS
from fedloom.experiment.atomic import Lock, refuse_link, write_whole
from fedloom.experiment.rundir import PROVENANCE, RunDirectory
from fedloom_apps.claims.comparisons import ENTRIES, ON_TEST, Published, comparisons, in_case
from fedloom_apps.claims.rule import Claim, Evidence, Verdict, deciding, evidence, published_gain

ANYHOW = ("seed", "engine", "compute", "device", "client_state", "checkpoint", "trackers")
"""Keys that say how a run is computed; runs that differ in them fit the same claim."""
KEYS = ("method", "data", "partition", "clients", "participation", "cohort", "sampling", "rounds", "model", "local",
        "evaluation", "augment", "held_out", "validation", "weighting", "dtype", "noise", "target")  # fmt: skip
"""The keys that a claim may set."""
FREE = ("evaluation.what", "evaluation.metric", "evaluation.metrics", "augment", "sampling", "held_out", "dtype",
        "model.norm")  # fmt: skip
"""Settings that are names without being annotated as a list of words; none of them is a file's."""
NAME = re.compile(r"[A-Za-z0-9_]{1,40}(/[A-Za-z0-9_]{1,40}){0,4}")
SETTING = re.compile(r"\w+(\.\w+)*", re.ASCII)
"""A key alone: with ``=`` or a comma it would be other settings once it is typed."""
OPENING = ("path", "network", "weights", "pretrained", "file", "repository")
"""Parameters of data sets and models that read what they name; those that have one cannot be in a claim."""
ELSEWHERE = ("root", "download")
"""Settings of published data that say where they are read from."""
LOOKS = 1000
PARTS = ("settings", "runs", "cases", "minutes")
SIZE, PAIRS, LONG = 1 << 16, 1000, 400
MARKS = set("<|`[]\\")
"""Characters that would make more than a text of a cell in a generated page: tags, further cells, links."""
SHORTEST = 0.01
"""Minutes to which those of runs are rounded."""


@dataclass(frozen=True, eq=False)
class ClaimFile:
    """The content of a claim file, checked.

    Attributes:
        name: of the file.
        title: of its section on a page.
        runs: by name, their settings of ``fedloom run``.
        claims: the comparisons.
        minutes: of one core for one seed, by run.
        differs: how all of its runs differ from the publication; empty if they do not.
        scripts: whether they follow the authors' scripts where these differ from the text.
        note: a remark.
        path: of the file.
    """

    name: str
    title: str
    runs: Mapping[str, Mapping[str, Any]]
    claims: Sequence[Published]
    minutes: Mapping[str, float]
    differs: str = ""
    scripts: bool = False
    note: str = ""
    path: Path = Path()

    @cached_property
    def complete(self) -> Mapping[str, Mapping[str, Any]]:
        """By run, all settings, flat, without those that say how it is computed.

        Raises:
            ConfigError: if ``fedloom run`` would refuse them, as far as that shows without data.
        """
        with claim_file(self.path):
            return {name: _complete(self.words(name)) for name in self.runs}

    @property
    def metrics(self) -> list[str]:
        """The metrics that its claims measure."""
        return sorted({claim.metric for claim in self.claims})

    @property
    def stored(self) -> Path:
        """The file of its results."""
        return self.path.parent / "results" / f"{self.name}.json"

    def results(self) -> dict[str, Any]:
        """Its stored results: ``runs``, and ``looks``, how often seeds were judged; without runs if there are none."""
        if not self.stored.exists():
            return {"runs": {}, "looks": 1}
        with refusing(f"{str(self.stored)!r} cannot be read as results", ConfigError):
            content = json.loads(readable_path(self.stored).read_text())
            if content.setdefault("looks", 1) not in range(1, LOOKS):
                raise ValueError(f"looks must be a whole number from 1 to {LOOKS - 1}")
            for record in (record for seeds in content["runs"].values() for record in seeds.values()):
                curves = (record["curves"][metric] for metric in self.metrics)
                values = [record[key] for key in ("rounds", "cost", "left_out", "minutes")]
                for value in chain(values, *curves):
                    isnan(value or 0)  # raises for what is no number
        return content

    def words(self, run: str) -> list[str]:
        """The settings of one of its runs, as ``fedloom run`` takes them."""
        return [f"{key}={format_unquoted(value)}" for key, value in self.runs[run].items()]

    def judged(self, results: Mapping[str, Any]) -> list[tuple[Claim, Evidence | None]]:
        """Its claims with the evidence of results; None where one of the runs is missing altogether."""
        pairs: list[tuple[Claim, Evidence | None]] = []
        for comparison in self.claims:
            claim = replace(comparison.claim(self.differs, self.scripts), looks=results.get("looks", 1))
            is_run = all(results["runs"].get(name) for name in (comparison.ours, comparison.other))
            pairs.append((claim, evidence(claim, results) if is_run else None))
        return pairs


@contextmanager
def refusing(what: str, kind: type[FedLoomError]) -> Iterator[None]:
    """Turn the errors that the content of a stranger's file leads to into one that says what it is."""
    try:
        yield
    except FedLoomError:
        raise
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise kind(f"{what}: {type(error).__name__}: {error}.") from error


def comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, flat, without those that say how a run is computed and how it was made."""
    settings = {key: value for key, value in values.items() if key not in (*ANYHOW, *PROVENANCE)}
    return flatten(settings)


def read_claims(place: Path) -> list[ClaimFile]:
    """The claim file at a path, or all in a folder."""
    paths = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    if not paths:
        raise ConfigError(f"{str(place)!r} holds no claim file; name one, or a folder of them, as --claims.")
    return [read_claim(path) for path in paths]


def read_claim(path: Path) -> ClaimFile:
    """One claim file.

    Raises:
        ConfigError: if it is not what a claim file must be; the sentence begins with its name.
    """
    with claim_file(path):
        if readable_path(path).is_file() and path.stat().st_size > SIZE:
            raise ConfigError(f"it has more than {SIZE:,} bytes.")
        return _parse(path, read(path))


@contextmanager
def claim_file(path: Path) -> Iterator[None]:
    """Begin the sentences about the content of a claim file with its name."""
    try:
        with refusing("its content", ConfigError):
            yield
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{str(path)!r} is not a claim file: {error}") from error


def _parse(path: Path, content: Mapping[str, Any]) -> ClaimFile:
    """A claim file from its content."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", path.stem):
        raise ConfigError("its name is part of commands, and must consist of letters, digits and ._- alone.")
    for key in content:
        one_of("unknown key", key, (*PARTS, "title", "claims", "differs", "scripts", "note"))
    if lacking := {"title", "settings", "runs", "claims", "minutes"} - content.keys():
        raise ConfigError(f"it lacks {', '.join(sorted(lacking))}.")
    for text in _texts(content):
        if len(text) > LONG or not text.isprintable() or set(text) & MARKS:
            raise ConfigError(
                f"a text has more than {LONG} characters, some not to be printed, or one of {' '.join(sorted(MARKS))}."
            )
    for key in ("title", "differs", "note"):
        if not isinstance(content.get(key) or "", str):
            raise ConfigError(f"{key} must be a text.")
    settings, runs, cases, minutes = parts = [content.get(key, {"": {}}) for key in PARTS]
    for key, part in zip(PARTS, parts, strict=True):
        if not isinstance(part, Mapping) or not 0 < len(part) <= ENTRIES:
            raise ConfigError(f"{key} must be a mapping of 1 to {ENTRIES} entries.")
        for name, overrides in part.items() if key in ("runs", "cases") else ():
            if not isinstance(name, str) or not isinstance(overrides, Mapping):
                raise ConfigError(f"{key}.{name} must be a mapping of settings under a name.")
    names = {in_case(run, case): (run, case) for case in cases for run in runs}
    pairs = [*islice(comparisons(content["claims"], runs, names), PAIRS + 1)]
    claims = [pair for pair in pairs if pair]
    compared = {name for claim in claims for name in (claim.ours, claim.other)}
    if len(pairs) > PAIRS or len(compared) > ENTRIES:
        raise ConfigError(f"its claims compare more than {PAIRS:,} pairs of runs, or more than {ENTRIES} runs.")
    run_settings = {
        name: {**settings, **runs[run], **cases[case]} for name, (run, case) in names.items() if name in compared
    }
    if idle := {*runs, *cases} - {part for name in run_settings for part in names[name]}:
        raise ConfigError(f"its claims never compare {min(idle)!r}.")
    for name in minutes:
        one_of("minutes of a run", name, (*runs, *run_settings))
    takes = {name: minutes.get(name, minutes.get(names[name][0])) for name in run_settings}
    for name, overrides in run_settings.items():
        if not re.fullmatch(r"[\w ,.+()∇=-]{1,40}", name):
            raise ConfigError(f"the run {name!r} needs a name of at most 40 letters, digits, spaces and ,.+()=-.")
        if "method" not in overrides:
            raise ConfigError(f"runs.{name} names no method.")
        check_settings(overrides)
        if not isinstance(takes[name], int | float) or not 0 < takes[name] < 1e6:
            raise ConfigError(f"minutes.{name} must be the minutes that one seed of {name} takes.")
    if not isinstance(content.get("scripts", False), bool):
        raise ConfigError("scripts must be true or false.")
    return ClaimFile(
        path.stem, content["title"], run_settings, claims, takes, content.get("differs") or "",
        content.get("scripts", False), content.get("note") or "", path,
    )  # fmt: skip


def _complete(words: Sequence[str]) -> dict[str, Any]:
    """All settings that words stand for, flat, checked as far as they can be without data."""
    config = resolve(words)
    build_method(config)
    for key in ("local", "evaluation", "partition"):
        RUN.sections[key].instantiate(config[key])
    return comparable(config.values)


def _texts(content: Any) -> Iterator[str]:
    """All texts in plain data, keys included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping | list):
        for value in chain(content, content.values() if isinstance(content, Mapping) else ()):
            yield from _texts(value)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that a claim file may not have: other keys, free texts, data or models that open files.

    >>> check_settings({"method": "feddyn", "method.alpha": 0.1, "data": "digits", "evaluation.what": ["global"]})
    >>> check_settings({"data": "npz", "data.path": "/etc/passwd"})
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: data=npz reads what its settings name; claims have data of a known content.
    """
    for key, section in (("data", RUN.sections["data"]), ("model", RUN.sections["model"])):
        assert isinstance(section, Choice)
        name = settings.get(key, RUN.defaults[key])
        if not isinstance(name, str) or name not in section.registry:
            raise ConfigError(f"{key} must be a name; {nearest(str(name), section.registry.names())}")
        if set(OPENING) & section.registry[name].parameters.keys():
            raise ConfigError(f"{key}={name} reads what its settings name; claims have {key} of a known content.")
    for key, value in settings.items():
        if not isinstance(key, str) or not SETTING.fullmatch(key):
            raise ConfigError(f"{str(key)!r} is not a key; keys are words and dots.")
        if key.partition(".")[0] not in KEYS or key.rpartition(".")[2] in ELSEWHERE:
            raise ConfigError(f"{key} is not for a claim to set; {nearest(str(key).partition('.')[0], KEYS, 'key')}")
        for item in elements(value):
            if isinstance(item, str):
                if not NAME.fullmatch(item) or not _is_word(key, settings):
                    raise ConfigError(f"{key} is {item!r}, but a claim sets numbers and words of closed lists.")
            elif item is not None and not isinstance(item, bool | int | float):
                raise ConfigError(f"{key} must be a number, a word, or a list of them.")


def _is_word(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting may be a text: a name out of a registry, or a word of its annotation."""
    first, _, rest = key.partition(".")
    section = RUN.sections.get(first)
    if key in FREE or (isinstance(section, Choice) and rest in ("", *SLOTS)):
        return True
    if first == "method":
        slot, _, setting = rest.partition(".")
        if setting and slot in SLOTS:
            choice = settings.get(f"method.{slot}")
            entries = (
                [SLOTS[slot][name] for name in elements(choice) if name in SLOTS[slot]] if slot not in SEVERAL else []
            )
            return any(_has_words(entry.parameters, setting) for entry in entries)
        return _has_words(METHOD.parameters(str(settings.get("method", "fedavg"))), rest)
    if isinstance(section, Record):
        return _has_words(signature(section.factory), rest)
    if isinstance(section, Choice):
        return _has_words(section.parameters(str(settings.get(first, RUN.defaults.get(first)))), rest)
    return False


def _has_words(parameters: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter's annotation is a list of words."""
    return name in parameters and isinstance(range_of(parameters[name].annotation), Words)


class Fit(NamedTuple):
    """The claim file and the run of it that a run directory is evidence for."""

    file: ClaimFile
    run: str
    seed: str


def fit(directory: RunDirectory, files: Sequence[ClaimFile]) -> Fit:
    """What a run directory is evidence for.

    Raises:
        CheckpointError: if it is no run of any claim; the sentence says from which one it differs least, and how.
    """
    stored = directory.config()
    settings, seed = comparable(stored), stored.get("seed")
    nearest_fit: tuple[int, str] | None = None
    for file in files:
        for run, claim_settings in file.complete.items():
            differing = [
                key for key in {**claim_settings, **settings} if claim_settings.get(key, ...) != settings.get(key, ...)
            ]
            if not differing and type(seed) is int:  # not true, which is the run of seed 1
                return Fit(file, run, str(seed))
            if nearest_fit is None or len(differing) < nearest_fit[0]:
                values = (
                    (key, *(format_unquoted(of.get(key, "none")) for of in (settings, claim_settings)))
                    for key in differing
                )
                differences = (f"{key} {here} ≠ {there}" for key, here, there in values)
                nearest_fit = len(differing), f"{file.name}, {run}: {'; '.join([*differences][:3])}"
    raise CheckpointError(f"fits no claim; it is nearest to {nearest_fit[1] if nearest_fit else 'none'}.")


def of_run(directory: RunDirectory, metrics: Sequence[str]) -> dict[str, Any]:
    """What is stored of a run: rounds, cost of a round relative to FedAvg's, updates left out, curves, minutes.

    Raises:
        CheckpointError: if it ended before its rounds with no setting that ends it, or its records lack what is stored.
    """
    history, summary, config = directory.metrics(), directory.summary(), directory.config()
    with refusing("its records are not those of a run", CheckpointError):
        curves = {metric: [_metric_value(record, metric) for record in history] for metric in metrics}
        if lacking := [metric for metric, curve in curves.items() if all(value is None for value in curve)]:
            raise CheckpointError(f"records no {lacking[0]}, which its claim measures.")
        ends = config["evaluation"].get("stop_at_target") or config["evaluation"].get("patience")
        if len(history) < config["rounds"] and not ends:
            raise CheckpointError(f"has {len(history)} of {config['rounds']} rounds.")
        size = 2 * int(summary["parameters"])
        sent = [(r["comm/down_params"] + r["comm/up_params"]) / (size * r["cohort"]) for r in history if r["cohort"]]
        cohort, seconds = (sum(record[key] for record in history) for key in ("cohort", "seconds"))
        if not 0 <= seconds < inf:
            raise CheckpointError("the seconds of its rounds are not finite numbers of at least 0.")
        return {
            "rounds": len(history),
            "cost": float(f"{max(sent, default=0):.2g}"),
            "left_out": sum(record["failures"] for record in history) / max(cohort, 1),
            "minutes": round(seconds / 60, 2),
            "curves": curves,
        }


def _metric_value(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a record to six significant digits, NaN where it is no number; None where it was not evaluated.

    Where clients have no λ to choose, as published is as deployed.

    >>> _metric_value({"clients/accuracy/mean": 0.5}, "as_published/accuracy/mean")
    0.5
    >>> _metric_value({"loss": None}, "loss")
    nan
    """
    key = metric if metric in record else metric.replace(ON_TEST, "clients/", 1)
    if key not in record:
        return None
    return nan if record[key] is None else float(f"{record[key]:.6g}")


def merged(results: Mapping[str, Any], run: str, seed: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Results with one run more."""
    runs = {name: dict(seeds) for name, seeds in results["runs"].items()}
    runs.setdefault(run, {})[seed] = record
    return {**results, "runs": runs}


def count_look(file: ClaimFile, results: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Results with one look more than before, if a claim that enough seeds did not decide has further pairs of runs."""
    again = any(
        earlier is not None
        and earlier.verdict is Verdict.SEEDS
        and now is not None
        and now.gain["seeds"] > earlier.gain["seeds"] >= row.seeds
        for row, (_, earlier), (_, now) in zip(file.claims, file.judged(before), file.judged(results), strict=True)
    )
    return {**results, "looks": before["looks"] + again}


def store(file: ClaimFile, results: Mapping[str, Any]) -> dict[str, Any]:
    """Write a claim file's results beside it, one run a line; what others have stored meanwhile stays.

    Returns what is stored, with one look more if there are further seeds for a claim that enough did not decide.
    """
    refuse_link(file.stored.parent, "fedloom claim check --store")
    file.stored.parent.mkdir(exist_ok=True)
    lock = Lock(file.stored.parent)
    try:
        before = file.results()
        runs = dict(before["runs"])
        for run, seeds in results["runs"].items():
            runs[run] = {**runs.get(run, {}), **seeds}
        content = count_look(file, {**results, "runs": runs}, before)
        text = json.dumps(content, separators=(",", ":")).replace("},", "},\n")
        write_whole(file.stored, f"{text}\n".encode())
        return content
    finally:
        lock.release()


class Work(NamedTuple):
    """Runs that would bring a claim file nearer to a verdict."""

    run: str
    seeds: tuple[int, ...]
    minutes: float


class Open(NamedTuple):
    """A claim file with open claims, the work that its next verdicts take, and how promising that is."""

    file: ClaimFile
    works: Sequence[Work]
    score: float

    @property
    def minutes(self) -> float:
        """Minutes of one core for all of the work."""
        return sum(work.minutes for work in self.works)


def open_work(
    files: Sequence[ClaimFile],
    results_by_file: Mapping[str, Mapping[str, Any]] | None = None,
    minutes: Mapping[tuple[str, str], float] | None = None,
) -> list[Open]:
    """The files that have open claims, by (importance × chance to decide) / estimated minutes, the best one first.

    The chance is that of the rule where a claim has enough seeds for a spread (1 if the seeds it asks for are known,
    0 if more runs like these decide nothing), and a half before. Minutes of a run are the mean of those measured.
    """
    result = []
    for file in files:
        results = (results_by_file or {}).get(file.name) or file.results()
        seeds_by_run: dict[str, int] = {}
        worth = 0.0
        for comparison, (claim, judged) in zip(file.claims, file.judged(results), strict=True):
            if judged is not None and not judged.verdict.open:
                continue
            seeds, chance = comparison.seeds, 0.5
            if judged is not None and judged.gain["seeds"] >= comparison.seeds:
                seeds = (
                    deciding(judged.gain, published_gain(claim), judged.looks) if judged.verdict is Verdict.SEEDS else 0
                )
                chance = float(seeds > 0)
            if chance:
                worth += comparison.importance * chance
                for run in (comparison.ours, comparison.other):
                    seeds_by_run[run] = max(seeds_by_run.get(run, 0), seeds)
        works = [_work(file, run, count, results, minutes or {}) for run, count in seeds_by_run.items()]
        if works := [work for work in works if work.seeds]:
            result.append(Open(file, works, worth / max(sum(work.minutes for work in works), SHORTEST)))
    return sorted(result, key=lambda entry: -entry.score)


def _work(
    file: ClaimFile, run: str, count: int, results: Mapping[str, Any], minutes: Mapping[tuple[str, str], float]
) -> Work:
    """The seeds of a run that are missing, and the minutes that they take."""
    there = results["runs"].get(run, {})
    seeds = tuple(seed for seed in range(count) if str(seed) not in there)
    usual = fmean(record["minutes"] for record in there.values()) if there else file.minutes[run]
    return Work(run, seeds, len(seeds) * minutes.get((file.name, run), usual))
