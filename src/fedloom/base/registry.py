"""Registries of everything chosen by name: methods, parts, data sources, partitions, models, engines.

A registry maps a name to a factory (a function or a frozen dataclass). The factory's signature *is* its configuration
schema and its docstring *is* its description; the command line, ``fedloom list`` and the README's table read both from
here. Names are known without the factories: a package says in which of its modules each factory is defined
(``register_lazily``), and the module is imported when the name is first used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from fedloom.base.documentation import documentation
from fedloom.base.errors import ConfigError, nearest
from fedloom.base.ranges import elements, out_of_range, range_error, range_of
from fedloom.base.settings import convert_argument, signature

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


_titles: dict[Callable[..., Any] | str, str] = {}  # by factory, or by its place before it is loaded


def title_of(factory: Callable[..., Any]) -> str:
    """The kind and name under which a class or function was first registered, for messages; else its own name.

    >>> from fedloom.parts.drift import FedDynDrift
    >>> title_of(FedDynDrift), title_of(dict)
    ("drift 'dynamic'", 'dict')
    """
    return _titles.get(factory) or _titles.get(place_of(factory)) or factory.__name__


class Ranged:
    """Base class of dataclasses of settings, which refuses values outside the ranges of their annotations.

    See ``fedloom.base.ranges``. A subclass with a ``__post_init__`` of its own calls this one.
    """

    def __post_init__(self) -> None:
        if wrong := out_of_range(self):
            raise ConfigError(f"{title_of(type(self))}: {wrong}.")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered factory, with its signature and docstring; ``load`` imports or makes it, on first use."""

    kind: str
    name: str
    load: Callable[[], Callable[..., T]]
    place: str = ""  # module and name of its definition

    @cached_property
    def factory(self) -> Callable[..., T]:
        """The function or class that is registered."""
        return self.load()

    @classmethod
    def of(cls, kind: str, name: str, factory: Callable[..., T], place: str) -> Entry[T]:
        """The entry of a factory that is loaded already."""
        return cls(kind, name, lambda: factory, place)

    def __reduce__(self) -> tuple[Any, ...]:
        return Entry.of, (self.kind, self.name, self.factory, self.place)

    @property
    def summary(self) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.factory) or "").strip().partition("\n")[0]

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that can be set, by name, with annotations resolved to types."""
        return signature(self.factory)

    def make(self, **settings: Any) -> T:
        """Call the factory."""
        parameters = self.parameters
        for name in settings:
            if name not in parameters:
                what = f"{self.kind} {self.name!r}"
                raise ConfigError(f"{what} has no setting {name!r}; {nearest(name, parameters, what)}")
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in settings]
        if missing:
            raise ConfigError(f"{self.kind} {self.name!r} needs a value for {', '.join(map(repr, missing))}.")
        what = f"{self.kind} {self.name!r}: "
        arguments = {n: convert_argument(what + n, value, parameters[n].annotation) for n, value in settings.items()}
        for name, value in arguments.items():
            allowed = range_of(parameters[name].annotation)
            if wrong := next(
                (w for element in elements(value) if allowed and (w := range_error(allowed, element))), None
            ):
                raise ConfigError(f"{what}{name} {wrong}.")
        return self.factory(**arguments)


class Registry(Generic[T]):
    """A named collection of factories of one kind.

    Args:
        kind: the noun in error sentences.
        shared: descriptions of parameters that many factories of this kind have; ``register`` adds them to the
            docstrings of those that do not describe the parameter themselves.

    >>> shapes = Registry[str]("shape")
    >>> @shapes.register
    ... def square(side: int = 1) -> str:
    ...     "Four equal sides."
    ...     return "#" * side
    >>> shapes.make("square", side=3), shapes["square"].summary
    ('###', 'Four equal sides.')
    >>> shapes.make("sqare")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: unknown shape 'sqare'; did you mean 'square'? There are: square. ...
    """

    def __init__(self, kind: str, shared: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._shared = shared or {}
        self._entries: dict[str, Entry[T]] = {}
        self._names: dict[Callable[..., T] | str, str] = {}  # by factory, or by its place before it is loaded

    @overload
    def register(self, factory: F) -> F: ...
    @overload
    def register(self, *, name: str) -> Callable[[F], F]: ...
    def register(self, factory: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
        """Decorator: register a factory under ``name``, by default its own name in lower case."""

        def add(factory: F) -> F:
            key = name or factory.__name__.lower()
            parameters = inspect.signature(factory).parameters
            if "name" in parameters:  # would clash with the key ``name``
                raise ConfigError(
                    f"{self.kind} {key!r} has a setting called 'name', which is reserved for its own name; rename that."
                )
            self._add([Entry.of(self.kind, key, factory, place_of(factory))])
            self._names.setdefault(factory, key)
            _titles.setdefault(factory, f"{self.kind} {key!r}")
            shared = self._shared.keys() & parameters
            if shared and (missing := shared - documentation(factory)[1].keys()):
                lines = "".join([f"    {name}: {text}\n" for name, text in self._shared.items() if name in missing])
                before, _, after = inspect.cleandoc(factory.__doc__ or "").partition("\n\nArgs:\n")
                factory.__doc__ = f"{before}\n\nArgs:\n{lines}{after}"
            return factory

        return add if factory is None else add(factory)

    def register_loader(self, name: str, load: Callable[[], Callable[..., T]], place: str) -> None:
        """Register a factory that ``load`` imports or makes when it is first used; ``place`` says where it is defined.

        Raises:
            ConfigError: if a factory defined elsewhere has the name. A factory defined in the same place is replaced,
                as when a cell of a notebook is run again.
        """
        self._add([Entry(self.kind, name, load, place)])

    def _add(self, entries: list[Entry[T]]) -> None:
        for entry in entries:
            if entry.name in self._entries and self._entries[entry.name].place != entry.place:
                raise ConfigError(f"there are two {self.kind}s named {entry.name!r}.")
            self._entries[entry.name] = entry
            self._names[entry.place] = entry.name
            _titles.setdefault(entry.place, f"{entry.kind} {entry.name!r}")

    def register_lazily(self, package: str, places: Sequence[str], *exports: str) -> Callable[[str], Any]:
        """Register factories of a package's modules by name; returns the ``__getattr__`` of the package.

        Args:
            package: the package's ``__name__``.
            places: the module and attribute of each factory, after its name and an equals sign unless the name is the
                attribute in lower case, like ``["scaffold.Scaffold", "dynamic=feddyn.FedDynDrift"]``.
            exports: modules and attributes that the package exports without registering them, likewise.
        """
        names = {at.rpartition("=")[2]: at.partition("=")[0].rpartition(".")[2].lower() for at in places}
        self._add([Entry(self.kind, n, partial(_at, package, at), f"{package}.{at}") for at, n in names.items()])
        return lazy_attributes(package, *names, *exports)

    def name_of(self, factory: Callable[..., Any]) -> str | None:
        """The name under which a factory is registered."""
        return self._names.get(factory) or self._names.get(place_of(factory))

    def __getitem__(self, name: str) -> Entry[T]:
        if not isinstance(name, str) or (registered := self.canonical(name)) not in self._entries:
            hint = nearest(str(name).lower().replace("-", "_"), self._entries, self.kind)
            raise ConfigError(
                f"unknown {self.kind} {name!r}; {hint} A name of your own needs its module: --import MODULE, "
                "or in Python import MODULE first."
            )
        return self._entries[registered]

    def canonical(self, name: str) -> str:
        """The registered name that equals ``name`` up to case and hyphens; ``name`` itself if there is none.

        >>> methods = Registry[int]("method")
        >>> @methods.register
        ... def q_ffl() -> int: return 1
        >>> methods.canonical("Q-FFL"), methods.canonical("fedavg")
        ('q_ffl', 'fedavg')
        """
        plain = name.lower().replace("-", "_")
        return name if name in self._entries or plain not in self._entries else plain

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All names, in order of registration."""
        return list(self._entries)

    def describe(self, record: Any) -> dict[str, Any]:
        """Registered name and settings of a frozen dataclass, as plain data."""
        return {"name": self.name_of(type(record)) or type(record).__name__} | {
            f.name: getattr(record, f.name) for f in fields(record)
        }

    def make(self, name: str, /, **settings: Any) -> T:
        """Call the factory registered under ``name`` with ``settings``; ``name:value`` gives its required setting."""
        name, more = self.shorthand(name)
        return self[name].make(**more, **settings)

    def of(self, choice: str | Mapping[str, Any], /, **context: Any) -> T:
        """Call the factory that a name, or a mapping of a name and settings, chooses.

        Of ``context``, further arguments, a factory gets those that it takes and that ``choice`` does not set.

        >>> texts = Registry[str]("text")
        >>> @texts.register
        ... def dots(count: int = 1) -> str:
        ...     "Some dots."
        ...     return "." * count
        >>> texts.of("dots"), texts.of({"name": "dots", "count": 3})
        ('.', '...')
        """
        settings = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{self.kind} {choice!r} is neither a name nor a mapping with a name and settings.")
        parameters = self[self.shorthand(name)[0]].parameters
        return self.make(name, **({key: value for key, value in context.items() if key in parameters} | settings))

    def shorthand(self, name: str) -> tuple[str, dict[str, Any]]:
        """Split ``name:value`` into the name and the factory's first setting, if that one is required.

        >>> files = Registry[str]("file")
        >>> @files.register
        ... def text(path: str, lines: int = 0) -> str:
        ...     "A text file."
        ...     return path
        >>> files.shorthand("text:notes/a.txt"), files.shorthand("text")
        (('text', {'path': 'notes/a.txt'}), ('text', {}))
        """
        if not isinstance(name, str):
            return name, {}
        name = self.canonical(name)
        kind, colon, value = name.partition(":")
        kind = self.canonical(kind)
        if colon and kind in self:
            first = next(iter(self[kind].parameters.items()), None)
            if first is not None and first[1].default is inspect.Parameter.empty:
                return kind, {first[0]: value}
        return name, {}


def place_of(factory: Callable[..., Any]) -> str:
    """The module and name of a definition."""
    return f"{factory.__module__}.{factory.__qualname__}"


def lazy_attributes(package: str, *places: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, which imports each ``module.attribute`` when it is first used.

    An attribute must not have the name of a module of the package, which would take its place.
    """
    homes = {place.rpartition(".")[2]: place for place in places}

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = _at(package, homes[name])
        setattr(sys.modules[package], name, value)
        return value

    return attribute


def _at(package: str, place: str) -> Any:
    """The attribute of one of a package's modules."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"{package}.{module}"), name)
