# SPDX-License-Identifier: Apache-2.0
"""Reports an invalid configuration in one last line that says what to change."""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

import vllm.envs as envs

TOLD = "_is_of_vllm_config"  # set on errors that end a command with one line


class ConfigError(ValidationError):
    """Pydantic's error without what it adds to the message, such as a link."""

    @classmethod
    def of(cls, error: ValidationError) -> "ConfigError":
        return cls.from_exception_data(
            error.title, [_details(**each) for each in error.errors()]
        )

    def __str__(self) -> str:
        return in_one_line(self)


@contextmanager
def says_in_one_line() -> Iterator[None]:
    """Reduces pydantic errors that are raised within to their message.

    Raises:
        ConfigError: in the place of such an error; others are raised as they are.
    """
    try:
        try:
            yield
        except ValidationError as error:
            raise ConfigError.of(error).with_traceback(error.__traceback__) from None
    except ValueError as error:
        setattr(error, TOLD, True)
        raise


@contextmanager
def ends_in_one_line() -> Iterator[None]:
    """Makes such an error end the process, with one line and status 1.

    With VLLM_LOGGING_LEVEL=DEBUG it is raised, as it is for users of the Python API.
    """
    try:
        yield
    except ValueError as error:
        if not hasattr(error, TOLD) or envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        # Else garbage collection of all imports takes seconds at exit.
        gc.freeze()
        sys.exit(f"error: {in_one_line(error)}")


def in_one_line(error: Exception) -> str:
    """An error's message, without what pydantic adds to it."""
    if isinstance(error, ValidationError):
        words = "; ".join(_words(error.title, **each) for each in error.errors())
    else:
        words = str(error)
    return " ".join(words.split())


def _details(
    type: str, loc: tuple, msg: str, input: Any, ctx: dict | None = None, **_
) -> InitErrorDetails:
    """One entry of a ValidationError, for use in a new one."""
    words = PydanticCustomError(type, "{words}", {**(ctx or {}), "words": msg})
    return InitErrorDetails(type=words, loc=loc, input=input)


def _words(title: str, type: str, loc: tuple, msg: str, input: Any, **_) -> str:
    """The message of one entry, with its key; our validators' messages name the key."""
    if type == "value_error":
        return msg.removeprefix("Value error, ")
    names = re.findall(r"'([^']+)'", msg) if type == "literal_error" else []
    near = get_close_matches(str(input), names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{'.'.join(map(str, (title, *loc)))}: {msg}{hint}"
