"""maxgain report: the page is made of what a folder holds, or it is said why not."""

import json

import pytest

from maxgain.errors import RunError
from maxgain.study.cli.app import main
from maxgain.study.comparing.records import Records
from maxgain.study.report import page
from page_elements import BETTER, NONE, Elements, bare_records
from synthetic_records import failed_run, save


def test_the_command_writes_the_page(tmp_path, capsys):
    save(tmp_path, bare_records({"none": NONE, "maxgain": BETTER}, failed=[failed_run("maxgain", fold=7)]))
    out = tmp_path / "deep" / "report.html"
    assert main(["report", str(tmp_path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(out), "runs": 10, "failed": 1}
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_promise_19_folders_that_contradict_each_other_are_named(tmp_path, capsys):
    for name, scores in (("a", NONE), ("b", BETTER)):
        save(tmp_path / name, bare_records({"none": scores}))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    assert "b: another folder here has other scores for 5 runs of it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["page.html", "page.htm", "page"])
def test_a_page_is_made_again_whatever_it_is_called_and_another_file_is_left_alone(tmp_path, name):
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
        ({"run/result.json": "", "run/config.json": ""}, "result.json cannot be used: it is not JSON"),
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
    assert not error.endswith("..\n")
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_is_answered_with_a_sentence(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "report.html")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_runs_that_all_failed_are_still_reported(tmp_path):
    save(tmp_path, Records((), (failed_run("maxgain", error="out of memory"),), ()))
    page.write(tmp_path, tmp_path / "report.html")
    assert "out of memory" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("_in_this_process")
def test_the_page_about_a_real_comparison_says_what_the_comparison_said(tmp_path):
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
