"""Charts of the page as SVG: numbers in, elements out, in the page's own colours and type.

The style sheet gives the classes their looks, in light, in dark and on paper. Whatever a chart shows is also said in
words, in its description.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ..tables import uniform

COLOURS = 8
"""How many the style sheet has for lines and dots."""
DASHES = ("none", "7 3", "2 2.5", "8 3 2 3")
WIDTH = 420
"""Of a chart, in pixels on a wide window; two fit beside each other, and one on a telephone."""
FOREST = 200
"""How wide the intervals of a comparison are drawn."""
LARGEST = 1e100
"""Of the numbers on an axis: a loss may be anything that a computer can write."""
MOST_POINTS = 60
"""Of a line: more could not be told apart."""

Numbers = Sequence[float]


@dataclass(frozen=True)
class Axis:
    """Where numbers lie in a drawing: `low` at `start` and `high` at `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False) -> Axis:
        """An axis that holds all the values, with a little room at both ends; what no axis could hold is at its end."""
        values = [max(-LARGEST, min(value, LARGEST)) for value in values] or [1.0]
        low, high = min(values), max(values)
        if logarithmic:
            low, high = max(low, 1 / LARGEST), max(high, 1 / LARGEST)
            room = max((high / low) ** 0.05, 1.02)
            return cls(low / room, high * room, start, end, logarithmic=True)
        room = next((room for room in (0.05 * (high - low), 0.05 * abs(high)) if room > 1 / LARGEST), 1.0)
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        """The place of a number; of one that is not on the axis, its nearest end."""
        low, high = self.low, self.high
        value = max(low, min(value, high))
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers along the axis, a few of them."""
        if not self.logarithmic:
            return _multiples(self.low, self.high, most)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [f * 10.0**p for p in powers for f in factors if self.low <= f * 10.0**p <= self.high]
            if len(ticks) <= most + 1:
                break
        ticks = ticks[:: 1 + len(ticks) // (most + 2)]  # powers of ten may be too many too
        return ticks if len(ticks) > 1 else _multiples(self.low, self.high, most)

    def texts(self, ticks: Numbers) -> list[str]:
        """Numbers along the axis: with the same decimals, or each as short as can be where they go by powers of ten."""
        return [f"{tick:g}".replace("e-0", "e-") for tick in ticks] if self.logarithmic else uniform(ticks)


def is_wide(values: Numbers) -> bool:
    """Whether numbers are so far apart that a logarithmic axis shows them better."""
    return bool(values) and 0 < 20 * min(values) < max(values)


def _multiples(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * power) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


# Elements


def element(name: str, *inside: str, **attributes: object) -> Markup:
    """An SVG element; class_ is its class, and underscores in attributes' names are hyphens."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, Markup("").join(inside))


def _picture(width: float, height: float, description: str, *inside: str) -> Markup:
    box = f"0 0 {round(width, 1):g} {round(height, 1):g}"
    return element("svg", *inside, viewBox=box, role="img", aria_label=description)


def _text(x: float, y: float, words: str, anchor: str = "start", class_: str = "") -> Markup:
    return element("text", escape(words), x=x, y=y, **({"text_anchor": anchor} if anchor != "start" else {}),
                   **({"class_": class_} if class_ else {}))  # fmt: skip


def _path(points: Iterable[tuple[float, float]], close: bool = False) -> str:
    """A line through the points: after the first one by steps, which are short to write."""
    (x, y), *rest = ((round(10 * x), round(10 * y)) for x, y in points)
    written = [f"M{x / 10:g} {y / 10:g}l" if rest else f"M{x / 10:g} {y / 10:g}h0"]
    for right, down in rest:
        written.append(f"{(right - x) / 10:g} {(down - y) / 10:g}")
        x, y = right, down
    return written[0] + " ".join(written[1:]) + ("z" if close else "")


def look(index: int) -> dict[str, str]:
    """The colour and dashes of the index-th of several lines, different for the first 32."""
    rounds, colour = divmod(index, COLOURS)
    return {"class_": f"series s{colour}", "stroke_dasharray": DASHES[(colour + rounds) % len(DASHES)]}


# Charts


@dataclass(frozen=True)
class Frame:
    """The axes of a chart, with their numbers and titles."""

    x: Axis
    y: Axis
    x_title: str
    y_title: str
    show: Callable[[Numbers], list[str]] | None = None
    """How the numbers of the vertical axis are written, if not as the axis does."""
    show_x: Callable[[Numbers], list[str]] | None = None

    def drawn(self) -> list[Markup]:
        """Grid lines, numbers and titles."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        ticks, across = self.y.ticks(), self.x.ticks()
        lines = "".join(f"M{left:g} {self.y(tick):g}H{right:g}" for tick in ticks)
        return [
            element("path", class_="grid", d=lines),
            *(
                _text(left - 6, self.y(tick) + 4, text, "end")
                for tick, text in zip(ticks, (self.show or self.y.texts)(ticks), strict=True)
            ),
            element("path", class_="axis", d=f"M{left:g} {bottom:g}H{right:g}"),
            *(
                _text(self.x(tick), bottom + 16, text, "middle")
                for tick, text in zip(across, (self.show_x or self.x.texts)(across), strict=True)
            ),
            _text((left + right) / 2, bottom + 32, self.x_title, "middle", "title"),
            _text(4, self.y.end - 10, self.y_title, class_="title"),
        ]


def percent(values: Numbers) -> list[str]:
    """Fractions as percentages with the same decimals."""
    return [f"{text} %" for text in uniform([100 * value for value in values], 3)]


def curves(series: Mapping[int, Sequence[Numbers]], title: str, description: str, *, share: bool) -> Markup:
    """Lines over the epochs: the mean of each entry's runs, and a band from their lowest to their highest.

    The keys say which colour an entry has. `share` is for fractions, which are shown as percentages; losses get a
    logarithmic axis.
    """
    means, lows, highs = ({}, {}, {})
    for index, runs in series.items():
        columns = list(zip(*(run[: min(map(len, runs))] for run in runs), strict=True))
        means[index] = [math.fsum(column) / len(column) for column in columns]
        lows[index], highs[index] = list(map(min, columns)), list(map(max, columns))
    everything = [value for values in (*lows.values(), *highs.values()) for value in values]
    logarithmic = not share and min(everything) > 0
    frame = Frame(
        Axis(1, max(2, max(map(len, means.values()))), 52, WIDTH - 8),
        Axis.over(everything, 226, 26, logarithmic=logarithmic),
        "epoch",
        title,
        percent if share else None,
        lambda ticks: [f"{tick:g}" if tick == int(tick) else "" for tick in ticks],
    )
    bands, lines = [], []
    for index, mean in means.items():
        kept, fewer = _thinned(len(mean), MOST_POINTS), _thinned(len(mean), MOST_POINTS // 3)
        above = [(frame.x(place + 1), frame.y(highs[index][place])) for place in fewer]
        below = [(frame.x(place + 1), frame.y(lows[index][place])) for place in fewer]
        if len(series[index]) > 1:
            bands.append(element("path", class_=f"band s{index % COLOURS}", data_series=index,
                                 d=_path(above + below[::-1], close=True)))  # fmt: skip
        points = _path((frame.x(place + 1), frame.y(mean[place])) for place in kept)
        lines.append(element("path", data_series=index, d=points, **look(index)))
    return _picture(WIDTH, 264, description, *frame.drawn(), *bands, *lines)


def _thinned(count: int, most: int) -> list[int]:
    """Which of `count` points to draw, `most` of them: evenly spaced, with the first and the last."""
    step = max(1, math.ceil(count / most))
    return [*range(0, count - 1, step), count - 1]


def layers(panels: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[Markup]:
    """Dots, a row per layer from the input down, a chart per quantity, a colour per regulariser, all on one scale.

    `panels` holds a number for each quantity's title, each regulariser's place among the colours and each layer.
    """
    names = list(dict.fromkeys(name for entries in panels.values() for rows in entries.values() for name in rows))
    values = [value for entries in panels.values() for rows in entries.values() for value in rows.values() if value > 0]
    left, top, row = 10 + 6.6 * max(map(len, names), default=0), 44, 19
    axis = Axis.over(values, left, left + 220, logarithmic=True)
    bottom, ticks = top + row * len(names), axis.ticks(5)
    frame = [
        element("path", class_="grid", d="".join(f"M{axis(tick):g} {top}V{bottom}" for tick in ticks)),
        *(_text(axis(tick), top - 8, f"{tick:g}", "middle") for tick in ticks),
        *(_text(left - 8, top + row * (place + 0.5) + 4, name, "end") for place, name in enumerate(names)),
    ]
    charts = []
    for title, entries in panels.items():
        dots = [
            _dots(
                index,
                [
                    (axis(rows[name]), top + row * (place + 0.5))
                    for place, name in enumerate(names)
                    if rows.get(name, 0) > 0
                ],
            )
            for index, rows in entries.items()
        ]
        about = f"Dots: {title} by layer, a colour per row; the numbers are in the table below."
        charts.append(_picture(left + 228, bottom + 6, about, _text(0, 16, title, class_="title"), *frame, *dots))
    return charts


def _dots(index: int, points: Iterable[tuple[float, float]]) -> Markup:
    """Marks at the points, all in one element; squares, once the colours begin again."""
    places = "".join(f"M{x:g} {y:g}h0" for x, y in points)
    square = {"stroke_linecap": "square"} if index >= COLOURS else {}
    return element("path", class_=f"dots s{index % COLOURS}", data_series=index, d=places, **square)


def trials(
    curve: Mapping[str, Sequence[tuple[float, float]]],
    x_title: str,
    y_title: str,
    description: str,
    *,
    share: bool,
    joined: bool,
    chosen: float | None,
) -> Markup:
    """What each number came to on each part of the data, and which one was chosen."""
    at = [x for points in curve.values() for x, _ in points]
    scores = [y for points in curve.values() for _, y in points]
    frame = Frame(
        Axis.over(at, 52, WIDTH - 12, logarithmic=is_wide(at)),
        Axis.over(scores, 226, 26, logarithmic=not share and is_wide(scores)),
        x_title,
        y_title,
        percent if share else None,
    )
    inside = frame.drawn()
    if chosen is not None:
        x = frame.x(chosen)
        side = "end" if x > 0.8 * WIDTH else "start"
        inside.append(element("path", class_="bound", d=f"M{x:g} {frame.y.start:g}V{frame.y.end:g}"))
        inside.append(_text(x + (-5 if side == "end" else 5), frame.y.end + 4, f"chosen: {chosen:g}", side))
    for index, points in enumerate(curve.values()):
        places = sorted((frame.x(x), frame.y(y)) for x, y in points)
        if joined:
            inside.append(element("path", data_series=index, d=_path(places), **look(index)))
        inside.append(_dots(index, places))
    return _picture(WIDTH, 264, description, *inside)


# Intervals


def forest_axis(intervals: Iterable[tuple[float, float]]) -> Axis:
    """One axis for all intervals of a comparison, with zero on it."""
    ends = [end for interval in intervals for end in interval] or [-0.01, 0.01]
    return Axis.over([*ends, 0.0], 4, FOREST - 4)


def interval(axis: Axis, low: float, mean: float, high: float) -> Markup:
    """A difference as a dot on its interval; zero is a line through all rows."""
    return _strip(
        element("path", class_="zero", d=f"M{axis(0):g} 0V24"),
        element("path", class_="reach", d=f"M{axis(low):g} 12H{axis(high):g}M{axis(low):g} 8v8M{axis(high):g} 8v8"),
        element("circle", class_="mean", cx=axis(mean), cy=12, r=4),
    )


def scale(axis: Axis) -> Markup:
    """The numbers under the intervals, in percentage points."""
    ticks = [tick / 100 for tick in _multiples(100 * axis.low, 100 * axis.high, 5)]
    texts = [f"{100 * tick:+g}".replace("-", "−") if abs(tick) > 1e-12 else "0" for tick in ticks]
    return _strip(
        element("path", class_="axis", d="M0 1H200" + "".join(f"M{axis(tick):g} 1v5" for tick in ticks)),
        *(_text(axis(tick), 18, text, "middle") for tick, text in zip(ticks, texts, strict=True)),
    )


def _strip(*inside: Markup) -> Markup:
    """A drawing that a table cell holds; the table has its numbers."""
    return element("svg", *inside, class_="forest", viewBox=f"0 0 {FOREST} 24", aria_hidden="true")
