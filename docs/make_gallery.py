"""Make docs/gallery/: the page in a wide window, on a telephone, in the dark, on paper, and terminals of three widths.

    python docs/make_gallery.py [--chromium PATH]

It trains small networks on digits, which takes a few minutes on a CPU, and needs the extra `gallery` and a Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pypdfium2
import pyte
from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.style import Style
from rich.text import Text

GALLERY = Path(__file__).parent / "gallery"
QUICK = ["--network", "mlp", "--epochs", "20"]
LONG = ["--network", "mlp", "--epochs", "90"]
COMPARE = ["compare", "digits", "--regularisers", "none", "dropout", "maxgain", "maxgain+dropout", "--folds", "6",
           "--contrasts", "matched", *QUICK, "--out", "compare"]  # fmt: skip
TUNE = ["tune", "digits", "--regulariser", "maxgain", "--grid", "gamma=1.25:3:0.25", "--fold", "0", *QUICK,
        "--out", "tune"]  # fmt: skip
TRAIN = ["train", "digits", "--regulariser", "maxgain", "--fold", "0", *QUICK, "--out", "run"]
RUNNING = {
    "train": (["train", "digits", "--regulariser", "maxgain", *LONG, "--out", "watched"], r" [3-9]\d/"),
    "compare": (["compare", "digits", "--regularisers", "none", "maxgain", "--folds", "10", *LONG, "--out", "many"],
                r" \d*[2-9]/20 runs(?s:.*) [1-9]\d/\d+ epochs"),
}  # fmt: skip
"""Commands that are looked at while they run, when the terminal shows something like this, and then stopped."""
ROWS = 24
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


def on_a_terminal(words: list[str], columns: int, folder: Path, errors: str) -> tuple[int, int]:
    """A command that runs on a terminal of that width: its process, and the terminal's other end."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        line = f"stty cols {columns} rows {ROWS}; exec {shlex.join(command(*words))} {errors}"
        os.execvpe("sh", ["sh", "-c", line], os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"})
    return child, terminal


def pieces(terminal: int, seconds: float = 600) -> Iterator[bytes]:
    """What a terminal shows, as it comes, until its command ends."""
    while select.select([terminal], [], [], seconds)[0]:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            return
        if not piece:
            return
        yield piece


def seen_on_a_terminal(words: list[str], columns: int, folder: Path) -> Text:
    """What a command shows on a terminal of that width, progress bars apart."""
    child, terminal = on_a_terminal(words, columns, folder, "2>/dev/null")
    shown = b"".join(pieces(terminal))
    os.waitpid(child, 0)
    return Text.from_ansi(shown.decode(errors="replace").replace("\r", ""))


def seen_while_it_runs(words: list[str], sign: str, columns: int, folder: Path) -> Text:
    """What a terminal of that width holds once it shows the sign, with progress bars; then the command is stopped."""
    child, terminal = on_a_terminal(words, columns, folder, "")
    screen = pyte.Screen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    for piece in pieces(terminal):
        stream.feed(piece)
        if re.search(sign, "\n".join(screen.display)):
            break
    lines = [Text.assemble(*(_cell(screen.buffer[row][column]) for column in range(columns))) for row in range(ROWS)]
    os.kill(child, signal.SIGINT)
    for _ in pieces(terminal, 60):
        pass
    os.waitpid(child, 0)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return Text("\n").join(lines)


def _cell(cell: Any) -> tuple[str, Style]:
    colour = None if cell.fg == "default" else f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else cell.fg
    return cell.data, Style(color="yellow" if colour == "brown" else colour, bold=cell.bold)


def terminal_picture(name: str, text: Text, columns: int) -> None:
    """An SVG of a terminal."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(text, soft_wrap=True)
    title = f"maxgain {name.partition('-')[0]}, {columns} columns"
    console.save_svg(str(GALLERY / f"terminal-{name}-{columns}.svg"), title=title)


def page_pictures(name: str, page: Path, windows: dict[str, dict[str, Any]], chromium: str | None) -> None:
    """PNGs of a page in windows of several kinds, and its first sheet of paper."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for kind, window in windows.items():
            context = browser.new_context(**window)
            shown = context.new_page()
            shown.goto(page.as_uri())
            _save(Image.open(io.BytesIO(shown.screenshot(full_page=True))), f"page-{name}-{kind}")
            context.close()
        if "telephone" in windows:
            shown = browser.new_page()
            shown.goto(page.as_uri())
            _save(sheets(shown.pdf(format="A4")), f"page-{name}-paper")
        browser.close()


def sheets(pdf: bytes, count: int = 2) -> Image.Image:
    """The first sheets of paper, side by side."""
    pages = [sheet.render(scale=1.2).to_pil() for sheet in list(pypdfium2.PdfDocument(pdf))[:count]]
    gap, (width, height) = 12, pages[0].size
    side_by_side = Image.new("RGB", (len(pages) * (width + gap) - gap, height), "#888888")
    for number, sheet in enumerate(pages):
        side_by_side.paste(sheet, (number * (width + gap), 0))
    return side_by_side


def _save(picture: Image.Image, name: str) -> None:
    """In 256 colours, so that the pictures stay small; lines of different colours must stay different."""
    picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(GALLERY / f"{name}.png", optimize=True)


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
        for what, (words, sign) in RUNNING.items():
            terminal_picture(f"{what}-running", seen_while_it_runs(words, sign, 100, folder), 100)
        for what in ("compare", "tune", "run"):
            subprocess.run(command("report", what, "--out", f"{what}.html"), cwd=folder, check=True)
            windows = WINDOWS if what == "compare" else {"wide": WINDOWS["wide"]}
            page_pictures(what, folder / f"{what}.html", windows, chromium)


if __name__ == "__main__":
    main()
