"""The same rows in other stores: each writes them once and reads a batch by row numbers.

A writer takes a folder and the decoded arrays, [row, position, ...] by name, and returns a
reader: row numbers in, the same dictionary of arrays out as `Cache.rows` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import tensorstore as ts
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

Arrays = dict[str, np.ndarray]
Reader = Callable[[np.ndarray], Arrays]


def tensorstore(location: Path, names: tuple[str, ...]) -> Reader:
    """A cache's own arrays, read with nothing but TensorStore, opened as `Cache` opens them."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": 8 * 2**20}})
    arrays = {}
    for name in names:
        specification = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{location}/arrays/{name}/"},
            "fill_missing_data_reads": False,
            "recheck_cached_data": "open",
        }
        arrays[name] = ts.open(specification, context=context, open=True).result()

    def read(indices: np.ndarray) -> Arrays:
        futures = [(name, array[indices].read()) for name, array in arrays.items()]
        return {name: future.result() for name, future in futures}

    return read


def memory_map(folder: Path, arrays: Mapping[str, np.ndarray]) -> Reader:
    """Decoded arrays in .npy files, mapped into memory."""
    mapped = {}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
        mapped[name] = np.load(folder / f"{name}.npy", mmap_mode="r")

    def read(indices: np.ndarray) -> Arrays:
        return {name: np.asarray(values[indices]) for name, values in mapped.items()}

    return read


def array_record(folder: Path, arrays: Mapping[str, np.ndarray], compression: str) -> Reader:
    """One record a row: its arrays' bytes end to end. `compression` as ArrayRecord names it."""
    path = str(folder / "rows.array_record")
    writer = ArrayRecordWriter(path, f"group_size:1,{compression}")
    for row in range(len(next(iter(arrays.values())))):
        writer.write(b"".join(values[row].tobytes() for values in arrays.values()))
    writer.close()
    # Random access: reading ahead would be wasted.
    reader = ArrayRecordReader(path, options="readahead_buffer_size:0")
    shapes = {name: (values.dtype, values.shape[1:]) for name, values in arrays.items()}

    def read(indices: np.ndarray) -> Arrays:
        joined = np.frombuffer(b"".join(reader.read(indices.tolist())), np.uint8)
        records = joined.reshape(len(indices), -1)
        values, start = {}, 0
        for name, (dtype, shape) in shapes.items():
            size = dtype.itemsize * int(np.prod(shape))
            piece = np.ascontiguousarray(records[:, start : start + size])
            values[name] = piece.view(dtype).reshape(len(indices), *shape)
            start += size
        return values

    return read


def parquet_rows(folder: Path, arrays: Mapping[str, np.ndarray], group: int) -> Reader:
    """One column an array, a row's values as fixed-size bytes, zstd, `group` rows a row group."""
    path = folder / "rows.parquet"
    columns, shapes = {}, {}
    for name, values in arrays.items():
        size = values[0].nbytes
        buffer = pa.py_buffer(np.ascontiguousarray(values))
        columns[name] = pa.Array.from_buffers(pa.binary(size), len(values), [None, buffer])
        shapes[name] = (values.dtype, values.shape[1:])
    parquet.write_table(
        pa.table(columns),
        path,
        row_group_size=group,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
    )
    file = parquet.ParquetFile(path, memory_map=True)

    def read(indices: np.ndarray) -> Arrays:
        # Only the row groups that hold a row of the batch; `Dataset.take` reads all of them.
        groups, place = np.unique(indices // group, return_inverse=True)
        table = file.read_row_groups(groups.tolist())
        taken = table.take(pa.array(place * group + indices % group)).combine_chunks()
        values = {}
        for name, (dtype, shape) in shapes.items():
            column = taken.column(name)
            joined = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
            data = np.frombuffer(joined.buffers()[1], dtype)
            start = joined.offset * int(np.prod(shape))
            size = len(indices) * int(np.prod(shape))
            values[name] = data[start : start + size].reshape(len(indices), *shape)
        return values

    return read


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
