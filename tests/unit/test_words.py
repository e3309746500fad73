"""A run in words."""

from lockstep.data.loader import BadSample
from lockstep.train.display import describe_skipped


def test_skipped_samples_are_named_once_and_counted():
    once = [
        BadSample(sample, 0, sample, f"part.tar: record {sample} is cut short.\nCopy it again.") for sample in range(7)
    ]
    assert describe_skipped(once[:1]) == (
        "1 sample skipped, as they could not be read:\n  sample 0: part.tar: record 0 is cut short."
    )
    lines = describe_skipped([*once, *once[:2]]).splitlines()
    assert lines == [
        "9 samples skipped, as they could not be read:",
        "  sample 0: part.tar: record 0 is cut short. (2 times)",
        "  sample 1: part.tar: record 1 is cut short. (2 times)",
        "  sample 2: part.tar: record 2 is cut short.",
        "  sample 3: part.tar: record 3 is cut short.",
        "  sample 4: part.tar: record 4 is cut short.",
        "  and 2 others; the run folder has all",
    ]
