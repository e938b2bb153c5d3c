"""Many clients' models as one network: layers over a leading client axis, with backward passes of their own.

``CohortNet`` holds C clients' parameters as rows of one tensor θ [C, P] and answers forward and backward for all of
them at once; ``cohort_layer`` registers how a type of module becomes such a layer. ``train`` runs rounds of plain
stochastic gradient descent on it, in which weight gradients never exist.
"""

from fedloom.compute.cohort import convolution, dense, normalise, pointwise, pool  # noqa: F401  (they register layers)
from fedloom.compute.cohort.descent import Trained, train
from fedloom.compute.cohort.layers import CohortLayer, Draws, Lookup, Unsupported, cohort_layer
from fedloom.compute.cohort.loss import cross_entropy
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import SGD, Parameter
from fedloom.compute.cohort.schedule import Schedule

__all__ = [
    "SGD", "CohortLayer", "CohortNet", "Draws", "Lookup", "Parameter", "Schedule", "Trained", "Unsupported",
    "cohort_layer", "cross_entropy", "train",
]  # fmt: skip
