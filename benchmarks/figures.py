"""The figures of a record: what a step costs in each mode, and with ``every=8``.

python -m benchmarks.figures benchmarks/results/RECORD.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODES = ("eager", "compiled", "captured")


def draw(rows: Sequence[dict[str, Any]], folder: Path, stem: str = "bench") -> None:
    """Write two figures, of steps that all measure and of steps of which every eighth does."""
    for variant, name in (("MaxGain", stem), ("every=8", f"{stem}-every-8")):
        if chosen := [row for row in rows if row["variant"] == variant and "(" not in row["network"]]:
            _bars(chosen, folder / f"{name}.svg", variant)


def _bars(rows: Sequence[dict[str, Any]], path: Path, variant: str) -> None:
    """Bars of ratios, one per mode and network, with the ends over the turns."""
    from matplotlib.figure import Figure

    names, modes = list(dict.fromkeys(row["network"] for row in rows)), [*MODES]
    modes = [mode for mode in modes if any(row["mode"] == mode for row in rows)]
    figure = Figure(figsize=(7.6, 1 + 0.5 * len(names)), layout="constrained")
    axis = figure.subplots()
    for index, mode in enumerate(modes):
        bars = [row for row in rows if row["mode"] == mode]
        places = [names.index(row["network"]) + (index - (len(modes) - 1) / 2) * 0.25 for row in bars]
        ends = [[row["ratio"] - row["lowest"] for row in bars], [row["highest"] - row["ratio"] for row in bars]]
        axis.barh(places, [row["ratio"] - 1 for row in bars], 0.22, left=1, xerr=ends, label=mode, error_kw={"lw": 0.8})
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.axvline(1, color="black", lw=0.8)
    axis.set_xlabel(f"step with {variant} / step without")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    record = Path(sys.argv[1])
    draw(json.loads(record.read_text())["rows"], record.parent, record.stem)
