"""The configuration of a command: its keys, and how a recipe and overrides are merged over the defaults."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from fedloom.applications import of_kind
from fedloom.base import yaml
from fedloom.base.errors import CheckpointError, ConfigError, first_line, nearest
from fedloom.base.settings import (
    EMPTY,
    convert,
    flatten,
    format_unquoted,
    format_value,
    signature,
    to_plain,
)
from fedloom.config.overrides import PATHS, Key, ParsedOverride, combinations, parse
from fedloom.config.sections import Choice, Record, Section, Tree, merge
from fedloom.experiment.checkpoint import run_and_round
from fedloom.experiment.rundir import PLAN, PROVENANCE, RunDirectory

DEPLOYED = "deploy"  # the key that only deployments have
Condition = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class Config:
    """A complete configuration: every key with its value, as plain data.

    Attributes:
        values: nested mappings, as in a run directory's ``config.yaml``; ``values["method"]["name"]`` is the method.
        out: the run directory, if one was named.
        resume: the run directory or checkpoint to continue, if one was named.
        sweep_values: in a sweep, the keys that vary with this one's values.
    """

    values: dict[str, Any]
    out: Path | None = None
    resume: Path | None = None
    sweep_values: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value at a dotted key."""
        return reduce(getitem, key.split("."), self.values)


