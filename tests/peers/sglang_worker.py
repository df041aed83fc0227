"""Runs sglang's own, unguarded functions on calls that may corrupt memory: a process that is fed one call at a time.

A line of JSON in is a call: which function, which kind, and the seed of everything else. A line out says whether our
contract refuses the call, then another whether sglang refuses it, runs it right or runs it wrong. Each call has a fork
of its own, so that what one of them corrupts is neither another's nor the end of all.
"""

from __future__ import annotations

import json
import os
import sys

import peer_calls
import torch


def run(line: str, answers: int) -> None:
    """Both answers to one call."""
    case = peer_calls.make(**json.loads(line))
    os.write(answers, (json.dumps(case.ours()) + "\n").encode())
    os.write(answers, (json.dumps(case.theirs()) + "\n").encode())


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what sglang prints is no answer
    torch.set_num_threads(1)  # threads do not survive a fork
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(line, answers)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            os.write(answers, f'"{peer_calls.WRONG}: it ended the process"\n'.encode())


if __name__ == "__main__":
    main()
