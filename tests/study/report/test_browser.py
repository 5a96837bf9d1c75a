"""The page in a real browser: it works, it fits, it complains of nothing, and it asks nobody for anything."""

import shutil

import pytest

from maxgain.study.comparing.records import Records
from maxgain.study.report.page import build_page
from maxgain.study.report.tunings import Tuning
from synthetic_records import failed_run, synthetic_records, synthetic_run

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium to show the page in", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright to drive the browser with")

NONE = [0.90, 0.91, 0.89, 0.92]
BETTER = [0.95, 0.955, 0.945, 0.96]
LONG_NAME = "maxgain=1.75+batchnorm+gaussiandropout=0.25"
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


def curve():
    numbers = (1.25, 1.5, 2.0, 3.0)
    scores = {"train_accuracy": 0.99, "train_loss": 0.02, "validation_accuracy": 0.9, "validation_loss": 0.3}
    return Tuning(
        "digits, maxgain",
        tuple({"values": {"maxgain": number}, "status": "complete", **scores} for number in numbers),
        {"maxgain": 2.0},
        "Chosen: maxgain=2.",
    )


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of synthetic records that have everything, with long names and a deep network."""
    scores = {"none": NONE, "dropout": [0.91, 0.90, 0.90, 0.91], "maxgain": BETTER}
    found = synthetic_records(scores, layers=19)
    long = tuple(synthetic_run(LONG_NAME, fold=fold, layers=19, accuracy=0.9) for fold in range(4))
    failed = (failed_run("dropout", fold=9, error="x" * 300),)
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(build_page(Records(found.runs + long, failed, ()), [curve()]), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, address):
    """Opens the page in a window of some kind; in the end nothing must have been complained of or asked for."""
    contexts, complaints, requests = [], [], []

    def opened(**window):
        context = browser.new_context(**window)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {address}


def first_column(page, table="The regularisers"):
    return page.get_by_role("region", name=table).locator("tbody th").all_inner_texts()


def heading(page, name):
    return page.get_by_role("columnheader", name=name, exact=True)


def overflow(page):
    """How far the page can be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_the_table_sorts_by_a_click_on_a_heading(show):
    page = show()
    assert first_column(page) == ["none", "dropout", "maxgain", LONG_NAME]
    assert heading(page, "Accuracy, %").get_attribute("aria-sort") is None
    heading(page, "Accuracy, %").get_by_role("button").click()
    assert first_column(page)[0] == "maxgain"
    assert heading(page, "Accuracy, %").get_attribute("aria-sort") == "descending"
    heading(page, "Accuracy, %").get_by_role("button").click()
    assert first_column(page)[-1] == "maxgain"
    assert heading(page, "Accuracy, %").get_attribute("aria-sort") == "ascending"
    heading(page, "Regulariser").get_by_role("button").click()
    assert first_column(page) == ["dropout", "maxgain", LONG_NAME, "none"]
    assert page.locator("[aria-sort]").count() == 1


def test_the_table_sorts_by_the_keyboard(show):
    page = show()
    heading(page, "Holm p").get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert heading(page, "Holm p").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Space")
    assert first_column(page, "The contrasts")[0] == "maxgain against none"  # the smallest p


def test_all_figures_show(show):
    page = show()
    figures = page.locator("figure svg").all()
    assert len(figures) == 4 + 3 + 2 + 2  # learning curves, layers, box plots, the search
    for figure in figures:
        box = figure.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
        assert figure.get_attribute("aria-label")
    assert page.locator("figure.curve svg").first.locator("path.series").count() == 4
    assert page.locator("figure.boxes .box").count() == 2 * 2 * 19


def test_choosing_another_run_changes_its_box_plot_and_its_words(show):
    page = show()
    first, second = (page.locator(f"figure.boxes[data-side='{side}']") for side in (0, 1))
    before = first.locator("svg").inner_html(), second.locator("svg").inner_html()
    assert first.locator("figcaption").inner_text().startswith("none, fold 0, seed 0: largest gain")
    assert second.locator("figcaption").inner_text().startswith("maxgain=2, fold 0, seed 0: largest gain")
    assert first.locator(".bound").count() == 0
    assert second.locator(".bound").count() == 2  # in the training and in the test set
    page.get_by_label("Run", exact=True).select_option("dropout=1, fold 2, seed 0")
    assert first.locator("figcaption").inner_text().startswith("dropout=1, fold 2, seed 0: largest gain")
    assert first.locator("svg").inner_html() != before[0]
    page.get_by_label("beside").select_option("none, fold 0, seed 0")
    assert second.locator("svg").inner_html() != before[1]


def test_two_runs_have_the_same_scale_until_it_is_unchecked(show):
    page = show()
    ticks = [page.locator(f"figure.boxes[data-side='{side}'] svg text.tick") for side in (0, 1)]
    numbers = [[text for text in tick.all_text_contents() if text[0].isdigit()] for tick in ticks]
    assert numbers[0] == numbers[1]
    page.get_by_label("on the same scale").uncheck()
    numbers = [[text for text in tick.all_text_contents() if text[0].isdigit()] for tick in ticks]
    assert numbers[0] != numbers[1]


