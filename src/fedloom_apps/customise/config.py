"""The configuration of ``fedloom target``: a method with its settings."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.config.overrides import parse
from fedloom.config.schema import Choice, Tree
from fedloom.core.errors import ConfigError
from fedloom_apps.customise.calibration import CCVR
from fedloom_apps.customise.methods import TargetMethod, target_methods

TARGET_METHOD = Choice(target_methods, "target_head")
TARGET_SETTINGS = frozenset(setting for entry in target_methods for setting in entry.parameters)
"""The settings of all methods."""


def build(words: Sequence[str]) -> TargetMethod | CCVR:
    """The method of overrides like ``method=target_fit`` and ``method.steps=100``.

    >>> build(["method=target_fit", "method.steps=100"]).steps, type(build([])).__name__
    (100, 'TargetHead')

    Raises:
        ConfigError: for an unknown method or setting, or a wrong value.
    """
    tree = Tree(name=TARGET_METHOD.start)
    for word in words:
        override = parse(word)
        if override.is_sweep:
            raise ConfigError(f"fedloom target takes one method and one value of each setting, not {word}.")
        if override.key[0] != "method":
            raise ConfigError(f"{word} is no setting of a method for a target; write method=… or method.SETTING=….")
        tree |= TARGET_METHOD.nest("method", override.key[1:], override.values[0])
    return TARGET_METHOD.instantiate(TARGET_METHOD.validate("method", tree))
