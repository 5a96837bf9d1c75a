"""maxgain demo: one command from nothing to a page, and the same again without training."""

import json
import re
from dataclasses import replace

import pytest

from maxgain.study.cli import demo
from maxgain.study.cli.app import main


@pytest.fixture
def quick(monkeypatch):
    """The demo with networks that train in no time; what it does besides is what it always does."""
    usual = demo.recipe_named
    monkeypatch.setattr(
        demo, "recipe_named", lambda name: replace(usual(name), network="mlp", epochs=2, learning_rate=0.03)
    )


@pytest.mark.usefixtures("quick", "_in_this_process")
def test_demo_leaves_a_table_figures_and_a_page_and_trains_nothing_twice(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo"), "--jobs", "1"]) == 0
    first = capsys.readouterr().out
    assert "over 10 folds" in first
    assert "paired t-test on disjoint folds" in first
    assert "maxgain=2.5 against none: " in first
    assert re.search(r"the largest gain of any layer .* is \S+; without it, \S+ \(in \S+\)\.", first)
    assert re.search(r"Test accuracy: [\d.]+% without and [\d.]+% with it, .* \(95 % interval \S+ to \S+\)\.\n", first)
    assert "On CIFAR-10 MaxGain helps: see REPRODUCTION.md" in first
    assert f"written: gains-none.png, gains-maxgain.png, report.html in {tmp_path / 'demo'}" in first
    assert "next: maxgain train digits --regulariser maxgain=2 --out runs/first" in first
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    for regulariser in ("none", "maxgain"):
        assert (tmp_path / "demo" / f"gains-{regulariser}.png").read_bytes().startswith(b"\x89PNG")

    assert main(["demo", "--out", str(tmp_path / "demo"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert len((tmp_path / "demo" / "results" / "digits.jsonl").read_text().splitlines()) == 20
    assert [row["name"] for row in again["comparison"]["rows"]] == ["none", "maxgain=2.5"]
    assert again["comparison"]["contrasts"][0]["pairs"] == list(range(10))
