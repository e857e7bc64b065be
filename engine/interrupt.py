"""Ctrl-C while the libraries are loaded, and during training."""

import os
import signal
import sys


def stop_in_one_line() -> None:
    """Let Ctrl-C end the process with one line and exit code 130, until `as_command` takes over.

    An exception could come out of a half-loaded library as another one.
    """

    def stop(number: int, frame) -> None:
        print("\nstopped, nothing has begun", file=sys.stderr, flush=True)
        os._exit(130)

    signal.signal(signal.SIGINT, stop)


class StopRequest:
    """The first Ctrl-C asks to stop after the current step, the second one stops at once."""

    def __init__(self, is_announced: bool = False):
        self.received = False
        self.is_announced = is_announced  # by another process

    def __enter__(self) -> "StopRequest":
        self.previous = signal.signal(signal.SIGINT, self.receive)
        return self

    def __exit__(self, *exception) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def receive(self, number: int, frame) -> None:
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.is_announced:
            print(
                "\nfinishing this step, then saving (Ctrl-C again: at once, without saving)",
                file=sys.stderr,
            )
