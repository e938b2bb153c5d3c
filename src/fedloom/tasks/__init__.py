"""What uses the round or its trainer for another end than one model: synthetic data, streams of tasks, distillation."""
