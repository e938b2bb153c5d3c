"""Augmentations against Pillow, against their specification, and as functions of their draws."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.data import augment
from fedloom.data.augment import (
    NUMBER,
    OPERATIONS,
    POLICY,
    Scale,
    apply_operations,
    augmentation,
    augmentations,
    pipeline,
    strength,
)

MEAN, STD = (0.49, 0.48, 0.44), (0.25, 0.24, 0.26)


def photo(seed: int = 0, size: int = 24, channels: int = 3) -> np.ndarray:
    """Smooth colours with some noise, uint8 [H, W, C]; nothing touches both ends of the range."""
    draw = np.random.default_rng(seed)
    grid = np.linspace(0, 3, size)
    planes = [
        np.sin(grid[:, None] * (c + 1) + draw.uniform(0, 6)) + np.cos(grid * (2 - c / 2)) for c in range(channels)
    ]
    x = 120 + 45 * np.stack(planes, -1) + draw.normal(0, 6, (size, size, channels))
    return x.clip(3, 251).astype(np.uint8)


def tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)[None].double() / 255


def bytes_of(x: Tensor) -> np.ndarray:
    return (x[0].permute(1, 2, 0) * 255).numpy()


def normalised(count: int = 12, seed: int = 0) -> Arrays:
    x = torch.cat([tensor(photo(seed + k)).float() for k in range(count)])
    x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    return Arrays(x, torch.arange(count) % 2, 2, mean=MEAN, std=STD)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.4, 1.9])
@pytest.mark.parametrize("name", ENHANCE)
def test_enhancements_are_pillows(name: str, factor: float) -> None:
    for seed in range(3):
        image = photo(seed)
        expected = np.asarray(ENHANCE[name](Image.fromarray(image)).enhance(factor), dtype=float)
        output = apply_operations(
            tensor(image), torch.tensor([NUMBER[name]]), torch.tensor([factor]), torch.zeros(3, 1, 1)
        )
        assert np.abs(bytes_of(output) - expected).max() <= 2.01  # Pillow rounds twice to 8 bits


@pytest.mark.parametrize(
    ("name", "value", "pillow", "tolerance"),
    [
        ("posterize", 4.0, lambda image: ImageOps.posterize(image, 4), 1e-6),
        ("posterize", 6.0, lambda image: ImageOps.posterize(image, 6), 1e-6),
        ("solarize", 128.0, lambda image: ImageOps.solarize(image, 128), 1e-6),
        ("solarize", 0.0, lambda image: ImageOps.solarize(image, 0), 1e-6),
        ("invert", 0.0, ImageOps.invert, 1e-6),
        ("equalize", 0.0, ImageOps.equalize, 1e-6),
        ("autocontrast", 0.0, ImageOps.autocontrast, 1.01),
    ],
)
def test_pixel_operations_are_pillows(name: str, value: float, pillow, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    for image in (
        photo(1),
        photo(2),
        np.full((24, 24, 3), 7, np.uint8),
        np.kron(np.eye(6), np.full((4, 4), 255))[..., None].repeat(3, 2).astype(np.uint8),
    ):
        expected = np.asarray(pillow(Image.fromarray(image)), dtype=float)
        output = apply_operations(
            tensor(image), torch.tensor([NUMBER[name]]), torch.tensor([value]), torch.zeros(3, 1, 1)
        )
        assert np.abs(bytes_of(output) - expected).max() <= tolerance


AFFINE = {
    "shear_x": lambda v: (1, v, 0, 0, 1, 0),
    "shear_y": lambda v: (1, 0, 0, v, 1, 0),
    "translate_x": lambda v: (1, 0, v, 0, 1, 0),
    "translate_y": lambda v: (1, 0, 0, 0, 1, v),
}


@pytest.mark.parametrize("name", [*AFFINE, "rotate"])
def test_moves_are_pillows(name: str) -> None:
    image = photo(3)
    for value in (-0.23, 0.111) if "shear" in name else (-7.0, 3.0):
        pillow = Image.fromarray(image)
        if name == "rotate":
            expected = np.asarray(pillow.rotate(value, Image.Resampling.NEAREST), dtype=float)
        else:
            expected = np.asarray(
                pillow.transform((24, 24), Image.Transform.AFFINE, AFFINE[name](value), Image.Resampling.NEAREST),
                dtype=float,
            )
        output = apply_operations(
            tensor(image),
            torch.tensor([NUMBER[name]]),
            torch.tensor([value], dtype=torch.float64),
            torch.zeros(3, 1, 1).double(),
        )
        off = np.abs(bytes_of(output) - expected).max(-1) > 1e-6
        assert off.mean() < 0.02, name  # pixels that fall between two


def test_blur_is_pillows_gaussian_where_the_kernel_is_wide_enough() -> None:
    image = photo(4, 40)
    expected = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5)), dtype=float)
    output = bytes_of(augment.blur(tensor(image), torch.tensor([1.5]), 13))
    assert np.abs(output - expected)[8:-8, 8:-8].max() < 3  # Pillow approximates by boxes
    flat = torch.full((2, 3, 9, 9), 0.3)
    torch.testing.assert_close(augment.blur(flat, torch.tensor([0.1, 2.0]), 5), flat)


def test_hue_turns_red_into_green_into_blue() -> None:
    red = torch.tensor([1.0, 0.2, 0.2])[None, :, None, None].expand(3, 3, 4, 4)
    turned = augment.hue(red, torch.tensor([0.0, 1 / 3, -1 / 3]))
    torch.testing.assert_close(turned[0], red[0])
    torch.testing.assert_close(turned[1, :, 0, 0], torch.tensor([0.2, 1.0, 0.2]), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[2, :, 0, 0], torch.tensor([0.2, 0.2, 1.0]), atol=1e-5, rtol=0)
    x = tensor(photo(5))
    torch.testing.assert_close(augment.hue(augment.hue(x, torch.tensor([0.2])), torch.tensor([-0.2])), x)


@given(st.integers(0, 200))
def test_crop_flip_and_cutout_by_hand(seed: int) -> None:
    arrays = normalised(5)
    x, scale = arrays.x, Scale.of(arrays.x, MEAN, STD)
    n, channels, h, w = x.shape
    crop = augmentation({"name": "crop", "padding": 3})
    draws = crop.draw(n, (channels, h, w), rng(seed))
    wide = scale.black.expand(n, channels, h + 6, w + 6).clone()
    wide[:, :, 3:-3, 3:-3] = x
    for i, (top, left) in enumerate(draws["corner"].tolist()):
        torch.testing.assert_close(crop.apply(x, draws, scale)[i], wide[i, :, top : top + h, left : left + w])
    flip = augmentation("flip")
    draws = flip.draw(n, (channels, h, w), rng(seed))
    for i, flipped in enumerate(draws["flipped"].tolist()):
        assert torch.equal(flip.apply(x, draws, scale)[i], x[i].flip(2) if flipped else x[i])
    cutout = augmentation({"name": "cutout", "size": 6})
    draws = cutout.draw(n, (channels, h, w), rng(seed))
    new = cutout.apply(x, draws, scale)
    for i, (row, column) in enumerate(draws["centre"].tolist()):
        expected = x[i].clone()
        expected[:, max(row - 3, 0) : row + 3, max(column - 3, 0) : column + 3] = 0
        assert torch.equal(new[i], expected)


def test_draws_have_the_asked_probabilities() -> None:
    shape, n = (3, 32, 32), 40_000
    corner = augmentation("crop").draw(n, shape, rng())["corner"].numpy()
    assert np.bincount(corner[:, 0] * 9 + corner[:, 1], minlength=81).std() < 3 * np.sqrt(n / 81)
    assert augmentation({"name": "flip", "p": 0.3}).draw(n, shape, rng())["flipped"].float().mean() == pytest.approx(
        0.3, abs=0.02
    )
    jitter = augmentation("jitter").draw(n, shape, rng())
    assert jitter["happens"].float().mean() == pytest.approx(0.8, abs=0.02)
    assert jitter["brightness"].min() >= 0.6 - 1e-6
    assert jitter["brightness"].max() <= 1.4 + 1e-6
    assert (jitter["hue"][~jitter["happens"]] == 0).all()
    for low, high in ((0.1, 2.0), (0.5, 1.5)):
        sigma = augmentation({"name": "blur", "low": low, "high": high}).draw(n, shape, rng())["sigma"]
        assert (sigma.min(), sigma.max()) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    operations = augmentation({"name": "randaugment", "operations": 3}).draw(n, shape, rng())["operation"].numpy()
    counts = np.bincount(operations.ravel(), minlength=len(OPERATIONS))
    assert counts[NUMBER["invert"]] == 0
    assert np.abs(counts[:-1] / counts.sum() - 1 / 14).max() < 0.004


def test_autoaugment_draws_the_published_table() -> None:
    """How often each operation happens, against its expectation under the table; and a few strengths by hand."""
    assert POLICY.shape == (25, 2, 3)
    n = 60_000
    draws = augmentation("autoaugment").draw(n, (3, 32, 32), rng())
    expected: Counter[int] = Counter()
    for operation, p, _ in POLICY.reshape(-1, 3):
        expected[int(operation)] += p / 25
    counts = np.bincount(draws["operation"].numpy().ravel(), minlength=len(OPERATIONS))
    for number in range(1, len(OPERATIONS)):
        assert counts[number] / n == pytest.approx(expected[number], abs=0.01)
    for name, level, value in (
        ("rotate", 2, 30 * 2 / 9),
        ("translate_x", 9, 14.0),
        ("shear_y", 8, 0.3 * 8 / 9),
        ("contrast", 6, 1.6),
        ("posterize", 7, 5.0),
        ("solarize", 8, 255 / 9),
    ):
        positive = strength(np.array([NUMBER[name]]), np.array([float(level)]), 10, np.array([1]), 32, 32)
        assert positive[0] == pytest.approx(value), name
        negative = strength(np.array([NUMBER[name]]), np.array([float(level)]), 10, np.array([-1]), 32, 32)
        signed = {"contrast": 0.4}.get(name, -value) if name not in ("posterize", "solarize") else value
        assert negative[0] == pytest.approx(signed), name


def test_policies_go_both_ways_and_move_by_shares_of_width_and_height() -> None:
    shape = (3, 20, 60)  # 150/331 of the width is 27.2 pixels, of the height 9.1

    def strengths(settings: dict[str, Any], name: str) -> list[float]:
        draws = augmentation(settings).draw(20_000, shape, rng())
        return draws["strength"][draws["operation"] == NUMBER[name]].unique().tolist()

    largest: dict[str, Any] = {"name": "randaugment", "magnitude": 30}
    assert strengths(largest, "rotate") == [-30, 30]
    assert strengths(largest, "translate_x") == [-27, 27]
    assert strengths(largest, "translate_y") == [-9, 9]
    assert strengths(largest, "sharpness") == pytest.approx([0.1, 1.9])
    assert strengths({"name": "autoaugment"}, "translate_x") == [-27, -24, 24, 27]  # at the levels 8 and 9
    assert strengths({"name": "autoaugment"}, "translate_y") == [-9, -3, 3, 9]  # 3 and 9


def test_what_a_policy_moves_in_has_the_mean_colour() -> None:
    black = torch.zeros(1, 3, 4, 6)
    draws = {"operation": torch.tensor([[NUMBER["translate_x"]]]), "strength": torch.tensor([[2.0]])}
    moved = augmentation("randaugment").apply(black, draws, Scale.of(black, MEAN, STD))
    assert (moved[..., :4] == 0).all()
    torch.testing.assert_close(moved[..., 4:], torch.tensor(MEAN)[:, None, None].expand(1, 3, 4, 2))


def test_jitter_changes_brightness_contrast_saturation_and_hue_in_this_order() -> None:
    x = torch.cat([tensor(photo(1)), tensor(photo(2))])
    values = {"brightness": 0.7, "contrast": 1.3, "saturation": 0.8, "hue": 0.05}
    draws = {name: torch.full((2,), value) for name, value in values.items()} | {"happens": torch.tensor([True, False])}
    new = augmentation("jitter").apply(x, draws, Scale.of(x, (), ()))
    picture = Image.fromarray(photo(1))
    for kind, factor in ((ImageEnhance.Brightness, 0.7), (ImageEnhance.Contrast, 1.3), (ImageEnhance.Color, 0.8)):
        picture = kind(picture).enhance(factor)
    expected = augment.hue(tensor(np.array(picture)), torch.tensor([0.05]))
    assert (new[0] - expected[0]).abs().max() < 5 / 255  # Pillow rounds to 8 bits each time
    assert torch.equal(new[1], x[1])


ALL = [[name] for name in augmentations.names()] + [
    ["crop", "flip", "autoaugment", "cutout"],
    ["jitter", "blur", "randaugment", "flip"],
]


@pytest.mark.parametrize("names", ALL, ids="+".join)
def test_the_same_draws_are_the_same_bits_however_batches_are_put_together(names: list[str]) -> None:
    """Batches of several clients at once against each client's alone."""
    arrays = normalised(11)
    change = pipeline(names, arrays)
    sizes = [4, 1, 6]
    together = change(arrays.x, [(rng(k), n) for k, n in enumerate(sizes)])
    by_client = [change(x, [(rng(k), len(x))]) for k, x in enumerate(arrays.x.split(sizes))]
    torch.testing.assert_close(together, torch.cat(by_client), atol=1e-5, rtol=1e-5)
    assert torch.equal(change(arrays.x, [(rng(5), 11)]), change(arrays.x, [(rng(5), 11)]))
    assert not torch.equal(change(arrays.x, [(rng(5), 11)]), change(arrays.x, [(rng(6), 11)]))
    assert torch.equal(arrays.x, normalised(11).x)  # inputs are not written to
    images = together * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    assert images.min() > -1e-4
    assert images.max() < 1 + 1e-4


