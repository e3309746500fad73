"""Parquet and Arrow files: every row by its index, and broken files by their name."""

import os

import pytest
import torch
from torch.utils.data import default_collate

from lockstep.data import open_tables
from lockstep.errors import ConfigurationError, DataError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def files(tmp_path):
    """Write three files of ten rows, in groups of four."""
    for number in range(3):
        rows = range(10 * number, 10 * number + 10)
        columns = {"x": [row / 2 for row in rows], "y": rows, "z": [[row, -row] for row in rows], "t": map(str, rows)}
        table = pyarrow.table({name: list(values) for name, values in columns.items()})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    return tmp_path / "{0..2}.parquet"


def test_rows_of_parquet_files_are_dictionaries_of_tensors(files, tmp_path):
    rows = open_tables(files, cache=tmp_path / "cache")
    assert len(rows) == 30
    assert [rows[index]["y"].item() for index in range(30)] == list(range(30))
    batch = default_collate([rows[3], rows[29]])
    assert torch.equal(batch["x"], torch.tensor([1.5, 14.5]))
    assert torch.equal(batch["z"], torch.tensor([[3, -3], [29, -29]]))
    assert batch["t"] == ["3", "29"]


def test_columns_can_be_chosen(files, tmp_path):
    rows = open_tables(files, columns=["y"], cache=tmp_path / "cache")
    assert rows[7] == {"y": 7}
    with pytest.raises(ConfigurationError) as error:
        open_tables(files, columns=["y", "label"], cache=tmp_path / "cache")
    assert str(error.value) == f"{tmp_path}/0.parquet has no column label.\nIt has: x, y, z, t."


def test_arrow_files_are_read_where_they_are(files, tmp_path):
    datasets.Dataset.from_dict({"y": list(range(9)), "w": [0] * 9}).save_to_disk(tmp_path / "saved", num_shards=2)
    rows = open_tables(tmp_path / "saved" / "*.arrow", columns=["y"])
    assert list(rows) == [{"y": number} for number in range(9)]
    with pytest.raises(ConfigurationError) as error:
        open_tables([tmp_path / "0.parquet", tmp_path / "saved" / "*.arrow"])
    assert str(error.value) == "The files end in .arrow and .parquet.\nGive .parquet files, or .arrow files."


def failing(files, tmp_path):
    with pytest.raises(DataError) as error:
        open_tables(files, cache=tmp_path / "cache")
    return error.value


def test_a_file_that_is_missing_or_cut_short_is_named(files, tmp_path):
    path = tmp_path / "1.parquet"
    os.truncate(path, 300)
    error = failing(files, tmp_path)
    assert error.file == str(path)
    assert str(error) == (
        f"{path} is no whole Parquet file: Parquet magic bytes not found in footer. "
        "Either the file is corrupted or this is not a parquet file.\nRestore it."
    )
    path.unlink()
    assert str(failing(files, tmp_path)) == (f"{path} does not exist.\nCheck the name, and that this machine sees it.")


def test_rows_that_cannot_be_read_are_named_with_file_and_byte(files, tmp_path):
    path = tmp_path / "1.parquet"
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset)
        file.write(b"\xff" * 40)
    error = failing(files, tmp_path)
    assert (error.file, error.offset) == (str(path), column.dictionary_page_offset)
    assert str(error).startswith(
        f"{path} cannot be read in rows 4 to 7 (row group 1, from byte {column.dictionary_page_offset}): "
    )


def test_an_arrow_file_that_is_cut_short_is_named(tmp_path):
    datasets.Dataset.from_dict({"y": list(range(9))}).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    os.truncate(path, 200)
    error = failing(path, tmp_path)
    assert error.file == str(path)
    assert str(error).startswith(f"{path} is no whole Arrow file: Expected to read ")
