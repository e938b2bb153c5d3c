"""Use what a run trained: load it, predict, measure, export, and let a new client join."""

import fedloom as fl
from fedloom.cli import main

main(["run", "-q", "method=ditto", "clients=10", "rounds=5", "out=runs/ditto"])

run = fl.load("runs/ditto")
print(run.history[["round", "clients/accuracy/mean"]])

model = run.client(7)  # the personal model that client 7 deploys
samples = run.federation.held_out.client(7)
print("predictions:", model.predict(samples.x).tolist())
print("client 7:", model.evaluate(samples.x, samples.y))
model.export("runs/client-7.safetensors")
model.export("runs/client-7.pt2", format="torch-export")

new = run.adapt(samples.x[:10], samples.y[:10])  # a client that was not there in training
print("new client:", new.evaluate(samples.x[10:], samples.y[10:]))
