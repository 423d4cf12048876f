# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""results.jsonl: what is appended is loaded again, whatever happens to the processes that append."""

import fcntl
import json
import multiprocessing
from dataclasses import replace

import pytest
from made_up_study import make_result, make_results

from diff_transformer.reproduction.results import RunId, append, load


@pytest.fixture
def file(tmp_path):
    return tmp_path / "results.jsonl"


def result(seed: int = 0):
    return make_result("recall", "diff", seed, 1e-3, [[320, 1.5, 0.25]])


def test_what_is_appended_is_loaded(file):
    results = make_results()
    for x in results:
        append(file, x)
    assert load(file) == results
    assert len(file.read_text().splitlines()) == len(results)
    assert results[0].run == RunId("retrieval", "transformer", 0, 1e-3, True)
    assert (results[0].loss, results[0].accuracy) == (1.5, 0.5)


def test_without_a_file_there_are_no_results(file):
    assert load(file) == [] and not file.exists()


def _append_many(file, first: int):
    for seed in range(first, first + 30):
        append(file, result(seed))


def test_processes_that_append_at_the_same_time_lose_nothing(file):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_many, args=(file, first)) for first in (0, 100, 200)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(x.seed for x in load(file)) == [first + i for first in (0, 100, 200) for i in range(30)]


def test_a_process_waits_while_another_appends(file):
    """What it would take for the half line of a killed process may be a line that is being written."""
    process = multiprocessing.get_context("fork").Process(target=append, args=(file, result()))
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write("half of ")
        stream.flush()
        process.start()
        process.join(0.3)
        assert process.is_alive() and file.read_text() == "half of "
        fcntl.flock(stream, fcntl.LOCK_UN)  # of the process too, which has inherited the stream
    process.join(60)
    assert load(file) == [result()]


@pytest.mark.parametrize("whole", [0, 2])
@pytest.mark.parametrize("length", [1, 40, -1])
def test_the_half_line_of_a_killed_process_is_left_out_and_then_removed(file, whole, length):
    for seed in range(3):
        append(file, result(seed))
    lines = file.read_text().splitlines()
    before = "".join(f"{line}\n" for line in lines[:whole])
    half = lines[2][:length]  # of -1, only the end of the line and the last brace are missing
    file.write_text(before + half)
    assert [x.seed for x in load(file)] == list(range(whole))
    append(file, result(7))
    assert [x.seed for x in load(file)] == [*range(whole), 7]
    assert file.read_text() == before + json.dumps(vars(result(7)), separators=(",", ":")) + "\n"


@pytest.mark.parametrize(
    "line", ["not JSON", "", "[1]", '{"experiment": "recall"}', json.dumps({**vars(result()), "unknown": 1})]
)
def test_a_line_that_is_not_a_result_is_named(file, line):
    append(file, result())
    with file.open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"results.jsonl, line 2 is not the result of a run: .*\. Remove the line\."):
        load(file)


def test_a_run_that_is_there_twice_is_named(file):
    for x in (result(0), result(1), replace(result(0), learning_rate=2e-3), replace(result(0), seconds=1.0)):
        append(file, x)
    with pytest.raises(ValueError, match=r"line 4 is a second RunId\(experiment='recall', arm='diff', seed=0.*Remove"):
        load(file)


def test_a_number_that_json_does_not_have_is_an_error_and_writes_nothing(file):
    append(file, result())
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(file, replace(result(1), curve=[[320, float("nan"), 0.0]]))
    assert load(file) == [result()]
