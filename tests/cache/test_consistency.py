"""Each rule of consistency: a targeted change gives exactly that finding, nothing gives none."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache.consistency import inconsistencies
from cache.encoding import encode_shard
from cache.format import NO_DOCUMENT, Encoding
from tests.cache.builder import Built, make_encoding, make_rows, make_targets

Arrays = dict[str, np.ndarray]


def _arrays(encoding: Encoding, scale: float = 2.0, seed: int = 0, rows: int = 10) -> Arrays:
    laid = make_rows(rows, encoding, seed)
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, encoding.length, encoding.vocabulary)) * scale
    return encode_shard(laid, make_targets(logits, laid, encoding), encoding)


def _found(arrays: Arrays, encoding: Encoding, documents: int | None = None) -> list[Any]:
    return list(inconsistencies(arrays, encoding, documents))


@pytest.mark.parametrize("logprobs", ["float32", "float16", "rounded"])
@pytest.mark.parametrize("tail", ["none", "sampled"])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 10.0, 300.0])
def test_sound_shards_have_no_finding(logprobs: str, tail: str, scale: float) -> None:
    for bits in (1, 6) if logprobs == "rounded" else (6,):
        encoding = make_encoding(tail=tail, logprobs=logprobs, mantissa_bits=bits)
        arrays = _arrays(encoding, scale)
        assert _found(arrays, encoding, int(arrays["documents"].max())) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"k": 60},
        {"k": 1},
        {"k": 60, "tail": "sampled"},
        {"k": 3, "tail": "sampled"},
        {"temperatures": (0.5, 3.0)},
        {"tail": "sampled", "temperatures": (2.0,)},
        {"vocabulary": 2, "k": 1},
        {"vocabulary": 1, "k": 1},
        {"vocabulary": 300, "k": 255},
        {"length": 2},
    ],
)
def test_sound_shards_of_other_settings(settings: dict[str, Any]) -> None:
    encoding = make_encoding(**settings)
    assert _found(_arrays(encoding), encoding) == []


def test_a_teacher_whose_logprobs_leave_float16_is_sound() -> None:
    encoding = make_encoding(k=60)
    assert _found(_arrays(encoding, scale=40_000.0), encoding) == []


def test_tokens_that_are_impossible_leave_empty_slots() -> None:
    for tail in ("none", "sampled"):
        encoding = make_encoding(tail=tail)
        rows = make_rows(4, encoding)
        labels = np.concatenate([rows["tokens"][:, 1:], rows["tokens"][:, :1]], axis=1)
        logits = np.full((4, 8, 60), -np.inf)
        logits[..., :3] = [2.0, 1.0, 0.0]
        np.put_along_axis(logits, labels[..., None].astype(np.int64), 0.5, axis=-1)
        arrays = encode_shard(rows, make_targets(logits, rows, encoding), encoding)
        assert (arrays["target_ids"][arrays["label_mask"] == 1][:, 4:] == encoding.no_id).all()
        assert _found(arrays, encoding) == []


# One rule each. `place` is a position with a label whose next position has one too.


def _set(name: str, value: Any, slot: Any = None) -> Callable[[Arrays, tuple[int, int]], None]:
    def change(arrays: Arrays, place: tuple[int, int]) -> None:
        key = place if slot is None else (*place, slot)
        arrays[name][key] = value(arrays[name][key]) if callable(value) else value

    return change


def _documents_within_a_segment(arrays: Arrays, place: tuple[int, int]) -> None:
    arrays["documents"][place[0], place[1] + 1] += 1


def _segments_skip(arrays: Arrays, place: tuple[int, int]) -> None:
    row = arrays["segments"][0]
    row[row >= 2] += 1


def _padding_inside(arrays: Arrays, place: tuple[int, int]) -> None:
    """Row 5 holds one token; padding, then another segment."""
    arrays["segments"][5, 3] = 1
    arrays["documents"][5, 3] = arrays["documents"][5, 0]


def _padding_token(arrays: Arrays, place: tuple[int, int]) -> None:
    arrays["tokens"][5, 6] = 3


def _label_at_the_end(arrays: Arrays, place: tuple[int, int]) -> None:
    """A label where the next token is another document's: C13's kind."""
    row, end = _segment_end(arrays)
    source = {name: value[place].copy() for name, value in arrays.items()}
    for name in ("target_ids", "target_logprobs", "exact_counts", "tail_logprobs", "entropy"):
        arrays[name][row, end] = source[name]
    arrays["label_mask"][row, end] = 1
    arrays["label_logprobs"][row, end] = -60.0
    arrays["tokens"][row, end + 1] = 0  # not among the entries


def _segment_end(arrays: Arrays) -> tuple[int, int]:
    segments = arrays["segments"]
    ends = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] != 0)
    row, end = np.argwhere(ends)[0].tolist()
    return row, end


def _swap_first_two(arrays: Arrays, place: tuple[int, int]) -> None:
    for name in ("target_ids", "target_logprobs"):
        arrays[name][place][[0, 1]] = arrays[name][place][[1, 0]]


def _repeat_an_id(arrays: Arrays, place: tuple[int, int]) -> None:
    ids = arrays["target_ids"][place]
    label = arrays["tokens"][place[0], place[1] + 1]
    spare = [slot for slot in range(6) if ids[slot] != label]
    ids[spare[1]] = ids[spare[0]]


def _label_token_is_an_entry(arrays: Arrays, place: tuple[int, int]) -> None:
    arrays["tokens"][place[0], place[1] + 1] = arrays["target_ids"][place][0]
    arrays["label_logprobs"][place] = -30.0


def _label_likelier_than_entries(arrays: Arrays, place: tuple[int, int]) -> None:
    others = set(range(60)) - set(arrays["target_ids"][place].tolist())
    arrays["tokens"][place[0], place[1] + 1] = max(others)
    arrays["label_logprobs"][place] = -1e-3


RULES: dict[str, tuple[Callable[[Arrays, tuple[int, int]], None], tuple[str, str]]] = {
    "token": (_set("tokens", 60), ("tokens", "illegal token id")),
    "token fill": (_set("tokens", 65535), ("tokens", "illegal token id")),
    "padding token": (_padding_token, ("tokens", "padding should be token 0")),
    "segment gap": (_segments_skip, ("segments", "segments should number 1, 2, … and then be 0")),
    "padding inside": (_padding_inside, ("segments", "segments should number 1, 2, …")),
    "document of padding": (
        lambda arrays, place: arrays["documents"].__setitem__((5, 6), 3),
        ("documents", "only padding has no document"),
    ),
    "no document": (
        lambda arrays, place: arrays["documents"][5].__setitem__(0, NO_DOCUMENT),
        ("documents", "only padding has no document"),
    ),
    "document changes": (_documents_within_a_segment, ("documents", "one document")),
    "no such document": (
        lambda arrays, place: arrays["documents"][5].__setitem__(0, 5000),
        ("documents", "no such document"),
    ),
    "label at the end": (_label_at_the_end, ("label_mask", "where the segment does not go on")),
    "count 0": (_set("exact_counts", 0), ("exact_counts", "an impossible count")),
    "count above k": (_set("exact_counts", 7), ("exact_counts", "an impossible count")),
    "exact without id": (
        _set("target_ids", 65535, 5),
        ("target_ids", "an exact entry without an id"),
    ),
    "illegal id": (_set("target_ids", 60, 5), ("target_ids", "illegal id")),
    "repeated id": (_repeat_an_id, ("target_ids", "the same id twice at one position")),
    "positive": (
        lambda arrays, place: arrays["target_logprobs"][place].__setitem__(0, 1e-5),
        ("target_logprobs", "a log-prob that is not a finite number <= 0"),
    ),
    "order": (_swap_first_two, ("target_logprobs", "exact entries out of order")),
    "mass": (
        _set("tail_logprobs", lambda value: value + np.float16(0.5), 0),
        ("tail_logprobs", "exact mass + tail mass is not 1"),
    ),
    "mass without tail": (
        _set("tail_logprobs", -np.inf, 0),
        ("tail_logprobs", "exact mass + tail mass is not 1"),
    ),
    "tail above 1": (
        _set("tail_logprobs", 0.5, 2),
        ("tail_logprobs", "a tail that is not a number <= 0"),
    ),
    "tail NaN": (
        _set("tail_logprobs", np.nan, 1),
        ("tail_logprobs", "a tail that is not a number <= 0"),
    ),
    "label off": (
        _label_token_is_an_entry,
        ("label_logprobs", "not the log-prob of the entry that is the label"),
    ),
    "label too likely": (
        _label_likelier_than_entries,
        ("label_logprobs", "label is no exact entry, yet likelier than one"),
    ),
    "label NaN": (
        _set("label_logprobs", np.nan),
        ("label_logprobs", "label"),
    ),
    "entropy": (_set("entropy", 4.2), ("entropy", "an entropy outside 0 … log(vocabulary)")),
    "entropy below 0": (_set("entropy", -0.1), ("entropy", "an entropy outside")),
    "entropy NaN": (_set("entropy", np.nan), ("entropy", "an entropy outside")),
}


def _place(arrays: Arrays) -> tuple[int, int]:
    """A labelled position whose label is no entry, with two more tokens of its segment."""
    label = arrays["label_mask"] == 1
    labels = np.concatenate([arrays["tokens"][:, 1:], arrays["tokens"][:, :1]], axis=1)
    hit = (arrays["target_ids"] == labels[..., None]).any(axis=-1)
    following = np.concatenate([label[:, 1:], np.zeros_like(label[:, :1])], axis=1)
    row, position = np.argwhere(label & following & ~hit)[0].tolist()
    return row, position


@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_finds_what_it_is_for(rule: str) -> None:
    encoding = make_encoding()
    arrays = _arrays(encoding)
    change, (name, reason) = RULES[rule]
    place = _place(arrays)
    change(arrays, place)
    found = _found(arrays, encoding, 1000)
    assert any(where == name and reason in text for where, text in found), found
    # A count of 0 or a positive log-prob changes the masses too.
    assert len(found) == 1 or rule in ("count 0", "positive"), found
    assert all(" places, first at row " in text for _, text in found)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            lambda arrays, at: arrays["target_logprobs"][at].__setitem__(5, -20),
            ("target_logprobs", "a log-prob at an entry that is not exact"),
        ),
        (
            lambda arrays, at: arrays["target_ids"][at].__setitem__(
                [4, 5], arrays["target_ids"][at][[5, 4]]
            ),
            ("target_ids", "sampled ids should ascend"),
        ),
        (
            lambda arrays, at: arrays["target_ids"][at].__setitem__(4, 65535),
            ("target_ids", "an entry behind an empty slot"),
        ),
        (
            lambda arrays, at: arrays["target_ids"][at].__setitem__(
                slice(arrays["exact_counts"][at], None), 65535
            ),
            ("exact_counts", "no sampled entry, yet the tail has mass"),
        ),
    ],
)
def test_rules_of_sampled_entries(change: Any, finding: tuple[str, str]) -> None:
    encoding = make_encoding(tail="sampled")
    arrays = _arrays(encoding)
    row, position = _place(arrays)
    assert arrays["exact_counts"][row, position] <= 4
    change(arrays, (row, position))
    found = _found(arrays, encoding)
    assert [(name, reason[: len(finding[1])]) for name, reason in found] == [finding]


def test_nothing_drawn_in_a_cache_with_samples() -> None:
    """A position whose entries are all exact, in a cache of a capture that always draws."""
    encoding = make_encoding(tail="sampled")
    arrays, plain = _arrays(encoding), _arrays(make_encoding(temperatures=(1.0,)))
    place = _place(arrays)
    for name in ("target_ids", "target_logprobs", "exact_counts", "tail_logprobs"):
        arrays[name][place] = plain[name][place]
    ((name, reason),) = _found(arrays, encoding)
    assert name == "exact_counts"
    assert reason.startswith("no sampled entry, yet the tail has mass at 1 places")


def test_samples_in_a_cache_without(exact_cache: Built) -> None:
    encoding = make_encoding()
    arrays = _arrays(encoding)
    place = _place(arrays)
    arrays["exact_counts"][place] = 5
    arrays["target_logprobs"][place][5] = np.nan
    names = [reason for _, reason in _found(arrays, encoding)]
    assert any("a sampled entry in a cache without samples" in reason for reason in names)


@pytest.mark.parametrize(
    "name",
    ["target_ids", "target_logprobs", "exact_counts", "tail_logprobs", "label_logprobs", "entropy"],
)
def test_bytes_where_there_is_no_label(name: str) -> None:
    encoding = make_encoding()
    arrays = _arrays(encoding)
    arrays[name][5, 6] = 0
    found = _found(arrays, encoding)
    assert {where for where, _ in found} == {name}
    assert found[0][1] == (
        "no label, yet not the canonical bytes at 1 places, first at row 5 of the shard, position 6"
    )


def test_another_nan_is_not_canonical() -> None:
    encoding = make_encoding()
    arrays = _arrays(encoding)
    arrays["entropy"].view(np.uint16)[5, 6] = 0x7E01
    ((found, _),) = _found(arrays, encoding)
    assert found == "entropy"


def test_a_mask_that_is_neither() -> None:
    encoding = make_encoding()
    for value in (2, 255):
        arrays = _arrays(encoding)
        arrays["label_mask"][5, 6] = value
        found = _found(arrays, encoding)
        assert [name for name, _ in found] == ["label_mask"]
        assert "a label mask is 0 or 1" in found[0][1]


def test_the_bound_is_the_roundings() -> None:
    """A label's log-prob off by more than the rounding is found, by less is not."""
    for logprobs, off in (("float32", 3e-4), ("float16", 0.01), ("rounded", 0.2)):
        encoding = make_encoding(logprobs=logprobs, k=60)
        arrays = _arrays(encoding)
        assert _found(arrays, encoding) == []
        place = _place_of_any_label(arrays)
        arrays["label_logprobs"][place] -= off
        ((name, reason),) = _found(arrays, encoding)
        assert (name, reason[:16]) == ("label_logprobs", "not the log-prob")


def _place_of_any_label(arrays: Arrays) -> tuple[int, int]:
    where = np.argwhere((arrays["label_mask"] == 1) & (arrays["label_logprobs"] > -6))
    row, position = where[0].tolist()
    return row, position


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_found_and_nothing_breaks(seed: int) -> None:
    """Random bytes in any array: findings, never an exception or a warning."""
    encoding = make_encoding()
    random = np.random.default_rng(seed)
    for name in encoding.arrays():
        arrays = _arrays(encoding, seed=seed, rows=4)
        raw = random.integers(0, 256, arrays[name].nbytes, dtype=np.uint8)
        arrays[name] = raw.view(arrays[name].dtype).reshape(arrays[name].shape)
        assert _found(arrays, encoding)


def test_rows_of_another_capture_are_found(exact_cache: Built, sampled_cache: Built) -> None:
    """C36's kind: each array of one teacher's beside the others of another's."""
    encoding = make_encoding()
    one, other = _arrays(encoding, seed=0), _arrays(encoding, seed=3)
    for name in encoding.arrays():
        mixed = {**one, name: other[name]}
        assert _found(mixed, encoding), name
