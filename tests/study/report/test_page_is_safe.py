"""A page of its own, whatever is in the records: nothing from elsewhere, nothing obeyed, and never huge."""

import base64
import hashlib
import re

import pytest

from maxgain.study.comparing.records import Records
from maxgain.study.report.page import build_page
from page_elements import NONE, Elements, gains_on
from synthetic_records import failed_run, synthetic_records, synthetic_run

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
