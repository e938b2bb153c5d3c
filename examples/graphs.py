"""Graphs of any size as plain lists of edges, by message passing: does any node have four neighbours or more?"""

import numpy as np
import torch
from torch import nn

import fedloom as fl


def make_graph(seed):
    """A random graph: the number of its nodes and its edges [2, E] in both directions; and its class."""
    draw = np.random.default_rng(seed)
    nodes = int(draw.integers(5, 10))
    upper = np.triu(draw.random((nodes, nodes)) < 0.3, 1)
    adjacency = (upper | upper.T).astype(int)
    return (nodes, torch.tensor(np.stack(np.nonzero(adjacency)))), int(adjacency.sum(0).max() > 3)


def collate(graphs):
    """One graph of all: its edges, and the graph of each node."""
    sizes = [nodes for nodes, _ in graphs]
    first = np.cumsum([0, *sizes])
    edges = torch.cat([edges + start for (_, edges), start in zip(graphs, first, strict=False)], 1)
    return {"edges": edges, "graph": torch.arange(len(graphs)).repeat_interleave(torch.tensor(sizes))}


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 16), nn.Linear(32, 16), nn.Linear(32, 2)

    def forward(self, x):
        (source, target), graph = x["edges"], x["graph"]
        ones = self.head.weight.new_ones(len(graph), 1)
        h = self.first(torch.cat([ones, torch.zeros_like(ones).index_add(0, target, ones[source])], 1)).relu()
        h = self.second(torch.cat([h, torch.zeros_like(h).index_add(0, target, h[source])], 1)).relu()
        graphs = h.new_zeros(int(graph.max()) + 1, 16)
        largest = graphs.scatter_reduce(0, graph[:, None].expand_as(h), h, "amax")
        return self.head(torch.cat([graphs.index_add(0, graph, h), largest], 1))


graphs, labels = zip(*map(make_graph, range(300)), strict=True)
federation = fl.data.federate(graphs, "dirichlet", clients=5, y=labels, collate=collate)
run = fl.run("fedavg", federation, Passing, rounds=20, local=fl.Local(lr=0.02))
print(run.summary["final"]["clients/accuracy/mean"], run.trained.server.predict(graphs[:5]))
