"""What a training step costs: `python -m benchmarks`."""
