"""What the network's errors say."""

import pytest

from lockstep.comm.network import gloo_cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.79.0.2]:5804: "
            "Connection timed out. This is typically caused by a remote worker hanging. Check the logs",
            "Read error [10.79.0.2]:5804: Connection timed out",
        ),
        (
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
            "Connection closed by peer [127.0.0.1]:1",
        ),
        ("[10.0.0.1]:80 refused\nmore", "[10.0.0.1]:80 refused"),
        ("", ""),
    ],
)
def test_an_error_of_gloo_names_the_peer_and_not_its_source(text, cause):
    assert gloo_cause(RuntimeError(text)) == cause
