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
from padfree.config.models import expand_home
from padfree.config.rules import LARGEST_GIB, SMALLEST_GIB, check_seconds, closest, need

MOST_PROCESSES = 1024
"""Of rewards, on a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """vLLM servers that the run starts, watches and ends: `command` once for each entry of `devices`."""

    command: tuple[str, ...] = ()  # its words; the model, the port and what else the run needs are added
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

    reward: str | None = None
    environment: str | None = None  # module:function of an episode
    agent: tuple[str, ...] = ()  # or the words of a program that is one, with the policy at its OPENAI_BASE_URL
    episode_timeout: float = 300.0  # seconds of an episode's own, its reward's too; waiting for tokens does not count
    on_failure: OnFailure = "error"  # skip: a group whose episode or reward raises or hangs is left out
    reward_processes: int = 0  # that rewards are computed in; 0: in the process
    group: int = 8  # responses to a prompt
    max_new_tokens: int = 256
    engine: str = "in_process"  # who samples: in_process, vllm, or your own as module:function
    batch: int = 256  # responses a device writes at a time
    kv_cache_memory: Literal["auto"] | float = "auto"  # GiB of keys and values; auto: half of what is free at most
    staleness: int = 0  # batches that are sampled ahead while one is trained
    filter: RolloutFilter = "none"  # equal: groups with equal rewards are replaced by other prompts'
    oversample: float = 1.0  # groups that are asked for at once, times those that are needed
    filter_bound: float = 3.0  # groups that a batch may ask for in all, times its own
    overlong_buffer: int = 0  # the last tokens of the room: a response that ends among them loses some reward,
    overlong_penalty: float = 1.0  # and so much of it at the last
    # Of vllm alone
    servers: tuple[str, ...] = ()  # addresses of servers that run
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    transfer: WeightTransfer = "group"  # how weights get to servers
    transfer_folder: str | None = None  # of files, seen by run and servers; None: memory, or the run folder
    timeout: float = 600.0
    canary: float | None = None  # mean difference of log-probabilities that is allowed; None: by model.dtype
    top_p: float = 1.0
    top_k: int | None = None

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes; None: auto."""
        return None if self.kv_cache_memory == "auto" else int(self.kv_cache_memory * 2**30)

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
        for name in ("group", "max_new_tokens", "batch"):
            need(getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "give 1 or more")
        if self.kv_cache_memory != "auto":
            memory = self.kv_cache_memory
            need(SMALLEST_GIB <= memory <= LARGEST_GIB, "rollout.kv_cache_memory", memory, "give auto or GiB above 0")
        self._check_batches()
        expand_home(self, "transfer_folder")
        cure = "leave it out, the trainer's log-probabilities are those of the whole softmax"
        need(self.top_p == 1.0, "rollout.top_p", self.top_p, cure)
        need(self.top_k is None, "rollout.top_k", self.top_k, cure)
        check_seconds("rollout.timeout", self.timeout)
        need(self.canary is None or self.canary > 0, "rollout.canary", self.canary, "give more than 0, or leave it out")
        need(self.transfer_folder != "", "rollout.transfer_folder", "", "give a folder, or leave it out")
        self._check_engine()
        self._check_episodes()
        servers, command = list(self.servers), list(self.launch.command)
        if self.engine != "vllm":
            cure = "set rollout.engine=vllm, or leave it out"
            need(not servers, "rollout.servers", servers, cure)
            need(not command, "rollout.launch.command", command, cure)
            return
        for url in servers:
            right = re.fullmatch(r"https?://[^/:\s]+(:\d{1,5})?(/\S*)?", url) is not None
            need(right, "rollout.servers", url, 'give addresses such as ["http://127.0.0.1:8000"]')
        need(len(set(servers)) == len(servers), "rollout.servers", servers, "name each server once")
        cure = "give the addresses of servers that run, or rollout.launch.command to have them started, and not both"
        need(bool(servers) != bool(command), "rollout.servers", servers, cure)

    def _check_batches(self) -> None:
        need(self.staleness >= 0, "rollout.staleness", self.staleness, "give 0 or more batches")
        ahead = self.staleness > 0 and self.engine == "in_process"
        cure = "rollout.engine in_process samples from the weights that are in training: set rollout.engine=vllm, or 0"
        need(not ahead, "rollout.staleness", self.staleness, cure)
        need(1.0 <= self.oversample < math.inf, "rollout.oversample", self.oversample, "give 1 or more")
        filtered = self.filter != "none"
        need(filtered or self.oversample == 1.0, "rollout.oversample", self.oversample, "set rollout.filter=equal")
        need(1.0 <= self.filter_bound < math.inf, "rollout.filter_bound", self.filter_bound, "give 1 or more")
        compared = not filtered or self.group > 1
        need(compared, "rollout.filter", self.filter, "set rollout.group to 2 or more, one response is equal to itself")
        right = 0 <= self.overlong_buffer <= self.max_new_tokens
        cure = f"give 0 to rollout.max_new_tokens, {self.max_new_tokens}"
        need(right, "rollout.overlong_buffer", self.overlong_buffer, cure)
        penalty = self.overlong_penalty
        need(0 < penalty < math.inf, "rollout.overlong_penalty", penalty, "give more than 0")

    def _check_episodes(self) -> None:
        environment, agent = self.environment, list(self.agent)
        right = environment is None or is_path(environment)
        cure = "give 'module:function', such as padfree.rollout.environment.calculator:episode"
        need(right, "rollout.environment", environment, cure)
        need(all(agent), "rollout.agent", agent, "give words, none of them empty")
        cure = "leave it out, rollout.environment is the environment (padfree.rollout.environment.run_agent runs one)"
        need(not agent or environment is None, "rollout.agent", agent, cure)
        cure = "set rollout.reward=exact_match or another, it judges what rollout.agent prints"
        need(not agent or self.reward is not None, "rollout.reward", None, cure)
        check_seconds("rollout.episode_timeout", self.episode_timeout)
        processes = self.reward_processes
        need(0 <= processes <= MOST_PROCESSES, "rollout.reward_processes", processes, f"give 0 to {MOST_PROCESSES}")
        cure = "set rollout.reward, without one there is nothing to compute in processes"
        need(
            not self.reward_processes or self.reward is not None,
            "rollout.reward_processes",
            self.reward_processes,
            cure,
        )

    def _check_engine(self) -> None:
        if self.engine in SAMPLING_ENGINES or is_path(self.engine):
            return
        near = closest(self.engine, SAMPLING_ENGINES)
        meant = "" if near is None else f"did you mean {near!r}? "
        cure = f"{meant}give one of {', '.join(SAMPLING_ENGINES)}, or 'module:function'"
        need(False, "rollout.engine", self.engine, cure)
