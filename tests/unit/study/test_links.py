"""The model of a step over a network, against cases worked out by hand; links by name; what is advised."""

from dataclasses import replace

import pytest

from lockstep.errors import ConfigurationError
from lockstep.study.links import (
    Computing,
    Cost,
    Link,
    Method,
    Profile,
    ReadyBucket,
    break_even,
    cable_bytes,
    format_rate,
    given_link,
    parse_rate,
    predict_step,
)

# 4 samples: 1 s before backward, 2 s of backward, 0.5 s after it. 30 MB of gradients, ready at 1/2 and at the end.
WHOLE, HALF = Computing(1.0, 2.0, 0.5), Computing(0.5, 1.0, 0.5)
PROFILE = Profile(
    4, {4: WHOLE, 2: HALF}, (ReadyBucket(10_000_000, 0.5), ReadyBucket(20_000_000, 1.0)), cores=2, busy_cores=1
)
LINK = Link(10e6, 0.0)
PLAIN = Method("ddp")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("100Mb", 12.5e6), ("1Gb", 125e6), ("2.5Gbit/s", 312.5e6), ("20MB/s", 20e6), ("512kbps", 64e3), (" 1GB ", 1e9)],
)
def test_rates_are_read(text, bytes_per_s):
    assert parse_rate(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["100", "fast", "", "-1Mb", "0Mb", "1e3Mb", "nanMb", "10 apples", "٣Mb"])
def test_what_is_no_rate_is_one_clear_error(text):
    with pytest.raises(ConfigurationError) as error:
        parse_rate(text)
    assert str(error.value) == (
        f"{text!r} is not the rate of a link.\nGive bits per second, such as 100Mb or 2.5Gb, or bytes, such as 20MB/s."
    )


def test_rates_are_written_as_networks_are_called():
    assert [format_rate(each / 8) for each in (20e6, 99.99e6, 1e9, 2.5e9, 56e3, 9)] == [
        "20 Mb/s", "100 Mb/s", "1 Gb/s", "2.5 Gb/s", "56 kb/s", "9 b/s",
    ]  # fmt: skip
    assert given_link("100Mb").bytes_per_s < 12.5e6, "headers take a part"
    assert given_link("12.5MB/s").bytes_per_s == 12.5e6, "what gradients get"


def test_a_machine_sends_what_a_ring_moves():
    # The figures of two machines with two ranks each, as they were measured: flat, and by machine.
    assert cable_bytes(43.2e6, 4) == pytest.approx(64.8e6)
    assert cable_bytes(43.2e6, 2) == pytest.approx(43.2e6)
    assert predict_step(PROFILE, PLAIN, LINK, 2).sent_bytes == 30e6
    two = replace(PROFILE, ranks_per_machine=2, global_batch_size=8)
    assert predict_step(two, PLAIN, LINK, 2).sent_bytes == 30e6


def test_one_machine_exchanges_nothing():
    step = predict_step(PROFILE, PLAIN, LINK, 1)
    assert (step.seconds, step.sent_bytes, step.samples_per_s) == (3.5, 0.0, pytest.approx(4 / 3.5))


def test_buckets_leave_in_order_while_backward_goes_on():
    # Ready after 0.5 s of backward, the first travels 1 s, until 1.5; the second, ready at 1.0, then 2 s.
    assert predict_step(PROFILE, PLAIN, LINK, 2).seconds == pytest.approx(0.5 + 3.5 + 0.5)
    # Over a fast link nothing is left but the last bucket: 20 ms.
    assert predict_step(PROFILE, PLAIN, replace(LINK, bytes_per_s=1e9), 2).seconds == pytest.approx(2.0 + 0.02)


def test_each_bucket_waits_for_as_many_messages_as_the_ring_has_turns():
    slow = predict_step(PROFILE, PLAIN, replace(LINK, latency_s=0.1), 2).seconds
    assert slow == pytest.approx(4.5 + 2 * 2 * 0.1)
    with_four = replace(PROFILE, computing={**PROFILE.computing, 1: HALF})
    apart = [predict_step(with_four, PLAIN, replace(LINK, latency_s=s), 4).seconds for s in (0.0, 0.1)]
    assert apart[1] - apart[0] == pytest.approx(2 * 6 * 0.1)


