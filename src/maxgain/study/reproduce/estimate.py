"""How long runs will take, by what runs like them took: known once there is one, and not before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from ..comparing.jobs import Job
from ..comparing.records import Record
from ..wording import counted, duration


def seconds(job: Job, runs: Iterable[Record]) -> float | None:
    """What a run is expected to take: by runs of its row where there are any, else by others of its recipe."""
    of_recipe = [run for run in runs if run["recipe"] == job.recipe.name and "seconds" in run]
    alike = [run for run in of_recipe if run["regulariser"] == job.row] or of_recipe
    return job.recipe.epochs * median(run["seconds"] / run["config"]["epochs"] for run in alike) if alike else None


def in_words(jobs: Sequence[Job], runs: Sequence[Record], at_once: int) -> str:
    """How long these runs will take together, as far as records can tell."""
    known = [seconds(job, runs) for job in jobs]
    total = sum(one for one in known if one is not None)
    if not jobs:
        return "nothing is left to run"
    if None in known:
        return f"{counted(len(jobs), 'run')}, and no record of one like them that could tell how long they take"
    recipes = {job.recipe.name for job in jobs}
    devices = dict.fromkeys(run["device"] for run in runs if run["recipe"] in recipes and "device" in run)
    return (
        f"{counted(len(jobs), 'run')}, {duration(total / min(at_once, len(jobs)))} of training with {at_once} at a "
        f"time, if they take as long as those recorded on {', '.join(devices)}; starting and measuring come on top"
    )
