"""Names that have changed since version 0.1; using an old one is an error that states the new one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fedloom.core.errors import nearest

RENAMED: dict[str, tuple[str, ...]] = {
    # keys
    "states": ("client_state",), "track": ("trackers",), "tested": ("test_samples",), "warm": ("warmup_epochs",),
    "teaching": ("teacher_training",), "teaching_epochs": ("teacher_epochs",), "optimizer": ("optimiser",),
    "on": ("what",), "enough": ("loss_tol",),
    # parts
    "everything": ("local_only",), "renewed": ("reinitialised",), "head": ("private_head",), "body": ("private_body",),
    "head_first": ("alternating",), "apart": ("decoupled",), "depth": ("early_exit",), "width": ("width_slice",),
    "moreau": ("pfedme",),
    # settings
    "pull_in": ("lam",), "tilt": ("lam",), "rate": ("personal_lr", "guide_lr"), "start": ("start_round",),
    "share": ("head_fraction",), "simple": ("simple_fraction",), "side": ("side_weight",), "shares": ("widths",),
    "by_size": ("size_weighted",), "everyone": ("average_over_all",), "epochs": ("steps",), "baseline": ("M",),
    "low": ("c1",), "high": ("c2",), "last": ("beta_final",), "least": ("lam_min",), "most": ("max_steps", "lam_max"),
    "period": ("lam_period",), "top": ("top_k",),
}  # fmt: skip
"""New names by old name; the one that applies is the one that is valid where the old name was used."""

_AFTER = "fedloom target run=DIR data=FILE method={}, after a run of any method,"
INSTEAD = {
    ("method 'fedevg'", "kept"): "method=fedevg_kept",
    ("mixing", "target_fit"): _AFTER.format("target_fit"), ("server", "target_head"): _AFTER.format("target_head"),
    **{("method", name): _AFTER.format(name) for name in ("target_head", "target_fit", "target_prior")},
    ("method", "ccvr"): "fedloom target run=DIR method=ccvr, on a finished run,",
    ("key", "learning_rate"): "local.lr", ("local", "learning_rate"): "local.lr",
    ("key", "optimizer"): "local.optimiser", ("key", "algorithm"): "method", ("key", "strategy"): "method",
    ("objective", "mse"): "squared_error",
    ("method", "fedala"): "apfl with method.learn=true (docs/personal.md says why FedALA is not here)",
}  # fmt: skip
"""What to write instead of settings and parts that no longer exist, and of words that are usual in other libraries."""


def renamed(name: str, valid: Collection[str]) -> str | None:
    """The new name of ``name`` if it is among the valid ones; None if there is none."""
    return next((new for new in RENAMED.get(name, ()) if new in valid), None)


def hint(what: str, name: str, valid: Iterable[str]) -> str:
    """The end of an error message about ``name``: its new name, its replacement, or the closest valid name.

    >>> hint("personal 'ditto'", "pull_in", ["lam"])
    "it is called 'lam' now."
    >>> hint("personal 'ditto'", "lamb", ["lam"])
    "did you mean 'lam'? There are: lam."
    >>> hint("method 'fedevg'", "kept", ["beta"])
    'take method=fedevg_kept instead.'
    """
    valid = sorted(valid)
    if instead := INSTEAD.get((what, name)):
        return f"take {instead} instead."
    new = renamed(name, valid)
    return nearest(name, valid) if new is None else f"it is called {new!r} now."
