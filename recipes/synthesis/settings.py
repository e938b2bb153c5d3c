"""The sizes at which the tables of synthetic sets are made: data, rounds, and each method's network and local work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedloom import methods
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom_apps.synthesis.judge import EvalConfig


@dataclass(frozen=True)
class Setup:
    """One row of a table: a method with its settings, the network that it trains, and a client's work in a round."""

    method: str
    network: str
    local: Local
    settings: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)

    def make_method(self, spc: int, numbers: int) -> Method:
        """The method; FedEvg is told the number of images of a class; the others can draw any number in the end.

        The setting ``D`` is the count of ``numbers`` of an image.
        """
        settings = {name: numbers if value == "D" else value for name, value in self.settings.items()}
        return methods.make(self.method, **({"per_class": spc} if self.method.startswith("fedevg") else {}), **settings)


@dataclass(frozen=True)
class Scale:
    """What ``--scale`` chooses: ``sides`` are those of the images, ``setups`` the methods by name.

    ``skewed`` are setups for an alpha of .1 and less, where they differ. With ``stops`` a method ends when it has sent
    as much as FedEvg in all of its rounds.
    """

    sides: dict[str, int]
    clients: tuple[int, ...]
    rounds: int
    setups: dict[str, Setup]
    judging: EvalConfig
    skewed: dict[str, Setup] = field(default_factory=dict)
    spc: int = 10
    stops: bool = False
    device: str = "cpu"

    def at(self, alpha: float) -> Scale:
        """The scale with the setups for that alpha."""
        return replace(self, setups=self.setups | self.skewed) if alpha <= 0.1 else self


def adam(steps: int, lr: float, batch_size: int = 32, beta1: float = 0.9) -> Local:
    """A client's work: a number of Adam steps, with a fresh optimiser in every round."""
    return Local(steps=steps, batch_size=batch_size, optimiser="adam", lr=lr, beta1=beta1)


def cgan(latent: int, local: Local, **layers: Any) -> Setup:
    """FedCGAN."""
    return Setup("fedcgan", "conditional_gan", local, {"latent": latent}, {"latent": latent, **layers})


def acgan(latent: int, local: Local, **layers: Any) -> Setup:
    """FedCGAN as published: AC-GAN, whose classifier learns random classes for generated images."""
    return Setup("fedcgan", "acgan", local, {"latent": latent, "auxiliary": "random"}, {"latent": latent, **layers})


def cvae(latent: int, local: Local, beta: float | Literal["D"] = 1.0, **layers: Any) -> Setup:
    """FedCVAE; ``beta`` is the weight of the divergence: 1 for the bound of the likelihood, the number D of pixels
    where the reconstruction is a mean over pixels instead of their sum, as in the published baseline."""
    return Setup("fedcvae", "conditional_vae", local, {"latent": latent, "beta": beta}, {"latent": latent, **layers})


FREE: dict[str, Any] = {"schedule": "half", "clip_chain": False, "clip_gradient": None}
AS_CODED: dict[str, Any] = {"schedule": "ddpm", "clip_chain": True, "clip_gradient": 3.0, "labelled": "moved"}
AUTHORS = Local(
    epochs=1, batch_size=64, optimiser="adam", lr=1e-3, beta1=0.5, weight_decay=1e-4, lr_decay=0.9, decay_every=50
)  # of the scripts of FedEvg's author


def evg(local: Local, beta: float = 10.0, network: str = "energy_cnn", **settings: Any) -> Setup:
    """FedEvg, with ``kept`` the one of kept models; ``beta`` is the server's first step, the last is 1/1000 of it.

    The schedule of the server's steps and the clients' free chains are those with which the other settings were chosen.
    """
    name = "fedevg_kept" if settings.pop("kept", False) else "fedevg"
    layers = {"activation": "swish", "spectral": True} if network == "resnet10" else {}
    return Setup(name, network, local, {"beta": beta, "beta_final": beta / 1000, **FREE, **settings}, layers)


