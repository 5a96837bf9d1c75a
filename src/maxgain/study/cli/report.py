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
}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Make one self-contained HTML page of what 'maxgain compare' and 'maxgain tune' left in a folder.

    It shows the comparison with its significance tests, learning curves, gains, and how each run was made. Nothing is
    trained.
    """

    folder: tyro.conf.Positional[Path]
    """the folder that --out named in 'maxgain compare' or 'maxgain tune'"""
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
    screen.show(f"{counted(len(found.runs), 'run')}{failed}")
    screen.end([options.out])
    return {"page": str(options.out), "runs": len(found.runs), "failed": len(found.failed)}
