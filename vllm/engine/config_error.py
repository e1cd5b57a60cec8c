# SPDX-License-Identifier: Apache-2.0
"""A wrong configuration is told in one line, the last, that says what to change."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

import vllm.envs as envs

MARK = "error: "


@contextmanager
def says_in_one_line() -> Iterator[None]:
    """Within, an error's traceback ends with its words alone, in one line.

    Pydantic writes some lines around them, of which the last is a link.
    """
    try:
        yield
    except ValueError as error:
        error.add_note(MARK + in_one_line(error))
        raise


@contextmanager
def ends_in_one_line() -> Iterator[None]:
    """Within, an error that was noted so ends the process with the line and status 1.

    VLLM_LOGGING_LEVEL=DEBUG has it raised, as Python's users have.
    """
    try:
        yield
    except ValueError as error:
        notes = getattr(error, "__notes__", [])
        line = next((note for note in notes if note.startswith(MARK)), None)
        if line is None or envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        # Else Python, as it ends, takes seconds to collect what was imported.
        gc.freeze()
        sys.exit(line)


def in_one_line(error: Exception) -> str:
    """Its words, without what pydantic writes around them."""
    words = str(error)
    if isinstance(error, ValidationError):
        words = "; ".join(_words(error.title, **each) for each in error.errors())
    return " ".join(words.split())


def _words(title: str, type: str, loc: tuple, msg: str, **_) -> str:
    """Of one of pydantic's errors: what our validators say names the key itself."""
    if type == "value_error":
        return msg.removeprefix("Value error, ")
    return f"{'.'.join(map(str, (title, *loc)))}: {msg}"
