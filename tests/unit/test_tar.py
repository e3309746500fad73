"""Tar shards: samples by index in the WebDataset layout, an index that is kept, and errors that name the record."""

import io
import json
import os
import pickle
import tarfile
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lockstep.data import TarShards, tar_index
from lockstep.errors import ConfigurationError, DataError


def write(path, members, **settings):
    """Write a tar file of (name, bytes)."""
    with tarfile.open(path, "w", **settings) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def pairs(first, last):
    return [
        (f"{number:04d}.{field}", data)
        for number in range(first, last)
        for field, data in (("txt", f"text {number}".encode()), ("cls", str(number % 3).encode()))
    ]


def png(color, size=(3, 2)):
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, "png")
    return data.getvalue()


def npy(array, **settings):
    data = io.BytesIO()
    np.save(data, array, **settings)
    return data.getvalue()


@pytest.fixture
def shards(tmp_path):
    write(tmp_path / "train-000.tar", pairs(0, 3))
    write(tmp_path / "train-001.tar", pairs(3, 4))
    write(tmp_path / "train-002.tar", pairs(4, 8))
    return tmp_path / "train-{000..002}.tar"


def test_every_sample_of_every_shard_once(shards):
    data = TarShards(shards)
    expected = [{"__key__": f"{n:04d}", "txt": f"text {n}", "cls": n % 3} for n in range(8)]
    assert [data[index] for index in range(len(data))] == expected
    assert data[-1] == expected[-1]
    with pytest.raises(IndexError, match="sample 8 of 8"):
        data[8]


def test_names_are_split_at_the_first_dot_and_fields_are_lower_case(tmp_path):
    members = [("a/0.1.TXT", b"x"), ("b.c/0.txt", b"y"), ("b.c/0.seg.txt", b"z"), (".hidden.txt", b""), ("README", b"")]
    assert list(TarShards(write(tmp_path / "a.tar", members))) == [
        {"__key__": "a/0", "1.txt": "x"},
        {"__key__": "b.c/0", "txt": "y", "seg.txt": "z"},
    ]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_every_format_of_tar_and_long_names(tmp_path, format):
    folder = "f" * 90
    path = write(tmp_path / "a.tar", [(f"{folder}/{'k' * 60}.txt", b"long"), ("b.txt", b"short")], format=format)
    assert [sample["txt"] for sample in TarShards(path)] == ["long", "short"]
    assert TarShards(path)[0]["__key__"] == f"{folder}/{'k' * 60}"


def test_values_by_extension(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    members = {"json": b'{"a": [1]}', "cls": b"7", "npy": npy(array), "png": png((255, 0, 7)), "bin": b"\x00\x01"}
    path = write(tmp_path / "a.tar", [(f"0.{field}", data) for field, data in members.items()])
    (sample,) = TarShards(path)
    assert (sample["json"], sample["cls"], sample["bin"]) == ({"a": [1]}, 7, b"\x00\x01")
    assert torch.equal(sample["npy"], torch.from_numpy(array))
    assert sample["png"].dtype == torch.uint8
    assert torch.equal(sample["png"], torch.tensor([255, 0, 7], dtype=torch.uint8).view(3, 1, 1).expand(3, 2, 3))


def test_own_decoders_fields_and_transform(tmp_path):
    path = write(tmp_path / "a.tar", [("0.seg.png", b"ab"), ("0.png", b"cd"), ("0.cls", b"1")])
    data = TarShards(
        path,
        fields=["cls", "PNG", "seg.png"],
        decode={"png": len, "seg.png": bytes.upper},
        transform=lambda sample: tuple(sample.values()),
    )
    assert data[0] == ("0", 1, 2, b"AB")


def test_the_index_is_kept_and_made_anew_when_the_shard_changes(tmp_path, monkeypatch):
    path, scans = write(tmp_path / "a.tar", pairs(0, 2)), []
    scan = tar_index.scan
    monkeypatch.setattr(tar_index, "scan", lambda shard: scans.append(shard) or scan(shard))
    assert [len(TarShards(path)) for _ in range(2)] == [2, 2]
    assert scans == [str(path)]
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "a.tar.index"]
    assert len(TarShards(tmp_path / "*")) == 2, "index files are no shards"
    write(path, pairs(0, 3))
    assert len(TarShards(path)) == 3
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(TarShards(path)) == 3
    for damage in (b"", b"{}", (tmp_path / "a.tar.index").read_bytes()[:-1]):
        (tmp_path / "a.tar.index").write_bytes(damage)
        assert [sample["__key__"] for sample in TarShards(path)] == ["0000", "0001", "0002"]
    assert len(scans) == 6


