"""Parameters that are never communicated: all of them, the head, or the body."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.core.parts import Personal
from fedloom.core.slots import personals


@personals.register(name="local_only")
@dataclass(frozen=True)
class LocalOnly(Personal):
    """All parameters are private: every client trains alone and nothing is sent."""

    def private(self, name: str) -> bool:
        return True


@personals.register(name="reinitialised")
@dataclass(frozen=True)
class Reinitialised(Personal):
    """All parameters are private and discarded after the round; each round starts from a new random initialisation.

    For methods that communicate something other than models, such as FedEvg's synthetic samples.
    """

    @property
    def kept(self) -> bool:
        return False

    def private(self, name: str) -> bool:
        return True


@personals.register(name="private_head")
@dataclass(frozen=True)
class PrivateHead(Personal):
    """The body is shared, the head private; both are trained together. Arivazhagan et al. 2019 (FedPer)."""

    citation = """@article{arivazhagan2019fedper, title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}}"""

    def private(self, name: str) -> bool:
        """Whether the parameter belongs to the model's ``head``."""
        return name.startswith("head.")


@personals.register(name="private_body")
@dataclass(frozen=True)
class PrivateBody(Personal):
    """The head is shared, the body private. Liang et al. 2020 (LG-FedAvg)."""

    citation = """@article{liang2020lgfedavg,
  title={Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author={Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
  Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe}, journal={arXiv:2001.01523}, year={2020}}"""

    def private(self, name: str) -> bool:
        """Whether the parameter belongs to the body."""
        return not name.startswith("head.")
