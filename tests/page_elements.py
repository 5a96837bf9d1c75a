"""The page taken apart: its elements, its words, its tables and what its box plots are drawn from."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np

from maxgain.study.report.page import build_page
from synthetic_records import synthetic_records

NONE = [0.90, 0.91, 0.89, 0.92, 0.90]
LIKE = [0.91, 0.90, 0.90, 0.92, 0.89]  # no better than NONE
BETTER = [0.95, 0.955, 0.945, 0.96, 0.951]


class Elements(HTMLParser):
    """What a page consists of: its elements, its visible text, and its tables as rows of cells' texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self.words, self.open, self.kinds = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
            self.kinds.append(dict(attributes).get("class", "").split())
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.words.append(data)
        if self.tables and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def table(self, kind):
        """The first table of a kind: each row's cells by heading, by its first cell."""
        number = next(number for number, kinds in enumerate(self.kinds) if kind in kinds)
        headings, *rows = ([" ".join(cell.split()) for cell in row] for row in self.tables[number])
        return {row[0]: dict(zip(headings, row, strict=True)) for row in rows if row[0]}

    @property
    def rows(self):
        """The table of regularisers."""
        return self.table("rows")

    @property
    def contrasts(self):
        """The table of contrasts."""
        return self.table("contrasts")


def bare_records(scores, **options):
    """Records without what figures are drawn from, which takes time."""
    return synthetic_records(scores, **{"history": [], "operator_norms": {}} | options)


def built(scores, **options):
    return Elements(build_page(bare_records(scores, **options)))


def gains_on(text):
    """What the page's script draws box plots from: each run's name, bound and gains by part and layer."""
    data = json.loads(re.search(r'id="gain-data">(.*?)</script>', text)[1])
    runs = []
    for row, regulariser, fold, seed, bound, network, *codes in data["runs"]:
        run = {"row": data["words"][row], "name": (data["words"][regulariser], fold, seed), "bound": bound}
        for part, code in zip(("train", "test"), codes, strict=True):
            steps = np.frombuffer(base64.b64decode(code), "<u2").astype(float).reshape(-1, 5)
            values = np.where(steps == 0, 0, 2 ** ((steps - 32768) / 2048)).tolist()
            run[part] = dict(zip(data["networks"][network], values, strict=True)) if values else {}
        runs.append(run)
    return runs
