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

from pipelines.corpus_formats import format_of, read_documents
from pipelines.errors import CorpusError


def read(data: bytes, path: str = "d/x.jsonl", column: str = "text", unit="file", first=0) -> list:
    return list(read_documents(io.BytesIO(data), path, column, unit, first))


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


TRICKY = "\ufeffone\r\ntwo\n\n\nthree\rfour\x85five\u2028six\x0b\x0c\x00 \t\n"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_a_text_file_is_one_document_byte_for_byte():
    assert read(TRICKY.encode(), "a.txt") == [TRICKY]
    assert read(b"", "a.text") == [""]


@given(texts)
def test_any_text_file_comes_back_byte_for_byte(text):
    assert read(text.encode(), "a.txt") == [text]


def test_lines_of_a_text_file():
    assert read(TRICKY.encode(), "a.txt", unit="line") == [
        "\ufeffone",
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
    ("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_compressed(suffix, compress):
    data = compress(b'{"text": "a"}\n{"text": "b"}\n' * 1000)
    assert read(data, f"x.jsonl.{suffix}") == ["a", "b"] * 1000
    assert read(compress(TRICKY.encode()), f"X.TXT.{suffix.upper()}") == [TRICKY]
    with pytest.raises(CorpusError, match=rf"Cannot read x\.jsonl\.{suffix}"):
        read(data[:-9], f"x.jsonl.{suffix}")
    with pytest.raises(CorpusError, match=rf"Cannot read x\.jsonl\.{suffix}"):
        read(b'{"text": "a"}', f"x.jsonl.{suffix}")


def test_formats_by_name():
    names = ["a.jsonl", "a.JSON", "b.jsonl.gz", "a.parquet", "a.txt", "a.text.xz"]
    formats = ["json", "json", "json", "parquet", "text", "text"]
    assert [format_of(name) for name in names] == formats
    assert [format_of(name) for name in ("a", "a.gz", "a.parquet.gz", "a.csv", "jsonl")] == [
        None
    ] * 5
