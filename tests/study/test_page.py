"""The page: what is on it for a run, a search and comparisons; that it is whole, safe and the same each time."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib
import pytest
from msgspec import structs

from made_results import BASE, made, made_plan, made_result, write
from maxgain.errors import FileError
from maxgain.study import _files, report
from maxgain.study.api import page as write_page
from maxgain.study.comparison import compare
from maxgain.study.report import build_page
from maxgain.study.result import History, export
from maxgain.study.tuning import grid_recipes

NONE = [0.939, 0.944, 0.922, 0.95]
SCORES = {"none": NONE, "maxgain=2.5": [0.93, 0.94, 0.93, 0.94]}


class Page(HTMLParser):
    """Headings, text outside <details>, links and SVG labels of a page; fails where tags do not match."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.open, self.folded, self.drawings = [], "", "", 0
        self.headings = {"h1": [], "h2": [], "title": []}
        self.targets, self.links = set(), set()
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.drawings += tag == "svg"
        self.targets.add(attributes.get("id"))
        self.links.add(attributes.get("href", "").removeprefix("#") if tag == "a" else None)
        assert tag not in ("script", "iframe", "object")
        assert not attributes.get("src")
        if tag not in ("meta", "link", "wbr"):
            self.stack.append(tag)
            if tag in self.headings:
                self.headings[tag].append("")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] in self.headings:
            self.headings[self.stack[-1]][-1] += data
        if "details" in self.stack:
            self.folded += data
        else:
            self.open += data


def page(folder):
    return Page(build_page(folder))


def test_a_comparison_opens_with_its_number_and_folds_its_method(tmp_path):
    plan, results = made(SCORES)
    comparison = compare(plan, results)
    shown = page(write(tmp_path, plan, results))
    assert shown.headings["h1"] == shown.headings["title"] == [comparison.title]
    assert "Cannot tell maxgain=2.5 from none: −0.38 points of accuracy (" in comparison.title
    assert comparison.method in shown.folded
    assert "the largest is 8.00 with none and 2.50 with maxgain=2.5" in shown.open
    for text in ("93.88 ± 0.60", "p = 2", "γ = 2.5", "8 finished runs"):
        assert text in shown.open
    assert shown.drawings == 5, "forest, two boxes, loss and accuracy"


def test_over_seeds_the_error_of_the_test_images_is_folded_away(tmp_path):
    shown = page(write(tmp_path, *made(SCORES, over="seed")))
    assert "sampling of test images" in shown.folded
    assert "maxgain=2.5 against none" in shown.folded


def test_every_comparison_below_a_folder_is_shown(tmp_path):
    """One folder with a stored plan once hid every folder without."""
    write(tmp_path / "a", *made(SCORES))
    write(tmp_path / "b", *made({"none": NONE, "dropout": NONE[::-1]}, recipe=replace(BASE, epochs=4)))
    lone = made_result(replace(BASE, epochs=5), 0.87)
    write(tmp_path / "c", None, [lone])
    shown = page(tmp_path)
    titles = [" ".join(title.split()) for title in shown.headings["h2"]]
    assert len(titles) == 3
    assert "Cannot tell maxgain=2.5" in titles[0]
    assert "Cannot tell dropout" in titles[1]
    assert "test accuracy 87.00 %" in titles[2]
    assert "17 finished runs" in shown.open
    made_plan(SCORES, recipe=replace(BASE, epochs=6)).write(tmp_path / "d")
    assert page(tmp_path).headings["h2"][2] == "No result: none of the 8 runs has finished"
    assert "other data" not in shown.open, "a false note once stood in both sections"
    assert shown.links - {None} <= shown.targets


def test_names_break_between_regularisers_and_numbers_do_not(tmp_path):
    html = build_page(write(tmp_path, *made({"none": NONE, "maxgain=2+dropout": [0.95, 0.96, 0.95, 0.97]})))
    assert "maxgain=2+<wbr>dropout" in html
    assert not re.search(r"\+<wbr>\d", html)


