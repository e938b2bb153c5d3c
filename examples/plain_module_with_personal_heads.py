"""FedRep with a plain PyTorch module: clients share the body and keep their heads."""

from torch import Tensor, nn

import fedloom as fl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 16, 32)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv(x).relu(), 2)
        return self.fc(self.hidden(x.flatten(1)).relu())


federation = fl.data.federate("digits", "dirichlet", clients=10)
result = fl.run("fedrep", federation, lambda: fl.wrap(Net(), head="fc"), rounds=5)
samples = federation.held_out.client(7)
print("mean accuracy of the clients:", result.summary["final"]["clients/accuracy/mean"])
print("client 7:", result.trained.client(7).evaluate(samples.x, samples.y))
