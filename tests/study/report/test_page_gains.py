"""Gains and operator norms on the page."""

import base64
import math

import numpy as np
import pytest

from maxgain.study.comparing.records import Records
from maxgain.study.report import gain_data
from maxgain.study.report.gain_data import packed
from maxgain.study.report.page import build_page
from page_elements import BETTER, NONE, Elements, bare_records, gains_on
from synthetic_records import synthetic_records, synthetic_run


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
