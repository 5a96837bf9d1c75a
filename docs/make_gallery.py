"""Make docs/gallery/: the page in a wide window, on a telephone, in the dark, on paper, and terminals of three widths.

    python docs/make_gallery.py [--chromium PATH]

It trains small networks on digits, which takes a few minutes on a CPU, and needs playwright with a Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

GALLERY = Path(__file__).parent / "gallery"
QUICK = ["--network", "mlp", "--epochs", "20"]
COMPARE = ["compare", "digits", "--regularisers", "none", "dropout", "maxgain", "maxgain+dropout", "--folds", "6",
           "--contrasts", "matched", *QUICK, "--out", "compare"]  # fmt: skip
TUNE = [
    "tune",
    "digits",
    "--regulariser",
    "maxgain",
    "--grid",
    "gamma=1.25:3:0.25",
    "--fold",
    "0",
    *QUICK,
    "--out",
    "tune",
]
TRAIN = ["train", "digits", "--regulariser", "maxgain", "--fold", "0", *QUICK, "--out", "run"]
WIDTHS = (60, 100, 160)
TERMINALS = {"compare": (COMPARE, WIDTHS), "inspect": (["inspect", "run"], WIDTHS), "list": (["list"], (100,))}
WINDOWS = {
    "wide": {"viewport": {"width": 1200, "height": 900}},
    "telephone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
}


def command(*words: str) -> list[str]:
    """The command line, run by this Python."""
    return [sys.executable, "-m", "maxgain.study", *words]


def seen_on_a_terminal(words: list[str], columns: int, folder: Path) -> str:
    """What a command shows on a terminal of that width, progress bars apart."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        line = " ".join(["stty", "cols", str(columns), ";", "exec", *map(_quoted, command(*words)), "2>/dev/null"])
        os.execvpe("sh", ["sh", "-c", line], os.environ | {"TERM": "xterm-256color"})
    shown = b""
    while select.select([terminal], [], [], 600)[0]:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.waitpid(child, 0)
    return shown.decode(errors="replace").replace("\r", "")


def _quoted(word: str) -> str:
    return f"'{word}'"


def terminal_picture(name: str, text: str, columns: int) -> None:
    """An SVG of a terminal."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    console.save_svg(str(GALLERY / f"terminal-{name}-{columns}.svg"), title=f"maxgain {name}, {columns} columns")


def page_pictures(name: str, page: Path, windows: dict[str, dict], chromium: str | None) -> None:
    """PNGs of a page in windows of several kinds, and its first sheet of paper."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for kind, window in windows.items():
            context = browser.new_context(**window)
            shown = context.new_page()
            shown.goto(page.as_uri())
            _save(shown.screenshot(full_page=True), f"page-{name}-{kind}")
            context.close()
        if "telephone" in windows:
            shown = browser.new_page(viewport={"width": 680, "height": 962})  # an A4 sheet less its margins
            shown.goto(page.as_uri())
            shown.emulate_media(media="print")
            shown.evaluate("dispatchEvent(new Event('beforeprint'))")
            _save(shown.screenshot(full_page=False), f"page-{name}-paper")
        browser.close()


def _save(png: bytes, name: str) -> None:
    """Few colours, so that the pictures stay small."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(96)
    picture.save(GALLERY / f"{name}.png", optimize=True)


def main() -> None:
    """Train, capture, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: playwright's own)")
    chromium = parser.parse_args().chromium
    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for words in (TRAIN, COMPARE, TUNE):
            subprocess.run(command(*words), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for what, (words, widths) in TERMINALS.items():
            for columns in widths:
                terminal_picture(what, seen_on_a_terminal(words, columns, folder), columns)
        for what in ("compare", "tune", "run"):
            subprocess.run(command("report", what, "--out", f"{what}.html"), cwd=folder, check=True)
            windows = WINDOWS if what == "compare" else {"wide": WINDOWS["wide"]}
            page_pictures(what, folder / f"{what}.html", windows, chromium)


if __name__ == "__main__":
    main()
