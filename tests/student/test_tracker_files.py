"""Records of trackers' files, also of files that end anywhere."""

import struct

import pytest

from student.tracker_files import last_steps, tensorboard_records, wandb_records

# Small ones, one that fills a block but for 3 bytes, and one of several blocks.
RECORDS = [b"a", b"", b"b" * 100, b"c" * (32768 - 7 - 8 - 7 - 107 - 7 - 3), b"d" * 70000, b"e" * 9]


def wandb_file(records: list[bytes]) -> tuple[bytes, list[int]]:
    """A log as LevelDB writes it, behind the header; and where each record ends."""
    data, ends = bytearray(b":W&B" + bytes(3)), []
    for record in records:
        rest, first = record, True
        while first or rest:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += bytes(left)
                left = 32768
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else 2 if first else 3
            data += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
        ends.append(len(data))
    return bytes(data), ends


def event_file(records: list[bytes]) -> tuple[bytes, list[int]]:
    data, ends = b"", []
    for record in records:
        data += struct.pack("<QI", len(record), 0) + record + bytes(4)
        ends.append(len(data))
    return data, ends


@pytest.mark.parametrize(
    ("write", "read"), [(wandb_file, wandb_records), (event_file, tensorboard_records)]
)
def test_whole_records_up_to_any_end(write, read):
    data, ends = write(RECORDS)
    assert list(read(data)) == RECORDS
    for cut in {0, 3, *ends, *(end - 1 for end in ends), *(end + 5 for end in ends), 50000}:
        assert list(read(data[:cut])) == RECORDS[: sum(end <= cut for end in ends)]


def test_zeros_end_a_log():
    data, _ = wandb_file(RECORDS[:3])
    assert list(wandb_records(data + bytes(500))) == RECORDS[:3]


def test_the_highest_step_of_each_name():
    rows = [(1, ["a", "b"]), (3, ["a"]), (2, ["a", "c"])]
    assert last_steps(rows) == {"a": 3, "b": 1, "c": 2}
    assert last_steps([]) == {}