def test_a_box_is_where_its_quantiles_are(show):
    page = show()
    places = page.evaluate(
        """() => {
          const svg = document.querySelector("figure.boxes svg");
          const lines = [...svg.querySelectorAll(".grid")].map((line) => line.getBBox().y);
          const labels = [...svg.querySelectorAll("text.tick")].map((text) => Math.log(Number(text.textContent)));
          const unit = (lines[1] - lines[0]) / (labels[1] - labels[0]);
          const gain = (y) => Math.exp(labels[0] + (y - lines[0]) / unit);
          const box = svg.querySelector(".box").getBBox();
          return { top: gain(box.y), bottom: gain(box.y + box.height) };
        }"""
    )
    _, lower, _, upper, _ = synthetic_run("none", layers=19, accuracy=NONE[0])["gain_quantiles"]["train"][
        "features.conv0"
    ]
    assert places["bottom"] == pytest.approx(lower, rel=0.01)
    assert places["top"] == pytest.approx(upper, rel=0.01)


def test_a_bound_is_drawn_and_named(show):
    page = show()
    second = page.locator("figure.boxes[data-side='1']")
    assert second.locator("svg text", has_text="γ = 2").count() == 2
    assert second.locator("svg text", has_text="Gain ‖Wx‖ / ‖x‖, test set").count() == 1


def test_pointing_at_a_name_brings_out_its_line_and_its_band(show):
    page = show()
    band = page.locator("figure.curve svg").first.locator(".band[data-series='2']")
    assert not band.is_visible()
    page.locator(".legend li", has_text="maxgain").first.hover()
    assert band.is_visible()
    assert page.locator("figure.curve svg").first.locator(".series.lit").count() == 1
    page.locator("h1").hover()
    assert not band.is_visible()


def test_a_link_to_a_run_unfolds_the_list_of_runs(show):
    page = show()
    page.get_by_text("The score of every run").click()
    row = page.locator("#r0")
    assert not row.is_visible()
    page.locator("a[href='#r0']").click()
    assert row.is_visible()
    row.locator("a").click()
    assert page.url.endswith("#m0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_never_scrolls_sideways(show, scheme, width):
    page = show(viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert overflow(page) == 0
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert overflow(page) == 0


@pytest.mark.parametrize("name", ["The contrasts", "The regularisers"])
def test_on_a_telephone_nothing_of_the_main_tables_is_out_of_sight(show, name):
    page = show(viewport={"width": 390, "height": 800})
    box = page.get_by_role("region", name=name)
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    for cell in box.locator("tbody tr").last.locator("th, td").all():
        place = cell.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390
    assert box.locator("tbody svg.forest").count() == (3 if name == "The contrasts" else 0)


def test_a_wide_table_scrolls_in_its_own_box(show):
    page = show(viewport={"width": 390, "height": 800})
    box = page.get_by_role("region", name="Every regulariser against every other")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    box.locator("tbody td").last.scroll_into_view_if_needed()
    assert box.evaluate("box => box.scrollLeft") > 0
    assert box.locator("tbody th").first.bounding_box()["x"] >= 0  # the names stay in sight


def test_the_intervals_are_200_pixels_wide_and_have_one_zero_line(show):
    page = show()
    drawings = page.locator(".contrasts tbody svg.forest").all()
    assert {round(drawing.bounding_box()["width"]) for drawing in drawings} == {200}
    assert len({round(drawing.bounding_box()["x"]) for drawing in drawings}) == 1
    page.emulate_media(media="print")
    assert all(drawing.is_visible() for drawing in drawings)


LOWEST_CONTRAST = """
(elements) => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, channel) => sum + part * [0.2126, 0.7152, 0.0722][channel], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...elements.map((element) => {
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement ? (style.stroke === "none" ? style.fill : style.stroke) : style.color;
    const ink = light(drawn);
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
  }));
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in_light_and_dark(show, scheme):
    page = show(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(253, 253, 252)") == (scheme == "light")
    words = "p, li, th, td, figcaption, a, summary, .minor, .mark, figure svg text"
    assert page.locator(words).evaluate_all(LOWEST_CONTRAST) > 4.5
    lines = "figure.curve svg path.series, figure.boxes .median, figure.boxes .whisker, svg .reach"
    assert page.locator(lines).evaluate_all(LOWEST_CONTRAST) > 3


def test_paper_shows_everything(show):
    page = show(color_scheme="dark")
    assert not page.get_by_text("Numbers", exact=True).first.locator("xpath=..").get_attribute("open")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".choices").is_hidden()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.set_viewport_size({"width": 680, "height": 1000})  # an A4 sheet less its margins
    assert overflow(page) == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_scripts_everything_but_the_box_plots_is_there(browser, address):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("figure.curve svg").count() == 4
    assert page.locator(".choices").is_hidden()
    assert page.get_by_text("drawn by JavaScript, which is switched off").first.is_visible()
    context.close()
