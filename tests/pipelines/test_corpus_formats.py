"""Documents are read as they are, and what is none is refused by file, line and number."""

import bz2
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.corpus_formats import TextUnit, format_of, read_documents
from pipelines.errors import CorpusError


def read(
    data: bytes,
    path: str = "d/x.jsonl",
    column: str = "text",
    unit: TextUnit = "file",
    first: int = 0,
) -> list[str]:
    return list(read_documents(io.BytesIO(data), path, column, unit, first))


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


TRICKY = "one\ufeff\r\ntwo\n\n\nthree\rfour\x85five\u2028six\x0b\x0c\x00 \t\n"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_a_text_file_is_one_document_byte_for_byte():
    assert read(TRICKY.encode(), "a.txt") == [TRICKY]
    assert read(b"", "a.text") == [""]


@given(texts)
def test_any_text_file_comes_back_byte_for_byte(text):
    assert read(b"x" + text.encode(), "a.txt") == ["x" + text]


BOM = "\ufeff".encode()
UNITS: tuple[TextUnit, ...] = ("file", "line")


def test_a_byte_order_mark_at_the_start_of_a_file_is_dropped():
    text = "one \ufeff\n\ufefftwo"
    assert read(BOM + text.encode(), "a.txt") == [text]
    assert read(BOM + text.encode(), "a.txt", unit="line") == ["one \ufeff", "\ufefftwo"]
    assert read(gzip.compress(BOM + b"one"), "a.txt.gz") == ["one"]
    assert read(BOM + BOM + b"one", "a.txt") == ["\ufeffone"]
    assert read(BOM, "a.txt") == [""]
    assert read(BOM, "a.txt", unit="line") == []
    assert read(BOM + b'[{"text": "one"}]', "a.json") == ["one"]


def test_byte_order_marks_between_json_files_that_were_joined_are_dropped():
    files = [b'{"text": "\xef\xbb\xbfone"}\n', b"", b'{"text": "two"}\r\n', b'{"text": "three"}']
    joined = b"".join(BOM + file for file in files)
    assert read(joined) == read(joined, "x.ndjson") == ["\ufeffone", "two", "three"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.ndjson"])
def test_wide_text_is_refused(encoding, name):
    data = '{"text": "a text"}\n'.encode(encoding)
    for unit in UNITS:
        with pytest.raises(CorpusError, match=rf"d/{name} is UTF-16 or UTF-32 text.*Convert it"):
            read(data, f"d/{name}", unit=unit)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><title>404</title></html>\n"
NAMES = ["a.jsonl", "a.ndjson", "a.json", "a.txt", "a.parquet", "a.jsonl.gz", "a.txt.zst", "a.text"]


@pytest.mark.parametrize(("content", "next_step"), [(POINTER, "git lfs pull"), (PAGE, "again")])
@pytest.mark.parametrize("name", NAMES)
def test_what_stands_in_place_of_a_file_is_refused(content, next_step, name):
    for unit in UNITS:
        with pytest.raises(CorpusError, match=rf"d/{name} is .*{next_step}"):
            read(content, f"d/{name}", unit=unit)


def test_what_stands_in_place_of_a_file_is_refused_inside_compressed_files():
    with pytest.raises(CorpusError, match=r"d/a\.txt\.gz is .*git lfs pull"):
        read(gzip.compress(POINTER), "d/a.txt.gz")
    with pytest.raises(CorpusError, match=r"d/a\.txt\.xz is an HTML page.*put it into a \.jsonl"):
        read(lzma.compress(PAGE), "d/a.txt.xz")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("content", [POINTER, PAGE])
def test_a_text_that_begins_like_a_pointer_or_a_page_is_a_text(content, kind):
    text = content.decode()
    data = json.dumps({"text": text}).encode()
    if kind == "parquet":
        data = parquet(pa.table({"text": [text]}))
    assert read(data, f"a.{kind}") == [text]
    assert read(b"A page: " + content, "a.txt") == ["A page: " + text]


def test_lines_of_a_text_file():
    assert read(TRICKY.encode(), "a.txt", unit="line") == [
        "one\ufeff",
        "two",
        "",
        "",
        "three\rfour\x85five\u2028six\x0b\x0c\x00 \t",
    ]
    assert read(b"a\n\nb", "a.txt", unit="line") == ["a", "", "b"]
    assert read(b"a\r", "a.txt", unit="line") == ["a\r"]
    assert read(b"", "a.txt", unit="line") == []


@given(st.lists(texts, max_size=8), st.booleans())
def test_json_strings_come_back_as_they_were(values, ascii):
    lines = "\n".join(json.dumps({"id": 1, "text": v}, ensure_ascii=ascii) for v in values)
    assert read(lines.encode()) == values
    array = json.dumps([{"text": v} for v in values], ensure_ascii=ascii, indent=1)
    assert read(array.encode(), "x.json") == values


def test_json_lines_end_with_a_line_feed_only():
    data = b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b\xc2\x85c"}\r\n\n  \n{"text": "d"}'
    assert read(data) == ["a\u2028b\x85c", "d"]


def test_strings_that_look_like_dates_or_numbers_stay_strings():
    # The JSON loader of `datasets` makes timestamps of the first two.
    values = ["2026-01-01", "2026-01-01T00:00:00", "1", "true", "null"]
    assert read("\n".join(json.dumps({"text": v}) for v in values).encode()) == values


def test_other_columns_may_hold_anything():
    data = b'{"meta": {"a": [1]}, "text": "x"}\n{"text": "y", "meta": 3}\n{"text": ""}\n'
    assert read(data) == ["x", "y", ""]
    with pytest.raises(
        CorpusError, match=r"line 1: Document 0 .* 'meta' holds a value of type dict"
    ):
        read(data, column="meta")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": null}', r"x\.jsonl, line 2: Document 8 .*nothing \(null\)"),
        (b'{"text": "a"}\n\n{"other": "b"}', r"line 3: Document 8 .*'text' holds nothing"),
        (b'{"text": 5}', r"line 1: Document 7 .*value of type int"),
        (b'{"text": "a\\ud800"}', r"line 1: Document 7 .*lone surrogate"),
        (b'{"text": "a"}\n{"text":', r"line 2: malformed JSON .*one object per line"),
        (b'{\n "text": "a"\n}', r"line 1: malformed JSON"),
        (b'{"text": "a"} {"text": "b"}', r"line 1: malformed JSON \(Extra data, character 15\)"),
        (b'[{"text": "a"},\n {"text" "b"}]', r"line 2: malformed JSON"),
        (b'["a"]', r"element 0: expected an object, but found string"),
        (b'"a"', r"line 1: expected an object, but found string"),
        (b'{"text": "\xff"}', r"line 1: no valid UTF-8 at byte 10"),
        (b"[" * 100_000, r"line 1: "),
        (
            b'{"id": 1, "body": "x", "tags": [], "meta": {}, "ok": true, "no": null}',
            r"no column 'text'.*'id' \(number\), 'body' \(string\), 'tags' \(array\), "
            r"'meta' \(object\), 'ok' \(boolean\), 'no' \(null\)",
        ),
    ],
)
def test_bad_json(data, message):
    with pytest.raises(CorpusError, match=message):
        read(data, first=7)


