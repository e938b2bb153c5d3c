"""Many clients' models as one network: layers with a leading client axis and their own backward passes.

``CohortNet`` holds the parameters of C clients as rows of one tensor θ [C, P] and runs forward and backward passes for
all of them at once. ``train`` runs rounds of plain SGD on it without materialising weight gradients. To support another
type of module, register a ``CohortLayer`` for it with ``cohort_layer``.
"""

from fedloom.compute.cohort import convolution, dense, normalise, pointwise, pool  # noqa: F401  (they register layers)
from fedloom.compute.cohort.descent import TrainedCohort, cross_entropy, train
from fedloom.compute.cohort.layers import CohortLayer, Draws, Lookup, Unsupported, cohort_layer, dropout_draws
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import Parameter, StepRule
from fedloom.compute.cohort.schedule import BatchSchedule, Change, Rows

__all__ = [
    "BatchSchedule", "Change", "CohortLayer", "CohortNet", "Draws", "Lookup", "Parameter", "Rows", "StepRule",
    "TrainedCohort", "Unsupported", "cohort_layer", "cross_entropy", "dropout_draws", "train",
]  # fmt: skip
