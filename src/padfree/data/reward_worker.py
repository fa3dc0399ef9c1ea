"""A worker process that computes rewards for `padfree.rollout.reward_workers`.

The worker reads requests from its standard input and writes answers to its standard output. A message is a
pickled tuple, preceded by the length of the pickle in bytes, an 8-byte integer.

    request    (text, row, uid)
    answer     (True, reward) or (False, UserError)

The reward function cannot disturb the protocol: its standard output is redirected to standard error, and its standard
input is empty. The process ends when its input ends. If the reward function cannot be imported, every answer has the
error of the import.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys

from padfree.data.rewards import Reward, load_reward
from padfree.errors import UserError

LENGTH = struct.Struct("<Q")


def main(name: str) -> None:
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    reward: Reward | None = None
    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        text, row, uid = pickle.loads(questions.read(length))
        answer: tuple[bool, float | UserError]
        try:
            reward = reward or load_reward(name)
            answer = True, reward(text, row, uid)
        except UserError as error:
            answer = False, error
        message = pickle.dumps(answer)
        answers.write(LENGTH.pack(len(message)) + message)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
