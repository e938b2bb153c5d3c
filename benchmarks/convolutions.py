"""A cohort's convolution on a GPU, forward and backward: client by client, unfolded, or one grouped call.

    python benchmarks/convolutions.py [--out FILE]

Milliseconds of one recorded pass (a CUDA graph of it, mean of 20 replays) for c clients with batches of B images, in
float32 with and without TF32, and with factors rounded to bfloat16; first layers need no gradient of their images.
Client by client and unfolded are the layer's own ways; grouped is the library's call alone, channels last or first,
without bringing images into that order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from record import machine, options, save
from torch import Tensor, nn

from fedloom.compute.cohort import convolution
from fedloom.compute.cohort.convolution import Convolution
from fedloom.compute.cohort.parameters import Parameter
from fedloom.core.layout import Leaf

SHAPES = {  # clients, images, channels in and out, side of the kernel and of the images, padding
    "FedDyn's CNN, first": (10, 50, 3, 64, 5, 32, 0),
    "FedDyn's CNN, second": (10, 50, 64, 64, 5, 14, 0),
    "FedDyn's CNN, first, of all clients": (100, 50, 3, 64, 5, 32, 0),
    "McMahan's CNN, first": (100, 10, 1, 32, 5, 28, 2),
    "McMahan's CNN, second": (100, 10, 32, 64, 5, 14, 2),
    "a block of a ResNet": (10, 64, 64, 64, 3, 32, 1),
}
WAYS = {"client by client": 0.0, "unfolded": 1e18}
aten = torch.ops.aten


def milliseconds(work: Callable[[], Any], times: int = 20) -> float:
    """Of one pass, replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    return round((time.perf_counter() - begin) / times * 1e3, 3)


def compare(shape: tuple[int, ...], rounded: torch.dtype | None, first: bool) -> dict[str, float]:
    """Milliseconds of each way; a first layer has no gradient of its inputs."""
    c, batch, into, out, side, image, pad = shape
    leaf = Leaf.of("weight", nn.Conv2d(into, out, side).weight)
    theta = torch.randn(c, leaf.size, device="cuda") * 0.05
    weight = Parameter(leaf, theta, torch.zeros_like(theta), rounded)
    x = torch.randn(c, batch, into, image, image, device="cuda")
    ratios = {}
    for label, small in WAYS.items():
        convolution.SMALL = small
        convolution.is_on_gpu = lambda x, unfolded=bool(small): unfolded
        layer = Convolution(weight, None, [1, 1], [pad, pad], [1, 1], groups=1)
        layer.input_gradient = not first
        grad = torch.randn_like(layer.forward(x))

        def once(layer: Convolution = layer, grad: Tensor = grad) -> None:
            layer.forward(x)
            layer.backward(grad)

        ratios[label] = milliseconds(once)
    settings = ([1, 1], [pad, pad], [1, 1], False, [0, 0], c)
    for label, order in (("last", torch.channels_last), ("first", torch.contiguous_format)):
        images = x.transpose(0, 1).flatten(1, 2).to(rounded or x.dtype).contiguous(memory_format=order)
        kernels = theta.view(c * out, into, side, side).to(images.dtype).contiguous(memory_format=order)
        grads = torch.randn_like(aten.convolution(images, kernels, None, *settings))

        def grouped(images: Tensor = images, kernels: Tensor = kernels, grads: Tensor = grads) -> None:
            aten.convolution(images, kernels, None, *settings)
            aten.convolution_backward(grads, images, kernels, None, *settings, [not first, True, False])

        ratios[f"grouped, channels {label}"] = milliseconds(grouped)
    return ratios


def main() -> None:
    """Compare all shapes in all precisions; write JSON if requested."""
    args = options(__doc__).parse_args()
    torch.backends.cudnn.deterministic = True
    results: dict[str, Any] = {
        "command": "python benchmarks/convolutions.py",
        "machine": machine() | {"gpu": torch.cuda.get_device_name()},
    }
    for tf32, rounded in itertools.product((False, True), (None, torch.bfloat16)):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        kind = "bfloat16" if rounded else "TF32" if tf32 else "float32"
        if rounded and tf32:
            continue
        for name, shape in SHAPES.items():
            results.setdefault(kind, {})[name] = compare(shape, rounded, ", first" in name)
            print(kind, name, results[kind][name], flush=True)
            save(results, args.out)


if __name__ == "__main__":
    main()
