"""The pages under docs/: links lead somewhere, tables and figures are made from what was measured, prose quotes it."""

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import mean, median
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

import maxgain
import maxgain.monitor

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NUMBERS = DOCS / "figures" / "numbers.json"
PAGES = sorted(DOCS.glob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md"]
TABLE = re.compile(r"<!-- table: ([\w-]+) -->")
MEASURED = {page: TABLE.findall(page.read_text(encoding="utf-8")) for page in PAGES}
MEASURED = {page: names for page, names in MEASURED.items() if names}
"""The pages that show measurements, and the names of those."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUOTED_FROM_THE_PAPER = {"2.006"}
LARGEST_FIGURE = 150_000

named = pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: str(page.relative_to(ROOT)))
measured = pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A copy of the pages, worked over by the script in a hurry, and a copy that it only filled in again."""
    quick, redrawn = tmp_path_factory.mktemp("quick"), tmp_path_factory.mktemp("redrawn")
    for page in PAGES:
        shutil.copy(page, quick)
        shutil.copy(page, redrawn)
    (redrawn / "figures").mkdir()
    shutil.copy(NUMBERS, redrawn / "figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        for folder, mode in ((quick, "--quick"), (redrawn, "--redraw")):
            patch.setattr(sys, "argv", ["make_figures.py", mode, "--out", str(folder)])
            runpy.run_path(str(DOCS / "make_figures.py"), run_name="__main__")
    return quick, redrawn


@named
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, heading = unquote(target).partition("#")
        if "://" in path:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in headings(linked), f"{page.name} links to {target}"


def test_index_knows_every_page():
    index = LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES} - {"README.md"} <= set(index)


@measured
def test_tables_hold_what_was_measured(page, scripted):
    _, redrawn = scripted
    assert (redrawn / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
        "run docs/make_figures.py --redraw"
    )


@measured
def test_prose_quotes_what_was_measured(page):
    """Every decimal number in a sentence or a caption stands in the page's table, or is a measured one, rounded."""
    text = page.read_text(encoding="utf-8")
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    leaves = [leaf for name in ("of all", *MEASURED[page]) for leaf in numbers_in(numbers[name])]
    prose = re.sub(r"^```.*?^```|`[^`]*`|^\|.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = set(re.findall(r"\d+\.\d+", prose)) - QUOTED_FROM_THE_PAPER - set(re.findall(r"\d+\.\d+", tables))
    unknown = {
        number for number in quoted if number not in {f"{leaf:.{len(number.partition('.')[2])}f}" for leaf in leaves}
    }
    assert not unknown


def test_what_ranks_take_to_exchange_bytes_is_what_was_recorded():
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    record = ROOT / "benchmarks" / "results" / "exchange-2026-11-16.json"
    by_ranks = json.loads(record.read_text(encoding="utf-8"))["milliseconds"]
    assert f"../benchmarks/results/{record.name}" in page
    for size in by_ranks["2"]:
        quartiles = [by_ranks[ranks][size] for ranks in ("2", "4")]
        cells = [f"{q['median']:.2f} ms ({q['lower']:.2f} to {q['upper']:.2f})" for q in quartiles]
        assert f"| {int(size):,} | {' | '.join(cells)} |" in page


def test_the_ratchet_on_cifar10_is_what_was_recorded():
    page = (DOCS / "ratchet.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- records: ratchet -->")[2].partition("<!-- end -->")[0]
    searched = {run["config"]["regulariser"]: run for run in records("tuning/cifar10.jsonl")}
    (released,) = records("ratchet/cifar10.jsonl")
    tight, loose = searched["maxgain=1.5"], searched["maxgain=2"]
    assert released["config"] == tight["config"] | {"strength": "rate"}
    for name, run in {"γ = 1.5": tight, "γ = 1.5 and `strength='rate'`": released, "γ = 2": loose}.items():
        epochs = [run["history"][epoch - 1] for epoch in (100, 120, 122, 130, 140)]
        losses = [f"{epoch['train_loss']:.4f}" for epoch in epochs]
        gains = [f"{mean(epoch['max_gain'].values()):.3f}" for epoch in epochs]
        assert f"| {name}, training loss | {' | '.join(losses)} |" in shown
        assert f"| {name}, gain | {' | '.join(gains)} |" in shown
        accuracies = [f"{100 * epoch['validation_accuracy']:.1f} %" for epoch in epochs]
        assert f"| {name}, validation accuracy | {' | '.join(accuracies)} |" in shown


def test_how_gamma_was_chosen_on_cifar10_is_what_was_recorded():
    page = (DOCS / "choosing-gamma.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- records: choosing-gamma -->")[2].partition("<!-- end -->")[0].replace("*", "")
    searched = {(run["regulariser"], run["gamma"]): run for run in records("tuning/cifar10.jsonl")}
    finished = records("cifar10.jsonl")
    rows = ["maxgain", "maxgain+dropout", "maxgain+batchnorm", "maxgain+batchnorm+dropout"]
    for gamma in (1.25, 1.5, 2.0, 3.0, 4.0):
        runs = [searched[row, gamma] for row in rows]
        cells = [f"{100 * run['train_accuracy']:.1f} / {100 * run['validation_accuracy']:.1f}" for run in runs]
        assert f"| {gamma:g} | {' | '.join(cells)} |" in shown
    medians = []
    for free in ("none", "dropout", "batchnorm", "batchnorm+dropout"):
        gains = [run["max_gain"]["train"].values() for run in finished if run["regulariser"] == free]
        medians.append(f"{mean(map(median, gains)):.1f}")
    assert f"| median gain without a bound | {' | '.join(medians)} |" in shown


def test_the_gamma_curve_of_svhn_is_what_was_recorded():
    page = (DOCS / "choosing-gamma.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- records: gamma-curve -->")[2].partition("<!-- end -->")[0].replace("*", "")
    runs = sorted(
        (run for run in records("tuning/svhn.jsonl") if run["regulariser"] == "maxgain"), key=itemgetter("gamma")
    )
    gammas = [f"{run['gamma']:g}" for run in runs]
    assert f"| γ | {' | '.join(gammas)} |" in shown
    for name in ("training", "validation"):
        key = "train_accuracy" if name == "training" else "validation_accuracy"
        accuracies = [f"{100 * run[key]:.1f}" for run in runs]
        assert f"| {name} | {' | '.join(accuracies)} |" in shown


def test_what_the_readme_opens_with_is_what_was_established():
    opening = " ".join((ROOT / "README.md").read_text(encoding="utf-8").partition("**Does it help?**")[2].split())
    scores = defaultdict(list)
    for run in records("cifar10.jsonl"):
        scores[run["regulariser"]].append(100 * run["test_accuracy"])
    gained = {
        free: mean(scores[held]) - mean(scores[free])
        for held, free in (
            ("maxgain", "none"),
            ("maxgain+dropout", "dropout"),
            ("maxgain+batchnorm", "batchnorm"),
            ("maxgain+batchnorm+dropout", "batchnorm+dropout"),
        )
    }
    points = [f"{points:+.1f}" for points in gained.values()]
    assert re.findall(r"[+]\d+\.\d", opening)[: len(points)] == points


def records(name):
    """The recorded runs of a file in results/."""
    return [json.loads(line) for line in (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()]


@measured
def test_figures_are_small_and_made_by_the_script(page, scripted):
    quick, redrawn = scripted
    for name in MEASURED[page]:
        assert f"figures/{name}.svg" in LINK.findall(page.read_text(encoding="utf-8"))
        for folder in (DOCS, redrawn, quick):
            content = (folder / "figures" / f"{name}.svg").read_bytes()
            assert len(content) < LARGEST_FIGURE
            assert "prefers-color-scheme: dark" in content.decode()
            drawn = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(content).iter()}
            assert {"path", "text"} <= drawn


def test_a_quick_run_replaces_numbers_and_tables(scripted):
    quick, _ = scripted
    numbers = json.loads((quick / "figures" / "numbers.json").read_text(encoding="utf-8"))
    assert set(numbers) == {"of all", *chain.from_iterable(MEASURED.values())}
    for page in MEASURED:
        assert (quick / page.name).read_text(encoding="utf-8") != page.read_text(encoding="utf-8")


PUBLIC = [name for name in dir(maxgain) if callable(getattr(maxgain, name))]


@pytest.mark.parametrize("name", [*PUBLIC, "functional.gain", "functional.project_", "monitor.Monitor"])
def test_docstrings_list_every_argument(name):
    thing = attrgetter(name)(maxgain)
    described = re.findall(r"^ {4}(\w+): ", inspect.getdoc(thing).partition("Args:\n")[2], re.MULTILINE)
    assert described == list(inspect.signature(thing).parameters)


def test_the_site_builds_without_a_warning(tmp_path):
    """Every page is in the contents, every link leads somewhere, every name of the reference exists."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "api" / "method" / "index.html").read_text(encoding="utf-8")
    assert "MaxGain" in PUBLIC
    assert [name for name in PUBLIC if f'id="maxgain.{name}"' not in reference] == []


def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def numbers_in(content):
    """Every number of a JSON value; not those of long series, among which one would find anything."""
    if isinstance(content, dict):
        for value in content.values():
            yield from numbers_in(value)
    elif isinstance(content, list):
        if len(content) <= 20:
            for value in content:
                yield from numbers_in(value)
    elif isinstance(content, int | float):
        yield content
