"""The section `rollout`: how the responses of a run are sampled and rewarded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from padfree.choices import (
    SAMPLING_ENGINES,
    OnFailure,
    OnUpdate,
    RolloutFilter,
    Routing,
    WeightSyncKind,
    WeightTransfer,
)
from padfree.config.functions import is_path
from padfree.config.model_sections import expand_home
from padfree.config.packaged import is_packaged, packaged_environment
from padfree.config.setting import STAYS, check_table, need_of, setting
from padfree.config.units import GIB, SECONDS
from padfree.errors import closest, need

MOST_PROCESSES = 1024
"""Maximum number of reward processes per rank."""

TRUNCATION = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "min_new_tokens": 0}
"""The settings that truncate the sampler's softmax, with the values that truncate nothing."""

TRUNCATION_BY_LOGITS = ("top_p", "top_k", "min_p")
"""The settings of `TRUNCATION` that exclude tokens with low probabilities."""

_ENDS = "is not supported, because the model's end-of-sequence tokens are the only stop tokens"
_ENDS_FIX = "leave it out, and set eos_token in the tokenizer's files or eos_token_id in generation_config.json"
_CHANGED = "is not supported, because the trainer cannot apply it when it computes log-probabilities"
UNSUPPORTED = {
    "rollout.temperature": ("no such setting", "set loss.temperature, which the sampler uses too"),
    "rollout.seed": ("no such setting", "set run.seed, from which each response gets its own seed"),
    "rollout.max_tokens": ("no such setting", "write rollout.max_new_tokens"),
    "rollout.min_tokens": ("no such setting", "write rollout.min_new_tokens"),
    "rollout.stop": (_ENDS, _ENDS_FIX),
    "rollout.stop_token_ids": (_ENDS, _ENDS_FIX),
    **{
        f"rollout.{name}": (_CHANGED, "leave it out, or set rollout.top_p=0.95")
        for name in (
            "bad_words",
            "allowed_token_ids",
            "logit_bias",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "length_penalty",
            "typical_p",
        )
    },
}
"""Settings that other samplers have and padfree does not, such as `rollout.seed`.

Each has the two parts of its error message: what is wrong, and what to do instead.
"""

