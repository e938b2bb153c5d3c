"""The errors that users can cause, each message one sentence that says what to do; and where warnings point."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

GPU_IS_FULL = "OutOfMemoryError"  # by its name, because to import PyTorch takes seconds
CPU_IS_FULL = ("DefaultCPUAllocator", "not enough memory")  # on Linux and macOS, and on Windows


class FedLoomError(Exception):
    """Base class of all errors raised deliberately; the command line prints only the message and exits with 2."""


class ConfigError(FedLoomError, ValueError):
    """An unknown setting, a value of the wrong type, or an impossible combination of settings."""


class DataError(FedLoomError, ValueError):
    """Data or a partition that cannot be used as requested."""


class CheckpointError(FedLoomError, RuntimeError):
    """A run directory or checkpoint that cannot be written, read or resumed."""


class ClientError(FedLoomError, RuntimeError):
    """Local work failed at every client of a round, so that nothing could be aggregated.

    Args:
        sentence: the message.
        trace: the traceback of the first failure, for ``--debug``.
    """

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


class LossError(ClientError):
    """The loss of the received model cannot be computed at some of the clients that were asked for it."""


def first_line(error: BaseException, most: int | None = None) -> str:
    r"""The first line of an exception's message without its full stop, or its type if it has none.

    >>> first_line(ValueError("no such axis.\nSee the manual.")), first_line(AssertionError())
    ('no such axis', 'AssertionError')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:most].rstrip(".")


def with_type(error: BaseException) -> str:
    """An exception's type and message, without its full stop.

    >>> with_type(ValueError("no such axis."))
    'ValueError: no such axis'
    """
    return f"{type(error).__name__}: {error}".rstrip(".")


def in_one_line(error: BaseException, most: int = 200) -> str:
    r"""An exception's message on one line of at most ``most`` characters, without its full stop; or its type.

    >>> in_one_line(ValueError("shapes differ:\n  [2] and [3].")), in_one_line(AssertionError())
    ('shapes differ: [2] and [3]', 'AssertionError')
    """
    return (printable(str(error))[:most] or type(error).__name__).rstrip(".")


def import_extra(extra: str, name: str, what: str) -> Any:
    """Import a module that an extra of this package installs; ``what`` needs it."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another PyTorch
        package = (getattr(error, "name", None) or name).partition(".")[0]  # it may be one that the module imports
        raise ConfigError(
            f"{what} needs the package {package}, which cannot be imported ({first_line(error)}): "
            f"pip install 'fedloom[{extra}]'."
        ) from error


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Turn an exception of a user's code into a ``ConfigError``; ``what`` begins the sentence."""
    try:
        yield
    except FedLoomError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} {type(error).__name__}: {first_line(error)}.") from error


def add_note(error: BaseException, note: str) -> None:
    """Add a line that follows an exception's traceback, which Python prints from 3.11 on."""
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the memory of this machine or of a GPU is full.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if isinstance(error, MemoryError) or type(error).__name__ == GPU_IS_FULL:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_IS_FULL)