APART: dict[str, Any] = {"repulsion": 0.2, "blur": 1.5}
KEPT: dict[str, Any] = {"kept": True, "magnitude": 1.0}
KEPT_RAW: dict[str, Any] = {"kept": True, "magnitude": 0.03, "weights": "raw"}
SCALES = {
    "digits": Scale(
        {"digits": 8},
        (10,),
        rounds=60,
        setups={
            "FedCGAN": cgan(16, adam(60, 3e-3, beta1=0.5), width=8),
            "FedCVAE": cvae(16, adam(60, 2e-3), beta=0.3, width=16),
            "FedEvg": evg(adam(15, 1e-3), weights="raw"),
            "FedEvg, apart": evg(adam(15, 1e-3), repulsion=0.1, blur=0.7),
            "FedEvg, kept": evg(adam(5, 1e-3), beta=2.0, **KEPT),
            "FedCGAN, ACGAN": acgan(16, adam(60, 3e-3, beta1=0.5), width=8),
            "FedCVAE, β = D": cvae(16, adam(60, 2e-3), beta="D", width=16),
            "FedEvg, kept, apart": evg(adam(5, 5e-4), beta=5.0, repulsion=0.2, blur=0.7, **KEPT_RAW),
        },
        judging=EvalConfig(max_steps=1000),
        skewed={
            "FedCGAN": cgan(16, adam(15, 1e-3, beta1=0.5), width=8),
            "FedEvg, apart": evg(adam(15, 1e-3), repulsion=0.2, blur=0.7),
            "FedEvg, kept": evg(adam(5, 5e-4), beta=5.0, **KEPT_RAW),
        },
        stops=True,
    ),
    "reduced": Scale(
        {"mnist": 28},
        (10,),
        rounds=60,
        setups={
            "FedCGAN": cgan(32, adam(15, 1e-3, beta1=0.5), width=16),
            "FedCVAE": cvae(16, adam(15, 5e-3), width=16),
            "FedEvg": evg(adam(15, 3e-3), beta=30.0),
            "FedEvg, apart": evg(adam(15, 3e-3), beta=30.0, **APART),
            "FedEvg, kept": evg(adam(5, 1e-3), beta=15.0, **KEPT),
            "FedCGAN, ACGAN": acgan(32, adam(15, 1e-3, beta1=0.5), width=16),
            "FedCVAE, β = D": cvae(16, adam(15, 5e-3), beta="D", width=16),
            "FedEvg, kept, apart": evg(adam(5, 1e-3), beta=15.0, **APART, **KEPT_RAW),
        },
        judging=EvalConfig(max_steps=1000),
        skewed={
            "FedCVAE": cvae(16, adam(15, 2e-3), width=16),
            "FedEvg, kept": evg(adam(5, 1e-3), beta=15.0, **KEPT_RAW),
        },
    ),
    "full": Scale(
        {"mnist": 32, "cifar10": 32, "dermamnist": 64, "organcmnist": 64},
        (10, 100),
        rounds=500,
        setups={
            "FedCGAN": cgan(100, AUTHORS),
            "FedCVAE": cvae(64, AUTHORS),
            "FedEvg": evg(AUTHORS, network="resnet10", **AS_CODED),
            "FedEvg, apart": evg(adam(15, 3e-3, 50), network="resnet10", **APART),
            "FedEvg, kept": evg(adam(5, 1e-3, 50), 5.0, "resnet10", **KEPT),
            "FedCGAN, ACGAN": acgan(128, AUTHORS, width=64),
            "FedCVAE, β = D": cvae(64, AUTHORS, beta="D"),
            "FedEvg, kept, apart": evg(adam(5, 1e-3, 50), 5.0, "resnet10", **APART, **KEPT_RAW),
        },
        judging=EvalConfig(),
        skewed={"FedEvg, kept": evg(adam(5, 1e-3, 50), 5.0, "resnet10", **KEPT_RAW)},
        device="auto",
    ),
}
METHODS = ("FedCGAN", "FedCVAE", "FedEvg", "FedEvg, apart", "FedEvg, kept")
VARIANTS = ("FedCGAN, ACGAN", "FedCVAE, β = D", "FedEvg, kept, apart")
"""Rows that are run when asked for: the published network of FedCGAN and divergence of FedCVAE, and all three changes
to FedEvg at once (kept models, raw weights, repulsion)."""
