"""Rebuild REPRODUCTION.md from results/, or run what is missing of an experiment first.

python -m experiments                                   # rebuild
python -m experiments list
python -m experiments run cifar100 --data DIR --jobs 5  # then rebuild
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxgain.study.recipe import Recipe
from maxgain.study.result import Inputs, Result, export, load
from maxgain.study.running import Machine, Runner

from .document import ROOT, build
from .plan import BRIDGE, EDGE, EXPERIMENTS
from .state import by_key, read

RESULTS = ROOT / "results" / "plan-2"
REPEATS = {"edge": EDGE, "bridge": BRIDGE}
"""Recorded runs that are made again: their results stand beside the recorded ones."""


def run(name: str, data: Path | None, work: Path, machine: Machine) -> None:
    """Choose the experiment's numbers, then train its rows; every result is kept as it ends."""
    if name in REPEATS:
        train(REPEATS[name], name, work, data, machine, test=name == "bridge")
        return
    for _ in ("candidates", "numbers"):
        state = read(ROOT / "results")[name]
        wanted = [recipe for recipe in state.searched if recipe.key not in state.tuned]
        train(wanted, name, work / "tuning", data, machine, test=False)
    state = read(ROOT / "results")[name]
    if state.plan is not None:
        known = by_key(state.results)
        final = [recipe for row in state.plan.rows for recipe in state.plan.recipes(row)]
        train([one for one in final if one.key not in known], name, work, data, machine, test=True)


def train(recipes: Sequence[Recipe], name: str, work: Path, data: Path | None, machine: Machine, *, test: bool) -> None:
    """Train these and add their results to the experiment's file."""
    path = (RESULTS if test else RESULTS / "tuning") / f"{name}.jsonl"
    kept: list[Result] = load(path) if path.exists() else []
    done = by_key(kept)
    missing = [recipe for recipe in recipes if recipe.key not in done]
    with Runner(machine, Inputs(root=data)) as runner:
        for result in runner.run(missing, work, test=test):
            kept.append(result)
            export(kept, path)
            print(f"{result.recipe.title}: {result.status}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="experiments", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["build", "list", "run"], default="build")
    parser.add_argument("name", nargs="?", choices=[*EXPERIMENTS, *REPEATS])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--jobs", type=int, default=5, help="runs at once")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.what == "list":
        for name, state in read(ROOT / "results").items():
            print(f"{name}: {state.experiment.title}: {state.progress}")
        return
    if options.what == "run":
        if options.name is None:
            parser.error("name the experiment to run")
        machine = Machine(device=options.device, jobs=options.jobs)
        run(options.name, options.data, options.work / options.name, machine)
    for path in build():
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
