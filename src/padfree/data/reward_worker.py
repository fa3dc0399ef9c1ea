"""A process that judges texts for `padfree.rollout.environment.reward_workers`: asked and answered through its pipes.

    length (8 bytes), (text, row, uid)   ->   length, (True, reward) or (False, the `UserError`)

What the reward prints goes to the standard error, and what it reads is empty, so that questions and answers stay apart.
The process ends with its input. A reward that cannot be imported is the answer to every question.
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
