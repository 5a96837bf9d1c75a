"""What tests of the promises share: torch.compile that begins with nothing."""

from collections.abc import Iterator

import pytest

from promises.common import forget_compiled_code


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    forget_compiled_code()
    yield
    forget_compiled_code()