def test_samples_of_a_batch_are_changed_each_in_its_own_way() -> None:
    arrays = normalised(1)
    x = arrays.x.expand(64, -1, -1, -1).clone()
    for names, least in ((["crop"], 40), (["cutout"], 50), (["jitter"], 45), (["autoaugment"], 25), (["flip"], 2)):
        new = pipeline(names, arrays)(x, [(rng(), 64)])
        assert len({row.numpy().tobytes() for row in new}) >= least


def test_operations_on_pixels_do_not_depend_on_the_normalisation() -> None:
    """De-normalised around what needs pixels: the same images come out, whatever the constants."""
    arrays = normalised(6)
    plain = arrays.x * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    plain = Arrays(plain.clamp(0, 1), arrays.y, 2)
    for names in (["jitter"], ["crop"], ["blur"], ["jitter", "crop", "flip", "blur"]):
        a = pipeline(names, arrays)(arrays.x, [(rng(1), 6)])
        b = pipeline(names, plain)(plain.x, [(rng(1), 6)])
        torch.testing.assert_close(
            a * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None], b, atol=1e-5, rtol=0
        )


def test_grey_images_and_float64() -> None:
    arrays = Arrays(torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.zeros(6, dtype=torch.long), 1)
    for names in ALL:
        new = pipeline(names, arrays)(arrays.x, [(rng(), 6)])
        assert new.dtype == torch.float64
        assert new.shape == arrays.x.shape


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("crpo", "unknown augmentation 'crpo'; did you mean 'crop'"),
        ({"name": "cutout", "side": 3}, "augmentation 'cutout' has no setting 'side'"),
        ({"size": 3}, "neither a name nor a mapping with a name"),
        ({"name": "jitter", "hue": 0.7}, "hue must lie"),
        ({"name": "blur", "size": 4}, "must be odd"),
    ],
)
def test_bad_settings_get_one_sentence(setting: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        augmentation(setting)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_data_that_do_not_suit_are_refused() -> None:
    y = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"'crop' needs images \[N, C, H, W\], not inputs of shape \[7\]"):
        pipeline(["crop"], Arrays(torch.zeros(4, 7), y, 1))
    with pytest.raises(ConfigError, match="'autoaugment' needs images of 1 or 3 channels, not 2"):
        pipeline(["autoaugment"], Arrays(torch.zeros(4, 2, 5, 5), y, 1))
    with pytest.raises(ConfigError, match="'jitter' works on pixels from 0 to 1, but the inputs lie between -3 and 2"):
        pipeline(["jitter"], Arrays(torch.tensor([-3.0, 2.0] * 50).reshape(4, 1, 5, 5), y, 1))
    with pytest.raises(ConfigError, match="'blur' of size 11 reaches beyond images of 5 by 5; choose a size below 10"):
        pipeline([{"name": "blur", "size": 11}], Arrays(torch.zeros(4, 1, 5, 5), y, 1))
    blur = pipeline([{"name": "blur", "size": 9}], Arrays(torch.zeros(4, 1, 5, 5), y, 1))
    assert blur(torch.zeros(4, 1, 5, 5), [(np.random.default_rng(0), 4)]).shape == (4, 1, 5, 5)
    pipeline(["crop", "flip", "cutout", "blur"], Arrays(torch.randn(4, 2, 5, 5), y, 1))  # these take any scale