COLOCATED_FIX = "leave it out, or set rollout.servers or rollout.launch.command, because only servers can sleep"
SERVED_FIX = "leave it out, or set rollout.engine=vllm"
FILTERED = need_of("filter", "equal", fix="set rollout.filter=equal")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """Inference servers that the run starts and, at its end, stops: one for each entry of `devices`."""

    command: tuple[str, ...] = setting(
        (),
        about="The command that starts a server, as a list of words; padfree adds the model, port and other options.",
        needs=need_of("rollout.may_have_servers", fix=SERVED_FIX, about="rollout.engine=vllm or an engine of your own"),
    )
    devices: tuple[str, ...] = setting(
        ("0",), about="Devices of the servers: for each server the value of CUDA_VISIBLE_DEVICES, or cpu."
    )
    environment: dict[str, str] = setting(
        factory=dict, about="Environment variables of the servers; they are written to config.json."
    )

    def __post_init__(self) -> None:
        need(all(self.command), "rollout.launch.command", list(self.command), "remove the empty strings")
        fix = 'give CUDA_VISIBLE_DEVICES for each server, such as ["0", "1"], or "cpu"'
        need(len(self.devices) > 0 and all(self.devices), "rollout.launch.devices", list(self.devices), fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Rollouts that the run samples itself, if `reward`, `environment` or `agent` is set.

    In such a run, `data.path` holds prompts, and `batch.samples` counts responses. Otherwise `data.path` holds finished
    rollouts.
    """

    reward: str | None = setting(
        None,
        about="The reward: exact_match, number_after_hashes, your own function as module:function, or a reward model "
        "as model:folder.",
        resume="may change within RL",
    )
    environment: str | None = setting(
        None,
        about="An environment: module:function (a coroutine function that plays one episode), verifiers:NAME or "
        "openenv:ADDRESS.",
    )
    agent: tuple[str, ...] = setting(
        (),
        about="A command that plays one episode, as a list of words. The environment variable OPENAI_BASE_URL tells it "
        "the address of the policy.",
        needs=need_of("reward", fix="set rollout.reward=exact_match or another reward, for the output of the program"),
    )
    episode_timeout: float = setting(
        300.0,
        **SECONDS,
        about="Time limit in seconds for an episode and its reward; time spent waiting for sampled tokens does not "
        "count. Without an environment: time limit for each reward.",
    )
    on_failure: OnFailure = setting(
        "error",
        about="If an episode or a reward fails or hangs: end the run, or skip its group and list it in failures.jsonl.",
    )
    reward_processes: int = setting(
        0,
        least=0,
        most=MOST_PROCESSES,
        about="Number of processes per rank that compute rewards; 0 computes them in the training process.",
        needs=need_of("reward", fix="leave it out, or set rollout.reward: there is no reward to compute"),
    )
    samples_per_prompt: int = setting(
        8, least=1, about="Number of responses per prompt, i.e. the size of a group.", resume=STAYS, formerly="group"
    )
    max_new_tokens: int = setting(256, least=1, about="Maximum number of tokens of a response.")
    min_new_tokens: int = setting(
        0,
        allowed="0 to rollout.max_new_tokens",
        about="Minimum number of tokens of a response. In episodes with several turns, it applies to each turn.",
    )
    engine: str = setting(
        "in_process",
        about="The sampling engine: in_process, vllm, or your own as module:function.",
    )
    max_concurrent: int = setting(
        256,
        least=1,
        about="Maximum number of responses that a device generates at the same time. With servers: maximum number of "
        "requests that a process sends to each server at the same time.",
        formerly="batch",
    )
    kv_cache_memory: Literal["auto"] | float = setting(
        "auto",
        **GIB,
        about="Size of the KV cache on a GPU in GiB. auto: what rollout.max_concurrent responses need, at most half "
        "of the free memory.",
        fix="give 'auto' or a number of GiB greater than 0",
    )
    exact: Literal["auto"] | bool = setting(
        "auto",
        about="Whether the log-probabilities of the in_process sampler equal those of the trainer bit for bit; auto: "
        "true if the model supports this on this device.",
        fix="give 'auto', true or false",
    )
    staleness: int = setting(
        0,
        least=0,
        about="Number of batches that are sampled ahead of training; in_process supports 0 only.",
        fix="give 0 or more batches",
    )
    on_update: OnUpdate = setting(
        "continue",
        about="What happens to responses in progress at a weight sync: the new weights continue them, the sync waits "
        "until they finish, or they restart with the new weights.",
    )
    routing: Routing = setting(
        "recompute",
        about="Which experts a token gets in training: recompute lets the routers choose again, replay uses the "
        "sampler's choice.",
    )
    filter: RolloutFilter = setting(
        "none", about="equal: groups whose rewards are all equal are replaced by groups of other prompts."
    )
    oversample: float = setting(
        1.0,
        least=1,
        about="How many groups are requested at once, as a multiple of the number that the batch still needs.",
        needs=FILTERED,
    )
    filter_bound: float = setting(
        3.0,
        least=1,
        about="With rollout.filter=equal: maximum number of groups sampled for a batch, as a multiple of the number of "
        "groups in the batch. At this maximum, groups whose rewards are all equal fill the batch.",
    )
    overlong_buffer: int = setting(
        0,
        about="Length of the soft-penalty zone: the last tokens before rollout.max_new_tokens, where a penalty lowers "
        "the reward.",
        allowed="0 to rollout.max_new_tokens",
    )
    overlong_penalty: float = setting(
        1.0,
        above=0,
        about="Penalty for a response of rollout.max_new_tokens tokens; it grows linearly inside the soft-penalty zone "
        "(rollout.overlong_buffer).",
    )
    # Servers only
    servers: tuple[str, ...] = setting(
        (),
        about='Addresses of running servers, such as ["http://10.0.0.2:8000"].',
        needs=need_of("may_have_servers", fix=SERVED_FIX, about="rollout.engine=vllm or an engine of your own"),
    )
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    colocated: bool = setting(
        False,
        about="Whether the servers share the GPUs of the run: they sleep while the run trains, and wake for the next "
        "weight sync.",
        needs=need_of("has_servers", fix=COLOCATED_FIX, about="rollout.servers or rollout.launch.command"),
    )
    server_memory: float | None = setting(
        None,
        above=0,
        most=1,
        about="With rollout.colocated: fraction of a GPU's memory that a server uses while it is awake. The run passes "
        "it to vLLM servers that it starts, and --dry-run shows it.",
        needs=need_of("colocated", fix="set rollout.colocated=true, or leave it out"),
    )
    sleeping_memory: float = setting(
        2.0,
        **GIB,
        about="With rollout.colocated: memory in GiB that a sleeping server keeps on its GPU; automatic choices, such "
        "as parallel.checkpointing=auto, leave it free.",
    )
    transfer: WeightTransfer = setting(
        "auto",
        about="How weights reach the servers. group: they are broadcast in a process group. files: they are written to "
        "files, which the servers read. auto: files with rollout.colocated, otherwise group.",
    )
    weight_sync: WeightSyncKind = setting(
        "auto",
        about="What a weight sync sends. full: all weights. difference: only the elements whose bits changed since "
        "the last weight sync. auto: full with rollout.colocated or in float32, otherwise difference.",
    )
    transfer_folder: str | None = setting(
        None,
        about="Folder for the files of a weight sync, with the same path for the run and the servers. If none: "
        "/dev/shm (memory) for colocated servers and servers that the run starts, otherwise the run folder.",
        filled="give a folder, or leave rollout.transfer_folder out",
    )
    timeout: float = setting(600.0, **SECONDS, about="The run ends if no server responds for this many seconds.")
    canary: float | None = setting(
        None,
        above=0,
        most=math.inf,
        about="Maximum mean absolute difference between the log-probabilities of a server and the trainer after a "
        "weight sync. The default, none, stands for 0.002 in float32 and 0.1 in bfloat16.",
        fix="give a number greater than 0, or leave rollout.canary out",
    )
    top_p: float = setting(
        1.0,
        above=0,
        most=1,
        about="Sample only from the most likely tokens whose probabilities sum to this number. The trainer truncates "
        "its distribution in the same way.",
    )
    top_k: int | None = setting(
        None,
        least=1,
        about="Sample only from this many of the most likely tokens; applied before rollout.top_p.",
    )
    min_p: float = setting(
        0.0,
        least=0,
        most=1,
        about="Sample only tokens with at least this fraction of the largest probability; applied after rollout.top_p.",
    )

    @property
    def kv_cache_bytes(self) -> int | None:
        """The setting `kv_cache_memory` in bytes; None if it is "auto"."""
        return None if self.kv_cache_memory == "auto" else int(self.kv_cache_memory * 2**30)

    @property
    def sleeping_bytes(self) -> int:
        """The bytes that a sleeping server keeps on each GPU of the run; 0 without `colocated`."""
        return int(self.sleeping_memory * 2**30) if self.colocated else 0

    @property
    def may_have_servers(self) -> bool:
        return self.engine != "in_process"

    @property
    def has_servers(self) -> bool:
        """Whether servers sample the responses. A user's own engine may have no servers."""
        return bool(self.servers or self.launch.command)

    def keeps_sent_weights(self, dtype: str) -> bool:
        """Return whether the trainer and the servers keep a copy of the weights that were last sent. The next weight
        sync then sends only the changed elements.

        `dtype`: the dtype of the weights.
        """
        # In float32, a training step changes nearly every element. A sleeping server would keep the copy on the host.
        automatic = dtype == "bfloat16" and not self.colocated
        return self.has_servers and self.weight_sync in (("auto", "difference") if automatic else ("difference",))

    @property
    def resolved_transfer(self) -> Literal["group", "files"]:
        """The setting `rollout.transfer`, with "auto" replaced by "group" or "files"."""
        if self.transfer == "auto":
            return "files" if self.colocated else "group"
        return self.transfer

    @property
    def source(self) -> str | None:
        """The setting that makes the run sample responses, or None if the run reads finished rollouts."""
        for name in ("environment", "agent", "reward"):
            if getattr(self, name):
                return f"rollout.{name}"
        return None

    @property
    def has_episodes(self) -> bool:
        """Whether an environment or agent plays episodes. Otherwise a response is an episode of one turn."""
        return self.environment is not None or bool(self.agent)

    def __post_init__(self) -> None:
        check_table(self, "rollout.")
        self._check_batches()
        expand_home(self, "rollout.", "transfer_folder")
        self._check_engine()
        self._check_truncation()
        self._check_colocated()
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
        fix = "give either the addresses of running servers, or rollout.launch.command to start servers, and not both"
        need(own or bool(servers) != bool(command), "rollout.servers", servers, fix)
        need(not (servers and command), "rollout.servers", servers, fix)

    def _check_truncation(self) -> None:
        right = 0 <= self.min_new_tokens <= self.max_new_tokens
        fix = f"give 0 to {self.max_new_tokens}, which is rollout.max_new_tokens"
        need(right, "rollout.min_new_tokens", self.min_new_tokens, fix)

    def _check_colocated(self) -> None:
        if not self.colocated:
            return
        fix = "set it to 0, or rollout.colocated=false: colocated servers sleep during training and cannot sample ahead"
        need(self.staleness == 0, "rollout.staleness", self.staleness, fix)
        fix = "set rollout.transfer=files, because NCCL does not connect processes that share a GPU"
        need(self.transfer != "group", "rollout.transfer", self.transfer, fix)

    def _check_batches(self) -> None:
        ahead = self.staleness > 0 and self.engine == "in_process"
        interrupts = self.engine == "vllm" and self.staleness > 0 and self.on_update == "continue"
        fix = (
            "set rollout.staleness=0 or rollout.on_update=finish: servers do not return the chosen experts of "
            "interrupted responses"
        )
        need(self.routing == "recompute" or not interrupts, "rollout.routing", self.routing, fix)
        fix = "set it to 0, or set rollout.engine=vllm: in_process samples with the weights that are being trained"
        need(not ahead, "rollout.staleness", self.staleness, fix)
        compared = self.filter == "none" or self.samples_per_prompt > 1
        need(
            compared,
            "rollout.filter",
            self.filter,
            "set rollout.samples_per_prompt to 2 or more: the filter compares the rewards of a group",
        )
        right = 0 <= self.overlong_buffer <= self.max_new_tokens
        fix = f"give 0 to {self.max_new_tokens}, which is rollout.max_new_tokens"
        need(right, "rollout.overlong_buffer", self.overlong_buffer, fix)

    def _check_episodes(self) -> None:
        environment, agent = self.environment, list(self.agent)
        if environment is not None and is_packaged(environment):
            packaged = packaged_environment(environment, "rollout.environment")
            fix = "leave the part after # out: it selects rows of data, so it is for data.path and eval.path"
            need(not packaged.held_out, "rollout.environment", environment, fix)
        else:
            right = environment is None or is_path(environment)
            fix = (
                "give 'module:function', such as padfree.rollout.environment.calculator:episode, or verifiers:NAME, or "
                "openenv:ADDRESS"
            )
            need(right, "rollout.environment", environment, fix)
        need(all(agent), "rollout.agent", agent, "remove the empty strings")
        fix = "leave it out: the function in rollout.environment can call padfree.rollout.environment.run_agent"
        need(not agent or environment is None, "rollout.agent", agent, fix)

    def _check_engine(self) -> None:
        if self.engine in SAMPLING_ENGINES or is_path(self.engine):
            return
        near = closest(self.engine, tuple(SAMPLING_ENGINES))
        meant = "" if near is None else f"did you mean {near!r}? "
        fix = f"{meant}give one of {', '.join(SAMPLING_ENGINES)}, or 'module:function'"
        need(False, "rollout.engine", self.engine, fix)
