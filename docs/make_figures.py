"""Makes every number, table and figure of these pages: `python docs/make_figures.py`.

What is measured goes to figures/numbers.json, the figures are drawn from that alone, and so are the tables, which
replace what stands between `<!-- table: NAME -->` and `<!-- end -->` in the pages. It takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from measurements import (
    batch_norm,
    choosing_gamma,
    every,
    gain_or_lipschitz,
    layer_by_layer,
    momentum,
    ratchet,
    stale_and_fresh,
)
from measurements.digits import QUICK, Effort, summary
from measurements.style import styled, svg

from maxgain.study.files import write_bytes, write_json, write_text

PARTS = {
    "layer-by-layer": layer_by_layer,
    "choosing-gamma": choosing_gamma,
    "momentum": momentum,
    "stale-and-fresh": stale_and_fresh,
    "batch-norm": batch_norm,
    "gain-or-lipschitz": gain_or_lipschitz,
    "ratchet": ratchet,
    "every": every,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder of the pages")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="measure these alone")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; draw what was measured before")
    parser.add_argument("--quick", action="store_true", help="train hardly at all, to see whether everything runs")
    options = parser.parse_args()
    kept = options.out / "figures" / "numbers.json"
    numbers: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if not options.redraw:
        torch.set_num_threads(1)
        effort = QUICK if options.quick else Effort()
        numbers["of all"] = summary(effort)
        for name in options.only:
            numbers[name] = rounded(PARTS[name].measure(effort))
            print(f"{name}: measured", flush=True)
        write_json(kept, numbers, replace=True)
    for name in PARTS:
        with styled():
            write_bytes(kept.with_name(f"{name}.svg"), svg(PARTS[name].draw(numbers[name])), replace=True)
    for page in options.out.glob("*.md"):
        write_text(page, with_tables(page.read_text(encoding="utf-8"), numbers), replace=True)


def rounded(content: Any) -> Any:
    """The same with five significant digits per number: more would only be noise."""
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(value) for value in content]
    return float(f"{content:.5g}") if isinstance(content, float) else content


def with_tables(text: str, numbers: dict[str, Any]) -> str:
    """A page with its tables made from the numbers."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{PARTS[found[2]].table(numbers[found[2]])}\n\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    main()
