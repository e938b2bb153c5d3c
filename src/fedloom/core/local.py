"""Settings of local training, and the batch order and cohorts derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, cos, pi
from numbers import Real
from typing import Annotated, Literal

import numpy as np
from torch import Tensor

from fedloom.base import rng
from fedloom.base.checks import all_hold, one_of
from fedloom.base.errors import ConfigError, in_words
from fedloom.base.ranges import Bound, Count, Decay, Fraction, NonNegative, NonNegativeInt, Positive, Probability, Range
from fedloom.base.settings import check_fields

TO_THE_END = ("cosine", "linear")  # schedules that go on until the last round
SCHEDULES = ("step", "milestones", *TO_THE_END)
STEP_SCHEDULES = ("constant", "linear", "cosine", "warmup")
CHANGEABLE = (  # of ``Local``, in a run that is continued: nothing that was computed so far depends on them
    "epochs", "steps", "batch_size", "last_batch", "micro_batch", "lr", "schedule", "lr_decay", "decay_every",
    "milestones", "horizon", "lr_end", "warmup", "step_schedule", "rates", "momentum", "nesterov", "weight_decay",
    "clip", "optimiser", "beta1", "beta2",
)  # fmt: skip
LENGTHS = ("epochs", "steps", "batch_size", "last_batch")
OWN = (*LENGTHS, "lr", "rates", "momentum", "nesterov", "weight_decay", "clip", "optimiser", "beta1", "beta2")
"""Settings of ``Local`` that a client may have of its own; those of lengths change no step."""
Length = Annotated[int, Range(1, 10_000_000)]  # of a round, whose batches are drawn before it begins


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """min(1, C/(‖g‖ + 10⁻⁶)): times this factor, a gradient of that norm has at most norm C.

    >>> import torch
    >>> clip_factor(torch.tensor([0.5, 4.0]), 2.0).round(decimals=4)
    tensor([1.0000, 0.5000])
    """
    return (clip / (norm + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class Local:
    """Settings of local training: a fresh optimiser for ``epochs`` passes or exactly ``steps`` mini-batches per round.

    A step is, in this order: gradient of the objective plus corrections, clipping to norm ``clip``, weight decay (g +
    wd·θ), momentum or Adam, θ ← θ - η_t·s_k·g, with η_t = lr · ``decay(t)`` in round t = 0, 1, ... and s_k of
    ``step_schedule`` in step k = 0, ..., K - 1.

    Args:
        epochs: E, passes over the client's data, the last of which may be a fraction of a pass (ignored if ``steps``
            is given).
        steps: number of mini-batches; the data are repeated as often as needed.
        batch_size: B; an epoch's last batch is smaller when B does not divide n_i. 0 means full batch.
        last_batch: what an epoch does with its smaller last batch: ``keep`` it, ``drop`` it, or ``merge`` a last batch
            of a single sample, which has no variance for batch normalisation, into the one before. A client with a
            single batch keeps it.
        micro_batch: samples of a forward and backward pass; gradients of larger mini-batches are accumulated over
            several passes, to save memory. None for one pass.
        lr: η, the learning rate in the first round, t = 0.
        schedule: the rate over rounds: ``step`` (times ``lr_decay`` every ``decay_every`` rounds), ``milestones``
            (times ``lr_decay`` at each of these rounds), ``cosine`` or ``linear`` (from η to ``lr_end``·η over
            ``horizon`` rounds), or a function of t that returns a factor on η.
        lr_decay: factor on η every ``decay_every`` rounds or at ``milestones``, in (0, 1].
        decay_every: number of rounds between decays.
        milestones: rounds t at which the rate decays.
        horizon: T, the number of rounds of cosine and linear schedules, after which the last rate stays. None for the
            rounds of the run.
        lr_end: fraction of η at the end of these schedules, in [0, 1].
        warmup: W, the number of first rounds in which the rate is (t + 1)/W of what it would be.
        step_schedule: s_k over the K local steps of a client's round: ``constant`` (1), ``linear`` (1 - k/K),
            ``cosine`` (½(1 + cos(πk/K))), ``warmup`` ((k + 1)/K), or a function of k and K.
        rates: factors on the rate for parameters whose names begin with a key, like ``{"head": 10.0}``; the longest
            matching key counts.
        momentum: heavy-ball coefficient; the buffer starts at zero every round, unless drift ``momentum`` keeps it.
        nesterov: use Nesterov momentum.
        weight_decay: coefficient of θ, added to the gradient after clipping.
        clip: largest Euclidean norm of the gradient over all parameters; None for no clipping.
        optimiser: ``sgd``, ``adam`` (Kingma and Ba 2015; its moments start at zero every round, and ``momentum`` must
            be 0) or ``adamw``, whose weight decay θ ← θ - η·wd·θ is decoupled from the moments (Loshchilov and
            Hutter 2019). The papers use SGD except for generative networks.
        beta1: decay of Adam's first moments.
        beta2: decay of Adam's second moments.
        precision: ``full``, or ``bf16``: while training, convolutions and linear layers round the factors of their
            products to bfloat16. Parameters, losses, updates and everything outside local training keep the run's
            dtype, which must be float32. Faster on processors that multiply in bfloat16, and refused on all others.
        dp_clip: C, a bound on the norm of every sample's gradient, for example-level differential privacy (DP-SGD, see
            docs/trust.md); None trains without it.
        dp_noise: z ≥ 0: a batch's sum of clipped gradients gets noise of standard deviation zC.
        dp_delta: δ of the reported ε.
        stragglers: s in [0, 1], system heterogeneity: in every round each client is, with this probability, a straggler
            that stops after a number of its steps drawn uniformly from 1 to all of them, and sends what it has (Li et
            al., MLSys 2020 (FedProx), §5.2, where whole epochs are drawn).
        poisson: every step takes each sample independently with probability B/n_i, instead of walking through shuffled
            epochs; needs ``steps`` and ``dp_clip``.

    Raises:
        ConfigError: for values outside their range.

    >>> Local(lr=0.1, lr_decay=0.5).rate(2)
    0.025
    """

    epochs: Annotated[int | float, Range(0, 10_000_000, above=True)] = 1
    steps: Length | None = None
    batch_size: NonNegativeInt = 10
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    micro_batch: Count | None = None
    lr: Positive = 0.1
    schedule: Literal["step", "milestones", "cosine", "linear"] | Callable[[int], float] = "step"
    lr_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    decay_every: Count = 1
    milestones: tuple[NonNegativeInt, ...] = ()
    horizon: Count | None = None
    lr_end: Probability = 0.0
    warmup: NonNegativeInt = 0
    step_schedule: Literal["constant", "linear", "cosine", "warmup"] | Callable[[int, int], float] = "constant"
    rates: Mapping[str, Positive] = field(default_factory=dict)
    momentum: Decay = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    clip: Bound | None = None
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    precision: Literal["full", "bf16"] = "full"
    dp_clip: Bound | None = None
    dp_noise: NonNegative = 0.0
    dp_delta: Fraction = 1e-5
    poisson: bool = False
    stragglers: Probability = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "local.")
        for name, names in (("schedule", SCHEDULES), ("step_schedule", STEP_SCHEDULES)):
            if not callable(value := getattr(self, name)):
                one_of(f"unknown local.{name}", value, names)
        conditions = {
            "milestones are used by schedule=milestones": not self.milestones or self.schedule == "milestones",
            "horizon and lr_end are used by schedule=cosine and schedule=linear": self.schedule in TO_THE_END
            or (self.horizon is None and not self.lr_end),
            "nesterov needs momentum above 0": not self.nesterov or self.momentum > 0,
            "momentum belongs to sgd; adam has beta1": self.optimiser == "sgd" or self.momentum == 0,
            "dp_noise is a multiple of dp_clip; set dp_clip too, to a finite number": not self.dp_noise
            or (self.dp_clip or float("inf")) < float("inf"),
            "poisson needs dp_clip, which may be inf": not self.poisson or self.dp_clip is not None,
            "poisson needs steps, since an epoch's number of batches depends on n_i": not self.poisson
            or self.steps is not None,
        }
        all_hold("local.", conditions)

    def until(self, rounds: int) -> Local:
        """These settings in a run of so many rounds, at whose end a cosine or linear schedule without horizon ends.

        >>> Local(schedule="cosine").until(4).horizon, Local(schedule="cosine", horizon=2).until(4).horizon
        (4, 2)
        """
        open_end = self.schedule in TO_THE_END and self.horizon is None
        return replace(self, horizon=max(rounds, 1)) if open_end else self

    @property
    def memory(self) -> int:
        """Number of optimiser state scalars per parameter."""
        return int(self.momentum > 0) if self.optimiser == "sgd" else 2

    @property
    def is_even(self) -> bool:
        """Whether every step of a round is SGD with the rate η_t on all parameters."""
        return self.optimiser == "sgd" and self.step_schedule == "constant" and not self.rates

    def rate(self, round: int) -> float:
        """η_t for round t."""
        return self.lr * self.decay(round)

    def decay(self, round: int) -> float:
        """η_t / η for round t.

        >>> [round(Local(schedule="cosine", horizon=4).decay(t), 3) for t in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.146]
        >>> [Local(schedule="milestones", milestones=(1, 3), lr_decay=0.5, warmup=2).decay(t) for t in range(4)]
        [0.5, 0.5, 0.5, 0.25]
        >>> [Local(schedule=lambda t: 1.0, warmup=2).decay(t) for t in range(3)]
        [0.5, 1.0, 1.0]

        Raises:
            ConfigError: if a user's function returns anything but a finite number greater than 0.
        """
        start = min((round + 1) / self.warmup, 1.0) if self.warmup else 1.0
        if callable(self.schedule):
            return _factor(self.schedule(round), f"schedule returned {{}} for round {round}") * start
        if self.schedule == "step":
            return self.lr_decay ** (round // self.decay_every) * start
        if self.schedule == "milestones":
            return self.lr_decay ** sum(round >= at for at in self.milestones) * start
        horizon = self.horizon or 1
        way = min(round, horizon - 1) / horizon
        left = 1 - way if self.schedule == "linear" else (1 + cos(pi * way)) / 2
        return (self.lr_end + (1 - self.lr_end) * left) * start

    def speeds(self, steps: int) -> list[float] | None:
        """s_k for each of K local steps; None if all are 1.

        >>> Local(step_schedule="linear").speeds(4)
        [1.0, 0.75, 0.5, 0.25]
        >>> [round(s, 3) for s in Local(step_schedule="cosine").speeds(4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        if callable(self.step_schedule):
            schedule = self.step_schedule
            return [
                _factor(schedule(k, steps), f"step_schedule returned {{}} for step {k} of {steps}")
                for k in range(steps)
            ]
        if self.step_schedule == "constant":
            return None
        way = [k / steps for k in range(steps)]
        if self.step_schedule == "warmup":
            return [at + 1 / steps for at in way]
        return [1 - at if self.step_schedule == "linear" else (1 + cos(pi * at)) / 2 for at in way]

    def effective_steps(self, steps: int, speeds: Sequence[float] | None = None) -> float:
        """‖a‖₁: k SGD steps along a constant gradient g move the model by -η_t·‖a‖₁·g.

        Without momentum ‖a‖₁ = k; with heavy-ball momentum β it is [k - β(1 - β^k)/(1 - β)]/(1 - β), and with Nesterov
        momentum k plus β times the latter. Wang et al., NeurIPS 2020 (FedNova), §4.2. With s_k it is Σ_k s_k times what
        step k moves, (1 - β^(k+1))/(1 - β) with heavy-ball momentum.

        >>> Local(momentum=0.5).effective_steps(2), Local().effective_steps(2)
        (2.5, 2.0)
        >>> Local(momentum=0.5, step_schedule="linear").effective_steps(2)
        1.75
        """
        beta = self.momentum
        speeds = self.speeds(steps) if speeds is None else speeds
        if speeds is not None:
            moves = [(1 - beta ** (k + 1)) / (1 - beta) for k in range(steps)]
            return sum(s * (1 + beta * move if self.nesterov else move) for s, move in zip(speeds, moves, strict=True))
        heavy = (steps - beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)
        return steps + beta * heavy if self.nesterov else heavy

    def steps_for(self, samples: int) -> int:
        """Number of local steps of a client with n_i samples that is not a straggler."""
        if not samples:
            return 0
        if self.steps:
            return self.steps
        return max(ceil(self.epochs * self.batches_per_epoch(samples) - 1e-9), 1)

    def batches_per_epoch(self, samples: int) -> int:
        """Number of mini-batches in a pass over n_i samples."""
        full, over = divmod(samples, self.batch_size or samples)
        is_separate = self.last_batch == "keep" or (self.last_batch == "merge" and over > 1) or not full
        return full + (over > 0 and is_separate)

    def _ends(self, samples: int) -> list[int]:
        """Where the mini-batches of an epoch of n samples begin, and where the last one ends.

        >>> [Local(batch_size=2, last_batch=how)._ends(5) for how in ("keep", "drop", "merge")]
        [[0, 2, 4, 5], [0, 2, 4], [0, 2, 5]]
        """
        size = self.batch_size or samples
        stop = self.batches_per_epoch(samples) * size
        return [*range(0, stop, size), min(stop, samples) if self.last_batch == "drop" else samples]

    def steps_of(self, samples: int, seed: int, round: int, client: int) -> int:
        """Number of local steps of a client in a round: a function of (seed, round, client) and its number of samples.

        >>> [Local(steps=10, stragglers=0.5).steps_of(8, 0, 0, client) for client in range(8)]
        [8, 10, 5, 8, 10, 10, 10, 5]
        """
        steps = self.steps_for(samples)
        if not self.stragglers:
            return steps
        draw = rng.stream(seed, "stragglers", round, client)
        return int(draw.integers(min(steps, 1), steps, endpoint=True)) if draw.random() < self.stragglers else steps

    def expected_batch(self, samples: int) -> int:
        """Expected size of a Poisson-sampled mini-batch of a client with n_i samples."""
        return min(self.batch_size or samples, samples)

    def batches(
        self, rows: np.ndarray, seed: int, round: int, client: int, purpose: str = "batches"
    ) -> list[np.ndarray]:
        """The rows of each mini-batch, in order: a function of (seed, purpose, round, client) alone.

        >>> [b.tolist() for b in Local(batch_size=2).batches(np.array([7, 8, 9]), seed=0, round=0, client=0)]
        [[9, 8], [7]]
        """
        draw = rng.stream(seed, purpose, round, client)
        batches: list[np.ndarray] = []
        total = self.steps_for(len(rows))
        if self.poisson:
            return [rows[draw.random(len(rows)) * len(rows) < self.expected_batch(len(rows))] for _ in range(total)]
        ends = self._ends(len(rows))
        while len(batches) < total:
            order = draw.permutation(rows)
            batches += [order[start:end] for start, end in pairwise(ends)]
        return batches[:total]


def _factor(value: float, what: str) -> float:
    """The factor that a user's function returned, checked; ``what`` is the message, with {} for it."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ConfigError(f"local.{what.format(in_words(value))}, but it must be a finite number greater than 0.")
    return float(value)


def cohort_size(clients: int, participation: float, cohort: int | None = None) -> int:
    """The cohort size |S_t|: ``cohort`` if given, else max(⌊C·K⌋, 1) with participation C.

    >>> cohort_size(1_000_000, 1e-5), cohort_size(20, 0.01)
    (10, 1)

    Raises:
        ConfigError: if C is outside (0, 1], or ``cohort`` outside 1 ... K.
    """
    if cohort is not None:
        if not 1 <= cohort <= clients:
            raise ConfigError(f"cohort is {cohort}, but it must lie between 1 and the number of clients, {clients}.")
        return cohort
    if not 0 < participation <= 1:
        raise ConfigError(f"participation is {participation:g}, but it must lie in (0, 1].")
    return max(int(participation * clients + 1e-9), 1)


def check_one_size(clients: int | None, participation: float, cohort: int | None, remedy: str = "") -> None:
    """Raise a ``ConfigError`` if a participation and a cohort that were both given differ in the cohort's size.

    >>> check_one_size(6, 0.5, 3)
    >>> check_one_size(20, 0.5, 3)
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: participation=0.5 and cohort=3 both set the size of cohorts; leave one out.
    """
    if cohort is not None and (clients is None or cohort_size(clients, participation) != cohort):
        raise ConfigError(
            f"participation={participation:g} and cohort={cohort} both set the size of cohorts; leave one out{remedy}."
        )


def draw_cohort(clients: int, size: int, seed: int, round: int, *, probability: float | None = None) -> np.ndarray:
    """The cohort S_t, sorted, int64: ``size`` clients without replacement, or every client with ``probability``.

    With ``probability``, an empty cohort is redrawn. The stream depends on (seed, round) alone, so every method sees
    the same cohorts.
    """
    draw = rng.stream(seed, "cohort", round)
    if probability is None:
        return np.arange(clients) if size == clients else np.sort(draw.choice(clients, size, replace=False))
    while True:
        count = draw.binomial(clients, probability)  # the law of K coin tosses, without tossing K coins
        if count:
            return np.sort(draw.choice(clients, count, replace=False))