def test_sending_takes_cores_from_computing_where_all_are_busy():
    # 0.05 s of a core for each MB: half a core while 10 MB/s are sent. One of two is idle: nothing is lost.
    method = replace(PLAIN, cost=Cost(cpu_s=0.05e-6))
    assert predict_step(PROFILE, method, LINK, 2).seconds == pytest.approx(4.5)
    # With both busy backward takes longer, but while the link is busy all the time nobody waits for that.
    busy = replace(PROFILE, busy_cores=2)
    assert predict_step(busy, method, LINK, 2).seconds == pytest.approx(4.5)
    # 0.25 s on its way with 0.8 of 2 cores: the pace is 0.6 for that long, and backward ends 0.1 s later.
    fast = replace(method, cost=Cost(cpu_s=0.02e-6)), Link(40e6, 0.0)
    assert predict_step(PROFILE, *fast, 2).seconds == pytest.approx(0.5 + 1.0 + 0.5 + 0.5)
    assert predict_step(busy, *fast, 2).seconds == pytest.approx(0.5 + 1.1 + 0.5 + 0.5)


def test_no_link_makes_ranks_faster_than_they_are_without_one():
    method = replace(PLAIN, cost=Cost(cpu_s=0.1e-6))
    assert predict_step(PROFILE, method, Link(1e12, 0.0), 2).seconds == pytest.approx(
        predict_step(PROFILE, PLAIN, LINK, 2).seconds
    )


def test_compression_sends_less_and_computes_more():
    method = replace(PLAIN, cost=Cost(sent=0.25, encode_s=0.01e-6, decode_s=0.02e-6))
    step = predict_step(PROFILE, method, LINK, 2)
    assert step.sent_bytes == 7.5e6
    # Encoded at 0.6, there at 0.85; the second ready at 1.1, encoded at 1.3, there at 1.8. The first is decoded by
    # then, the second at 2.2.
    assert step.seconds == pytest.approx(0.5 + 2.2 + 0.5)
    # Encoded beside backward and not sent meanwhile: 0.04 s of a core for each MB, half of it before and behind.
    staged = replace(PLAIN, cost=Cost(sent=0.25, cpu_s=0.04e-6, staged=True))
    # The first leaves at 0.7, until 0.95. The second, ready at 1.0, leaves at 1.4, until 1.9, and is there at 2.3.
    assert predict_step(PROFILE, staged, LINK, 2).seconds == pytest.approx(0.5 + 2.3 + 0.5)


def test_exchanging_less_often():
    # 4 micro-batches of the whole share, one exchange: three passes more.
    four = predict_step(PROFILE, replace(PLAIN, accumulate=4), LINK, 2)
    assert (four.seconds, four.num_samples) == (pytest.approx(4.5 + 3 * 1.5), 16)
    # Every 10 steps, after the update, with nothing beside it.
    tenth = predict_step(PROFILE, replace(PLAIN, sync_every=10), LINK, 2)
    assert (tenth.seconds, tenth.sent_bytes) == (pytest.approx(2.0 + 3.0 / 10), 3e6)


def test_shares_that_were_not_measured_take_time_in_proportion():
    assert PROFILE.computing_for(3) == Computing(0.75, 1.5, 0.5)
    assert PROFILE.computing_for(1) == Computing(0.25, 0.5, 0.5), "the update does not shrink"
    assert replace(PROFILE, global_batch_size=3).share(2) == 2
    with pytest.raises(ValueError, match="more ranks than samples"):
        predict_step(PROFILE, PLAIN, LINK, 8)


def test_from_which_link_on_it_pays():
    assert break_even(lambda rate: rate / 1e6, 20.0) == pytest.approx(20e6, rel=2e-3)
    assert break_even(lambda rate: 1.0 - 1e3 / rate, 1.0) is None
