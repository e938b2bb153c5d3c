"""Masks of dropout: SplitMix64 in plain integers, their rate, and what else draws from PyTorch's generator."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedloom.core.dropout import keyed, keys, masks

WORD = (1 << 64) - 1


def numbers(key: int, count: int) -> list[int]:
    """The numbers of 16 bits that follow from a key, lowest bits first (Steele, Lea and Flood 2014, figure 16)."""
    words = []
    for place in range(1, -(-count // 4) + 1):
        z = (key + place * 0x9E3779B97F4A7C15) & WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        z ^= z >> 31
        words += [(z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    return words[:count]


def dropped(number: int, p: float) -> bool:
    """Whether a number is below p, read as a signed one from -1/2 to 1/2."""
    signed = number - (1 << 16) if number >> 15 else number
    return signed + (1 << 15) < round(p * (1 << 16))


def test_masks_are_the_published_generator_at_each_clients_key() -> None:
    p, client_keys = 0.3, [5, -7]
    client_masks = masks(torch.tensor(client_keys), torch.zeros(2, 3, 7, dtype=torch.float64), p)
    for key, mask in zip(client_keys, client_masks, strict=True):
        scale = 1 / (1 - round(p * 65536) / 65536)
        expected = [0 if dropped(number, p) else scale for number in numbers(key & WORD, 21)]
        torch.testing.assert_close(mask.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


def test_images_are_numbered_in_the_order_in_which_they_are_stored() -> None:
    mask = masks(torch.tensor([3]), torch.zeros(1, 2, 3, 4, 5), 0.5)[0]
    flat = [not dropped(draw, 0.5) for draw in numbers(3, 120)]
    for number, (row, y, x, channel) in enumerate(product(range(2), range(4), range(5), range(3))):
        assert bool(mask[row, channel, y, x]) == flat[number]


def test_masks_of_many_clients_are_those_of_each_alone_and_of_the_right_rate() -> None:
    client_keys = keys(300, torch.Generator().manual_seed(0))
    client_masks = masks(client_keys, torch.zeros(300, 10, 100), 0.25)
    alone = torch.cat([masks(key[None], torch.zeros(1, 10, 100), 0.25) for key in client_keys])
    assert torch.equal(client_masks, alone)
    nonzero = client_masks.bool().double()
    assert abs(float(nonzero.mean()) - 0.75) < 5 * (0.25 * 0.75 / nonzero.numel()) ** 0.5
    assert float((nonzero.mean((1, 2)) - 0.75).square().mean()) < 1.5 * 0.25 * 0.75 / 1000  # between clients, too
    assert masks(client_keys[:1], torch.zeros(1, 9), 1e-9).min() > 0.99  # a rate below one bit


def test_what_is_computed_again_for_a_backward_pass_has_the_same_mask() -> None:
    layer, x = keyed(nn.Sequential(nn.Dropout(0.5))), torch.ones(4, 50, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
