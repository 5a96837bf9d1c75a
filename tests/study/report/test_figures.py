"""Figures are drawn whatever things are called."""

import pytest
from matplotlib.figure import Figure

from maxgain.measure import draw_boxes
from maxgain.study.report import figures

SCORES = [f"{part}_{score}" for part in ("train", "validation") for score in ("accuracy", "loss")]
ROW = (0.1, 0.2, 0.3, 0.4, 0.5)
NAMES = {
    "a formula that is none": r"$\frac{1}{$",
    "one dollar": "a$b",
    "two dollars": "$a$",
    "an escaped dollar": r"\$x",
    "control codes": "a\x00b\x0b\x1b[31mc",
    "half a character": "a\udcff",
    "emoji": "😀" * 3,
    "right to left": "\u202eabc\u05d0\u05d1",
    "markup": "</text><script>alert(1)</script>&amp;",
    "very long": "layer." * 1000,
    "nothing": "",
    "lines": "a\nb",
}


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_shown_and_never_understood(name: str, kind: str) -> None:
    curve = [{"values": {name: 1.0}, "status": "complete", **dict.fromkeys(SCORES, 0.5)}]
    for figure in (
        figures.gain_boxes({name: {name: ROW, "other": ROW}}, 1.0, name),
        figures.gains_beside_norms({name: 1.0, "other": 2.0}, {name: {name: 0.5}}),
        figures.tuning_curve(curve, {name: name}, {name: 1.0}),
    ):
        content = figures.rendered(figure, kind)
        assert len(content) > 1000
        assert b"<script" not in content


def test_a_bound_is_labelled_and_a_figure_says_what_it_shows() -> None:
    boxes = figures.rendered(figures.gain_boxes({"train": {"fc": ROW}}, 0.45, "digits, maxgain"), "svg").decode()
    bars = figures.gains_beside_norms({"fc": 1.0}, {"train": {"fc": 0.5}}, title="digits, maxgain", bound=0.45)
    point = {"train_accuracy": 1.0, "train_loss": 1e-4, "validation_accuracy": 0.9, "validation_loss": 0.3}
    curve = [{"values": {"maxgain": 2.0}, "status": "complete", **point}]
    tried = figures.rendered(figures.tuning_curve(curve, {"maxgain": "γ"}, title="digits, maxgain"), "svg").decode()
    assert "digits, maxgain" in tried
    for text in (boxes, figures.rendered(bars, "svg").decode()):
        assert all(words in text for words in ("digits, maxgain", "γ = 0.45", "‖Wx‖ / ‖x‖"))


def test_a_layer_with_a_dollar_in_its_name_can_be_drawn_alone() -> None:
    figure = draw_boxes(Figure().subplots(), {r"$\frac{$": ROW, "$a": ROW})
    assert figures.rendered(figure, "png")


def test_a_network_of_very_many_layers_fits_into_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert figures.LONGEST * 150 < 2**16, "beyond that matplotlib writes no PNG"
    monkeypatch.setattr(figures, "LONGEST", 2)
    layers = {str(number): 1.0 for number in range(20)}
    assert figures.gains_beside_norms(layers, {}).get_size_inches()[1] == 2
    assert figures.gain_boxes({"train": dict.fromkeys(layers, ROW)}, None, "title").get_size_inches()[0] == 2


def test_layers_whose_long_names_begin_alike_stay_apart() -> None:
    names = [f"{'block.' * 40}{number}" for number in range(3)]
    figure = figures.gain_boxes({"train": dict.fromkeys(names, ROW)}, None, "title")
    assert len(figure.axes[0].get_xticklabels()) == 3
