"""The page is what its readers believe: numbers against scipy, words against numbers, and nothing from elsewhere."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from maxgain.errors import RecordError, RunError
from maxgain.study.cli.app import main
from maxgain.study.comparing import engine, sentences, statistics
from maxgain.study.comparing.records import Records
from maxgain.study.report import gain_data, page
from maxgain.study.report.comparisons import comparisons
from maxgain.study.report.gain_data import packed
from maxgain.study.report.page import build_page
from synthetic_records import COMMAND, failed_run, save, synthetic_records, synthetic_run

NONE = [0.90, 0.91, 0.89, 0.92, 0.90]
LIKE = [0.91, 0.90, 0.90, 0.92, 0.89]  # no better than NONE
BETTER = [0.95, 0.955, 0.945, 0.96, 0.951]


class Elements(HTMLParser):
    """What a page consists of: its elements, its visible text, and its tables as rows of cells' texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.words, self.open, self.kinds = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.kinds.append(dict(attributes).get("class", "").split())
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.words.append(data)
        if self.tables and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def table(self, kind):
        """The first table of a kind: each row's cells by heading, by its first cell."""
        number = next(number for number, kinds in enumerate(self.kinds) if kind in kinds)
        headings, *rows = ([" ".join(cell.split()) for cell in row] for row in self.tables[number])
        return {row[0]: dict(zip(headings, row, strict=True)) for row in rows if row[0]}

    @property
    def rows(self):
        """The table of regularisers."""
        return self.table("rows")

    @property
    def contrasts(self):
        """The table of contrasts."""
        return self.table("contrasts")


def bare_records(scores, **options):
    """Records without what figures are drawn from, which takes time."""
    return synthetic_records(scores, **{"history": [], "operator_norms": {}} | options)


def built(scores, **options):
    return Elements(build_page(bare_records(scores, **options)))


@pytest.fixture(scope="module")
def whole_page():
    return build_page(synthetic_records({"none": NONE, "maxgain": BETTER}))


@pytest.fixture(scope="module")
def whole(whole_page):
    return Elements(whole_page)


# The comparison


def test_the_tables_have_the_numbers_of_the_paired_tests():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    mean, error = 100 * sum(BETTER) / 5, 100 * stats.sem(BETTER)
    assert shown.rows["maxgain"]["Accuracy, %"] == f"{mean:.2f} (highest mean) ± {error:.2f}"
    assert shown.rows["maxgain"]["Runs"] == "5"
    test = stats.ttest_rel(BETTER, NONE)
    low, high = test.confidence_interval(1 - 0.05 / 2)  # two contrasts
    row = shown.contrasts["maxgain against none"]
    difference = 100 * (sum(BETTER) - sum(NONE)) / 5
    assert row["Difference, points"] == f"{difference:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
    analyses = [row for row in shown.tables[1][1:] if "paired" in row]
    other = stats.ttest_rel(LIKE, NONE).pvalue
    assert [row[3] for row in analyses] == [f"{other:.3f}", "< 0.001" if test.pvalue < 0.001 else f"{test.pvalue:.3f}"]
    # Holm over two: the smaller p doubles, and the larger stays.
    assert shown.contrasts["dropout against none"]["Holm p"] == f"{max(other, 2 * test.pvalue):.3f}"


def test_verdicts_and_what_they_rest_on_are_said_in_words():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    assert shown.contrasts["dropout against none"]["Verdict"] == "inconclusive"
    assert shown.contrasts["maxgain against none"]["Verdict"] == "established"
    assert "Established: maxgain is better than none. Inconclusive: dropout against none." in shown.text
    assert "3 regularisers on digits, the same 5 disjoint folds" in shown.text
    assert f"2 contrasts, one family: verdicts follow the {statistics.DISJOINT_FOLDS}" in shown.text
    (comparison,) = comparisons(bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER})).values()
    for sentence in sentences.in_words(comparison).contrasts:
        assert sentence in shown.text


def test_a_worse_regulariser_is_called_worse():
    shown = built({"none": BETTER, "maxgain": NONE})
    assert shown.contrasts["maxgain against none"]["Verdict"] == "reversed"
    assert "Reversed: maxgain is worse than none." in shown.text


