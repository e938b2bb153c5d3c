"""Partitioners of flwr-datasets, unchanged."""

import json

import numpy as np
import pytest

from fedloom.base.errors import ConfigError, DataError
from fedloom.base.rng import stream
from fedloom.data import federate
from fedloom.data.partitions import Flower

kinds = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
pytestmark = pytest.mark.extra("flwr_datasets")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("IidPartitioner", {}), ("DirichletPartitioner", {"alpha": 0.3, "min_partition_size": 5})],
)
def test_objects_and_names_deal_every_sample(kind: str, settings: dict) -> None:
    column = {"partition_by": "label"} if "Dirichlet" in kind else {}
    partitioner = getattr(kinds, kind)(num_partitions=8, **column, **settings)
    labels = np.arange(800) % 10
    for partition in (Flower(partitioner), Flower(kind=kind, settings=settings)):
        index = partition(labels, 8, stream(0, "partition"))
        again = partition(labels, 8, stream(0, "partition"))
        assert np.array_equal(np.sort(index.rows), np.arange(800))
        assert np.array_equal(index.rows, again.rows)
        assert json.loads(json.dumps(partition.describe()))["kind"] == kind


@pytest.mark.filterwarnings("ignore")
def test_pathological_gives_k_classes() -> None:
    partition = Flower(kind="PathologicalPartitioner", settings={"num_classes_per_partition": 2})
    federation = federate("digits", partition, 10)
    y = federation.train.arrays.y.numpy()
    assert all(len(set(y[federation.train.index[k]])) == 2 for k in range(10))


def test_natural_ids_are_the_column_client() -> None:
    federation = federate("synthetic", Flower(kinds.NaturalIdPartitioner(partition_by="client")))
    assert len(federation) == 20


def test_bad_requests_get_one_sentence() -> None:
    labels = np.arange(100) % 10
    with pytest.raises(ConfigError, match="not both"):
        Flower(kinds.IidPartitioner(num_partitions=4), "DirichletPartitioner")
    with pytest.raises(ConfigError, match="did you mean 'IidPartitioner'"):
        Flower(kind="iidPartitioner")(labels, 5, stream(0, "partition"))
    with pytest.raises(DataError, match="4 lists of rows, but 5 clients"):
        Flower(kinds.IidPartitioner(num_partitions=4))(labels, 5, stream(0, "partition"))
    with pytest.raises(DataError, match="the columns are label, row"):
        Flower(kind="DirichletPartitioner", settings={"alpha": 1, "partition_by": "y"})(labels, 5, stream(0, "p"))
    with pytest.raises(DataError, match="cannot be made"):
        Flower(kind="DirichletPartitioner")(labels, 5, stream(0, "partition"))
