"""A process that judges texts for `padfree.rollout.environment.judge`: asked and answered through its pipes.

    length (8 bytes), (text, row, uid)   ->   length, (True, reward) or (False, what was wrong)

What the reward prints goes to the standard error, so that the answers stay apart. The process ends with its input.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys

from padfree.data.rewards import load_reward

LENGTH = struct.Struct("<Q")


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    reward = load_reward(name)
    while len(head := sys.stdin.buffer.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        text, row, uid = pickle.loads(sys.stdin.buffer.read(length))
        answer: tuple[bool, float | str]
        try:
            answer = True, reward(text, row, uid)
        except ValueError as error:
            answer = False, str(error)
        message = pickle.dumps(answer)
        answers.write(LENGTH.pack(len(message)) + message)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
