"""Environments: episodes of several turns, tools in between, branches, and programs that nobody changed.

trajectory     Branch, Tree, Trajectory: token ids and what of them was sampled
play           Play, Played: an episode to play, and what became of it
policy         Policy: what an episode is given
calculator     a built-in environment: word problems with a calculator
agent          a program as the environment (`rollout.agent`)
  command      its words: columns of the row, and what is refused
  gateway      OpenAI's interface to the policy, for such programs
  listener     HTTP on the loopback address, with limits
  call_fields  which fields a call may have
  calls        their calls as branches, token for token
runner         EpisodeRunner: plays many episodes at a time
  loop_thread  the event loop they run on
  tokens       their requests, sampled together in rounds or as they come
  judge        rewards in threads or processes, or later by a model (`padfree.data.reward_worker`)
choose         which environment the settings name
rehearse       an environment tried out without a model
"""

from padfree.rollout.environment.agent import Finished, run_agent
from padfree.rollout.environment.episode_policy import Policy, Turn
from padfree.rollout.environment.load_environment import check_episode_rows, check_episode_settings, load_episode
from padfree.rollout.environment.play import Played
from padfree.rollout.environment.rehearse import rehearse
from padfree.rollout.environment.trajectory import Trajectory

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
