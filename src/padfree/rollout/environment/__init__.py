"""Environments: multi-turn episodes with tools and branches, and unmodified agent programs.

trajectory         Branch, Tree, Trajectory: the token ids of an episode, and which of them were sampled
episode_policy     Policy: the object through which an episode samples tokens
calculator         a built-in environment: word problems with a calculator
agent              runs a program as the environment (`rollout.agent`)
  command          the program's command line: placeholders for data columns, and safety checks
  gateway          serves the policy to agent programs as an OpenAI-compatible API
  listener         an HTTP server on the loopback address, with limits
  call_fields      the fields that an API call may have
  calls            turns the API calls of a program into token sequences (branches of its episode)
verifiers_episode  plays an environment of the verifiers package
openenv_episode    plays an environment that an OpenEnv server provides
  responder        samples responses for environments that use chat messages instead of token ids
  tool_calls       reads tool calls in the text of a response
group_rewards      rewards that need all episodes of a prompt
runner             EpisodeRunner: plays many episodes concurrently
  tokens           samples tokens for episodes: in rounds, or as requests arrive
load_environment   loads the environment that the settings name
rehearse           plays an environment without a model, with given texts as the responses
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