def test_the_index_can_lie_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    first, second = write(tmp_path / "x" / "a.tar", pairs(0, 1)), write(tmp_path / "y" / "a.tar", pairs(1, 3))
    assert len(TarShards([first, second], cache=tmp_path / "cache" / "deep")) == 3
    assert len(os.listdir(tmp_path / "cache" / "deep")) == 2, "of the same name in two folders"
    assert os.listdir(tmp_path / "x") == ["a.tar"]
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert len(TarShards(first)) == 1
    assert len(os.listdir(tmp_path / "home" / "lockstep" / "tar")) == 1
    first.with_name("a.tar.index").write_bytes(next((tmp_path / "home" / "lockstep" / "tar").iterdir()).read_bytes())
    monkeypatch.setattr(tar_index, "_write", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert len(TarShards(first)) == 1, "an index beside the shard is used wherever a new one would go"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as error:
        TarShards(first, cache=tmp_path / "file")
    assert str(error.value).startswith(f"The index of {first} cannot be written to {tmp_path}/file/a.tar.")
    assert str(error.value).endswith(": File exists.\nName another folder for it (cache=...).")


def test_many_may_build_the_index_at_once(shards):
    lengths, start = [], threading.Barrier(8)

    def build():
        start.wait(timeout=30)
        data = TarShards(shards)
        lengths.append([data[index]["__key__"] for index in range(len(data))])

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert lengths == [[f"{number:04d}" for number in range(8)]] * 8
    assert len(os.listdir(shards.parent)) == 6, "no temporary file is left"


def test_loader_processes_read_the_same_whether_forked_or_spawned(shards):
    data = TarShards(shards, fields=["txt"])
    expected = list(data)
    for context in ("fork", "spawn"):
        loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
        assert list(loader) == expected
    assert list(pickle.loads(pickle.dumps(data))) == expected


def broken(path):
    with pytest.raises(DataError) as error:
        TarShards(path)
    assert error.value.file == str(path)
    assert not os.path.exists(f"{path}.index")
    return str(error.value).removeprefix(str(path))


def test_a_shard_that_is_cut_short_is_named_wherever_the_cut_is(tmp_path):
    path = write(tmp_path / "a.tar", [("0.txt", b"x" * 1000), ("1.txt", b"y" * 1000)])
    # 0.txt: header at 0, data from 512 to 1512, padded to 1536; 1.txt: 1536, 2048 to 3048, padded to 3072; then zeros
    whole = path.read_bytes()
    for size, text in (
        (2100, " ends at byte 2100, but 1.txt lies at bytes 2048 to 3048.\nRestore the shard."),
        (3050, " is damaged behind 1.txt: unexpected end of data.\nRestore the shard."),
        (3072, " has no end mark behind 1.txt: it was cut short.\nRestore the shard."),
        (1536, " has no end mark behind 0.txt: it was cut short.\nRestore the shard."),
        (1700, " has a damaged header at byte 1536, behind 0.txt.\nMake it anew, as a single archive."),
        (100, " is damaged behind its beginning: truncated header.\nRestore the shard."),
        (0, " is damaged behind its beginning: empty file.\nRestore the shard."),
    ):
        path.write_bytes(whole[:size])
        assert broken(path) == text, size


def test_what_would_be_lost_without_a_word_is_an_error(tmp_path):
    first, second = write(tmp_path / "1.tar", pairs(0, 1)), write(tmp_path / "2.tar", pairs(1, 2))
    both, end = tmp_path / "both.tar", len(first.read_bytes())
    both.write_bytes(first.read_bytes() + second.read_bytes())
    assert broken(both) == (
        f" has data behind its end mark at byte {end}, behind 0000.cls.\nMake it anew, as a single archive."
    )
    damaged = bytearray(first.read_bytes())
    damaged[1024 + 10] ^= 1
    both.write_bytes(damaged)
    assert broken(both) == (" has a damaged header at byte 1024, behind 0000.txt.\nMake it anew, as a single archive.")
    assert broken(write(tmp_path / "twice.tar", pairs(0, 1) * 2)) == (
        " holds 0000.txt twice.\nGive every sample of a shard a name of its own."
    )


def test_compressed_shards_and_links_are_refused(tmp_path):
    for kind, name in (("gz", "gzip"), ("bz2", "bzip2"), ("xz", "xz")):
        with tarfile.open(tmp_path / f"a.{kind}", f"w:{kind}"):
            pass
        assert broken(tmp_path / f"a.{kind}") == (
            f" is compressed with {name}.\nDecompress it: single records are read."
        )
    link = tarfile.TarInfo("0.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "1.txt"
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        archive.addfile(link)
    assert broken(tmp_path / "link.tar") == (
        " holds 0.txt, which is a link or a device.\nAdd plain files (tar --dereference)."
    )


def test_a_missing_shard_is_named_before_anything_is_scanned(shards):
    (shards.parent / "train-001.tar").unlink()
    with pytest.raises(DataError) as error:
        TarShards(shards)
    assert str(error.value) == (
        f"{shards.parent}/train-001.tar does not exist.\nCheck the name, and that this machine sees it."
    )
    assert not (shards.parent / "train-000.tar.index").exists()


def test_shards_without_samples_are_refused(tmp_path):
    write(tmp_path / "a.tar", [("README", b"")])
    with pytest.raises(ConfigurationError) as error:
        TarShards(tmp_path / "a.tar")
    assert str(error.value) == (
        f"There is no sample in 1 shards, the first of them {tmp_path}/a.tar.\n"
        "Name their files key.extension, such as 0001.jpg and 0001.cls."
    )
    with pytest.raises(ConfigurationError) as error:
        TarShards(tmp_path / "a.tar", fields="jpg")
    assert str(error.value) == "fields='jpg' is a string.\nGive a list of names: fields=['jpg']."


def failing(data, index):
    with pytest.raises(DataError) as error:
        data[index]
    assert error.value.sample == index
    return str(error.value)


def test_a_record_that_cannot_be_read_is_named_and_the_others_can(tmp_path):
    objects = npy(np.array([{}]), allow_pickle=True)
    members = [("0.txt", b"a"), ("1.cls", b"one"), ("2.npy", objects), ("3.png", b"no picture"), ("4.txt", b"\xff")]
    path = write(tmp_path / "a.tar", members)
    data = TarShards(path)
    assert data[0]["txt"] == "a"
    advice = "\nMake the shard anew, or name a decoder that understands the record (decode=...)."
    assert failing(data, 1) == (
        f"{path}: 1.cls (sample 1) at byte 1536 cannot be read: "
        f"ValueError: invalid literal for int() with base 10: b'one'{advice}"
    )
    assert failing(data, 2) == (
        f"{path}: 2.npy (sample 2) at byte 2560 cannot be read: "
        f"ValueError: Object arrays cannot be loaded when allow_pickle=False{advice}"
    )
    assert failing(data, 3).startswith(
        f"{path}: 3.png (sample 3) at byte 3584 cannot be read: UnidentifiedImageError: cannot identify image file"
    )
    assert "4.txt (sample 4)" in failing(data, 4)
    assert "UnicodeDecodeError" in failing(data, 4)


def test_a_sample_without_a_field_is_named(tmp_path):
    path = write(tmp_path / "a.tar", [*pairs(0, 2), ("x.txt", b"")])
    data = TarShards(path, fields=["txt", "cls", "jpg"])
    assert failing(data, 2) == (
        f"{path}: x (sample 2) at byte 4608 has no cls and no jpg, only txt.\n"
        "Make the shard anew, or name the fields that all samples have."
    )
    assert TarShards(path, fields=["txt"])[2] == {"__key__": "x", "txt": ""}


def test_a_shard_that_is_cut_short_later_is_named(tmp_path):
    path = write(tmp_path / "a.tar", pairs(0, 3))
    data = TarShards(path)
    os.truncate(path, 2563)
    assert data[0]["txt"] == "text 0"
    assert failing(data, 1) == (
        f"{path} ends at byte 2563, but 0001.txt (sample 1) lies at bytes 2560 to 2566.\n"
        "The file was cut short after the data set was made. Restore it and resume."
    )


def test_an_error_in_the_transform_says_in_which_sample(tmp_path):
    data = TarShards(write(tmp_path / "a.tar", pairs(0, 3)), transform=lambda sample: 1 / sample["cls"])
    with pytest.raises(ZeroDivisionError) as error:
        data[0]
    assert error.value.__notes__ == [f"in the transform of 0000 (sample 0) of {tmp_path}/a.tar"]


def test_the_data_set_holds_nothing_for_each_sample(tmp_path):
    data = TarShards(write(tmp_path / "a.tar", pairs(0, 500)))
    assert json.loads((tmp_path / "a.tar.index").read_bytes()[:256])["num_samples"] == len(data) == 500
    assert data[321]["txt"] == "text 321"
    assert len(pickle.dumps(data)) < 1000
