"""Words of a command line: a recipe, and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedloom.core.errors import ConfigError


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe, if one of the words is a YAML file, and the overrides.

    >>> split_words(["recipe.yaml", "seed=1"])
    (PosixPath('recipe.yaml'), ['seed=1'])

    Raises:
        ConfigError: for two recipes.
    """
    recipes = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    if len(recipes) > 1:
        raise ConfigError(f"there is room for one recipe, but {' and '.join(map(repr, recipes))} are given.")
    overrides = [word for word in words if word not in recipes]
    return (Path(recipes[0]) if recipes else None), overrides
