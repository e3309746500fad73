"""SLURM's compressed lists."""

import pytest

from lockstep.env import first_host, tasks_on_node
from lockstep.errors import ConfigurationError


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("a1,a2", "a1"),
        ("gpu[003-005,9],login", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("n[1-2]-ib.cluster.org,x", "n1-ib.cluster.org"),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts, variable="SLURM_NODELIST") == first


@pytest.mark.parametrize("hosts", ["", ",a", "gpu[", "gpu[a-b]", "gpu]3"])
def test_unreadable_hosts_name_the_variable(hosts):
    with pytest.raises(ConfigurationError) as raised:
        first_host(hosts, variable="SLURM_NODELIST")
    assert str(raised.value) == (
        f"SLURM_NODELIST={hosts!r} cannot be read.\n"
        "Set MASTER_ADDR to the host of rank 0 yourself, and unset SLURM_NODELIST."
    )


def test_tasks_on_each_node():
    assert [tasks_on_node("4(x2),1,8", node, variable="V") for node in range(4)] == [4, 4, 1, 8]


def test_unreadable_tasks_name_the_variable():
    with pytest.raises(ConfigurationError, match="SLURM_TASKS_PER_NODE='many' cannot be read"):
        tasks_on_node("many", 0, variable="SLURM_TASKS_PER_NODE")
