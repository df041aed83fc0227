"""Runs sglang's own, unguarded functions on calls that may corrupt memory: a process that is fed one call at a time.

A line of JSON in is a call: which function, which kind, and the seed of everything else. A line out says what our
contract refuses in the call, and whether sglang refuses it, runs it right or runs it wrong. Each call has a fork of its
own, so that what one of them corrupts is neither another's nor the end of all.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import peer_calls
import torch


def run(line: str, answers: int) -> None:
    """Both answers to one call, as far as it gets."""
    case = peer_calls.make(**json.loads(line))
    os.write(answers, (json.dumps(case.ours()) + "\n").encode())
    os.write(answers, (json.dumps(case.theirs()) + "\n").encode())


def in_a_fork(line: str) -> list[str]:
    """The lines that a fork of this process wrote before its end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(line, write)
        except BaseException:
            os.write(write, (json.dumps(traceback.format_exc()) + "\n").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        lines = answers.read().splitlines()
    os.waitpid(child, 0)
    return lines


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what sglang prints is no answer
    torch.set_num_threads(1)  # threads do not survive a fork
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        ours, *rest = in_a_fork(line) or [json.dumps("it ended before our contract had answered")]
        theirs = rest[0] if rest else json.dumps(f"{peer_calls.WRONG}: it ended the process")
        os.write(answers, f"[{ours}, {theirs}]\n".encode())


if __name__ == "__main__":
    main()
