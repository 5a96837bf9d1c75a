"""What it costs: run one with python -m benchmarks.NAME."""
