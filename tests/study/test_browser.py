"""The page in a browser: wide, on a phone, in the dark, on paper."""

import os
import shutil
from dataclasses import replace

import pytest

from made_results import BASE, made, made_result, write
from maxgain.study import page as write_page

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WINDOWS = {
    "wide": {"viewport": {"width": 1200, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}},
    "dark": {"viewport": {"width": 800, "height": 900}, "color_scheme": "dark"},
}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_in_a_browser(tmp_path):
    long_name = "maxgain=1.5+batchnorm+gaussiandropout"
    scores = {"none": [0.939, 0.944, 0.922], long_name: [0.93, 0.94, 0.93], "dropout": [0.93, None, 0.92]}
    write(tmp_path / "in" / "a", *made(scores, result={"layers": 19}))
    write(tmp_path / "in" / "b", None, [made_result(replace(BASE, epochs=7), 0.9, note="x" * 300)])
    address = write_page(tmp_path / "in", tmp_path / "page.html").as_uri()
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        for name, window in WINDOWS.items():
            complaints, requests = [], []
            page = browser.new_page(**window)
            page.on("console", lambda message, to=complaints: to.append(message.text))
            page.on("request", lambda request, to=requests: to.append(request.url))
            page.goto(address)
            assert (complaints, requests) == ([], [address]), name
            size = "document.documentElement.{0}Width"
            assert page.evaluate(f"{size.format('scroll')} - {size.format('client')}") == 0, f"{name} scrolls sideways"
            # Every figure has a size, and text and series colours that differ from the paper.
            looks = page.evaluate("""() => {
                const style = (element, name) => getComputedStyle(element)[name];
                return [...document.querySelectorAll('figure svg')].map((svg) => [
                    svg.getBoundingClientRect().width, style(svg.querySelector('text'), 'fill'),
                    style(svg.querySelector('[style*="--series-0"]'), 'stroke')]);
            }""")
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert len(looks) == 8
            assert all(width > 200 and paper not in (text, line) for width, text, line in looks), name
            assert (paper == "rgb(21, 24, 28)") == (name == "dark")
            method = page.locator("details p").first
            assert not method.is_visible()
            page.emulate_media(media="print")
            assert method.evaluate("element => element.getBoundingClientRect().height") > 0, "paper cannot be unfolded"
            page.close()
        browser.close()