def test_failed_and_missing_runs_are_said(tmp_path):
    scores = {"none": NONE, "maxgain": [*SCORES["maxgain=2.5"][:3], None]}
    shown = page(write(tmp_path, *made(scores)))
    assert "maxgain: 1 of 4 runs failed to train." in shown.open
    assert "the loss is nan" in shown.folded
    assert "3 of 4" in shown.open
    nothing = write(tmp_path / "nothing", *made({"none": [None], "maxgain": [None]}))
    assert page(nothing).headings["h1"][0].startswith("No result: none of the 2 runs has finished")


def write_choice(folder, regulariser, rule, runs, by="grid"):
    keys = [run.key for run in runs]
    _files.write_json(folder / "tuning.json", {"regulariser": regulariser, "by": by, "rule": rule, "runs": keys})


def test_an_early_search_in_the_folder_of_another(tmp_path):
    recipe = replace(BASE, train_on="train", regulariser="maxgain")
    full = [made_result(one, 0.9, validation=0.9) for one in grid_recipes(recipe, {"maxgain": (1.5, 2.0)}, None)]
    short = grid_recipes(replace(recipe, epochs=2), {"maxgain": (2.0, 3.0, 4.0)}, None)
    early = [made_result(one, 0.9, validation=0.9) for one in short]
    write_choice(write(tmp_path, None, [*full, *early]), "maxgain=3", "early", early, "early")
    shown = page(tmp_path)
    assert "maxgain=3 is the early rule's choice on digits" in shown.headings["h2"]
    assert "within 10 % of the lowest" in shown.open
    assert shown.drawings == 3, "the rule's picture, and the scores of both searches"


def test_a_search(tmp_path):
    recipe = replace(BASE, train_on="train", regulariser="maxgain")
    recipes = grid_recipes(recipe, {"maxgain": (1.5, 2.0, 3.0)}, None)
    runs = [made_result(one, 0.9, validation=0.9 - abs(one.gamma - 2) / 10) for one in recipes]
    runs.append(made_result(replace(recipe, regulariser="maxgain=9"), None))
    write_choice(tmp_path, "maxgain=2", "highest", runs)
    shown = page(write(tmp_path, None, runs))
    assert shown.headings["h1"] == ["maxgain=2 has the best validation accuracy on digits, 90.00 %"]
    assert "γ of maxgain" in shown.open
    assert "Chosen: maxgain=2 (highest)." in shown.folded
    assert shown.drawings == 1
    assert "failed" in shown.folded


def test_a_search_beside_a_run_of_the_same_recipe(tmp_path):
    recipe = replace(BASE, train_on="train", regulariser="maxgain")
    for folder, values in (("a", (1.5, 2.0)), ("b", (2.0, 3.0))):
        recipes = grid_recipes(recipe, {"maxgain": values}, None)
        runs = [made_result(one, 0.9, validation=0.9) for one in recipes]
        write_choice(write(tmp_path / folder, None, runs), f"maxgain={values[0]}", "first", runs)
    write(tmp_path / "run", None, [made_result(replace(recipe, regulariser="maxgain=2"), 0.91)])
    write_choice(tmp_path / "run", "maxgain=7", "gone", [made_result(replace(recipe, regulariser="maxgain=7"), 0.9)])
    shown = page(tmp_path)
    assert [title.partition(" ")[0] for title in shown.headings["h2"]] == ["maxgain=1.5", "maxgain=2", "digits,"]
    assert "Chosen: maxgain=1.5 (first)." in shown.folded
    assert "Chosen: maxgain=2 (first)." in shown.folded


def test_a_comparison_with_its_tuning_runs_shows_both(tmp_path):
    numbers = {"maxgain": {fold: {"maxgain": 2.0} for fold in range(4)}}
    plan, results = made({"none": NONE, "maxgain": SCORES["maxgain=2.5"]}, numbers=numbers, tuning_runs={"maxgain": 3})
    write(tmp_path, plan, results)
    tried = [
        made_result(recipe, 0.9, validation=0.9 - 0.1 * (recipe.gamma == 2) * (fold > 0))
        for fold in range(4)
        for recipe in grid_recipes(replace(BASE, fold=fold, regulariser="maxgain"), {"maxgain": (1.5, 2.0)}, None)
    ]
    write(tmp_path / "tuning", None, tried)
    shown = page(tmp_path)
    assert "Cannot tell maxgain=2" in shown.headings["h1"][0]
    assert "runs spent: maxgain 3" in shown.folded
    assert "Chosen numbers" in shown.folded
    (search,) = shown.headings["h2"]
    assert search.startswith("maxgain=1.5 has the best validation accuracy on digits, 90.00 %, the mean")


