"""A disk that fails, or a process that is killed, in any system call: a sentence at most, and nothing is lost."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torture import scenarios
from torture.size import LARGE, many

HERE = Path(__file__).parent
KILLED = 0
ERRORS = {"killed": KILLED, "disk full": errno.ENOSPC, "disk broken": errno.EIO, "not allowed": errno.EACCES}
SMALL_SAMPLE = 2


class Server:
    """The test's end of the fork server."""

    def __init__(self, library: Path) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": path}
        command = [sys.executable, "-m", "torture.fork_server"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._line() == "ready\n"

    def __call__(self, scenario: str, folder: Path, call: int = 0, error: int = 0) -> dict[str, Any]:
        order = {"scenario": scenario, "folder": str(folder), "call": call, "error": error}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait() == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make system calls fail with")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"], check=True)
    server = Server(library)
    yield server
    server.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_a_fault_in_any_system_call_loses_nothing(
    scenario: str, error: str, server: Server, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    whole = server(scenario, tmp_path / "whole")
    assert whole["code"] == 0, whole["said"]
    expected, calls = scenarios.kept(tmp_path / "whole"), list(range(1, whole["calls"] + 1))
    if not LARGE:
        calls = random.Random(scenario + error).sample(calls, min(SMALL_SAMPLE, len(calls)))
    for call in calls:
        folder = tmp_path / str(call)
        disturbed = server(scenario, folder, call, ERRORS[error])
        place = f"{scenario}, {error} in call {call} of {whole['calls']}"
        assert disturbed["code"] in ((-9,) if error == "killed" else (0, 2)), f"{place}: {disturbed['said']}"
        again = server(scenario, folder)
        assert again["code"] == 0, f"after {place}: {again['said']}"
        assert scenarios.kept(folder) == expected, f"after {place}"
        shutil.rmtree(folder)
    tried("faults and kills", len(calls))


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_one_fault_after_another_loses_nothing(
    scenario: str, server: Server, tmp_path: Path, tried: Callable[[str, int], None]
) -> None:
    assert server(scenario, tmp_path / "whole")["code"] == 0
    chance, faults = random.Random(scenario), many(4, 40)
    for _ in range(faults):
        disturbed = server(scenario, tmp_path / "run", chance.randrange(1, 40), chance.choice(list(ERRORS.values())))
        assert disturbed["code"] in (-9, 0, 2), disturbed["said"]
    again = server(scenario, tmp_path / "run")
    assert again["code"] == 0, again["said"]
    assert scenarios.kept(tmp_path / "run") == scenarios.kept(tmp_path / "whole")
    tried("faults and kills", faults)
