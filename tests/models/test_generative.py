"""Energy networks and generators: bounded heads, shapes, ranges, one vector of parameters, torch.func."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import make
from helpers.samples import digits
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.base.errors import ConfigError
from fedloom.core.layout import Layout
from fedloom.models import ACGAN, ConditionalGAN, ConditionalVAE, SpectralLinear, macs, models
from fedloom.models.generative import Stage, halvings

IMAGES = [(1, 28, 28), (3, 28, 28), (1, 32, 32), (3, 32, 32), (1, 64, 64), (3, 64, 64)]
ENERGY = ("resnet10", "energy_resnet", "energy_cnn")
SWITCHES = {"activation": "swish", "spectral": True}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("rows", "columns"), [(2, 7), (10, 4), (1, 5), (3, 3)])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_weight_is_divided_by_its_largest_singular_value(rows: int, columns: int, scale: float) -> None:
    torch.manual_seed(rows)
    layer = SpectralLinear(columns, rows).double()
    with torch.no_grad():
        layer.weight.mul_(scale)
    x = torch.randn(4, columns, dtype=torch.float64)
    w = layer.weight.detach().numpy()
    expected = x.numpy() @ (w / np.linalg.svd(w, compute_uv=False)[0]).T + layer.bias.detach().numpy()
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-12)
    assert not layer.state_dict().keys() - {"weight", "bias"}


def test_the_gradient_goes_through_the_singular_value() -> None:
    torch.manual_seed(0)
    layer = SpectralLinear(5, 3).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda w: functional_call(layer, {"weight": w}, (x,)), layer.weight)
    # the layer does not see the scale of its weight, so the gradient is orthogonal to it
    (g,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    assert float((g * layer.weight.detach()).sum()) == pytest.approx(0, abs=1e-10)
    assert g.abs().max() > 1e-3


def test_a_weight_of_zero_stays_zero() -> None:
    layer = SpectralLinear(3, 2)
    nn.init.zeros_(layer.weight)
    assert torch.equal(layer(torch.ones(1, 3))[0], layer.bias)


@pytest.mark.parametrize("name", ENERGY)
@pytest.mark.parametrize("inputs", IMAGES)
def test_energies_of_images_of_every_size(name: str, inputs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net: Any = models.make(name, classes=7, inputs=inputs, **SWITCHES)
    x = torch.randn(2, *inputs, requires_grad=True)
    out = net(x)
    assert out.shape == (2, 7)
    assert torch.equal(out, net.head(net.features(x)))
    (g,) = torch.autograd.grad(-out[:, 0].sum(), x)
    assert g.shape == x.shape
    assert bool((g.flatten(1).norm(dim=1) > 0).all())
    assert not list(net.buffers())
    assert Layout.of(net).size == size(net)


@pytest.mark.parametrize("name", ["resnet10_s", "energy_resnet", "energy_cnn"])
def test_switches_change_functions_and_not_parameters(name: str) -> None:
    plain: Any = make(name, activation="relu", spectral=False)
    energy = make(name, **SWITCHES)
    assert {n: p.shape for n, p in plain.named_parameters()} == {n: p.shape for n, p in energy.named_parameters()}
    assert {type(m) for m in plain.modules()} & {nn.SiLU, SpectralLinear} == set()
    assert nn.ReLU not in {type(m) for m in energy.modules()}
    assert macs(plain, (1, 8, 8)) == macs(energy, (1, 8, 8))
    energy.load_state_dict(plain.state_dict())
    x = torch.randn(3, 1, 8, 8)
    assert not torch.allclose(plain(x), energy(x), atol=1e-2)
    only: Any = make(name, activation="relu", spectral=True)
    only.load_state_dict(plain.state_dict())
    torch.testing.assert_close(only.features(x), plain.features(x))
    sigma = torch.linalg.matrix_norm(plain.head.weight, 2)
    torch.testing.assert_close((only(x) - plain.head.bias) * sigma, plain(x) - plain.head.bias)


def test_energies_do_not_grow_with_the_head() -> None:
    """|E(x, y) - b_y| ≤ ‖features‖, however large the head's weight becomes."""
    net: Any = make("energy_cnn")
    with torch.no_grad():
        net.head.weight.mul_(1e4)
    x = torch.randn(5, 1, 8, 8)
    reach = net.features(x).norm(dim=1, keepdim=True)
    assert bool(((net(x) - net.head.bias).abs() <= reach * (1 + 1e-5)).all())