@dataclass(frozen=True)
class CommandSchema:
    """The keys of a command and their defaults.

    Args:
        kind: of the runs that the command leaves.
        sections: what each key holds, in the order of ``config.yaml``.
        defaults: values of keys where they differ from the default of a signature.
        choice_defaults: defaults that go with a choice, by key and name, or by key and a condition on what is given
            below it.
        default_sweep: overrides to add where the first key is not set, given the keys that are.
        check_conflicts: raises a ``ConfigError`` if keys given in a recipe or on a command line contradict each other;
            called with the keys of both and all values.
        aliases: abbreviations of dotted keys.
        may_change: keys that a continued run may change, since what was computed so far does not depend on them.
        extendable: a key that a continued run may change upwards.
    """

    kind: str
    sections: Mapping[str, Section]
    defaults: Mapping[str, Any]
    choice_defaults: Mapping[tuple[str, str | Condition], Mapping[str, Any]] = field(default_factory=dict)
    default_sweep: Callable[[set[str]], Sequence[str]] = lambda keys: ()
    check_conflicts: Callable[[set[str], set[str], Mapping[str, Any]], None] = lambda recipe, words, full: None
    aliases: Mapping[str, str] = field(default_factory=dict)
    may_change: tuple[str, ...] = ("device",)
    extendable: str = ""

    @property
    def command(self) -> str:
        """The command's name."""
        return of_kind(self.kind).name

    def resolve(self, words: Sequence[str] = (), base: Path | str | None = None) -> Config:
        """One configuration from a recipe and overrides; the order of overrides does not matter.

        Args:
            words: overrides like ``method=feddyn``, ``method.alpha=0.1``; of two for one key the last one counts.
            base: a YAML file with the same keys.

        >>> from fedloom.config import resolve
        >>> config = resolve(["method.alpha=.1", "method=feddyn", "partition.alpha=0.6"])
        >>> config["method.name"], config["method.alpha"], config["partition.alpha"], config["clients"]
        ('feddyn', 0.1, 0.6, 20)
        >>> resolve(["method=feddin"])
        Traceback (most recent call last):
        ...
        fedloom.base.errors.ConfigError: unknown method 'feddin'; did you mean 'feddyn'? ...
        """
        return self._configs(self._parse(words, sweeps=False), base)[0]

    def sweep(self, words: Sequence[str] = (), base: Path | str | None = None) -> list[Config]:
        """All configurations of a sweep: the product of all keys with several values.

        >>> from fedloom.config import sweep
        >>> [(c["method.name"], c["seed"]) for c in sweep(["method=fedavg,feddyn", "seed=range(1,3)"])]
        [('fedavg', 1), ('fedavg', 2), ('feddyn', 1), ('feddyn', 2)]
        """
        return self._configs(self._parse(words), base)

    def plan(self, words: Sequence[str], base: Path | None, sweeps: bool) -> list[Config]:
        """The configurations of a command line; without a value for the first key, those of the default sweep."""
        overrides, keys = self._parse(words, sweeps), self.explicit_keys(words, base)
        if not {next(iter(self.sections)), "resume"} & keys:
            overrides = [*self._parse(self.default_sweep(keys)), *overrides]
        return self._configs(overrides, base)

    def explicit_keys(self, words: Sequence[str], base: Path | None) -> set[str]:
        """The keys of the first level that are set on a command line or in its recipe."""
        return {override.key[0] for override in self._parse(words)} | (read(base).keys() if base else set())

    def complete(self, recipe: Mapping[str, Any], words: Mapping[Key, Any] | None = None) -> dict[str, Any]:
        """Every key with its value: overrides over a recipe over what goes with the choices over the defaults."""
        layers = [self._tree({(key,): value for key, value in recipe.items()}), self._tree(words or {})]
        defaults = {key: section.default for key, section in self.sections.items() if section.default is not EMPTY}
        defaults |= self.defaults
        start = self._tree({(key,): value for key, value in defaults.items()})
        for (key, fits), fitting in self.choice_defaults.items():
            choice = self._overlay_all(start, layers).get(key, {})
            if choice.get("name") == fits if isinstance(fits, str) else fits(choice):
                start = self._overlay(start, self._tree({(k,): value for k, value in fitting.items()}), start)
        full = interpolate(self._overlay_all(start, layers))
        return {key: section.validate(key, full.get(key, EMPTY)) for key, section in self.sections.items()}

    def of_run(self, path: Path | str, instead: str) -> tuple[RunDirectory, Config]:
        """A run of this command and its configuration; ``instead`` tells what to do with one started from Python.

        Raises:
            ConfigError: if it is a run of another command, or one started from Python, which records no configuration.
            CheckpointError: if it is not a run directory.
        """
        directory = RunDirectory(path)
        stored, kind = directory.config(), directory.kind
        if kind != self.kind:
            raise ConfigError(f"{path} is a run of fedloom {of_kind(kind).name}, not of fedloom {self.command}.")
        if next(iter(self.sections)) not in stored:
            raise ConfigError(f"{path} was started from Python; {instead}.")
        return directory, Config(self.settings_of(directory.path))

    def settings_of(self, directory: Path) -> dict[str, Any]:
        """Every key with its value, of a run of this command; ``ConfigError`` if this version knows others."""
        return self._complete_stored(directory / "config.yaml", read_run(directory))

    def _complete_stored(self, place: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Every key with its value, of settings that a file holds; ``ConfigError`` if this version knows others."""
        try:
            return self.complete(settings)
        except ConfigError as error:
            raise ConfigError(f"{place}, perhaps of another version of FedLoom: {error}") from error

    def _parse(self, words: Sequence[str], sweeps: bool = True) -> list[ParsedOverride]:
        """Overrides, one per key."""
        choices = {key: section for key, section in self.sections.items() if isinstance(section, Choice)}
        choices |= {f"{k}.{slot}": s for k, c in choices.items() for slot, s in c.slots.items() if type(s) is Choice}
        names = {key: choice.registry.names() for key, choice in choices.items()}
        overrides: dict[Key, ParsedOverride] = {}
        for word in words:
            override = parse(word, names)
            if override.is_sweep and not sweeps:
                other = "" if ".".join(override.key) in names else ", or write a list as [a,b]"
                raise ConfigError(f"{word!r} holds several values; add -m to run each of them{other}.")
            overrides[override.key] = override
        return list(overrides.values())

    def _configs(self, overrides: Sequence[ParsedOverride], base: Path | str | None) -> list[Config]:
        recipe = {} if base is None else self._recipe(Path(base))
        place = recipe.pop("out", None)
        sweeps = [override.key for override in overrides if override.is_sweep]
        configs = []
        for words in combinations(overrides):
            sweep_values = {".".join(key): words[key] for key in sweeps}
            out, resume = (convert(key, words.pop((key,), None), Path | None) for key in PATHS)
            if resume is None:
                out = out or convert("out", place, Path | None)
                try:
                    configs.append(Config(self.complete(recipe, words), out, sweep_values=sweep_values))
                    self.check_conflicts({*recipe}, {".".join(key) for key in words}, configs[-1].values)
                except ConfigError as error:
                    raise ConfigError(self._setting_of_some(overrides) or str(error)) from error
                continue
            if base is not None or out is not None or sweeps:
                other = "a recipe" if base is not None else "out=" if out is not None else "a sweep"
                raise ConfigError(f"resume= continues a run as it is, so it cannot be combined with {other}.")
            configs.append(Config(self._resumed(run_and_round(resume)[0], words), resume=resume))
        return configs

    def _recipe(self, path: Path) -> dict[str, Any]:
        """The settings in a recipe, which may be the ``config.yaml`` of a run."""
        recipe, first = read(path), next(iter(self.sections))
        if "resume" in recipe:
            raise ConfigError(f"{str(path)!r} has the key 'resume', which belongs on the command line.")
        if recipe.keys() <= {"checkpoint"} and "identity" in yaml.load(path):
            raise ConfigError(
                f"{str(path)!r} names no {first}: this run was started from Python; repeat it from Python."
            )
        return recipe

    def _setting_of_some(self, overrides: Sequence[ParsedOverride]) -> str:
        """The message about a setting that only some of a sweep's choices have; "" if there is none."""
        several = {override.key: override.values for override in overrides if override.is_sweep}
        for override in overrides:
            section = self.sections.get(override.key[0])
            if not isinstance(section, Choice) or len(override.key) != 2 or override.key[1] in section.slots:
                continue
            names = [section.registry.canonical(n) for n in several.get(override.key[:1], ()) if isinstance(n, str)]
            has_setting = {
                name: override.key[1] in section.parameters(name) for name in names if name in section.registry
            }
            if len(set(has_setting.values())) == 2:
                key, setting = override.key
                has = [name for name, yes in has_setting.items() if yes]
                lacking = [name for name, yes in has_setting.items() if not yes]
                example = ",".join(
                    [*lacking, *((f"{{name:{name},{setting}:{format_unquoted(override.values[0])}}}") for name in has)]
                )
                return (
                    f"{key}.{setting} is a setting of {' and '.join(has)}, but not of {' and '.join(lacking)}; "
                    f"write it beside the name: '{key}={example}'."
                )
        return ""

    def _resumed(self, directory: Path, words: Mapping[Key, Any]) -> dict[str, Any]:
        """The configuration of a stored run, with the changes that a continued run may have."""
        stored, kind = read_run(directory), RunDirectory(directory).kind
        deployed = DEPLOYED in stored
        if kind != self.kind or deployed != (DEPLOYED in self.sections):
            how = f"fedloom {of_kind(kind).name} resume={directory}"
            if deployed:
                local = f"fedloom deploy local resume={directory}"
                how = f"{local} if its nodes ran on this machine, and with fedloom deploy server otherwise"
            raise ConfigError(f"{str(directory)!r} was not started by fedloom {self.command}; continue it with {how}.")
        if (first := next(iter(self.sections))) not in stored:
            raise CheckpointError(
                f"{str(directory / 'config.yaml')!r} names no {first}: this run was started from Python; resume it "
                "from Python."
            )
        old = flatten(self.settings_of(directory))
        after = self.complete(stored, words)
        new = flatten(after)
        changed = []
        for key in dict.fromkeys([*old, *new]):
            a, b = old.get(key), new.get(key)
            grows = key == self.extendable and b is not None and b > a
            if a != b and not grows and not any(f"{key}.".startswith(f"{may}.") for may in self.may_change):
                changed.append(f"{key}: {format_value(a)} → {format_value(b)}")
        if changed:
            may = ", ".join(dict.fromkeys(setting.partition(".")[0] for setting in self.may_change)) + (
                f", and {self.extendable}, upwards" if self.extendable else ""
            )
            raise ConfigError(
                f"{str(directory)!r} cannot be continued with other settings ({'; '.join(changed)}); "
                f"what may change is {may}."
            )
        self._refuse_cluster(directory, after, words)
        return after

    def stored(self, directory: Path, recipe: Mapping[str, Any], words: Sequence[str]) -> Config:
        """The configuration of a planned run of a sweep directory, with overrides of its engine."""
        changes = {override.key: override.values[0] for override in self._parse(words, sweeps=False)}
        self._complete_stored(directory / PLAN, recipe)
        values = self.complete(recipe, changes)
        self._refuse_cluster(directory, values, changes)
        return Config(values)

    def _refuse_cluster(self, directory: Path, values: Mapping[str, Any], words: Mapping[Key, Any]) -> None:
        """Raise a ``ConfigError`` if stored settings join a cluster that the words do not name: it runs code."""
        address = values.get("engine", {}).get("address", "")
        if address not in ("", "auto", self._tree(words).get("engine", {}).get("address")):
            raise ConfigError(
                f"{str(directory)!r} would send the data to {address!r} and run what comes from there; if that is your "
                f"cluster, add engine.address={format_unquoted(address)}, and otherwise engine=serial."
            )

    def _tree(self, values: Mapping[Key, Any]) -> Tree:
        """Settings by key as a tree: choices by name before their settings, whatever the order."""
        longer = [((*self.aliases.get(key[0], key[0]).split("."), *key[1:]), value) for key, value in values.items()]
        self._refuse_two_names(dict(longer))
        _refuse_twice(dict(longer))
        tree = Tree()
        for (first, *rest), value in sorted(longer, key=lambda item: len(item[0])):
            if first not in self.sections:
                raise self._unknown(first)
            tree = merge(tree, Tree({first: self.sections[first].nest(first, rest, value)}))
        return tree

    def _refuse_two_names(self, values: Mapping[Key, Any]) -> None:
        """Raise ``ConfigError`` for a choice with a second, other name among its settings."""
        for key, value in values.items():
            choice, where = values.get(key[:-1]), ".".join(key[:-1])
            if key[-1] == "name" and isinstance(choice, str) and choice != value:
                section, message = self.sections.get(key[0]), "leave one out"
                if (
                    isinstance(section, Choice)
                    and choice in section.registry
                    and "network" in section.parameters(choice)
                ):
                    message = f"the network of {choice} is {where}.network={format_unquoted(value)}"
                raise ConfigError(f"{where}={choice} and {where}.name={format_unquoted(value)} choose two; {message}.")

    def _overlay_all(self, start: Tree, layers: Sequence[Tree]) -> Tree:
        """The trees over the one at the start, one after the other."""
        return reduce(lambda full, tree: self._overlay(full, tree, start), layers, start)

    def _overlay(self, full: Tree, over: Tree, start: Tree) -> Tree:
        """A tree laid over a full one; a choice that returns to its name in ``start`` has its settings from there."""
        for key, tree in over.items():
            name = tree.get("name") if isinstance(tree, Tree) else None
            if name is not None and full[key].get("name") != name == start[key].get("name"):
                full = Tree({**full, key: start[key]})
        return merge(full, over)

    def _unknown(self, key: str) -> ConfigError:
        if key == DEPLOYED:
            return ConfigError(
                "these are settings of a deployment; start it with fedloom deploy local or deploy server."
            )
        keys = [*self.sections, *self.aliases, *PATHS]
        hint = nearest(key, keys, "key")
        records = {name: section for name, section in self.sections.items() if isinstance(section, Record)}
        inside = [f"{name}.{key}" for name, record in records.items() if key in signature(record.factory)]
        choices = {name: section for name, section in self.sections.items() if isinstance(section, Choice)}
        inside += [f"{name}.{key}" for name, choice in choices.items() if key in choice.slots]
        if not inside:
            inside = [
                f"{n}.{key}" for n, choice in choices.items() if any(key in e.parameters for e in choice.registry)
            ]
        if inside and not difflib.get_close_matches(key, keys, n=1, cutoff=0.7):
            hint = f"did you mean {' or '.join(map(repr, inside[:2]))}? There are: {', '.join(sorted(keys))}."
        return ConfigError(f"unknown key {key!r}; {hint}")


def _refuse_twice(values: Mapping[Key, Any]) -> None:
    """Raise a ``ConfigError`` for a setting given by its own key and in the mapping of another.

    >>> _refuse_twice({("local", "lr"): 0.1, ("local",): {"lr": 0.2}})
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: local.lr is set twice, alone and within local; leave one out.
    """
    for key in values:
        for cut in range(1, len(key)):
            within = values.get(key[:cut])
            for part in key[cut:]:
                within = within.get(part) if isinstance(within, Mapping) else None
            if within is not None:
                where, outer = ".".join(key), ".".join(key[:cut])
                raise ConfigError(f"{where} is set twice, alone and within {outer}; leave one out.")


def read(path: Path) -> dict[str, Any]:
    """A recipe: a YAML file of settings."""
    try:
        content = yaml.load(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}.") from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except yaml.YAMLProblem as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "in ").split()).rstrip(".")
        raise ConfigError(f"{str(path)!r} is not a YAML file of settings: {reason}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} holds no settings: it should be a mapping of keys to values.")
    return {str(key): value for key, value in content.items() if "identity" not in content or key not in PROVENANCE}


def read_run(directory: Path) -> dict[str, Any]:
    """The configuration of a run directory, without what records how it was made."""
    return {key: value for key, value in RunDirectory(directory).config().items() if key not in PROVENANCE}


def interpolate(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with references like ``${seed}`` replaced by what they refer to."""
    try:
        plain = to_plain(tree)
    except TypeError as error:
        raise ConfigError(f"a setting has a value that cannot be used: {error}.") from error
    try:
        return yaml.resolve(plain)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a reference cannot be resolved: {first_line(error)}.") from error


def to_yaml(config: Config) -> str:
    """A configuration as a recipe, which gives the same configuration again."""
    return yaml.dump(config.values)
