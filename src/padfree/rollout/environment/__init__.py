"""Environments: multi-turn episodes with tools and branches.

An environment is a coroutine function `episode(prompt, policy)` that returns `policy.trajectory(...)`.

    episode_policy       `Policy`: samples tokens and adds text
    trajectory           the token sequences of an episode
    runner               plays many episodes concurrently
    rehearse             plays an environment without a model
    calculator           a built-in environment
    agent                runs a program as the environment
    gateway              serves the policy to programs as an OpenAI-compatible API
    verifiers_episode    plays an environment of the verifiers package
    openenv_episode      plays an environment of an OpenEnv server
"""

from padfree.rollout.environment.agent import Finished, run_agent
from padfree.rollout.environment.episode_policy import Policy, Turn
from padfree.rollout.environment.load_environment import check_episode_rows, check_episode_settings, load_episode
from padfree.rollout.environment.rehearse import rehearse
from padfree.rollout.environment.trajectory import Trajectory
from padfree.rollout.group import Played

__all__ = [
    "Finished",
    "Played",
    "Policy",
    "Trajectory",
    "Turn",
    "check_episode_rows",
    "check_episode_settings",
    "load_episode",
    "rehearse",
    "run_agent",
]
