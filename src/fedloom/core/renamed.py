"""Names that have changed since version 0.1; using an old one is an error that states the new one."""

from __future__ import annotations

from collections.abc import Iterable

from fedloom.core.errors import nearest

_BUDGET = {"least": "lam_min", "most": "lam_max", "period": "lam_period", "top": "top_k"}
_CUTS = {"low": "c1", "high": "c2"}
_SIMPLE = {"simple": "simple_fraction"}
_BOTH = {**_SIMPLE, "side": "side_weight"}

RENAMED: dict[str, dict[str, str]] = {
    "key": {
        "states": "client_state",
        "track": "trackers",
        "tested": "test_samples",
        "warm": "warmup_epochs",
        "teaching": "teacher_training",
        "teaching_epochs": "teacher_epochs",
    },
    "local": {"optimizer": "optimiser"},
    "method": {
        "ccvr": "fedloom target run=DIR method=ccvr, on a finished run,",
        "fedala": "apfl with method.learn=true (docs/personal.md says why FedALA is not here)",
    },
    "evaluation": {"on": "what"},
    "judge": {"most": "max_steps", "enough": "loss_tol"},
    "personal": {
        "everything": "local_only",
        "renewed": "reinitialised",
        "head": "private_head",
        "body": "private_body",
        "head_first": "alternating",
        "apart": "decoupled",
        "depth": "early_exit",
        "width": "width_slice",
        "moreau": "pfedme",
    },
    "personal 'ditto'": {"pull_in": "lam"},
    "personal 'pfedme'": {"pull_in": "lam", "rate": "personal_lr"},
    "personal 'subspace'": {"start": "start_round"},
    "personal 'alternating'": {"share": "head_fraction"},
    "personal 'early_exit'": _BOTH,
    "personal 'decoupled'": _SIMPLE,
    "personal 'width_slice'": {"shares": "widths"},
    "drift 'dynamic'": {"by_size": "size_weighted"},
    "drift 'dc'": {"everyone": "average_over_all"},
    "mixing 'ssa'": {"epochs": "steps"},
    "mixing 'term'": {"tilt": "lam"},
    "mixing 'propfair'": {"baseline": "M"},
    "mixing 'aaggff_s'": _CUTS,
    "mixing 'aaggff_d'": _CUTS,
    "objective 'propfair'": {"baseline": "M"},
    "objective 'energy'": {"last": "beta_final"},
    "objective 'selective'": {**_BUDGET, "rate": "guide_lr"},
    "method 'ditto'": {"pull_in": "lam"},
    "method 'pfedme'": {"pull_in": "lam", "rate": "personal_lr"},
    "method 'superfed_mm'": {"start": "start_round"},
    "method 'superfed_lm'": {"start": "start_round"},
    "method 'fedrep'": {"share": "head_fraction"},
    "method 'fedhen'": _BOTH,
    "method 'noside'": _SIMPLE,
    "method 'decouple'": _SIMPLE,
    "method 'heterofl'": {"shares": "widths"},
    "method 'feddyn'": {"by_size": "size_weighted"},
    "method 'feddc'": {"everyone": "average_over_all"},
    "method 'fedssa'": {"epochs": "steps"},
    "method 'term'": {"tilt": "lam"},
    "method 'propfair'": {"baseline": "M"},
    "method 'fedevg'": {"last": "beta_final", "kept": "method=fedevg_kept"},
    "method 'disk'": {**_BUDGET, "rate": "guide_lr"},
    "method of distillation 'disk'": _BUDGET,
    "method of distillation 'simkd_disk'": {k: v for k, v in _BUDGET.items() if k != "top"},
}
"""New names by kind (or by the thing that has the setting) and old name.

An entry that is not a valid name there says what to write instead.
"""


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
    new = RENAMED.get(what, {}).get(name)
    if new is None or new in valid:
        return f"it is called {new!r} now." if new else nearest(name, valid)
    return f"take {new} instead."
