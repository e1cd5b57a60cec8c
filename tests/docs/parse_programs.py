# SPDX-License-Identifier: Apache-2.0
"""Lets programs parse their flags and do no more: commands in, errors out, as JSON.

A process of its own: programs set environment variables and import what they like.
"""

import argparse
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

SITES = ["--site", "ours=.", "--site", "base=."]  # pages leave them out, or say $SITES
PARSES = re.compile(r"\bArgumentParser\b|^from .* import .*\bparse\b", re.MULTILINE)
INCOMPLETE = "the following arguments are required"  # a page may name a program alone


class Parsed(Exception):
    """The flags are known: what comes next is not to be run."""


def problem(command: str) -> str:
    """What is wrong with `python -m module flags`; nothing if it is in order."""
    words = shlex.split(command.replace("$SITES", "").replace("$$", ""), comments=True)
    name, flags = words[2], words[3:]
    source = source_of(name)
    if source is None:
        return f"{name}: there is no such module"
    if not flags:
        return ""
    if not PARSES.search(source):
        return f"{name} takes no flags"
    if "site" in source and "--site" not in flags:
        flags = [*SITES, *flags]
    return said_by_parser(name, flags)


def source_of(name: str) -> str | None:
    for module in (f"{name}.__main__", name):
        with contextlib.suppress(ModuleNotFoundError):
            if spec := find_spec(module):
                return Path(spec.origin).read_text()
    return None


def said_by_parser(name: str, flags: list[str]) -> str:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(self, *args, **kwargs):
        parse_args(self, *args, **kwargs)
        raise Parsed

    said, before = io.StringIO(), sys.argv
    sys.argv = [name, *flags]
    argparse.ArgumentParser.parse_args = parse_only
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except Parsed:
        return ""
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["it ended before its parser"]
        return "" if INCOMPLETE in lines[-1] else lines[-1]
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = parse_args, before
    return f"{name} did not parse its flags"


if __name__ == "__main__":
    print(json.dumps({command: problem(command) for command in json.load(sys.stdin)}))
