"""Parts: the same bytes each time, the whole corpus in order, and files that are checked."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from cache.errors import CacheError
from cache.storage import Store
from decoder.tokenizer import load_tokenizer
from pipelines.corpus import CorpusSettings, digest_documents, open_corpus
from pipelines.errors import CaptureError, CorpusError, TeacherError
from pipelines.layout import Accounting, LayoutSettings
from pipelines.parts import (
    PartReceipt,
    PartRows,
    PartSettings,
    lay_part,
    part_key,
    part_receipt_key,
    read_part_receipts,
    total_accounting,
)
from tests.models import write_tiny_tokenizer
from tests.pipelines.small import write_corpus

TEXTS = ["ab", "", "c", "de", "a longer text, of more than one row", "", "", "x y z"]
SETTINGS = PartSettings(
    layout=LayoutSettings("pack", length=8),
    bos=False,
    eos=False,
    vocabulary=300,
    documents_per_part=3,
)


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(str(write_tiny_tokenizer(tmp_path / "tokenizer")))


def corpus(tmp_path, texts=TEXTS):
    return open_corpus(CorpusSettings(str(write_corpus(tmp_path / "corpus.jsonl", texts))))


def lay_all(tmp_path, tokenizer, texts=TEXTS, settings=SETTINGS, where="cache"):
    store, opened = Store(tmp_path / where), corpus(tmp_path, texts)
    parts = -(-len(texts) // settings.documents_per_part)
    return store, [lay_part(store, opened, tokenizer, settings, part) for part in range(parts)]


def rows_of(store, receipts) -> PartRows:
    return PartRows(store, tuple((receipt.rows, receipt.sha256) for receipt in receipts))


@pytest.mark.parametrize("kind", ["pack", "pad"])
def test_every_token_of_every_document_is_in_the_rows(tmp_path, tokenizer, kind):
    settings = dataclasses.replace(SETTINGS, layout=LayoutSettings(kind, length=8))
    store, receipts = lay_all(tmp_path, tokenizer, settings=settings)
    assert [receipt.documents for receipt in receipts] == [(0, 3), (3, 6), (6, 8)]
    rows = rows_of(store, receipts)
    whole = rows.read(0, len(rows))
    for index, text in enumerate(TEXTS):
        ids = tokenizer.encode(text).tolist()
        inside = whole["documents"] == index
        found = [whole["tokens"][row][inside[row]].tolist() for row in range(len(rows))]
        pieces = [piece for piece in found if piece]
        # A row that is full comes before what is left over, which may share an earlier row.
        pieces.sort(key=lambda piece: len(piece) < 8)
        # Each further piece begins with the last token of the one before.
        assert [token for at, piece in enumerate(pieces) for token in piece[at > 0 :]] == ids
        assert all(piece[0] == before[-1] for before, piece in pairwise(pieces))
    total = total_accounting(receipts)
    assert total["documents"] == len(TEXTS)
    assert total["empty_documents"] == 3
    assert total["one_token_documents"] == 1
    assert total["tokens"] == sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert total["stored"] == (whole["segments"] > 0).sum()
    assert total["stored"] == total["tokens"] + total["repeated"]
    assert total["labels"] == whole["label_mask"].sum()
    assert total["dropped_bytes"] == 0


def test_laying_a_part_again_gives_the_same_bytes(tmp_path, tokenizer):
    first, receipts = lay_all(tmp_path, tokenizer)
    second, _ = lay_all(tmp_path, tokenizer, where="other")
    keys = first.list()
    assert keys == second.list()
    assert len(keys) == 2 * len(receipts)
    assert first.read_many(keys) == second.read_many(keys)


def test_receipts_come_back_as_they_were(tmp_path, tokenizer):
    store, receipts = lay_all(tmp_path, tokenizer)
    assert read_part_receipts(store, 5) == dict(enumerate(receipts))
    for receipt in receipts:
        assert PartReceipt.from_bytes(receipt.to_bytes(), "x") == receipt
    texts = [TEXTS[receipts[1].documents[0] : receipts[1].documents[1]] for _ in range(2)]
    assert receipts[1].digest == digest_documents(texts[0], 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{", "not valid JSON"), (b"[]", "should be a JSON object"), (b"{}", "has no field")],
)
def test_a_receipt_that_is_none_is_named(data, message):
    with pytest.raises(CacheError, match=f"parts/000001.json.*{message}"):
        PartReceipt.from_bytes(data, "parts/000001.json")


def test_any_range_of_rows_is_read_across_parts(tmp_path, tokenizer):
    store, receipts = lay_all(tmp_path, tokenizer)
    assert receipts[2].rows > 0
    rows = rows_of(store, receipts)
    pieces = [np.load(store.local / part_key(part)) for part in range(3)]
    for name in ("tokens", "segments", "documents", "label_mask"):
        whole = np.concatenate([piece[name] for piece in pieces])
        for first in range(len(rows)):
            for end in range(first + 1, len(rows) + 1):
                np.testing.assert_array_equal(rows.read(first, end)[name], whole[first:end])


def test_a_part_without_rows_is_passed_over(tmp_path, tokenizer):
    store, receipts = lay_all(tmp_path, tokenizer, ["", "", "", "ab", "", "", "", "", "", "cd"])
    assert [receipt.rows for receipt in receipts] == [0, 1, 0, 1]
    found = rows_of(store, receipts).read(0, 2)["documents"]
    assert found[:, 0].tolist() == [3, 9]
    assert rows_of(store, receipts).read(1, 2)["documents"][0, 0] == 9


def test_the_rows_of_no_parts():
    assert len(PartRows(Store("nowhere"), ())) == 0


def test_rows_that_are_missing_or_changed_are_refused(tmp_path, tokenizer):
    store, receipts = lay_all(tmp_path, tokenizer)
    data = store.read(part_key(1))
    store.write(part_key(1), data[:-1])
    with pytest.raises(CaptureError, match=r"parts/000001\.npz is not what its receipt says"):
        rows_of(store, receipts).read(0, 9)
    store.delete(part_key(1))
    with pytest.raises(CaptureError, match=r"npz is missing. Delete parts/000001\.json and run"):
        rows_of(store, receipts).read(0, 9)
    store.write(part_key(1), data)
    assert len(rows_of(store, receipts).read(0, 2)["tokens"]) == 2


def test_a_receipt_is_written_after_its_rows(tmp_path, tokenizer, monkeypatch):
    written = []
    monkeypatch.setattr(Store, "write", lambda self, key, value: written.append(key))
    lay_part(Store(tmp_path / "c"), corpus(tmp_path), tokenizer, SETTINGS, 2)
    assert written == [part_key(2), part_receipt_key(2)]


def test_an_id_beyond_the_vocabulary_names_the_document(tmp_path, tokenizer):
    settings = dataclasses.replace(SETTINGS, vocabulary=60)
    with pytest.raises(TeacherError, match=r"Document 0 holds token 100 at position 0.*ends at 59"):
        lay_part(Store(tmp_path / "c"), corpus(tmp_path), tokenizer, settings, 0)
    with pytest.raises(TeacherError, match="Document 3 holds token"):
        lay_part(Store(tmp_path / "c"), corpus(tmp_path), tokenizer, settings, 1)


def test_a_null_names_document_and_column(tmp_path, tokenizer):
    from datasets import Dataset

    texts = {"body": ["a", "b", "c", "d", None]}
    Dataset.from_dict(texts).save_to_disk(str(tmp_path / "saved"))
    opened = open_corpus(CorpusSettings(str(tmp_path / "saved"), column="body"))
    with pytest.raises(CorpusError, match="Document 4 must be a text, but column 'body' holds"):
        lay_part(Store(tmp_path / "c"), opened, tokenizer, SETTINGS, 1)


def test_accounting_of_nothing():
    assert total_accounting([])["labels"] == 0
    assert total_accounting([])["documents"] == Accounting().documents
