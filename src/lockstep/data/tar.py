"""Tar shards in the WebDataset layout as a data set with a length and an index."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from lockstep.data.decode import Decoder, decoder_for
from lockstep.data.tar_index import open_indexes
from lockstep.data.tar_scan import Member
from lockstep.data.tokens import Files, PositionalReader, expand
from lockstep.errors import ConfigurationError, DataError, LockstepError


class TarShards(Dataset[Any]):
    """Samples in tar files: ``0001.jpg`` and ``0001.cls`` are ``{"__key__": "0001", "jpg": ..., "cls": ...}``.

    The shards are scanned once; an index of each is kept in a file. After that a sample costs a read for each of its
    members and two for the index, wherever it is. Holds a few bytes for each shard and nothing for each sample. Can be
    pickled, if ``decode`` and ``transform`` can, and forked.

    Args:
        shards: A path, in which ``{000..031}``, ``{a,b}`` and ``*`` are expanded, or several. They are not compressed.
        fields: Those to read, in this order; every sample must have them. If None, whatever a sample has.
        decode: Bytes to value, by field (``seg.png``) or extension (``png``); goes before what is known: json; txt;
            cls, count, id, index (a number); npy; pictures (uint8 of shape (3, height, width)). Others stay bytes.
        transform: What to make of the dictionary, such as a tuple of tensors of one shape.
        cache: Folder for the index files. If None, they lie beside the shards, or in the user's cache folder where that
            must not be written to.

    Raises:
        DataError: A shard is missing, cut short or damaged; names it, the byte and the record.
        ConfigurationError: The shards hold no sample.
    """

    def __init__(
        self,
        shards: Files,
        *,
        fields: Sequence[str] | None = None,
        decode: Mapping[str, Decoder] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise ConfigurationError(f"fields={fields!r} is a string.\nGive a list of names: fields=[{fields!r}].")
        self._fields = None if fields is None else [field.lower() for field in fields]
        self._decode = {field.lower(): decoder for field, decoder in (decode or {}).items()}
        self._transform = transform
        paths = [path for path in expand(shards) if ".tar.index" not in os.path.basename(path)]  # "*" finds ours too
        self._indexes = open_indexes(paths, None if cache is None else os.path.expanduser(os.fspath(cache)))
        self._ends = list(accumulate(index.num_samples for index in self._indexes))
        if not self._ends[-1]:
            raise ConfigurationError(
                f"There is no sample in {len(self._ends)} shards, the first of them {self._indexes[0].shard}.\n"
                "Name their files key.extension, such as 0001.jpg and 0001.cls."
            )
        self._reader = PositionalReader()

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return the sample ``index``, decoded and transformed. Blocks until it is read.

        Raises:
            DataError: A member is missing, cannot be read or decoded; names shard, byte, key and sample.
            IndexError: There is no such sample.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        shard = self._indexes[number]
        key, members = shard.look_up(index - (self._ends[number - 1] if number else 0), self._reader)
        sample: dict[str, Any] = {"__key__": key}
        for member in self._choose(members, shard.shard, key, index):
            sample[member.field] = self._value(member, shard.shard, key, index)
        if self._transform is None:
            return sample
        try:
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"in the transform of {key} (sample {index}) of {shard.shard}")
            raise

    def _choose(self, members: list[Member], shard: str, key: str, index: int) -> list[Member]:
        if self._fields is None:
            return members
        found = {member.field: member for member in members}
        missing = [field for field in self._fields if field not in found]
        if missing:
            offset = members[0].offset
            raise DataError(
                f"{shard}: {key} (sample {index}) at byte {offset} has no {' and no '.join(missing)}, "
                f"only {', '.join(found)}.\n"
                "Make the shard anew, or name the fields that all samples have.",
                file=shard,
                offset=offset,
                sample=index,
            )
        return [found[field] for field in self._fields]

    def _value(self, member: Member, shard: str, key: str, index: int) -> Any:
        name = f"{key}.{member.field} (sample {index})"
        data = self._reader.read(shard, member.offset, member.size, what=name, sample=index)
        try:
            return decoder_for(member.field, self._decode)(data)
        except LockstepError:
            raise
        except Exception as error:
            cause = (str(error).splitlines() or [""])[0]
            raise DataError(
                f"{shard}: {name} at byte {member.offset} cannot be read: {type(error).__name__}: {cause}\n"
                "Make the shard anew, or name a decoder that understands the record (decode=...).",
                file=shard,
                offset=member.offset,
                sample=index,
            ) from error
