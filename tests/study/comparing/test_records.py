"""Records: what is written is read, with several writers, killed writers and damaged files."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from json_values import VALUES, strictly
from maxgain.errors import FileError, RecordError
from maxgain.study import files
from maxgain.study.comparing import records
from maxgain.study.comparing.records import append, read
from maxgain.study.predictions import Predictions
from maxgain.study.recipes import RECIPES, from_json, run_key, to_json

CONFIG = files.revived(to_json(replace(RECIPES["digits"], regulariser="maxgain=2", milestones=(100, 120))))
KEY = run_key(from_json(CONFIG), "f")


def ok(seed=0, accuracy=0.9075, **fields):
    return about("ok", seed) | {"test_accuracy": accuracy, "test_loss": 0.31} | with_key(fields)


def failed(seed=0, error="the loss is no longer a number", **fields):
    return about("failed", seed) | {"error": error} | with_key(fields)


def about(status, seed):
    record = {"status": status, "fingerprint": "f", "recipe": "digits", "regulariser": "maxgain=2", "seed": seed}
    return record | with_key({"config": CONFIG | {"seed": seed}})


def with_key(fields):
    """The fields of a record, and its key if they have a config that it can be made of."""
    made = {}
    if fields.get("config") and "momentum" not in fields["config"]:
        made["key"] = run_key(from_json(fields["config"]), fields.get("fingerprint", "f"))
    return made | fields


def seeds(runs):
    return [run["seed"] for run in runs]


# What is written is read


def test_a_record_comes_back_with_its_key(tmp_path):
    record = ok(max_gain={"train": {"features.0": math.inf}})
    append(tmp_path / "new" / "results", record)
    found = read(tmp_path / "new" / "results")
    assert found.find(KEY) == files.sealed(record)
    assert (found.failed, found.warnings) == ((), ())
    assert [path.name for path in (tmp_path / "new" / "results").iterdir()] == ["digits.jsonl"]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(VALUES, st.floats(0, 1)), min_size=1, max_size=4))
def test_whatever_json_can_hold_comes_back(tmp_path, contents):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for seed, (extra, accuracy) in enumerate(contents):
        append(folder, ok(seed, accuracy, extra=extra))
    runs = read(folder).runs
    assert [(run["extra"], run["test_accuracy"]) for run in runs] == contents
    assert [[type(v) for v in (run["extra"], run["seed"])] for run in runs] == [[type(e), int] for e, _ in contents]


def test_lines_are_strict_json(tmp_path):
    append(tmp_path, ok(gamma=math.inf, lowest=-math.inf))
    [line] = (tmp_path / "digits.jsonl").read_text().splitlines()
    content = strictly(line)
    assert (content["gamma"], content["lowest"]) == ("inf", "-inf")
    assert read(tmp_path).runs[0]["gamma"] == math.inf


def test_a_result_that_was_stored_as_strict_json_before_is_accepted(tmp_path):
    append(tmp_path, ok(gamma="inf", train_loss="inf"))
    assert read(tmp_path).runs[0]["train_loss"] == math.inf


def test_a_folder_that_does_not_exist_yet_holds_nothing(tmp_path):
    assert read(tmp_path / "none") == records.Records((), (), (), folders=(tmp_path / "none",))


# Successes, failures, retries


def test_the_newest_success_wins_and_failures_never_hide_it(tmp_path):
    for record in (failed(0), ok(0, 0.5), ok(1, 0.6), ok(0, 0.7), failed(0), failed(2, "first"), failed(2, "second")):
        append(tmp_path, record)
    found = read(tmp_path)
    assert [(run["seed"], run["test_accuracy"]) for run in found.runs] == [(0, 0.7), (1, 0.6)]
    assert [(run["seed"], run["error"]) for run in found.failed] == [(2, "second")]
    assert found.find(KEY)["test_accuracy"] == 0.7
    assert found.find(run_key(from_json(CONFIG | {"seed": 2}), "f")) is None


def test_records_are_filed_by_recipe(tmp_path):
    for recipe in ("digits", "svhn"):
        for regulariser in ("none", "maxgain=2"):
            own = {"recipe": recipe, "regulariser": regulariser}
            append(tmp_path, ok(**own, config=CONFIG | {"name": recipe, "dataset": recipe, "regulariser": regulariser}))
    append(tmp_path, failed(recipe="svhn", config=CONFIG | {"seed": 9}))
    found = read(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.jsonl", "svhn.jsonl"]
    assert len(found.runs) == 4
    assert sorted(run["recipe"] for run in found.runs) == ["digits", "digits", "svhn", "svhn"]
    assert [run["recipe"] for run in found.failed] == ["svhn"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ok(accuracy=math.nan), "test_accuracy is nan"),
        (ok(accuracy=90.75), r"test_accuracy is 90.75, but must be a number from 0 to 1"),
        (ok(accuracy=-0.1), "test_accuracy is -0.1"),
        (ok(accuracy="high"), "test_accuracy is 'high'"),
        (ok(accuracy=True), "test_accuracy is True"),
        (ok(train_accuracy=math.inf), "train_accuracy is inf"),
        (ok(train_loss=math.nan), "train_loss is nan"),
        (ok(test_loss=-1), "test_loss is -1"),
        (ok(accuracy=None), "must have a test_accuracy or a validation_accuracy"),
        (ok(status="done"), "at status: invalid enum value 'done'"),
        ({**ok(), "status": None}, "at status: expected `str`, got `null`"),
        (failed(error=""), "must say why"),
        (failed(test_accuracy=0.0), "a run that failed has no results, but this one has a test_accuracy"),
        (failed(train_loss=2.3), "this one has a train_loss"),
        (ok(recipe="../digits"), "cannot be the name of a file"),
        (ok(recipe=None), "at recipe: expected `str`, got `null`"),
        (ok(config=None), "at config: expected `object`, got `null`"),
        (ok(key="0123"), "has the key 0123"),
        (ok(out=os), "out is of the type module"),
        (ok(max_gain={3: 1.0}), "a field called 3"),
    ],
)
def test_what_is_no_result_is_refused_and_leaves_no_trace(tmp_path, record, message):
    with pytest.raises(RecordError, match=message):
        append(tmp_path, record)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accuracy", [0, 1, 0.0, 1.0])
def test_the_extremes_are_results(tmp_path, accuracy):
    append(tmp_path, ok(accuracy=accuracy))
    assert read(tmp_path).runs[0]["test_accuracy"] == accuracy


def test_a_tuning_run_needs_no_test(tmp_path):
    append(tmp_path, ok(accuracy=None, validation_accuracy=0.8))
    assert len(read(tmp_path).runs) == 1


# Several writers, killed writers


def write_many(folder, writer, barrier):
    barrier.wait()
    for number in range(50):
        append(folder, ok(seed=50 * writer + number, text=str(number) * 5000))


def write_for_ever(folder):
    seed = 0
    while True:
        append(folder, ok(seed, text="x" * 50_000))
        seed += 1


def die_in_mid_write(folder):
    def half(descriptor, content):
        write(descriptor, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    write, os.write = os.write, half
    append(folder, ok(seed=99))


@pytest.fixture(scope="module")
def processes():
    """Processes that start quickly, because one that has imported everything already is forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypothesis", "pytest", "maxgain.study.comparing.records"])
    return context


