"""Parquet and Arrow files as a data set with a length and an index, read by Hugging Face's ``datasets``.

Its data sets work with ``fit`` as they are. What is added here is that broken files are named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.data.tokens import Files, expand, size_of
from lockstep.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from datasets import Dataset


def open_tables(
    files: Files, *, columns: Sequence[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> Dataset:
    """Return the rows of all ``files`` as a ``datasets.Dataset`` that gives dictionaries of tensors.

    Parquet files are converted to Arrow once, in the cache folder of ``datasets``, since single rows of Parquet cannot
    be read; that takes room on the disk. Several ranks may do so at once: one converts and the others wait for it.

    Args:
        files: A path, in which ``{000..031}``, ``{a,b}`` and ``*`` are expanded, or several. They are ``.parquet``, or
            ``.arrow`` as ``save_to_disk`` writes them.
        columns: Those to read; all if None.
        cache: Folder for the converted files, instead of that of ``datasets``.

    Raises:
        DataError: A file is missing or broken; names it, and of Parquet the rows and the byte.
        ConfigurationError: A column is not there, the kinds of files are mixed, or ``datasets`` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigurationError(
            "Parquet and Arrow files are read with Hugging Face's datasets, which is not installed.\n"
            "pip install 'lockstep-torch[data]'"
        ) from None
    paths = expand(files)
    for path in paths:
        size_of(path)
    suffixes = {os.path.splitext(path)[1] for path in paths}
    if suffixes == {".parquet"}:
        _require_columns(paths, columns)
        names = None if columns is None else list(columns)
        try:
            rows = datasets.Dataset.from_parquet(
                paths, columns=names, cache_dir=None if cache is None else os.fspath(cache)
            )
        except datasets.exceptions.DatasetGenerationError:
            for path in paths:
                _require_readable(path, names)
            raise
    elif suffixes == {".arrow"}:
        rows = datasets.concatenate_datasets([_open_arrow(path) for path in paths])
        rows = rows if columns is None else rows.select_columns(list(columns))
    else:
        raise ConfigurationError(
            f"The files end in {' and '.join(sorted(suffixes))}.\nGive .parquet files, or .arrow files."
        )
    return rows.with_format("torch")


def _require_columns(paths: Sequence[str], columns: Sequence[str] | None) -> None:
    """Check the end of each Parquet file, where its columns are listed."""
    from pyarrow import parquet

    for path in paths:
        with _naming(path, "is no whole Parquet file"), parquet.ParquetFile(path) as file:
            found = file.schema_arrow.names
        missing = [name for name in columns or () if name not in found]
        if missing:
            raise ConfigurationError(
                f"{path} has no column {' and no column '.join(missing)}.\nIt has: {', '.join(found)}."
            )


def _require_readable(path: str, columns: list[str] | None) -> None:
    """Read a Parquet file to its end, to find where it is broken."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            offset = min(
                chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                for chunk in chunks
            )
            rows = f"{first} to {first + group.num_rows - 1}"
            with _naming(path, f"cannot be read in rows {rows} (row group {number}, from byte {offset})", offset):
                file.read_row_group(number, columns=columns)
            first += group.num_rows


def _open_arrow(path: str) -> Dataset:
    import datasets

    with _naming(path, "is no whole Arrow file"):
        return datasets.Dataset.from_file(path)


@contextmanager
def _naming(path: str, what: str, offset: int | None = None) -> Iterator[None]:
    """Raise what pyarrow says as an error that names the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} {what}: {cause}.\nRestore it.", file=path, offset=offset) from error