def test_the_best_mean_alone_is_bold():
    text = build_page(bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER}))
    assert re.findall(r"<strong>(.*?)</strong>", text) == ["95.22"]


def test_a_difference_without_spread_is_no_finding():
    shown = built({"none": [0.90, 0.91, 0.92], "maxgain": [0.91, 0.92, 0.93]})
    row = shown.contrasts["maxgain against none"]
    assert (row["Holm p"], row["Verdict"]) == ("–", "inconclusive")
    assert {cell for row in shown.tables[1][1:] for cell in row[3:]} == {"–"}
    assert "Nothing was tested: the differences have no spread to judge them by." in shown.text


def test_seeds_on_one_split_are_called_that():
    shown = built({"none": NONE, "maxgain": BETTER}, over="seed")
    assert "the same 5 seeds on one split" in shown.text
    assert statistics.ONE_SPLIT in shown.text
    assert "it says nothing about other data" in shown.text


def test_one_run_each_is_not_tested():
    shown = built({"none": [0.9], "maxgain": [0.99]})
    assert "one run each cannot tell a difference from chance" in shown.text
    assert shown.contrasts["maxgain against none"]["Holm p"] == "–"


def test_a_failure_is_in_the_headline_and_takes_away_its_own_pair_alone():
    scores = {"none": NONE, "dropout": LIKE, "maxgain": [*BETTER[:4], None]}
    shown = built(scores, failed=[failed_run("maxgain", fold=4)])
    assert "maxgain (4 of 5 runs)" in shown.text
    assert "maxgain: 1 of 5 runs failed and have no score." in shown.text
    assert shown.rows["maxgain"]["Runs"] == "4 of 5"
    p_values = [row[3] for row in shown.tables[1][1:] if "paired" in row]
    expected = stats.ttest_rel(LIKE, NONE).pvalue, stats.ttest_rel(BETTER[:4], NONE[:4]).pvalue
    assert p_values == ["< 0.001" if p < 0.001 else f"{p:.3f}" for p in expected]


def test_a_row_whose_runs_all_failed_is_named():
    failed = [failed_run("maxgain", fold=fold) for fold in range(5)]
    shown = built({"none": NONE, "dropout": LIKE}, failed=failed)
    row = shown.rows["maxgain"]
    assert (row["Accuracy, %"], row["Runs"]) == ("–", "0 of 5")
    assert "maxgain is not compared: all of its 5 runs failed." in shown.text


def test_the_matrix_shows_every_row_against_every_row():
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    matrix = {name: list(row.values())[1:] for name, row in shown.table("matrix").items()}
    assert list(matrix) == ["none", "dropout", "maxgain"]
    p = stats.ttest_rel(LIKE, NONE).pvalue
    assert matrix["dropout"][0] == f"0.002/1/2, p {p:.3f}"
    assert matrix["maxgain"][0].startswith("+4.825/0/0, p")
    assert matrix["none"][2].startswith("−4.820/0/5, p")
    assert "maxgain has the highest mean, and is ahead of none and dropout on every fold." in shown.text


def test_the_baseline_can_be_chosen():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    shown = Elements(build_page(found, baseline="maxgain"))
    assert shown.contrasts["none against maxgain"]["Verdict"] == "reversed"
    with pytest.raises(RecordError, match="did you mean 'maxgain'"):
        build_page(found, baseline="maxgian")


def test_folds_and_seeds_of_one_recipe_are_two_comparisons():
    folds = bare_records({"none": NONE, "maxgain": BETTER})
    seeds = bare_records({"none": LIKE, "maxgain": BETTER}, over="seed")
    both = comparisons(Records(folds.runs + seeds.runs, (), ()))
    assert [(found.question.over, len(found.question.units)) for found in both.values()] == [("fold", 5), ("seed", 5)]
    alone = [next(iter(comparisons(part).values())) for part in (folds, seeds)]
    assert [found.contrasts for found in both.values()] == [found.contrasts for found in alone]


def test_runs_with_other_settings_are_not_compared_with_each_other():
    long = bare_records({"none": NONE, "maxgain": BETTER}, epochs=20)
    short = bare_records({"none": LIKE, "maxgain": NONE}, epochs=5)
    both = comparisons(Records(long.runs + short.runs, (), ()))
    assert sorted(both) == ["digits (epochs 20)", "digits (epochs 5)"]