def test_several_processes_may_append_at_once(tmp_path, processes):
    barrier = processes.Barrier(8)
    writers = [processes.Process(target=write_many, args=(tmp_path, writer, barrier)) for writer in range(8)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read(tmp_path).warnings == ()  # a reader never sees half a line either
        time.sleep(0.05)
    assert [writer.exitcode for writer in writers] == [0] * 8
    found = read(tmp_path)
    assert sorted(seeds(found.runs)) == list(range(400))
    assert all(run["text"] == str(run["seed"] % 50) * 5000 for run in found.runs)


def test_writers_and_readers_wait_for_a_line_that_is_being_written(tmp_path):
    append(tmp_path, ok(0))
    append(tmp_path / "other", ok(1))
    line = (tmp_path / "other" / "digits.jsonl").read_bytes()
    found = []
    others = [
        threading.Thread(target=lambda: append(tmp_path, ok(2))),
        threading.Thread(target=lambda: found.append(read(tmp_path))),
    ]
    with (tmp_path / "digits.jsonl").open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line[:50])
        for other in others:
            other.start()
        for other in others:
            other.join(timeout=0.2)
        file.write(line[50:])
    for other in others:
        other.join()
    assert seeds(read(tmp_path).runs) == [0, 1, 2]
    assert found[0].warnings == ()
    assert seeds(found[0].runs)[:2] == [0, 1]


def test_a_killed_writer_loses_at_most_the_record_it_was_writing(tmp_path, processes):
    for _ in range(3):
        writer = processes.Process(target=write_for_ever, args=(tmp_path,))
        writer.start()
        while len(read(tmp_path).runs) < 10:
            assert writer.exitcode is None
            time.sleep(0.01)
        writer.kill()
        writer.join()
        before = seeds(read(tmp_path).runs)
        assert before == list(range(len(before)))
        append(tmp_path, ok(seed=1_000_000))
        assert seeds(read(tmp_path).runs) == [*before, 1_000_000]
        (tmp_path / "digits.jsonl").unlink()


