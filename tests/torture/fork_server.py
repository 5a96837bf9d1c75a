"""A process that has imported everything and forks one for each order it reads, in which one system call goes wrong.

An order is a line of JSON: a scenario, its folder, the number of the call (0: none), and an error's number (0: the
process is killed in that call). The answer tells how the child ended, how many calls it made, and what it said.
"""

import ctypes
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from maxgain.errors import MaxGainError
from torture import scenarios


def answer(order: dict[str, object], faults: ctypes.CDLL) -> dict[str, object]:
    """Carries out one order in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faults.arm(order["call"] or 10**9, order["error"])
        code, said = 0, ""
        try:
            scenarios.SCENARIOS[str(order["scenario"])](Path(str(order["folder"])))
        except (MaxGainError, OSError) as error:  # which the command line answers in a sentence
            code, said = 2, str(error)
        except BaseException:
            code, said = 1, traceback.format_exc()
        calls = faults.calls()
        faults.arm(-1, 0)
        os.write(writing, json.dumps({"calls": calls, "said": said[-3000:]}).encode())
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"calls": 0, "said": ""} | (json.loads(told) if told else {}) | {"code": code}


def main() -> None:
    """Gets ready, says so, and answers until there are no more orders."""
    torch.set_num_threads(1)
    faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
    faults.arm.argtypes = [ctypes.c_long, ctypes.c_int]
    faults.calls.restype = ctypes.c_long
    with tempfile.TemporaryDirectory() as folder:  # what is imported on the way need not be imported again
        for name, scenario in scenarios.SCENARIOS.items():
            scenario(Path(folder) / name)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line), faults)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