def test_two_runs_of_one_row_on_one_fold_are_told_apart_by_their_numbers_and_never_mixed():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    others = bare_records({"maxgain": LIKE}, config={"regulariser": "maxgain=8"}).runs
    (comparison,) = comparisons(Records((*found.runs, *others), (), ())).values()
    assert [row.name for row in comparison.rows] == ["none", "maxgain=2", "maxgain=8"]
    assert list(comparison.row("maxgain=8").scores.values()) == LIKE


def test_the_page_depends_on_what_is_recorded_and_on_nothing_else(whole_page):
    found = bare_records({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    backwards = replace(found, runs=found.runs[::-1])
    assert Elements(build_page(found)).tables[:3] == Elements(build_page(backwards)).tables[:3]
    assert build_page(synthetic_records({"none": NONE, "maxgain": BETTER})) == whole_page


# Everything else on the page


def test_every_run_has_its_score_command_versions_and_machine():
    found = bare_records({"none": NONE, "maxgain": BETTER})
    other = synthetic_run(
        "maxgain", fold=9, command="maxgain train digits --fold 9", torch="2.11.0", accuracy=0.5, history=[]
    )
    shown = Elements(build_page(replace(found, runs=(*found.runs, other))))
    for told in (COMMAND, "maxgain train digits --fold 9", "torch 2.11.0", "torch 2.13.0", "Synthetic x86_64", "cpu"):
        assert told in shown.text
    for run in (*found.runs, other):
        assert run["key"] in shown.text


def test_failed_runs_are_listed_with_their_error_and_command():
    failed = failed_run("maxgain", fold=3, error="the loss became infinite in epoch 7") | {"command": "maxgain x"}
    shown = built({"none": NONE[:3], "maxgain": LIKE[:3]}, failed=[failed])
    assert "digits, maxgain=2, fold 3, seed 0" in shown.text
    assert "the loss became infinite in epoch 7" in shown.text
    assert "maxgain x" in shown.text


def test_figures_have_text_alternatives(whole):
    drawings = [attributes for tag, attributes in whole.elements if tag == "svg"]
    labelled = [attributes["aria-label"] for attributes in drawings if attributes.get("role") == "img"]
    assert len(labelled) == 4 + 3  # learning curves; gains of two parts and norms
    assert all(attributes.get("aria-hidden") or attributes.get("aria-label") for attributes in drawings)
    assert "After the last epoch: none" in labelled[0]


def test_ids_are_unique_and_references_lead_somewhere(whole):
    ids = [attributes["id"] for _, attributes in whole.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    inside = {
        reference
        for _, attributes in whole.elements
        for name, value in attributes.items()
        for reference in re.findall(r"#([\w-]+)", value or "")
        if name in ("href", "clip-path")
    }
    assert inside
    assert inside <= set(ids)


def test_gains_and_norms_of_a_layer_are_means_over_runs_and_are_explained(whole):
    assert "lower bound of the layer's operator norm" in whole.text
    runs = synthetic_records({"none": NONE}).runs
    norm = sum(run["operator_norms"]["classifier.fc"] for run in runs) / 5
    gain = sum(run["max_gain"]["test"]["classifier.fc"] for run in runs) / 5
    tables = [table for table in whole.tables if table[0] == ["Layer", "none", "maxgain"]]
    assert [table[-1][0] for table in tables] == ["classifier.fc"] * 3  # gains of two parts, norms
    assert [float(table[-1][1]) for table in tables[1:]] == pytest.approx([gain, norm], rel=1e-3)


def test_norms_are_not_set_beside_gains_in_another_norm():
    found = synthetic_records({"none": NONE}, config={"p": float("inf")}, p=float("inf"), history=[])
    assert "operator norms" not in Elements(build_page(found)).text


def test_what_a_record_does_not_have_is_left_out():
    shown = built({"none": NONE, "maxgain": BETTER}, gain_quantiles={}, command=None, machine=None)
    assert "maxgain is better than none" in shown.text
    for heading in ("Learning curves", "operator norms", "Gains of two runs", "How numbers were chosen"):
        assert heading not in shown.text


def test_final_runs_that_hold_nothing_out_have_no_validation_curves():
    found = synthetic_records({"none": NONE}, operator_norms={})
    runs = tuple(
        run | {"history": [line | {"validation_loss": None, "validation_accuracy": None} for line in run["history"]]}
        for run in found.runs
    )
    text = build_page(replace(found, runs=runs))
    assert "training loss" in text
    assert "validation loss" not in text


def test_a_number_that_is_none_spoils_no_figure():
    run = synthetic_run("none")
    last = run["history"][-1] | {"train_loss": math.inf, "validation_loss": None}
    quantiles = {"train": run["gain_quantiles"]["train"] | {"dead": [None] * 5, "wild": [1, 2, 3, 4, math.inf]}}
    norms = run["operator_norms"] | {"wild": math.inf}
    run |= {"history": [*run["history"], last], "gain_quantiles": quantiles, "operator_norms": norms, "max_gain": {}}
    text = build_page(Records((run,), (), ()))
    (drawn,) = gains_on(text)
    assert list(drawn["train"]) == list(norms)[:-1]
    assert drawn["test"] == {}


def gains_on(text):
    """What the page's script draws box plots from: each run's name, bound and gains by part and layer."""
    data = json.loads(re.search(r'id="gain-data">(.*?)</script>', text)[1])
    runs = []
    for row, regulariser, fold, seed, bound, network, *codes in data["runs"]:
        run = {"row": data["words"][row], "name": (data["words"][regulariser], fold, seed), "bound": bound}
        for part, code in zip(("train", "test"), codes, strict=True):
            steps = np.frombuffer(base64.b64decode(code), "<u2").astype(float).reshape(-1, 5)
            values = np.where(steps == 0, 0, 2 ** ((steps - 32768) / 2048)).tolist()
            run[part] = dict(zip(data["networks"][network], values, strict=True)) if values else {}
        runs.append(run)
    return runs


def test_a_search_is_drawn_with_its_numbers_and_its_choice(tmp_path):
    scores = {"train_accuracy": 0.99, "train_loss": 0.02, "validation_accuracy": 0.9125, "validation_loss": 0.3}
    curve = [{"values": {"maxgain": value}, "status": "complete", **scores} for value in (1.5, 2.0)]
    curve.append({"values": {"maxgain": 9.0}, "status": "pruned", "epochs": 3})
    tuned = {"recipe": "digits", "asked": "maxgain", "regulariser": "maxgain=2", "values": {"maxgain": 2.0}}
    for name, content in (("curve", curve), ("tuned", tuned)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page.write(tmp_path, tmp_path / "report.html")
    shown = Elements((tmp_path / "report.html").read_text())
    assert "γ for MaxGain on digits: 2 " in shown.text
    assert "Chosen: maxgain=2." in shown.text
    assert "3 trials" in shown.text
    assert "0 finished runs" not in shown.text
    drawn = next(a["aria-label"] for tag, a in shown.elements if a.get("role") == "img")
    assert "against γ, 2 points" in drawn
    headings, *rows = shown.tables[0]
    assert headings[0] == "γ"
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("1.5", "91.25", ""),
        ("2.0", "91.25", "chosen"),
        ("9.0", "–", "pruned"),
    ]


def test_notes_about_the_data_are_passed_on():
    assert "Note: half of SVHN." in built({"none": NONE}, note="half of SVHN").text


def test_gain_boxes_are_drawn_from_the_records():
    found = bare_records({"none": NONE[:2], "maxgain": BETTER[:2]})
    drawn = gains_on(build_page(found))
    assert [run["name"] for run in drawn] == [("none", 0, 0), ("none", 1, 0), ("maxgain=2", 0, 0), ("maxgain=2", 1, 0)]
    assert [run["bound"] for run in drawn] == [None, None, 2.0, 2.0]
    for run, record in zip(drawn, found.runs, strict=True):
        for part in ("train", "test"):
            for layer, row in record["gain_quantiles"][part].items():
                assert run[part][layer] == pytest.approx(row, rel=2e-4)


def test_gains_of_nothing_and_of_very_much_fit_into_two_bytes():
    codes = np.frombuffer(base64.b64decode(packed([0.0, 1.0, 1e-9, 1e9])), "<u2").tolist()
    assert codes == [0, 32768, 1, 65535]


def test_of_very_many_runs_each_row_keeps_as_many(monkeypatch):
    monkeypatch.setattr(gain_data, "MOST_RUNS", 4)
    text = build_page(bare_records({"none": NONE, "maxgain": BETTER}))
    assert [run["row"] for run in gains_on(text)] == ["none", "none", "maxgain", "maxgain"]
    assert "the first 2 of each row can be chosen here" in text


def test_a_row_says_its_numbers_and_where_they_come_from():
    shown = built({"none": NONE, "maxgain": BETTER})
    assert shown.rows["maxgain"]["Number"] == "γ = 2 (default, not tuned)"
    assert shown.rows["none"]["Number"] == "none"


def test_a_comparison_begins_with_what_was_established_and_says_when():
    shown = built({"none": NONE, "maxgain": BETTER}, finished="2026-05-31T23:30:00+00:00")
    assert "Established: maxgain is better than none. 10 finished runs · 31 May 2026 · maxgain 0.1.0" in shown.text


def test_a_score_leads_to_its_run_and_a_run_to_its_command(whole_page):
    anchors = re.findall(r'<td><a href="#(r\d+)">', whole_page)
    assert len(anchors) == 10
    for number, anchor in enumerate(anchors):
        row = re.search(rf'<tr id="{anchor}">(.*)', whole_page)[1]
        assert ("maxgain" if number % 2 else "none") in row
        assert 'href="#m0"' in row
    assert re.search(r'id="m0">.*?<pre>.*?compare', whole_page, re.DOTALL)


def test_intervals_lie_on_one_axis_with_zero(whole_page):
    shown = built({"none": NONE, "dropout": LIKE, "maxgain": BETTER})
    zeros = {a["style"] for tag, a in shown.elements if tag == "td" and "style" in a}
    assert len(zeros) == 1
    zero = float(re.search(r"--zero: ([\d.]+)px", zeros.pop())[1])
    marks = [float(a["cx"]) for tag, a in shown.elements if a.get("class") == "mean"]
    assert marks[0] == pytest.approx(zero, abs=0.1)  # dropout's mean difference is none
    assert marks[1] > zero


def test_one_run_has_a_page_with_its_score_curves_gains_and_command(tmp_path):
    run = synthetic_run("maxgain", accuracy=0.9725)
    shown = Elements(build_page(Records((run,), (), ()), alone={run["key"]}))
    assert "MaxGain (γ = 2) on digits: 97.25 % on the test set" in shown.text
    labels = [a["aria-label"] for _, a in shown.elements if a.get("role") == "img"]
    assert sum("by epoch" in label for label in labels) == 2
    assert COMMAND in shown.text


# A page of its own, whatever is in the records

STRANGE = "<b>bold</b> & \"'</script><script>alert(1)</script>{{ 1 }}"


def test_whatever_is_in_the_records_is_shown_and_not_obeyed():
    run = synthetic_run("dropout", command=STRANGE, machine=STRANGE, note=STRANGE) | {"regulariser": STRANGE}
    rows = {part: {STRANGE: [1.0, 1.1, 1.2, 1.3, 1.4]} for part in ("train", "test")}
    run |= {
        "gain_quantiles": rows,
        "max_gain": {part: {STRANGE: 1.4} for part in rows},
        "operator_norms": {STRANGE: 2.0},
    }
    found = Records(
        (run, synthetic_run("none")),
        (failed_run("dropout", fold=1, error=STRANGE) | {"regulariser": STRANGE},),
        (STRANGE,),
    )
    text = build_page(found)
    assert "<b>bold" not in text
    assert text.count("<script") == 2  # the page's own: its code, and the data of the box plots
    assert STRANGE in Elements(text).text
    assert STRANGE in [run["row"] for run in gains_on(text)]


def test_nothing_on_the_page_comes_from_elsewhere(whole_page, whole):
    for tag, attributes in whole.elements:
        assert tag not in ("iframe", "object", "embed", "base", "img")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:,"))
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in whole_page
    assert "url(" not in whole_page
    # The one address is the name of a vocabulary, which is never fetched.
    assert set(re.findall(r"https?://[^\s\"'<]+", whole_page)) == {"http://www.w3.org/2000/svg"}


def test_only_the_page_s_own_script_may_run(whole_page, whole):
    policy = next(a["content"] for _, a in whole.elements if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", whole_page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize(("runs", "most"), [(30, 150_000), (600, 700_000)])
def test_a_page_grows_gently_with_its_runs(runs, most):
    scores = dict.fromkeys(("none", "dropout", "maxgain"), NONE * (runs // 15))
    found = synthetic_records(scores, epochs=3, layers=19)
    assert len(found.runs) == runs
    assert len(build_page(found).encode()) < most


# The command


def test_the_command_writes_the_page(tmp_path, capsys):
    save(tmp_path, bare_records({"none": NONE, "maxgain": BETTER}, failed=[failed_run("maxgain", fold=7)]))
    out = tmp_path / "deep" / "report.html"
    assert main(["report", str(tmp_path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(out), "runs": 10, "failed": 1}
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["page.html", "page.htm", "page"])
def test_a_page_is_made_anew_whatever_it_is_called_and_another_file_is_left_alone(tmp_path, name):
    save(tmp_path, bare_records({"none": NONE}))
    for _ in range(2):
        page.write(tmp_path, tmp_path / name)
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match="no page of maxgain's"):
        page.write(tmp_path, tmp_path / name)
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_of_records_itself_will_do(tmp_path):
    save(tmp_path, bare_records({"none": NONE}))
    page.write(tmp_path / "results", tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no records of runs: maxgain train, tune and compare leave some there"),
        ({"results/digits.jsonl": "not json\n"}, "line 1: it is not JSON"),
        ({"search/curve.json": "{"}, "curve.json cannot be used: it is not JSON"),
        ({"search/curve.json": "[]", "search/tuned.json": "[]"}, "tuned.json cannot be used: expected `object`"),
        ({"search/curve.json": "[1]"}, "curve.json cannot be used: at [0]: expected `object`"),
        ({"search/curve.json": '[{"values": {"maxgain": 2}, "status": "complete"}]'}, "not what 'maxgain tune' writes"),
    ],
)
def test_a_folder_with_nothing_to_report_is_answered_with_a_sentence(tmp_path, capsys, content, message):
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_is_answered_with_a_sentence(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "report.html")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_runs_that_all_failed_are_still_reported(tmp_path):
    save(tmp_path, Records((), (failed_run("maxgain", error="out of memory"),), ()))
    page.write(tmp_path, tmp_path / "report.html")
    assert "out of memory" in (tmp_path / "report.html").read_text()


def test_the_page_about_a_real_comparison_says_what_the_comparison_said(tmp_path, monkeypatch):
    # Runs without processes of their own, which take longer to start than these take to run.
    monkeypatch.setattr(engine, "side_by_side", lambda work, jobs, *how: ((job, work(job)) for job in jobs))
    quick = ["--network", "mlp", "--epochs", "1", "--folds", "2", "--jobs", "1"]
    compared = ["--regularisers", "maxgain", "none", "--tuned", "--grid", "gamma=1.5:2.5:1"]
    assert main(["compare", "digits", *compared, *quick, "--out", str(tmp_path)]) == 0
    page.write(tmp_path, tmp_path / "report.html")
    shown = Elements((tmp_path / "report.html").read_text())
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert told["asked"]["contrasts"] == [["none", "maxgain"]]
    for row in told["rows"]:
        accuracy = shown.rows[row["name"]]["Accuracy, %"].replace(" (highest mean)", "")
        assert accuracy == f"{100 * row['summary']['mean']:.2f} ± {100 * row['summary']['standard_error']:.2f}"
    for sentence in (told["in_words"]["outcome"], told["in_words"]["design"], *told["in_words"]["contrasts"]):
        assert sentence in shown.text
    assert "How numbers were chosen" in shown.text
    for run in told["asked"]["rows"]["maxgain"]:
        assert f"{run['regulariser']} on fold {run['fold']}" in shown.text
