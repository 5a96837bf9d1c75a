"""The page of a comparison that has everything, built once."""

import pytest

from maxgain.study.report.page import build_page
from page_elements import BETTER, NONE, Elements
from synthetic_records import synthetic_records


@pytest.fixture(scope="session")
def whole_page():
    return build_page(synthetic_records({"none": NONE, "maxgain": BETTER}))


@pytest.fixture(scope="session")
def whole(whole_page):
    return Elements(whole_page)
