"""The paper's tables and figures, run again: `python -m experiments` rebuilds REPRODUCTION.md from results/."""
