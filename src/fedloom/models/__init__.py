"""The zoo: networks by name, each with ``features`` and a linear ``head``.

>>> len(models.names())
35
>>> models.make("mlp", classes=3, inputs=(2,), hidden=(4,)).head
Linear(in_features=4, out_features=3, bias=True)
"""

from fedloom.models import cohort as cohort  # registers the zoo's own layers for several clients at once
from fedloom.models.adapters import distilbert, efficientnet_b0, timm
from fedloom.models.audio import m5
from fedloom.models.classifier import Classifier, models
from fedloom.models.convolutional import feddyn_cnn, fedssa_cnn, leaf_cnn, two_cnn, vgg9
from fedloom.models.energy import energy_cnn, energy_resnet
from fedloom.models.exits import exit_cnn
from fedloom.models.generative import ConditionalGAN, ConditionalVAE, conditional_gan, conditional_vae
from fedloom.models.linear import logistic
from fedloom.models.macs import macs
from fedloom.models.mobile import mobilenet, mobilenet_v2, shufflenet_v2
from fedloom.models.norm import SpectralLinear
from fedloom.models.perceptron import mlp, two_nn
from fedloom.models.preactivated import (
    EarlyExit,
    Shallow,
    in_exit,
    preact_exit18,
    preact_resnet18,
    preact_resnet34,
    wide_resnet,
)
from fedloom.models.recurrent import stacked_lstm
from fedloom.models.residual import (
    resnet8x4,
    resnet10,
    resnet10_l,
    resnet10_m,
    resnet10_s,
    resnet10_xs,
    resnet10_xxs,
    resnet18,
    resnet32x4,
    resnet34,
)

__all__ = [
    "Classifier", "ConditionalGAN", "ConditionalVAE", "EarlyExit", "Shallow", "SpectralLinear", "conditional_gan",
    "conditional_vae", "distilbert",
    "efficientnet_b0", "energy_cnn", "energy_resnet", "exit_cnn", "feddyn_cnn", "fedssa_cnn", "in_exit", "leaf_cnn",
    "logistic", "m5", "macs", "mlp", "mobilenet", "mobilenet_v2", "models", "preact_exit18",
    "preact_resnet18", "preact_resnet34", "resnet8x4", "resnet10", "resnet10_l", "resnet10_m", "resnet10_s",
    "resnet10_xs", "resnet10_xxs", "resnet18", "resnet32x4", "resnet34", "shufflenet_v2", "stacked_lstm", "timm",
    "two_cnn", "two_nn", "vgg9", "wide_resnet",
]  # fmt: skip
