"""Tasks beyond training one federated model: synthetic data, task streams, distillation, search, and targets."""