def test_a_writer_killed_in_mid_write(tmp_path, processes):
    append(tmp_path, ok(0))
    writer = processes.Process(target=die_in_mid_write, args=(tmp_path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    found = read(tmp_path)
    assert seeds(found.runs) == [0]
    assert found.warnings == (
        f"{tmp_path / 'digits.jsonl'}, line 2: cut short when its writer was stopped, and left out; "
        "that run has no record",
    )
    append(tmp_path, ok(1))
    assert (seeds(read(tmp_path).runs), read(tmp_path).warnings) == ([0, 1], ())


def test_a_file_cut_anywhere_keeps_every_whole_line_and_takes_the_next(tmp_path):
    append(tmp_path, ok(0, text="γ\n{}"))
    append(tmp_path, ok(1))
    path = tmp_path / "digits.jsonl"
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        # A line that lacks nothing but its end is whole.
        whole = [seed for seed, end in ((0, first - 1), (1, len(content) - 1)) if cut >= end]
        assert seeds(read(tmp_path).runs) == whole
        assert len(read(tmp_path).warnings) == (cut not in (0, first - 1, first, len(content) - 1, len(content)))
        append(tmp_path, ok(2))
        assert (seeds(read(tmp_path).runs), read(tmp_path).warnings) == ([*whole, 2], ())
        assert path.read_bytes().startswith(content[: len(content) if 1 in whole else first if 0 in whole else 0])


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    append(tmp_path, ok(0))
    before = (tmp_path / "digits.jsonl").read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:20]))
    with pytest.raises(RecordError, match=rf"cannot write .*digits\.jsonl: {os.strerror(errno.ENOSPC)}"):
        append(tmp_path, ok(1))
    assert (tmp_path / "digits.jsonl").read_bytes() == before


# Damaged files


def unlike(record, **fields):
    return json.dumps(record | fields).encode()


LEFT_OUT = [
    (b"{", "it is not JSON"),
    (b"\xff\xfe", "it is not JSON"),
    (b"[1, 2]", "expected `object`, got `array`"),
    (b"[" * 100_000, "it is not JSON|nested deeper"),
    (unlike({name: value for name, value in ok(9).items() if name != "key"}), "missing required field `key`"),
    (unlike({name: value for name, value in ok(9).items() if name != "fingerprint"}), "missing .*`fingerprint`"),
    (unlike(ok(9), test_accuracy=math.nan), "it is not JSON"),
    (unlike(ok(9), test_accuracy=90.75), r"test_accuracy is 90\.75"),
    (unlike(ok(9), recipe="svhn"), r"whose file is svhn\.jsonl"),
    (unlike(ok(9), key="0123456789abcdef"), "it has the key 0123456789abcdef, but its config and data make it"),
    (unlike(ok(9), config=CONFIG | {"momentum": 0.9}), "another version of maxgain: it differs in 'momentum'"),
]


@pytest.mark.parametrize(("line", "message"), LEFT_OUT)
def test_a_line_that_is_no_record_is_named_and_the_rest_is_used(tmp_path, line, message):
    append(tmp_path, ok(0))
    path = tmp_path / "digits.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    append(tmp_path, ok(1))
    found = read(tmp_path)
    assert seeds(found.runs) == [0, 1]
    [warning] = found.warnings
    assert re.search(
        rf"digits\.jsonl: left out what is no record of this version of maxgain: line 2: .*{message}", warning
    )
    assert len(warning) < 1000


