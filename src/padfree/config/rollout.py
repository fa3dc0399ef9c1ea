"""The section `rollout`: who writes the responses of a run, how many, and what judges them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from padfree.config.choices import (
    SAMPLING_ENGINES,
    OnFailure,
    RolloutFilter,
    WeightTransfer,
)
from padfree.config.functions import is_path
from padfree.config.model_sections import expand_home
from padfree.config.setting import STAYS, check_table, need_of, setting
from padfree.config.units import GIB, SECONDS
from padfree.errors import closest, need

MOST_PROCESSES = 1024
"""Of rewards, on a host."""

SERVED_FIX = "set rollout.engine=vllm, or leave it out"
FILTERED = need_of("filter", "equal", fix="set rollout.filter=equal")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Servers that the run starts, watches and ends: `command` once for each entry of `devices`."""

    command: tuple[str, ...] = setting(
        (), needs=need_of("rollout.may_have_servers", fix=SERVED_FIX)
    )  # its words; the model, the port and what else the run needs are added
    devices: tuple[str, ...] = ("0",)  # CUDA_VISIBLE_DEVICES of each server; "cpu": none
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need(all(self.command), "rollout.launch.command", list(self.command), "give words, none of them empty")
        cure = 'give CUDA_VISIBLE_DEVICES of each server, such as ["0", "1"], or "cpu"'
        need(len(self.devices) > 0 and all(self.devices), "rollout.launch.devices", list(self.devices), cure)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Rollouts of the run itself: `reward` names a built-in or `module:function`, `environment` or `agent` what the
    policy talks to; without any of them `data.path` has finished ones.

    With one `data.path` holds prompts, `batch.samples` counts responses, and `loss.temperature` is the sampler's too.
    """

    reward: str | None = setting(None, resume="may change within RL")
    environment: str | None = None  # module:function of an episode
    agent: tuple[str, ...] = setting(
        (),
        needs=need_of("reward", fix="set rollout.reward=exact_match or another, it judges what rollout.agent prints"),
    )  # or the words of a program that is one, with the policy at its OPENAI_BASE_URL
    episode_timeout: float = setting(
        300.0, **SECONDS
    )  # seconds of an episode's own, its reward's too; waiting for tokens does not count
    on_failure: OnFailure = "error"  # skip: a group whose episode or reward raises or hangs is left out
    reward_processes: int = setting(
        0,
        least=0,
        most=MOST_PROCESSES,
        needs=need_of("reward", fix="set rollout.reward, without one there is nothing to compute in processes"),
    )  # that rewards are computed in; 0: in the process
    samples_per_prompt: int = setting(8, least=1, resume=STAYS, formerly="group")  # responses to a prompt
    max_new_tokens: int = setting(256, least=1)
    engine: str = "in_process"  # who samples: in_process, vllm, or your own as module:function
    max_concurrent: int = setting(256, least=1, formerly="batch")  # responses a device writes at a time
    kv_cache_memory: Literal["auto"] | float = setting(
        "auto", **GIB, fix="give auto or GiB above 0"
    )  # GiB of keys and values; auto: half of what is free at most
    staleness: int = setting(
        0, least=0, fix="give 0 or more batches"
    )  # batches that are sampled ahead while one is trained
    filter: RolloutFilter = "none"  # equal: groups with equal rewards are replaced by other prompts'
    oversample: float = setting(
        1.0, least=1, needs=FILTERED
    )  # groups that are asked for at once, times those that are needed
    filter_bound: float = setting(3.0, least=1)  # groups that a batch may ask for in all, times its own
    overlong_buffer: int = 0  # the last tokens of the room: a response that ends among them loses some reward,
    overlong_penalty: float = setting(1.0, above=0)  # and so much of it at the last
    # Of servers alone
    servers: tuple[str, ...] = setting(
        (), needs=need_of("may_have_servers", fix=SERVED_FIX)
    )  # addresses of servers that run
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    transfer: WeightTransfer = "group"  # how weights get to servers
    transfer_folder: str | None = setting(
        None, filled="give a folder, or leave it out"
    )  # of files, seen by run and servers; None: memory, or the run folder
    timeout: float = setting(600.0, **SECONDS)
    canary: float | None = setting(
        None, above=0, most=math.inf, fix="give more than 0, or leave it out"
    )  # mean difference of log-probabilities that is allowed; None: by model.dtype
    top_p: float = 1.0
    top_k: int | None = None

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes; None: auto."""
        return None if self.kv_cache_memory == "auto" else int(self.kv_cache_memory * 2**30)

    @property
    def may_have_servers(self) -> bool:
        return self.engine != "in_process"

    @property
    def has_servers(self) -> bool:
        """Whether servers write the responses; one of your own engines needs none."""
        return bool(self.servers or self.launch.command)

    @property
    def source(self) -> str | None:
        """The setting that has the run write its responses itself; None: it does not."""
        for name in ("environment", "agent", "reward"):
            if getattr(self, name):
                return f"rollout.{name}"
        return None

    @property
    def has_episodes(self) -> bool:
        """Whether an environment plays episodes; else every response is an episode of one turn."""
        return self.environment is not None or bool(self.agent)

    def __post_init__(self) -> None:
        check_table(self, "rollout.")
        self._check_batches()
        expand_home(self, "transfer_folder")
        cure = "leave it out, the trainer's log-probabilities are those of the whole softmax"
        need(self.top_p == 1.0, "rollout.top_p", self.top_p, cure)
        need(self.top_k is None, "rollout.top_k", self.top_k, cure)
        self._check_engine()
        self._check_episodes()
        servers, command = list(self.servers), list(self.launch.command)
        own = is_path(self.engine)
        if not self.may_have_servers:
            return
        for url in servers:
            scheme = "[a-z]+" if own else "https?"
            right = re.fullmatch(scheme + r"://[^/:\s]+(:\d{1,5})?(/\S*)?", url) is not None
            need(right, "rollout.servers", url, 'give addresses such as ["http://127.0.0.1:8000"]')
        need(len(set(servers)) == len(servers), "rollout.servers", servers, "name each server once")
        cure = "give the addresses of servers that run, or rollout.launch.command to have them started, and not both"
        need(own or bool(servers) != bool(command), "rollout.servers", servers, cure)
        need(not (servers and command), "rollout.servers", servers, cure)

    def _check_batches(self) -> None:
        ahead = self.staleness > 0 and self.engine == "in_process"
        cure = "rollout.engine in_process samples from the weights that are in training: set rollout.engine=vllm, or 0"
        need(not ahead, "rollout.staleness", self.staleness, cure)
        compared = self.filter == "none" or self.samples_per_prompt > 1
        need(
            compared,
            "rollout.filter",
            self.filter,
            "set rollout.samples_per_prompt to 2 or more, one response is equal to itself",
        )
        right = 0 <= self.overlong_buffer <= self.max_new_tokens
        cure = f"give 0 to rollout.max_new_tokens, {self.max_new_tokens}"
        need(right, "rollout.overlong_buffer", self.overlong_buffer, cure)

    def _check_episodes(self) -> None:
        environment, agent = self.environment, list(self.agent)
        right = environment is None or is_path(environment)
        cure = "give 'module:function', such as padfree.rollout.environment.calculator:episode"
        need(right, "rollout.environment", environment, cure)
        need(all(agent), "rollout.agent", agent, "give words, none of them empty")
        cure = "leave it out, rollout.environment is the environment (padfree.rollout.environment.run_agent runs one)"
        need(not agent or environment is None, "rollout.agent", agent, cure)

    def _check_engine(self) -> None:
        if self.engine in SAMPLING_ENGINES or is_path(self.engine):
            return
        near = closest(self.engine, tuple(SAMPLING_ENGINES))
        meant = "" if near is None else f"did you mean {near!r}? "
        cure = f"{meant}give one of {', '.join(SAMPLING_ENGINES)}, or 'module:function'"
        need(False, "rollout.engine", self.engine, cure)
