"""Topologies: who receives which of several models, and how the models are mixed."""

from typing import TYPE_CHECKING

from fedloom.core.slots import topologies

if TYPE_CHECKING:
    from fedloom.parts.topology.attention import Attention as Attention
    from fedloom.parts.topology.bipartition import Bipartition as Bipartition
    from fedloom.parts.topology.clusters import Clusters as Clusters
    from fedloom.parts.topology.collaboration import Collaboration as Collaboration
    from fedloom.parts.topology.cores import Cores as Cores
    from fedloom.parts.topology.first_order import FirstOrder as FirstOrder
    from fedloom.parts.topology.graphs import Complete as Complete
    from fedloom.parts.topology.graphs import EdgeList as EdgeList
    from fedloom.parts.topology.graphs import ErdosRenyi as ErdosRenyi
    from fedloom.parts.topology.graphs import Exponential as Exponential
    from fedloom.parts.topology.graphs import Graph as Graph
    from fedloom.parts.topology.graphs import OwnModel as OwnModel
    from fedloom.parts.topology.graphs import RandomPairs as RandomPairs
    from fedloom.parts.topology.graphs import Ring as Ring
    from fedloom.parts.topology.graphs import SmallWorld as SmallWorld
    from fedloom.parts.topology.graphs import Star as Star
    from fedloom.parts.topology.graphs import Torus as Torus
    from fedloom.parts.topology.heads import CombinedHeads as CombinedHeads
    from fedloom.parts.topology.hierarchy import Hierarchy as Hierarchy

make = topologies.make
__getattr__ = topologies.register_lazily(
    __name__,
    [
        "own_model=graphs.OwnModel", "graphs.Ring", "graphs.Torus", "graphs.Complete", "graphs.Star",
        "graphs.Exponential", "erdos_renyi=graphs.ErdosRenyi", "small_world=graphs.SmallWorld",
        "edge_list=graphs.EdgeList", "random_pairs=graphs.RandomPairs", "hierarchy.Hierarchy", "clusters.Clusters",
        "attention.Attention", "bipartition.Bipartition", "collaboration.Collaboration",
        "combined_heads=heads.CombinedHeads", "cores.Cores", "first_order=first_order.FirstOrder",
    ],
    "graphs.Graph",
)  # fmt: skip
