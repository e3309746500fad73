"""Private names of torch: what each relies on, the versions it was seen in, and what happens without it."""

from typing import cast

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


def prepare_ranks_of_agent(agent: LocalElasticAgent, envs: dict[int, dict[str, str]]) -> None:
    """Set LOCAL_RANK in the environments of ranks, and start what torchrun's environment variables ask for.

    These are the file timer (TORCHELASTIC_ENABLE_FILE_TIMER), the health check (TORCHELASTIC_HEALTH_CHECK_PORT) and
    CUDA_VISIBLE_DEVICES of ``--virtual-local-rank``. Relies on three methods of `LocalElasticAgent`, in torch 2.11 to
    2.14. Without them: no file timer, no health check, and all ranks see all devices.

    Args:
        agent: Which starts the ranks.
        envs: What is added to the environment of each rank, by its number on this machine; changed in place.
    """
    for local_rank, environ in envs.items():
        environ["LOCAL_RANK"] = str(local_rank)
        if hasattr(agent, "_set_local_rank_env"):
            agent._set_local_rank_env(cast(dict[str, str | None], environ), local_rank, agent.get_worker_group().spec)
    if hasattr(agent, "_setup_local_watchdog"):
        agent._setup_local_watchdog(envs=envs)
    if hasattr(agent, "_setup_healthcheck"):
        agent._setup_healthcheck()
