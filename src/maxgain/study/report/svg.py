"""Figures as elements of a page: small, in the page's own colours and type, and with words for who cannot see them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from .figures import COLOURS, rendered

# What a figure is drawn in, and what the page makes of it; the page defines the variables, for light and for dark.
PAGE_COLOURS = {"#000000": "currentColor", "#444444": "currentColor", "#ffffff": "none"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(COLOURS)
}


def inline(figure: Figure, description: str, identity: str) -> Markup:
    """The figure as an SVG element with a text alternative; `identity` sets its ids apart from other figures'."""
    root = ElementTree.fromstring(rendered(figure, "svg"))
    _drop(root, "metadata", "style")
    for element in root.iter():
        element.tag = _local(element.tag)
        element.text, element.tail = (element.text or "").strip() or None, None
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib = {name: _in_page(name, value, identity) for name, value in attributes.items()}
    used = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": description}
    # Text came in through the figure's own XML writer and leaves escaped through this one.
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704


def _in_page(name: str, value: str, identity: str) -> str:
    """An attribute as the page wants it: its own ids, colours and fonts, and no digit that nobody sees."""
    match name:
        case "id":
            return f"{identity}-{value}"
        case "href":
            return value.replace("#", f"#{identity}-")
        case "clip-path":
            return value.replace("url(#", f"url(#{identity}-")
        case "style":
            value = re.sub(r"font-family: [^;]+;? ?", "", value)
            return re.sub(r"#[0-9a-f]{6}", lambda found: PAGE_COLOURS.get(found[0], found[0]), value)
        case "d" | "x" | "y" | "transform" | "points":
            rounded = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
            return " ".join(rounded.split())
        case _:
            return value


def _drop(root: ElementTree.Element, *tags: str) -> None:
    for parent in list(root.iter()):
        for child in [child for child in parent if _local(child.tag) in tags]:
            parent.remove(child)


def _local(name: str) -> str:
    return name.rpartition("}")[2]
