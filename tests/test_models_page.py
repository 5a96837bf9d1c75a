"""docs/models.md, and a short version of it: what the page says of some models and ways of training still holds."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]


MODELS, WAYS = (
    [cells(line) for line in table.splitlines()[2:]] for table in re.findall(r"<!-- \w+ -->\n\n((?:\|.*\n)+)", PAGE)
)
SHORT = {
    "torch": [
        "nn.TransformerEncoder",
        "nn.TransformerEncoder, `split_attention`",
        "an LSTM between dense layers",
        "a loop of your own",
        "`measure='fresh'`",
        "SAM",
        "a weight-normed layer",
    ],
    "transformers": ["AlbertForSequenceClassification", "MixtralForCausalLM", "PhimoeForCausalLM"],
    "peft": ["Llama with LoRA"],
    "timm": ["test_nfnet", "test_mambaout"],
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the script and of what it imports."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return ROOT / "experiments"


def without_numbers(row: list[str]) -> list[str]:
    """A row of either table without its gain / γ, of which the last digit may differ on another machine."""
    return [cell for cell in row if not re.fullmatch(r"\d\.\d\d", cell)]


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_what_the_page_says_of_some_rows_still_holds(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for package in SHORT if importlib.util.find_spec(package) for name in SHORT[package]]
    monkeypatch.setattr(sys, "argv", ["models.py", "--only", *names])
    runpy.run_path(str(scripts / "models.py"), run_name="__main__")
    rows = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == len(names)
    on_page = [without_numbers(row) for row in (*MODELS, *WAYS)]
    for row in rows:
        assert without_numbers(row) in on_page, "run experiments/models.py --write"
        assert all(float(cell) < 1.1 for cell in row if re.fullmatch(r"\d\.\d\d", cell))


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row[0])
def test_promise_16_half_the_weight_of_every_layer_of_every_model_has_half_the_gain(row: list[str]) -> None:
    _, _, layers, _, halved, excess, said = row
    assert int(layers) > 0
    assert halved == "all"
    assert float(excess) < 1.1
    assert not re.search(r"\d+% of the weights", said), "sentences are shortened"


@pytest.mark.usefixtures("scripts")
def test_the_page_has_a_row_for_everything_that_the_script_tries() -> None:
    import model_families
    import training_ways

    names = [f"{one.name} ({one.remark})" if one.remark else one.name for one in model_families.FAMILIES]
    assert [row[0] for row in MODELS] == names
    assert [row[0] for row in WAYS] == list(training_ways.WAYS)
    assert all(float(row[1]) < 1.1 if row[1] else row[2].startswith("refused: ") for row in WAYS)