def test_many_lines_that_are_no_records_are_counted(tmp_path):
    append(tmp_path, ok(0))
    with (tmp_path / "digits.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for line, _ in LEFT_OUT)
    [warning] = read(tmp_path).warnings
    assert f"{len(LEFT_OUT)} lines, of which the first is line 2: it is not JSON" in warning


def test_a_whole_last_line_is_checked_even_without_its_end(tmp_path):
    (tmp_path / "digits.jsonl").write_bytes(unlike(ok(), test_accuracy=90.75))
    found = read(tmp_path)
    assert found.runs == ()
    assert re.search(r"line 1: test_accuracy is 90\.75", found.warnings[0])


def test_promise_18_the_same_recipe_on_other_data_is_another_run(tmp_path):
    append(tmp_path, ok(0, 0.5))
    append(tmp_path, ok(0, 0.7, fingerprint="other", config=CONFIG))
    append(tmp_path, failed(0, fingerprint="third", config=CONFIG))
    found = read(tmp_path)
    keys = [run_key(from_json(CONFIG), data) for data in ("f", "other", "third")]
    assert [found.find(key)["test_accuracy"] for key in keys[:2]] == [0.5, 0.7]
    assert found.find(keys[2]) is None
    assert len(found.failed) == 1


def test_empty_lines_and_files_do_no_harm(tmp_path):
    (tmp_path / "digits.jsonl").touch()
    (tmp_path / "svhn.jsonl").write_text("\n\n")
    append(tmp_path, ok(0))
    assert (seeds(read(tmp_path).runs), read(tmp_path).warnings) == ([0], ())


def test_places_that_cannot_hold_results_are_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "results" / "digits.jsonl").mkdir(parents=True)
    with pytest.raises(RecordError, match="file is a file: results are kept in a folder"):
        read(tmp_path / "file")
    with pytest.raises(RecordError, match="cannot write"):
        append(tmp_path / "file", ok())
    with pytest.raises(RecordError, match=r"cannot read .*digits\.jsonl"):
        read(tmp_path / "results")
    with pytest.raises(RecordError, match=r"cannot write .*digits\.jsonl"):
        append(tmp_path / "results", ok())


# Predictions


def test_predictions_are_kept_beside_their_record(tmp_path):
    kept = Predictions.of(np.array([1, 2, 3]), np.array([1, 2, 2]), np.zeros(3, np.float32))
    append(tmp_path, ok(0, predictions_sha256=kept.sha256), kept)
    append(tmp_path, ok(1))
    found = read(tmp_path)
    assert found.correct(found.runs[0]).tolist() == [True, True, False]
    other = Predictions.of(np.array([0, 0, 0]), np.array([1, 2, 2]), np.zeros(3, np.float32))
    append(tmp_path / "other", ok(0, predictions_sha256=other.sha256), other)  # as it came out on another machine
    assert replace(found, folders=(tmp_path / "other", tmp_path)).correct(found.runs[0]).tolist() == [True, True, False]
    assert found.correct(found.runs[1]) is None
    assert [path.name for path in (tmp_path / "predictions").iterdir()] == [f"{KEY}.npz"]
    (tmp_path / "predictions" / f"{KEY}.npz").write_bytes(b"damaged")
    with pytest.raises(FileError, match=rf"{KEY}\.npz holds no predictions of a run .*: remove it"):
        found.correct(found.runs[0])
    (tmp_path / "predictions" / f"{KEY}.npz").unlink()
    assert found.correct(found.runs[0]) is None


def test_a_flipped_bit_in_a_record_is_seen_wherever_it_is(tmp_path):
    append(tmp_path, ok(seed=1))
    append(tmp_path, ok(seed=2))
    path = tmp_path / "digits.jsonl"
    whole, length = path.read_bytes(), path.read_bytes().index(b"\n")
    for place in range(0, length, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 7
        path.write_bytes(damaged)
        found = read(tmp_path)
        assert seeds(found.runs) in ([2], [1, 2]), "the other record is used"
        # Where a bit of the checksum's own name went, nothing is known to be wrong, and nothing is.
        assert found.warnings or b"sha256" not in damaged[:length]


def test_the_newest_record_of_a_run_counts_wherever_its_line_stands_and_a_contradiction_is_named(tmp_path):
    new, old = "2026-05-02T00:00:00+00:00", "2026-05-01T23:00:00-02:00"
    for accuracy, finished in ((0.7, "2026-05-02T01:30:00+00:00"), (0.5, new), (0.6, old), (0.4, "once"), (0.3, None)):
        append(tmp_path, ok(0, accuracy, **({"finished": finished} if finished else {})))
    append(tmp_path, ok(1, 0.9, finished=new))
    append(tmp_path, ok(1, 0.9, finished=old))
    found = read(tmp_path)
    assert [(run["seed"], run["test_accuracy"]) for run in found.runs] == [(0, 0.7), (1, 0.9)]
    (warning,) = found.warnings
    assert "1 run is recorded more than once, with scores that differ; the newest record of each counts" in warning


def test_scores_may_be_numpys(tmp_path):
    append(tmp_path, ok(accuracy=np.float64(0.75)))
    (run,) = read(tmp_path).runs
    assert run["test_accuracy"] == 0.75


def test_a_results_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch) -> None:
    assert not read(tmp_path / "nowhere").runs

    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", denied)  # what pathlib lists folders by
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(RecordError, match=r"cannot read .*: Permission denied"):
        read(tmp_path)
