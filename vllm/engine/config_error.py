# SPDX-License-Identifier: Apache-2.0
"""Reports an invalid configuration in one last line that says what to change."""

import gc
import json
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import SkipValidation, ValidationError

import vllm.envs as envs

ENDS_COMMAND = "_is_of_vllm_config"  # set on errors that end one with a single line
EXAMPLE = '{"model": "amd/PARD-Llama-3.2-1B", "num_speculative_tokens": 7}'


class ConfigError(ValidationError):
    """Pydantic's error without what it adds to the message, such as a link."""

    @classmethod
    def of(cls, error: ValidationError) -> "ConfigError":
        return cls.from_exception_data(error.title, error.errors())

    def __str__(self) -> str:
        return in_one_line(self)


@contextmanager
def says_in_one_line() -> Iterator[None]:
    """Reduces pydantic errors that are raised within to their message: they become a
    `ConfigError`. Others are raised as they are."""
    try:
        yield
    except ValidationError as error:
        made = ConfigError.of(error).with_traceback(error.__traceback__)
        setattr(made, ENDS_COMMAND, True)
        raise made from None
    except ValueError as error:
        setattr(error, ENDS_COMMAND, True)
        raise


@contextmanager
def ends_in_one_line() -> Iterator[None]:
    """Makes such an error end the process, with one line and status 1; with
    VLLM_LOGGING_LEVEL=DEBUG it is raised, as it is for users of the Python API."""
    try:
        yield
    except ValueError as error:
        if not hasattr(error, ENDS_COMMAND) or envs.VLLM_LOGGING_LEVEL == "DEBUG":
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


def _words(title: str, type: str, loc: tuple, msg: str, input: Any, **_) -> str:
    """The message of one entry, with its key; our validators' messages name the key."""
    if type == "value_error":
        return msg.removeprefix("Value error, ")
    names = re.findall(r"'([^']+)'", msg) if type == "literal_error" else []
    near = get_close_matches(str(input), names, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{'.'.join(map(str, (title, *loc)))}: {hint}{msg}"


def parse_speculative_config(text: str) -> Any:
    """The value of --speculative-config: JSON, or a drafter's folder or hub id alone.
    What looks like JSON and is not is an ArgumentTypeError."""
    try:
        return json.loads(text)
    except ValueError as error:
        if not re.fullmatch(r"[^\s{}\[\]\"']+", text):
            raise ArgumentTypeError(
                f"{text} is not valid JSON ({error}): write for example {EXAMPLE}, in "
                "single quotes on a command line."
            ) from None
        return {"model": text}


def check_keys(settings: Any, config_class: type) -> None:
    """Refuses, with a ValidationError, settings that are no mapping, or unknown keys.

    Args:
        settings: the value of --speculative-config, as the user wrote it.
        config_class: SpeculativeConfig, whose fields are the keys.
    """
    if not isinstance(settings, Mapping):
        raise _invalid(
            f"speculative_config must be a JSON object, not {settings!r}: write for "
            f"example {EXAMPLE}.",
            settings,
        )
    known = settable(config_class)
    if settings.get("method") == "extract_hidden_states":
        known.add("draft_model_config")  # a setting of that name
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name in known or is_dataclass(value):
            continue  # a dataclass is vLLM's, in an engine's arguments made before
        named = [f'"{each}"' for each in get_close_matches(name, known, n=2)]
        remedy = f"did you mean {' or '.join(named)}?" if named else "remove it."
        raise _invalid(f'speculative_config has no key "{key}": {remedy}', settings)


def settable(config_class: type) -> set[str]:
    """A config's fields, but those that are not validated: the engine sets them."""
    return {
        field.name
        for field in fields(config_class)
        if not any(
            isinstance(note, SkipValidation)
            for note in getattr(field.type, "__metadata__", ())
        )
    }


def _invalid(words: str, settings: Any) -> ValidationError:
    """An error of the type that vLLM raises for an invalid config."""
    context = {"error": ValueError(words)}
    return ValidationError.from_exception_data(
        "SpeculativeConfig",
        [{"type": "value_error", "ctx": context, "input": settings}],
    )
