"""The format: types, fills, Zarr metadata, and what other readers make of it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import xarray
import zarr

import cache
from cache.derive import derive
from cache.errors import CacheError
from cache.format import MOST_VOCABULARY, Encoding, group_metadata, receipt_key
from cache.options import DeriveOptions
from cache.seals import seal_rows
from cache.shards import array_objects
from cache.storage import Store, encode_chunk
from tests.cache.builder import Built, make_cache, make_encoding, make_rows, same

ORDER = (
    "tokens",
    "segments",
    "documents",
    "label_mask",
    "target_ids",
    "target_logprobs",
    "exact_counts",
    "tail_logprobs",
    "label_logprobs",
    "entropy",
)
STORED = (*ORDER, "seals")


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "illegal"),
    [
        (1, "uint16", 65535),
        (65535, "uint16", 65535),
        (65536, "uint32", 2**32 - 1),
        (70000, "uint32", 2**32 - 1),
        (131072, "uint32", 2**32 - 1),
        (262144, "uint32", 2**32 - 1),
        (MOST_VOCABULARY, "uint32", 2**32 - 1),
    ],
)
def test_ids_have_room_for_an_illegal_one(vocabulary: int, dtype: str, illegal: int) -> None:
    encoding = make_encoding(vocabulary=vocabulary, k=1)
    assert (encoding.id_dtype, encoding.no_id) == (dtype, illegal)
    assert encoding.no_id >= vocabulary
    assert np.iinfo(encoding.id_dtype).max >= vocabulary
    for name in ("tokens", "target_ids"):
        spec = encoding.arrays()[name]
        assert (spec.dtype, spec.fill) == (dtype, illegal)


@pytest.mark.parametrize("logprobs", ["rounded", "float16"])
def test_tails_of_float16_caches_are_float16_and_named_nowhere(logprobs: Any) -> None:
    encoding = make_encoding(logprobs=logprobs)
    assert encoding.tail_dtype == "float16"
    assert encoding.features == ()
    assert "wide_tails" not in encoding.to_json()
    assert Encoding.from_json(encoding.to_json()) == encoding


def test_tails_are_float32_where_log_probs_are(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", logprobs="float32")
    for name in ("target_logprobs", "tail_logprobs", "label_logprobs", "entropy"):
        assert built.encoding.arrays()[name].dtype == "float32"
        group: Any = zarr.open_group(str(tmp_path / "c/arrays"), mode="r")
        assert group[name].dtype == np.float32
    label = built.arrays["label_mask"] == 1
    for name in ("tail_logprobs", "entropy"):
        assert same(built.arrays[name][label], built.targets[name][label])
        assert (built.arrays[name][label].astype(np.float16) != built.arrays[name][label]).any()
    assert cache.verify(tmp_path / "c", full=True).sound
    content = json.loads((tmp_path / "c/manifest.json").read_text())
    assert content["required_features"] == ["float32_tails"]
    assert content["encoding"]["wide_tails"] is True
    assert content["arrays"]["tail_logprobs"]["dtype"] == "float32"
    assert cache.open(tmp_path / "c").encoding == built.encoding


def test_float32_caches_from_before_keep_their_float16_tails(tmp_path: Path) -> None:
    built = make_cache(tmp_path / "c", logprobs="float32", wide_tails=False)
    content = json.loads((tmp_path / "c/manifest.json").read_text())
    assert "wide_tails" not in content["encoding"]
    assert content["required_features"] == []
    assert built.arrays["tail_logprobs"].dtype == built.arrays["entropy"].dtype == np.float16
    opened = cache.open(tmp_path / "c")
    assert opened.encoding == built.encoding
    rows = opened.rows(slice(None))
    assert all(same(rows[name], built.arrays[name]) for name in opened.fields)
    assert cache.verify(tmp_path / "c", full=True).sound
    options = DeriveOptions((str(tmp_path / "c"), str(tmp_path / "d")), k=3)
    derived = derive(options).cache
    assert derived.encoding.tail_dtype == "float16"
    assert cache.verify(derived.location, full=True).sound


@pytest.mark.parametrize("k", [3, 6])
def test_what_is_derived_keeps_the_type_of_tails(tmp_path: Path, k: int) -> None:
    for name, asked in (("whole", {}), ("coarse", {"logprobs": "float16"})):
        built = make_cache(tmp_path / f"{name}/c", logprobs="float32", tail="sampled")
        places = (str(built.path), str(tmp_path / f"{name}/d"))
        derived = derive(DeriveOptions(places, k=k, **asked)).cache  # type: ignore[arg-type]
        expected = "float32" if name == "whole" else "float16"
        assert derived.rows([0], "tail_logprobs")["tail_logprobs"].dtype == expected
        assert derived.manifest.encoding.tail_dtype == expected
        assert cache.verify(derived.location, full=True).sound


@pytest.mark.parametrize("vocabulary", [0, -1, MOST_VOCABULARY + 1])
def test_a_vocabulary_without_a_type_is_refused(vocabulary: int) -> None:
    with pytest.raises(CacheError, match="vocabulary should be between 1 and"):
        make_encoding(vocabulary=vocabulary, k=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 1}, "length should be at least 2, found 1"),
        ({"k": 0}, "k should be between 1 and the 60 tokens, found 0"),
        ({"k": 61}, "k should be between 1 and the 60 tokens, found 61"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"temperatures": (0.0,)}, "temperatures should be finite and above 0"),
        ({"temperatures": (-1.0, 1.0)}, "finite and above 0"),
        ({"temperatures": (math.nan,)}, "finite and above 0"),
        ({"temperatures": (math.inf,)}, "finite and above 0"),
        ({"temperatures": (2.0, 1.0)}, "ascending and distinct"),
        ({"temperatures": (1.0, 1.0)}, "ascending and distinct"),
        ({"tail": "sampled", "temperatures": (1.0, 2.0)}, "the one capture temperature"),
        ({"mantissa_bits": 0}, "mantissa_bits should be between 1 and 10"),
        ({"mantissa_bits": 11}, "mantissa_bits should be between 1 and 10"),
        ({"rows_per_example": 3}, "rows_per_example should be 1 or 2"),
        ({"rows_per_shard": 2**20 + 1}, "at most 1,048,576"),
        ({"rows_per_shard": 0}, "a positive multiple of rows_per_example"),
        ({"rows_per_shard": 3, "rows_per_example": 2}, "a positive multiple of rows_per_example"),
    ],
)
def test_an_impossible_encoding_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        make_encoding(**change)


def test_the_arrays_are_those_of_the_format() -> None:
    arrays = make_encoding(vocabulary=49152, k=5).arrays()
    assert tuple(arrays) == ORDER
    found = {name: (spec.dtype, spec.inner, spec.dimensions) for name, spec in arrays.items()}
    plain = ("row", "position")
    assert found == {
        "tokens": ("uint16", (8,), plain),
        "segments": ("uint16", (8,), plain),
        "documents": ("uint32", (8,), plain),
        "label_mask": ("uint8", (8,), plain),
        "target_ids": ("uint16", (8, 5), (*plain, "k")),
        "target_logprobs": ("float16", (8, 5), (*plain, "k")),
        "exact_counts": ("uint8", (8,), plain),
        "tail_logprobs": ("float16", (8, 3), (*plain, "temperature")),
        "label_logprobs": ("float32", (8,), plain),
        "entropy": ("float16", (8,), plain),
    }


def test_the_seals_are_one_more_array() -> None:
    for encoding in (make_encoding(), make_encoding(tail="sampled")):
        stored = encoding.stored_arrays()
        assert tuple(stored) == STORED
        seals = stored.pop("seals")
        assert stored == encoding.arrays()
        found = (seals.dtype, seals.inner, seals.dimensions, seals.fill)
        assert found == ("uint64", (len(ORDER),), ("row", "array"), 2**64 - 1)


def test_a_cache_of_format_1_0_has_no_seals() -> None:
    encoding = make_encoding(sealed=False)
    assert encoding.stored_arrays() == encoding.arrays() == make_encoding().arrays()
    assert "sealed" not in encoding.to_json()
    assert make_encoding().to_json() == {**encoding.to_json(), "sealed": True}
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert Encoding.from_json({**encoding.to_json(), "sealed": False}) == encoding


def test_every_fill_is_poison() -> None:
    for spec in make_encoding().stored_arrays().values():
        if spec.dtype.startswith("float"):
            assert math.isnan(spec.fill)
        else:
            assert spec.fill == np.iinfo(spec.dtype).max


@pytest.mark.parametrize(
    ("k", "dtype"), [(254, "uint8"), (255, "uint16"), (256, "uint16"), (1000, "uint16")]
)
def test_counts_up_to_k_leave_their_fill_free(k: int, dtype: str) -> None:
    spec = make_encoding(vocabulary=2000, k=k).arrays()["exact_counts"]
    assert spec.dtype == dtype
    assert k < spec.fill


@pytest.mark.parametrize(
    ("logprobs", "dtype", "error"),
    [("float32", "float32", 2**-24), ("float16", "float16", 2**-11), ("rounded", "float16", 2**-7)],
)
def test_logprobs_types(logprobs: str, dtype: str, error: float) -> None:
    encoding = make_encoding(logprobs=logprobs)
    assert encoding.arrays()["target_logprobs"].dtype == dtype
    assert encoding.relative_error == error


@pytest.mark.parametrize(
    ("rows", "spans"),
    [(1, [(0, 1)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (10, [(0, 4), (4, 8), (8, 10)])],
)
def test_shards_cover_the_rows(rows: int, spans: list[tuple[int, int]]) -> None:
    encoding = make_encoding()
    assert encoding.shards(rows) == len(spans)
    assert [encoding.shard_rows(shard, rows) for shard in range(len(spans))] == spans


def test_json_round_trip() -> None:
    for encoding in (make_encoding(), make_encoding(tail="sampled", temperatures=(0.7,), k=60)):
        text = json.dumps(encoding.to_json())
        assert Encoding.from_json(json.loads(text)) == encoding


@pytest.mark.parametrize("name", list(make_encoding().to_json()))
def test_a_field_that_is_missing_or_of_another_type_is_named(name: str) -> None:
    good = make_encoding(sealed=False).to_json()
    if name != "sealed":
        with pytest.raises(CacheError, match=name):
            Encoding.from_json({key: value for key, value in good.items() if key != name})
    wrongs: list[Any] = [None, "x", {}, [None], -1, 1.5, [10**400], [True]]
    wrongs += [0, 1] if name == "sealed" else [True]
    for wrong in wrongs:
        with pytest.raises(CacheError, match=name):
            Encoding.from_json({**good, name: wrong})


def test_receipt_keys_sort_by_shard() -> None:
    assert receipt_key(0) == "receipts/000000.json"
    keys = [receipt_key(shard) for shard in (0, 9, 10, 999, 123456)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("logprobs", ["rounded", "float32"])
@pytest.mark.parametrize("vocabulary", [60, 70000])
def test_tensorstore_states_the_metadata_as_we_write_it(logprobs: str, vocabulary: int) -> None:
    """What TensorStore itself writes for an array of ours is what we write."""
    for spec in make_encoding(logprobs=logprobs, vocabulary=vocabulary).stored_arrays().values():
        ours = spec.zarr(10, 4)
        context = ts.Context()
        kvstore = {"driver": "memory", "path": f"{spec.name}/"}
        ts.open(
            {"driver": "zarr3", "kvstore": kvstore, "metadata": ours}, context=context, create=True
        ).result()
        written = ts.KvStore.open(kvstore, context=context).result().read("zarr.json").result()
        theirs = json.loads(written.value)
        # It leaves out what is the default.
        assert ours.pop("attributes") == {}
        sharding = ours["codecs"][0]["configuration"]
        assert sharding.pop("index_location") == "end"
        blosc = sharding["codecs"][1]["configuration"]
        if blosc["shuffle"] == "noshuffle":
            assert blosc.pop("typesize") == np.dtype(spec.dtype).itemsize
        assert theirs == ours


def test_the_group_repeats_its_arrays_metadata(exact_cache: Built) -> None:
    folder = exact_cache.path / "arrays"
    group = json.loads((folder / "zarr.json").read_text())
    assert (group["zarr_format"], group["node_type"]) == (3, "group")
    consolidated = group["consolidated_metadata"]
    assert (consolidated["kind"], consolidated["must_understand"]) == ("inline", False)
    each = {name: json.loads((folder / name / "zarr.json").read_text()) for name in STORED}
    assert consolidated["metadata"] == each
    assert group == group_metadata(each)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*STORED, "zarr.json"])
    assert set(array_objects(exact_cache.encoding, 10)) == {
        "arrays/zarr.json",
        *(f"arrays/{name}/zarr.json" for name in STORED),
    }


def test_one_flat_file_a_shard_and_array(exact_cache: Built) -> None:
    for name, spec in exact_cache.encoding.stored_arrays().items():
        zeros = ".0" * len(spec.inner)
        files = {path.name for path in (exact_cache.path / "arrays" / name).iterdir()}
        assert files == {"zarr.json", *(f"c.{shard}{zeros}" for shard in range(3))}


def _with_seals(built: Built, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    seals = seal_rows(arrays, built.encoding, built.manifest.identities(), np.arange(10))
    return {**arrays, "seals": seals}


def _stored(built: Built) -> dict[str, np.ndarray]:
    """Every row of every array as our reader reads them, and their seals."""
    return _with_seals(built, cache.open(built.path).rows(slice(None)))


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_zarr_reads_what_we_read(
    kind: str, exact_cache: Built, sampled_cache: Built, tmp_path: Path
) -> None:
    """Warnings are errors in this suite, so this also shows that there are none."""
    built = exact_cache if kind == "exact" else sampled_cache
    ours = _stored(built)
    group = zarr.open_group(str(built.path / "arrays"), mode="r")
    assert group.metadata.consolidated_metadata is not None
    assert sorted(group.array_keys()) == sorted(ours)
    for name, values in ours.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert same(np.asarray(array[:]), values)
        assert array.metadata.dimension_names == built.encoding.stored_arrays()[name].dimensions
        assert array.shards == (4, *array.shape[1:])
        assert array.chunks == (1, *array.shape[1:])


def test_zarr_needs_only_the_groups_own_metadata(
    exact_cache: Built, copy: Any, tmp_path: Path
) -> None:
    built = copy(exact_cache)
    for name in STORED:
        (built.path / "arrays" / name / "zarr.json").unlink()
    group = zarr.open_group(str(built.path / "arrays"), mode="r", use_consolidated=True)
    for name in ORDER:
        assert same(np.asarray(group[name][:]), built.arrays[name])  # type: ignore[index]


def test_xarray_reads_what_we_read(exact_cache: Built) -> None:
    ours = _stored(exact_cache)
    with xarray.open_zarr(exact_cache.path / "arrays", chunks=None, mask_and_scale=False) as opened:
        assert set(opened.data_vars) == set(ours)
        assert dict(opened.sizes) == {
            "row": 10,
            "position": 8,
            "k": 6,
            "temperature": 3,
            "array": len(ORDER),
        }
        for name, values in ours.items():
            assert same(opened[name].values, values)
    # Its default, which may turn fill values into NaN, warns no more than that.
    with xarray.open_zarr(exact_cache.path / "arrays", chunks=None) as opened:
        np.testing.assert_array_equal(opened["label_logprobs"].values, ours["label_logprobs"])
        np.testing.assert_array_equal(opened["tokens"].values, ours["tokens"])


def test_a_careless_reader_meets_poison_where_a_file_is_missing(
    exact_cache: Built, copy: Any
) -> None:
    """zarr fills a missing chunk in silently: what it fills in is nothing anyone trains on."""
    built = copy(exact_cache)
    for path in (built.path / "arrays").glob("*/c.1.*"):
        path.unlink()
    whole = _with_seals(built, built.arrays)
    group = zarr.open_group(str(built.path / "arrays"), mode="r")
    for name, spec in built.encoding.stored_arrays().items():
        values = np.asarray(group[name][4:8])  # type: ignore[index]
        if spec.dtype.startswith("float"):
            assert np.isnan(values).all()
        else:
            assert (values == np.iinfo(spec.dtype).max).all()
        assert same(np.asarray(group[name][8:]), whole[name][8:])  # type: ignore[index]


@pytest.mark.parametrize(
    ("vocabulary", "token"),
    [(70000, 65541), (151936, 151935), (65550, 65549), (131072, 131071), (262144, 262143)],
)
def test_ids_beyond_16_bits_come_back(tmp_path: Path, vocabulary: int, token: int) -> None:
    """C23: the most likely token's id survives storing, and empty slots are no legal id."""
    settings = {"vocabulary": vocabulary, "length": 4, "k": 4, "rows_per_shard": 2}
    tokens = make_rows(2, make_encoding(**settings))["tokens"]
    labels = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)[..., None]
    logits = np.full((2, 4, vocabulary), -np.inf)
    np.put_along_axis(logits, labels.astype(np.int64), 0.0, axis=-1)
    logits[..., token] = 2.0
    logits[..., 3] = 1.0
    make_cache(tmp_path / "c", rows=2, logits=logits, **settings)
    read = cache.open(tmp_path / "c").rows([0, 1])
    label = read["label_mask"] == 1
    assert label.sum() >= 2
    ids = read["target_ids"][label]
    assert (ids[:, 0] == token).all()
    assert (ids[:, 1] == 3).all()
    assert (ids[:, 3].astype(np.int64) >= vocabulary).all()
    assert (ids[:, 2] == labels[..., 0][label]).all()
    assert (read["exact_counts"][label] == 3).all()
    assert (read["target_ids"][~label].astype(np.int64) >= vocabulary).all()