def test_text_files_have_one_column_and_are_utf8():
    with pytest.raises(CorpusError, match=r"a\.txt: There is no column 'body'.*'text' \(string\)"):
        read(b"x", "a.txt", column="body")
    with pytest.raises(CorpusError, match=r"a\.txt: no valid UTF-8 at byte 2 .*Convert"):
        read(b"ab\xff", "a.txt")
    with pytest.raises(CorpusError, match=r"a\.txt, line 2: no valid UTF-8 at byte 0"):
        read(b"a\n\xff\n", "a.txt", unit="line")


def test_parquet():
    values = [TRICKY, "", "2026-01-01"] * 700
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        table = pa.table({"n": pa.array(range(2100)), "text": pa.array(values).cast(kind)})
        assert read(parquet(table), "x.parquet") == values


def test_bad_parquet():
    table = pa.table({"n": [1, 2], "text": ["a", None]})
    with pytest.raises(CorpusError, match=r"x\.parquet, row 1: Document 6 .*nothing \(null\)"):
        read(parquet(table), "x.parquet", first=5)
    with pytest.raises(CorpusError, match=r"row 0: Document 5 .*'n' holds a value of type int"):
        read(parquet(table), "x.parquet", "n", first=5)
    with pytest.raises(CorpusError, match=r"no column 'body'.*'n' \(int64\), 'text' \(string\)"):
        read(parquet(table), "x.parquet", "body")
    with pytest.raises(CorpusError, match=r"Cannot read x\.parquet"):
        read(b"no parquet", "x.parquet")


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed(suffix, compress):
    data = compress(b'{"text": "a"}\n{"text": "b"}\n' * 1000)
    assert read(data, f"x.jsonl.{suffix}") == ["a", "b"] * 1000
    assert read(compress(TRICKY.encode()), f"X.TXT.{suffix.upper()}") == [TRICKY]
    with pytest.raises(CorpusError, match=rf"Cannot read x\.jsonl\.{suffix}"):
        read(data[:-9], f"x.jsonl.{suffix}")
    with pytest.raises(CorpusError, match=rf"Cannot read x\.jsonl\.{suffix}"):
        read(b'{"text": "a"}', f"x.jsonl.{suffix}")
    # Of several frames or members, as tools that compress in parallel write them.
    two = compress(b'{"text": "a"}\n{"te') + compress(b'xt": "b"}\n')
    assert read(two, f"x.ndjson.{suffix}") == ["a", "b"]
    with pytest.raises(CorpusError, match=rf"Cannot read x\.jsonl\.{suffix}"):
        read(two[:-3], f"x.jsonl.{suffix}")


def test_formats_by_name():
    names = ["a.jsonl", "a.JSON", "b.jsonl.gz", "a.parquet", "a.txt", "a.text.xz", "a.NDJSON.zst"]
    formats = ["json", "json", "json", "parquet", "text", "text", "json"]
    assert [format_of(name) for name in names] == formats
    assert [format_of(name) for name in ("a", "a.gz", "a.parquet.gz", "a.csv", "jsonl")] == [
        None
    ] * 5
