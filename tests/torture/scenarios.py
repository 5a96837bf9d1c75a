"""What a process may be at when a system call fails or the process is killed. Each can be done again, and goes on then.

`kept` tells what a scenario leaves behind, with the passage of time taken out: the same however often it was disturbed.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxgain.study.comparing import records, shards
from maxgain.study.files import write_json
from maxgain.study.recipes import RECIPES
from maxgain.study.report import page
from maxgain.study.runs import Place, perform
from synthetic_records import synthetic_run

RECIPE = replace(
    RECIPES["digits"], network="mlp", regulariser="maxgain+batchnorm+dropout", augment=True, epochs=2, fold=0
)
RUNS = [synthetic_run(name, fold=fold, epochs=2, layers=2) for name in ("none", "maxgain") for fold in range(2)]

TIMES = ("seconds", "finished", "command", "metrics_sha256", "sha256")
"""What is about the moment, or follows from what is."""


def every_epoch(folder: Path) -> None:
    """A run that saves after every epoch."""
    perform(RECIPE, Place(folder), resume=True)


def every_step(folder: Path) -> None:
    """A run that saves after every step."""
    perform(RECIPE, Place(folder, checkpoint_seconds=0), resume=True)


def recording(folder: Path) -> None:
    """Several runs recorded, each once."""
    for run in RUNS:
        if records.read(folder / "results").find(run["key"]) is None:
            records.append(folder / "results", run)


def reporting(folder: Path) -> None:
    """Records, and the page about them."""
    recording(folder)
    page.write(folder, folder / "report.html")


def merging(folder: Path) -> None:
    """Records and runs of another machine brought together with those of this one."""
    recording(folder / "there")
    for name in ("first", "second"):
        write_json(folder / "there" / "runs" / name / "result.json", {"name": name}, replace=True)
    shards.merge(folder / "here", [folder / "there" / "results", folder / "there"])


SCENARIOS: dict[str, Callable[[Path], None]] = {
    scenario.__name__: scenario for scenario in (every_epoch, every_step, recording, merging, reporting)
}


def kept(folder: Path) -> dict[str, Any]:
    """The content of every file below the folder, without what is about the time that it took."""
    return {
        str(path.relative_to(folder)): _timeless(path) for path in sorted(folder.rglob("*")) if path.name != ".maxgain"
    }


def _timeless(path: Path) -> Any:
    if path.is_dir():
        return None
    content = path.read_bytes()
    if path.suffix == ".json":
        return _without_time(json.loads(content))
    if path.suffix == ".jsonl":
        return [_without_time(json.loads(line)) for line in content.splitlines()]
    return content


def _without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_time(item) for name, item in value.items() if name not in TIMES}
    return value