@pytest.mark.parametrize("vocabulary", [65535, 65536])
def test_either_side_of_the_border_of_types(tmp_path: Path, vocabulary: int) -> None:
    settings = {"vocabulary": vocabulary, "length": 4, "k": 3, "rows_per_shard": 2}
    built = make_cache(tmp_path / "c", rows=3, **settings)
    read = cache.open(tmp_path / "c").rows(range(3))
    assert read["tokens"].dtype == ("uint16" if vocabulary == 65535 else "uint32")
    for name, values in read.items():
        assert same(values, built.arrays[name])
    report = cache.verify(tmp_path / "c", full=True)
    assert report.sound, report.damage


def test_a_partial_last_chunk_is_what_tensorstore_writes(tmp_path: Path) -> None:
    """The bytes of whole and partial chunks, against TensorStore's own writing to disk."""
    random = np.random.default_rng(0)
    for spec in make_encoding().stored_arrays().values():
        metadata = spec.zarr(10, 4)
        folder = tmp_path / spec.name
        array = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{folder}/"},
                "metadata": metadata,
                "store_data_equal_to_fill_value": True,
            },
            create=True,
        ).result()
        values = random.integers(0, 200, (10, *spec.inner)).astype(spec.dtype)
        values[4:8] = spec.fill
        array[:].write(values).result()
        for index in range(3):
            path = folder / f"c.{index}{'.0' * len(spec.inner)}"
            assert encode_chunk(metadata, index, values[4 * index : 4 * index + 4]) == (
                path.read_bytes()
            )
        store = Store(str(folder))
        opened = store.open_array("", metadata)
        assert same(opened[8:10].read().result(), values[8:10])


def test_an_encoding_in_the_format_of_a_cache() -> None:
    """What says nothing of the numbers does not make two captures differ."""
    old = make_encoding(logprobs="float32", mantissa_bits=3, sealed=False, wide_tails=False)
    assert make_encoding(logprobs="float32").in_format_of(old) == old
    coarse = make_encoding(mantissa_bits=3)
    assert make_encoding().in_format_of(coarse) == make_encoding()
    assert make_encoding(k=5, logprobs="float32").in_format_of(old) != old