@pytest.mark.parametrize("regulariser", ["none", "maxgain=2", "maxgain=inf"])
def test_a_run(tmp_path, regulariser):
    folder = write(tmp_path, None, [made_result(replace(BASE, regulariser=regulariser), 0.93)])
    shown = page(folder)
    assert shown.headings["h1"] == [f"digits, {regulariser}: test accuracy 93.00 %"]
    assert shown.drawings == 3


def test_a_run_without_gains_or_history(tmp_path):
    shown = page(write(tmp_path, None, [made_result(BASE, 0.93, gains={}, history=History())]))
    assert (shown.headings["h1"], shown.drawings) == (["digits, none: test accuracy 93.00 %"], 0)


def test_an_export_is_shown_too(tmp_path):
    export(made(SCORES)[1], tmp_path / "runs.jsonl")
    assert "8 runs outside any comparison" in page(tmp_path / "runs.jsonl").headings["h1"]


def test_nothing_to_show_is_an_error(tmp_path):
    with pytest.raises(FileError, match="no finished run"):
        build_page(tmp_path)


def test_the_same_results_give_the_same_bytes_and_leave_matplotlib_alone(tmp_path):
    write(tmp_path / "in", *made(SCORES))
    before = dict(matplotlib.rcParams)
    first, second = (write_page(tmp_path / "in", tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second
    assert dict(matplotlib.rcParams) == before
    assert not re.search(rb'(src|href)="(?!data:|#)', first), "nothing is fetched"


def test_text_is_escaped(tmp_path):
    hostile = "<script>alert(1)</script> $x_"
    plan, results = made(SCORES)
    for result in results:
        result.note = result.command = hostile
        result.gains = {"test": {f"{hostile}{index}": (0.1, 0.2, 0.3, 0.4, 0.5) for index in range(2)}}
    html = build_page(write(tmp_path, plan, results))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 4
    Page(html)


def test_colours_follow_the_pages_theme(tmp_path):
    html = build_page(write(tmp_path, *made(SCORES)))
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    for drawing in drawings:
        assert set(re.findall(r"#[0-9a-f]{6}", drawing)) <= {"#000000", "#ffffff"}
        assert "var(--series-0)" in drawing


def test_figures_are_usable_in_python():
    plan, results = made(SCORES)
    comparison = compare(plan, results)
    rows = comparison.results
    boxes = report.gain_boxes({row: runs[0] for row, runs in rows.items()})
    assert boxes.axes[0].get_ylim() == boxes.axes[1].get_ylim()
    assert len(report.forest(comparison).axes) == 1
    assert len(report.learning_curve(rows, "train_loss").axes) == 1
    assert report.learning_curve({"none": []}, "train_loss") is None
    short = [structs.replace(run, history=History(epoch=[1], train_loss=[2.0])) for run in rows["none"]]
    assert report.learning_curve({"none": short}, "train_loss") is None, "a point is no curve"
    steep = [structs.replace(rows["none"][0], history=History(epoch=[1, 2], train_loss=[2.0, 0.05]))]
    assert re.search(r">0\.1</text>", report.figures.svg(report.learning_curve({"none": steep}, "train_loss"), "loss"))
    two = made_plan({"maxgain+dropout": NONE}).recipe
    grid = {"maxgain": (1.5, 2.0), "dropout": (0.5, 1.0)}
    points = grid_recipes(replace(two, regulariser="maxgain+dropout"), grid, None)
    assert len(report.tuning_curves([made_result(one, 0.9, validation=0.8) for one in points]).axes) == 4
