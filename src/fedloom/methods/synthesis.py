"""Methods that make labelled synthetic data out of a federation."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.objectives import Adversarial, CrossEntropy, Energy, Variational
from fedloom.parts.personal import LocalOnly, Reinitialised


@methods.register
def fedevg(
    per_class: int = 10,
    lam: float = 0.1,
    gamma: float = 1.0,
    sigma: float = 0.01,
    steps: int = 1,
    beta: float = 10.0,
    beta_final: float = 0.01,
    delta: float = 0.01,
    weights: str = "signed",
    repulsion: float = 0.0,
    blur: float = 1.0,
    magnitude: float | None = None,
    clip: bool = True,
    kept: bool = False,
) -> Method:
    """Server's samples x ← x - β_t Σ p_i e_i ∇E_i(x) / Σ p_i e_i + δε, E_i = -f_i(x)[y] learnt by clients. FedEvg.

    Hahn 2024, chapter IV. Clients train f_i on cross entropy + E(x, y) - E(x̆, y̆) + λ CE(f(x̃), y̆); x̆ are the samples
    after Langevin steps. No model parameter crosses the network. See ``Energy``.

    Args:
        per_class: synthetic samples of each class.
        lam: λ, the weight of the samples' cross entropy.
        gamma: γ, Langevin step size at clients.
        sigma: σ, noise at clients.
        steps: R, Langevin steps at clients before each local step.
        beta: β, the server's first step size.
        beta_final: the server's last step size, reached along a cosine.
        delta: δ, noise at the server.
        weights: ``signed``, e_i = exp(sign(-E_i)), or ``raw``, e_i = exp(-E_i).
        repulsion: ρ, how strongly samples of a class push each other apart; 0 in the thesis.
        blur: how far images are blurred, in pixels, before they are told apart.
        magnitude: weight of squared energies in the clients' loss; None is 0 as in the thesis, or 0.1 for kept models.
        clip: whether samples are kept in the range of images, 0 to 1 or what became of it when they were normalised.
        kept: whether clients keep their models instead of starting anew in each round. Kept ones want short, gentle
            local work (5 steps of Adam at 5e-4 where new ones take 15 at 1e-3) and a β a few times smaller; with a
            class or two a client also raw weights and a magnitude of a few hundredths.
    """
    magnitude = (0.1 if kept else 0.0) if magnitude is None else magnitude
    term = Energy(
        per_class, lam, gamma, sigma, steps, beta, beta_final, delta, weights, repulsion, blur, magnitude, clip
    )
    return Method("fedevg", (CrossEntropy(), term), personal=LocalOnly() if kept else Reinitialised())


@methods.register
def fedcgan(latent: int = 100, labels: str = "own", speed: float = 1.0) -> Method:
    """FedAvg on both networks of a conditional GAN: ς(-D(x, y)) + ς(D(G(z, y), y)) for D, ς(-D(G(z, y), y)) for G.

    Rasouli, Sun & Rajagopal, 2020, with labels; ς(a) = log(1 + e^a). Clients train both at once. See ``Adversarial``.

    Args:
        latent: length of z; the model's has the same.
        labels: of made samples: ``own``, those of the mini-batch, or ``uniform``.
        speed: κ, the generator's step relative to the discriminator's, where local steps are SGD.
    """
    return Method("fedcgan", (Adversarial(latent, labels, speed),))


@methods.register
def fedcvae(latent: int = 64, beta: float = 1.0, likelihood: str = "bernoulli", variance: float = 0.1) -> Method:
    """FedAvg on a conditional variational autoencoder: -log p(x | z, y) + β KL(q(z | x, y)‖N(0, I)).

    Sohn, Lee & Yan, 2015, in a federation as in Hahn, 2024, IV.4. All parameters are averaged. See ``Variational``.

    Args:
        latent: length of z; the model's has the same.
        beta: β, the weight of the divergence.
        likelihood: ``bernoulli`` or ``gaussian``, of pixels in units of the data's range.
        variance: s² of the Gaussian.
    """
    return Method("fedcvae", (Variational(latent, beta, likelihood, variance),))
