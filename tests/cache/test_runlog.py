"""Run logs: events beside the data, several logs in a process, and lines that are none."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache.runlog import RunLog, read_events
from cache.storage import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_an_event_is_on_storage_when_write_returns(store: Store) -> None:
    log = RunLog(store, "run-1")
    before = time.time()
    log.write("begin", note="ü")
    (event,) = read_events(store)
    assert before - 1 <= event.pop("time") <= time.time() + 1
    assert event == {"event": "begin", "note": "ü"}
    log.write("shard", shard=3)
    assert [event["event"] for event in read_events(store)] == ["begin", "shard"]


def test_logs_of_one_process_keep_out_of_each_others_way(store: Store) -> None:
    """The command and its stages each have one, in one process when there is one worker."""
    first, second = RunLog(store, "run-1"), RunLog(store, "run-1")
    first.write("begin")
    second.write("shard", shard=0)
    RunLog(store, "run-1").write("shard", shard=1)
    first.write("finish")
    names = [event["event"] for event in read_events(store, "run-1")]
    assert sorted(names) == ["begin", "finish", "shard", "shard"]


def test_long_logs_take_several_files(store: Store) -> None:
    log = RunLog(store, "run-1")
    for number in range(250):
        log.write("shard", shard=number)
    assert len(store.list("runs")) == 3
    assert [event["shard"] for event in read_events(store)] == list(range(250))


def test_from_threads(store: Store) -> None:
    log = RunLog(store, "run-1")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: log.write("shard", shard=number), range(150)))
    assert sorted(event["shard"] for event in read_events(store)) == list(range(150))


def test_one_run_or_all_by_time(store: Store) -> None:
    RunLog(store, "b").write("one")
    RunLog(store, "a").write("two")
    assert [event["event"] for event in read_events(store)] == ["one", "two"]
    assert [event["event"] for event in read_events(store, "a")] == ["two"]
    assert read_events(store, "none") == []


def test_lines_that_are_no_event_are_left_out(store: Store) -> None:
    good = json.dumps({"time": 1.0, "event": "good"})
    lines = [good, "", "half a li", "[1]", "1", '{"event": "x"}', '{"time": 1}', '{"time": "1"}']
    store.write("runs/r/f.jsonl", "\n".join(lines).encode() + b"\n\xff\xfe\n")
    store.write("runs/r/config.toml", b"x = 1")
    assert read_events(store) == [{"time": 1.0, "event": "good"}]
