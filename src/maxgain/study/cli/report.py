"""maxgain report: one page about everything that is recorded in a folder, that opens offline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..report import page
from ..wording import counted
from .terminal import Common, Screen

EXAMPLES = {
    "maxgain report compare-digits": "a page of a comparison, into report.html",
    "maxgain report tune-digits-maxgain --out tune.html": "what a search tried, and what it chose",
    "maxgain report runs/digits-maxgain=2-seed0 --out run.html": "one run: its scores, curves and gains",
    "maxgain report . --out everything.html": "all that lies in the folders here",
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Make one self-contained HTML page of what 'maxgain train', 'tune' and 'compare' left in a folder.

    It shows comparisons with their significance tests, learning curves, gains, searches, and how each run was made. A
    folder that holds several of such folders makes one page of all of them. Nothing is trained.
    """

    folder: tyro.conf.Positional[Path]
    """the folder of a run, a search or a comparison, or one that holds several"""
    out: Path = Path("report.html")
    """the page"""
    baseline: str | None = None
    """what regularisers are tested against (default: as in the folder's last comparison, else none)"""


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Writes the page and says where it is."""
    found = page.write(options.folder, options.out, options.baseline)
    for warning in found.warnings:
        screen.show(f"note: {warning}")
    failed = f", {len(found.failed)} failed" if found.failed else ""
    if found.runs or found.failed:
        screen.show(f"{counted(len(found.runs), 'run')}{failed}")
    screen.end([options.out])
    screen.show(f"open it in a browser: {options.out.absolute().as_uri()}")
    return {"page": str(options.out), "runs": len(found.runs), "failed": len(found.failed)}