def printable(text: str) -> str:
    r"""Untrusted text on one line, without terminal control characters.

    >>> printable("shapes\n\x1b[2J differ")
    'shapes [2J differ'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def in_words(value: object) -> str:
    """A value of the wrong type for a message: text and numbers as they are, anything else by its type and size.

    >>> in_words("adam"), in_words(None), in_words([1, 2]), in_words({}), in_words(OSError())
    ("'adam'", 'None', 'a list of 2', 'a dict', 'an OSError')
    """
    if isinstance(value, str | int | float | None):
        return f"{value!r:.60}"
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"{kind} of shape {list(shape)}"
    return f"{kind} of {len(value)}" if isinstance(value, list | tuple) else kind


ELSEWHERE = {
    ("key", "learning_rate"): "local.lr", ("local", "learning_rate"): "local.lr",
    ("key", "optimizer"): "local.optimiser", ("key", "algorithm"): "method", ("key", "strategy"): "method",
    ("key", "dataset"): "data", ("key", "clients_per_round"): "cohort", ("key", "fraction_fit"): "participation",
    ("key", "C"): "participation", ("key", "local_epochs"): "local.epochs", ("key", "gpu"): "device",
    ("key", "random_state"): "seed", ("key", "loss"): "method.objective",
    ("objective", "mse"): "squared_error",
    ("method", "fedopt"): "fedadam, fedyogi, fedadagrad or fedavgm, FedAvg with that optimiser at the server,",
    ("method", "fedsgd"): "fedavg with local.epochs=1 and local.batch_size=0, one step on all samples,",
    ("method", "qfedavg"): "q_ffl", ("method", "q_fedavg"): "q_ffl", ("method", "median"): "coordinate_median",
    ("method", "fedmedian"): "coordinate_median", ("method", "fedtrimmedavg"): "trimmed_mean",
    ("method", "secagg"): "method.uplink=[secure_sum] with any method",
    ("partition", "lda"): "dirichlet", ("partition", "noniid"): "dirichlet", ("partition", "non_iid"): "dirichlet",
    ("model", "linear"): "logistic", ("model", "lenet"): "two_cnn", ("model", "cnn"): "two_cnn",
    ("engine", "gpu"): "device=cuda", ("engine", "cuda"): "device=cuda", ("compute", "vmap"): "batched",
    ("metric", "acc"): "accuracy",
    ("schedule", "async"): "asynchronous", ("schedule", "fedbuff"): "buffered",
    ("schedule", "fedasync"): "asynchronous",
    ("schedule", "sync"): "rounds", ("schedule", "synchronous"): "rounds",
    ("uplink", "dp"): "clip_noise", ("uplink", "secagg"): "secure_sum",
    ("method", "ccvr"): "fedloom target run=DIR method=ccvr, on a finished run,",
    **{
        ("method", name): f"fedloom target run=DIR data=FILE method={name}, after a run of any method,"
        for name in ("target_fit", "target_head", "target_prior")
    },
}  # fmt: skip
"""What to write instead of words of other libraries and other commands, by the kind of name and the word."""
MANY = 60
"""A longer list of names would hide the closest one."""


def nearest(name: str, valid: Iterable[str], what: str = "") -> str:
    """The hint that ends an "unknown ..." message: the closest valid name, then all, unless too many to be read.

    ``what`` is the kind of name, or the owner of the setting.

    >>> nearest("fedavgg", ["fedavg", "feddyn"])
    "did you mean 'fedavg'? There are: fedavg, feddyn."
    >>> nearest("--fast", ["--json", "--quiet"])  # dashes do not make options alike
    'there are: --json, --quiet.'
    >>> nearest("fedavgg", ["fedavg", *map(str, range(99))])
    "did you mean 'fedavg'?"
    >>> nearest("fedavg", ["scaffold, lr=1", "scaffold, lr=2"])
    'there are: scaffold, lr=1; scaffold, lr=2.'
    >>> nearest("mse", ["cross_entropy", "squared_error"], "objective")
    'take squared_error instead.'
    """
    if instead := ELSEWHERE.get((what, name)):
        return f"take {instead} instead."
    valid = sorted(valid)
    close = closest(name, valid)
    if close and len(valid) > MANY:
        return f"did you mean {close!r}?"
    names = ("; " if any("," in name for name in valid) else ", ").join(valid) or "none"
    return (f"did you mean {close!r}? There are" if close else "there are") + f": {names}."


def closest(name: str, valid: Iterable[str], alike: float = 0.6) -> str | None:
    """The valid name closest to a mistyped one, leading dashes ignored.

    None if none has at least the similarity ``alike``, in [0, 1].
    """
    bare = {option.lstrip("-"): option for option in valid}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=alike)
    return bare[close[0]] if close else None


def is_ours(module: str) -> bool:
    """Whether a module belongs to this distribution, the library or an application of it.

    >>> is_ours("fedloom.core"), is_ours("fedloom_apps.online"), is_ours("fedloom_hello")
    (True, True, False)
    """
    return module.partition(".")[0] in ("fedloom", "fedloom_apps")


def user_stacklevel() -> int:
    """The ``stacklevel`` of the caller's first caller outside this distribution."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and is_ours(str(frame.f_globals.get("__name__"))):
        frame, level = frame.f_back, level + 1
    return level