@pytest.mark.parametrize("name", ["resnet10_s", "energy_resnet", "energy_cnn"])
def test_energy_gradients_of_many_clients_at_once(name: str) -> None:
    """vmap over stacked models of ∇_x E(x, y), as a server that holds them needs it, equals one after the other."""
    nets = [make(name, **SWITCHES).double() for _ in range(3)]
    for k, net in enumerate(nets):
        for p in net.parameters():
            p.data.mul_(1 + 0.1 * k)
    params, _ = stack_module_state(nets)
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.randint(10, (4,))

    def energy(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return -functional_call(nets[0], p, (x,)).gather(1, y[:, None]).sum()

    gradients = vmap(grad(energy, argnums=1), in_dims=(0, None))(params, x)
    for k, net in enumerate(nets):
        torch.testing.assert_close(gradients[k], grad(lambda x, net=net: -net(x).gather(1, y[:, None]).sum())(x))


GENERATIVE = [ConditionalVAE, ConditionalGAN]


@pytest.mark.parametrize("inputs", [*IMAGES, (1, 8, 8), (3, 15, 9), (1, 2, 2)])
def test_generators_make_images_of_the_datas_shape_and_range(inputs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    y = torch.tensor([0, 5, 6])
    low, high = tuple(-1.0 - c for c in range(inputs[0])), tuple(2.0 + c for c in range(inputs[0]))
    vae, gan = (kind(7, inputs, 6, width=8, low=low, high=high) for kind in GENERATIVE)
    mean, logvar = vae.encode(torch.randn(3, *inputs), y)
    assert mean.shape == logvar.shape == (3, 6)
    for scale in (1.0, 1e4):
        for x in (vae.decode(scale * torch.randn(3, 6), y), gan.generate(scale * torch.randn(3, 6), y)):
            assert x.shape == (3, *inputs)
            assert bool((x.amin((0, 2, 3)) >= torch.tensor(low)).all())
            assert bool((x.amax((0, 2, 3)) <= torch.tensor(high)).all())
    assert gan.discriminate(x, y).shape == gan(torch.randn(3, 6), y).shape == (3,)
    assert vae(x, y).shape == x.shape
    for net in (vae, gan):
        assert not list(net.buffers())
        assert Layout.of(net).size == size(net)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_range_is_reached_to_its_ends(scale: float) -> None:
    net = ConditionalVAE(2, (1, 4, 4), 2, width=8, low=-3.0, high=5.0)
    with torch.no_grad():
        net.decoder.out.weight.zero_()
        nn.init.constant_(net.decoder.out.get_parameter("bias"), -scale)
    expected = -3 + 8 / (1 + np.exp(min(scale, 500.0)))
    assert net.decode(torch.zeros(1, 2)).flatten()[0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("inputs", "vae", "generator", "discriminator"),
    [
        ((1, 28, 28), 713_345, 404_833, 145_601),
        ((3, 32, 32), 909_379, 511_971, 167_873),
        ((3, 64, 64), 2_001_987, 1_152_483, 555_969),
    ],
)
def test_sizes_are_those_of_the_docstrings(
    inputs: tuple[int, ...], vae: int, generator: int, discriminator: int
) -> None:
    pair = ConditionalGAN(10, inputs)
    assert size(ConditionalVAE(10, inputs)) == vae
    assert (size(pair.generator), size(pair.discriminator)) == (generator, discriminator)


def test_a_discriminator_with_an_auxiliary_classifier_does_not_see_labels() -> None:
    torch.manual_seed(0)
    net = ACGAN(10, (1, 28, 28))
    assert (size(net.generator), size(net.discriminator)) == (404_833, 143_691)
    assert size(ACGAN(10, (3, 32, 32)).discriminator) == 165_963
    x = net.generate(torch.randn(3, 100), torch.tensor([0, 5, 6]))
    assert x.shape == (3, 1, 28, 28)
    assert net.discriminate(x).shape == (3, 11)
    assert torch.equal(net(x, torch.tensor([1, 2, 3]), part="discriminate"), net.discriminate(x))
    assert not [name for name, _ in net.discriminator.named_parameters() if "label" in name]


def test_a_stage_by_hand() -> None:
    """A convolution 1 → 2 with weight 1 on one pixel, no normalisation: the label's shift is added before swish."""
    stage = Stage(nn.Conv2d(1, 2, 1, bias=False), lambda _: nn.Identity(), 3, nn.SiLU(), doubles=True)
    with torch.no_grad():
        stage.conv.weight.fill_(1.0)
    out = stage(torch.full((1, 1, 1, 1), 2.0), torch.tensor([[0.0, 1.0, 0.0]]))
    assert stage.label is not None
    a = 2 + stage.label.weight[:, 1]
    assert out.shape == (1, 2, 2, 2)
    torch.testing.assert_close(out[0, :, 1, 0], a * a.sigmoid())


def test_sides_are_halved_until_none_is_above_eight() -> None:
    assert [halvings((28, side)) for side in (28, 32, 33, 64, 65)] == [2, 2, 3, 3, 4]


@pytest.mark.parametrize("kind", GENERATIVE)
def test_labels_matter_and_samples_do_not_mix(kind: type) -> None:
    torch.manual_seed(0)
    net = kind(4, (1, 8, 8), 6, width=8)
    from_latent, from_image = (
        (net.decoder, net.encoder) if kind is ConditionalVAE else (net.generator, net.discriminator)
    )
    z, x = torch.randn(1, 6).repeat(4, 1), torch.rand(1, 1, 8, 8).repeat(4, 1, 1, 1)
    for half, inputs in ((from_latent, z), (from_image, x)):
        out, again = half(inputs, torch.arange(4)).detach(), half(inputs[:1], torch.arange(1)).detach()
        assert all(float((out[a] - out[b]).abs().max()) > 1e-4 for a in range(4) for b in range(a))
        torch.testing.assert_close(out[:1], again)
    torch.testing.assert_close(from_latent(z), from_latent(z, torch.zeros(4, dtype=torch.int64)))


@pytest.mark.parametrize("kind", GENERATIVE)
def test_generators_run_for_many_clients_at_once(kind: type) -> None:
    torch.manual_seed(0)
    nets = [kind(4, (1, 8, 8), 6, width=8).double() for _ in range(3)]
    params, buffers = stack_module_state(nets)
    assert not buffers
    x = torch.rand(3, 5, 1, 8, 8, dtype=torch.float64)
    z, y = torch.randn(3, 5, 6, dtype=torch.float64), torch.randint(4, (3, 5))

    def loss(p: dict[str, Tensor], x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        inputs = x if kind is ConditionalVAE else z
        return functional_call(nets[0], p, (inputs, y)).square().sum()

    gradients = vmap(grad(loss))(params, x, z, y)
    for k, net in enumerate(nets):
        alone = grad(loss)({n: p.detach() for n, p in net.named_parameters()}, x[k], z[k], y[k])
        for name, value in alone.items():
            torch.testing.assert_close(gradients[name][k], value)


def test_either_half_runs_with_other_parameters() -> None:
    torch.manual_seed(0)
    a, b = (ConditionalGAN(4, (1, 8, 8), 6, width=8) for _ in range(2))
    z, y = torch.randn(3, 6), torch.tensor([0, 1, 2])
    torch.testing.assert_close(
        functional_call(a.generator, dict(b.generator.named_parameters()), (z, y)), b.generate(z, y)
    )
    names = {name.partition(".")[0] for name, _ in a.named_parameters()}
    assert names == {"generator", "discriminator"}


def test_cost_of_a_pass_is_that_of_both_halves() -> None:
    vae, gan = ConditionalVAE(4, (1, 8, 8), 6, width=8), ConditionalGAN(4, (1, 8, 8), 6, width=8)
    assert macs(vae, (1, 8, 8)) == macs(vae.encoder, (1, 8, 8)) + macs(vae.decoder, (6,))
    assert macs(gan, (6,)) == macs(gan.generator, (6,)) + macs(gan.discriminator, (1, 8, 8))
    # by hand: 10 numbers to 8·4·4; one doubling, 8 → 8 at 8 by 8, labels; 8 → 1
    assert macs(vae.decoder, (6,)) == 10 * 8 * 16 + 64 * 8 * 8 * 9 + 4 * 8 + 64 * 8 * 9
    # by hand: 1 → 8 at 4 by 4, labels, 8·4·4 to 12 numbers
    assert macs(vae.encoder, (1, 8, 8)) == 16 * 8 * 9 + 4 * 8 + 8 * 16 * 12


@pytest.mark.parametrize("kind", GENERATIVE)
@pytest.mark.parametrize(
    ("inputs", "settings", "sentence"),
    [
        ((64,), {}, "needs images"),
        ((1, 8, 8), {"norm": "grop"}, "did you mean 'group'"),
        ((1, 8, 8), {"groups": 5}, "divides 32, not 5"),
        ((1, 8, 8), {"low": 1.0}, "smallest value of a pixel must be below"),
        ((1, 8, 8), {"high": (1.0, 2.0)}, "one for each of 1 channels"),
    ],
)
def test_impossible_generators_end_in_one_sentence(kind: type, inputs: tuple, settings: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(10, inputs, **settings)


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "sentence"),
    [
        ("energy_cnn", (1, 3, 8), {"channels": (4, 4, 4)}, "at least 4 by 4"),
        ("energy_cnn", (8,), {}, "needs images"),
        ("energy_cnn", (1, 8, 8), {"groups": 3}, "divides 16, not 3"),
        ("energy_resnet", (1, 8, 8), {"activation": "swich"}, "did you mean 'swish'"),
        ("resnet10", (1, 8, 8), {"activation": "gelu"}, "here are: relu, swish"),
    ],
)
def test_impossible_energy_networks_end_in_one_sentence(
    name: str, inputs: tuple, settings: dict, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        models.make(name, classes=10, inputs=inputs, **settings)


@pytest.mark.exhaustive
def test_a_variational_autoencoder_learns_digits_by_class() -> None:
    """After a second's work its samples lie nearer to the mean image of their own class than to any other."""
    torch.manual_seed(0)
    x, y = digits()
    net = ConditionalVAE(10, (1, 8, 8), 8, width=16)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(150):
        rows = torch.randint(len(x), (64,))
        mean, logvar = net.encode(x[rows], y[rows])
        out = net.decode(mean + (logvar / 2).exp() * torch.randn_like(mean), y[rows])
        rebuilt = nn.functional.binary_cross_entropy(out, x[rows], reduction="sum")
        loss = (rebuilt - 0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()) / len(rows)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    labels = torch.arange(10).repeat_interleave(20)
    with torch.no_grad():
        samples = net.decode(torch.randn(200, 8), labels)
    centres = torch.stack([x[y == c].mean(0) for c in range(10)])
    nearest = torch.cdist(samples.flatten(1), centres.flatten(1)).argmin(1)
    assert float((nearest == labels).float().mean()) > 0.8


@pytest.mark.exhaustive
def test_an_adversarial_pair_learns_from_both_sides() -> None:
    """The discriminator tells digits from noise images, and the generator then moves its logits up."""
    torch.manual_seed(0)
    x, y = digits()
    net = ConditionalGAN(10, (1, 8, 8), 8, width=16)
    discriminator_adam = torch.optim.Adam(net.discriminator.parameters(), 1e-3)
    generator_adam = torch.optim.Adam(net.generator.parameters(), 1e-3)
    discriminator_losses, generator_losses = [], []
    for _ in range(60):
        rows, z = torch.randint(len(x), (64,)), torch.randn(64, 8)
        loss = nn.functional.softplus(-net.discriminate(x[rows], y[rows])) + nn.functional.softplus(net(z, y[rows]))
        discriminator_adam.zero_grad()
        loss.mean().backward()
        discriminator_adam.step()
        discriminator_losses.append(float(loss.detach().mean()))
    for _ in range(60):
        rows, z = torch.randint(len(x), (64,)), torch.randn(64, 8)
        loss = nn.functional.softplus(-net(z, y[rows])).mean()
        generator_adam.zero_grad()
        loss.backward()
        generator_adam.step()
        generator_losses.append(float(loss.detach()))
    assert discriminator_losses[-1] < 0.5 < discriminator_losses[0]  # 2 log 2 if it knew nothing
    assert generator_losses[-1] < 0.5 * generator_losses[0]
