"""Load the environment that the settings name: a user's function by import path, or a program."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from padfree.config.functions import UserFunction
from padfree.config.packaged import VERIFIERS, check_package, is_packaged, packaged_environment
from padfree.config.rollout import RolloutConfig
from padfree.data.verifiers_rows import check_verifiers_module
from padfree.errors import UserError
from padfree.rollout.environment.agent import agent_episode
from padfree.rollout.environment.command import check_command, check_row
from padfree.rollout.environment.episode_policy import Episode
from padfree.rollout.environment.openenv_episode import openenv_episode, openenv_server
from padfree.rollout.environment.verifiers_episode import verifiers_episode
from padfree.rollout.prompts import Prompt

USER_ENVIRONMENT = UserFunction(
    setting="rollout.environment",
    noun="tool environment",
    arguments=("prompt", "policy"),
    result="policy.trajectory(...)",
    asynchronous=True,
)


def check_episode_settings(settings: RolloutConfig) -> None:
    """Raise a `UserError` if the environment or the agent program cannot be found. Nothing is imported or started."""
    if settings.environment is not None and is_packaged(settings.environment):
        check_packaged(settings.environment)
    elif settings.environment is not None:
        USER_ENVIRONMENT.check(settings.environment)
    if settings.agent:
        check_command(settings.agent)
    if settings.agent and shutil.which(settings.agent[0]) is None:
        raise UserError(
            "rollout.agent",
            "is not an executable program",
            "give the path of a program, or the name of one on PATH",
            value=settings.agent[0],
        )


def check_episode_rows(settings: RolloutConfig, prompts: Sequence[Prompt]) -> None:
    """Raise a `UserError` if the placeholders of `rollout.agent` cannot be filled from every data row."""
    for prompt in prompts if settings.agent else ():
        check_row(settings.agent, prompt.row, prompt.uid)


def load_episode(settings: RolloutConfig) -> Episode:
    """Return the coroutine function that plays an episode. If it is a user's function, import its module."""
    if settings.environment is not None and is_packaged(settings.environment):
        return packaged_episode(settings.environment)
    if settings.environment is not None:
        episode: Episode = USER_ENVIRONMENT.load(settings.environment)
        return episode
    assert settings.agent, "the settings name no environment whose episodes could be played"
    return agent_episode(settings.agent)


def check_packaged(name: str) -> None:
    """Raise a `UserError` if an environment of another package cannot be loaded. Nothing is imported."""
    setting = "rollout.environment"
    given = packaged_environment(name, setting)
    check_package(given.package, setting, name)
    if given.package == VERIFIERS:
        check_verifiers_module(given.name, name, setting)
    else:
        openenv_server(name)


def packaged_episode(name: str) -> Episode:
    """Return the function that plays an episode in an environment of another package, e.g. verifiers."""
    check_packaged(name)
    return verifiers_episode(name) if name.startswith(f"{VERIFIERS}:") else openenv_episode(name)


def environment_name(settings: RolloutConfig) -> str:
    """Return the name of the environment, for messages and checkpoints."""
    return settings.environment or " ".join(settings.agent) or "one response"
