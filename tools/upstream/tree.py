# SPDX-License-Identifier: Apache-2.0
"""A git repository with the base's files, and the series on top as commits."""

import ast
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import ROOT
from tools.overlay.seams import seams_among

from .fold import Rule, fold, replaced, tidied
from .series import DOWNSTREAM, Series, reworded, rewritten
from .text import bound_names

LIBRARY = ".so"


def git(folder: Path, *arguments: str, **variables: str) -> str:
    """What a git command prints; its error is an exception's text."""
    command = ["git", "-c", "commit.gpgsign=false", "-c", "gc.auto=0", *arguments]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout}")
    return done.stdout.strip()


def identity(root: Path = ROOT) -> dict[str, str]:
    """Author and date of the last commit here, so that an export can be repeated."""
    name, mail, date = git(root, "log", "-1", "--format=%an%n%ae%n%cI").splitlines()
    return {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", name), ("EMAIL", mail), ("DATE", date))
    }


def make_base(wheel: ZipFile, folder: Path, version: str, who: dict[str, str]) -> None:
    """A repository of one commit: the wheel's package, without compiled libraries."""
    folder.mkdir(parents=True)
    names = [name for name in wheel.namelist() if name.startswith("vllm/")]
    wheel.extractall(folder, [name for name in names if not name.endswith(LIBRARY)])
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "core.autocrlf", "false")
    commit(folder, f"vLLM {version}", who)


def commit(folder: Path, message: str, who: dict[str, str]) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", message, **who)


@dataclass
class States:
    """The files that the series leaves behind, patch by patch."""

    series: Series
    wheel: ZipFile
    root: Path = ROOT

    def __post_init__(self) -> None:
        self.homes = self.series.homes(self.root)
        taken = [file for file, home in self.homes.items() if home != DOWNSTREAM]
        self.seams = seams_among(taken, self.wheel)
        places = {file: self.series.place(file) for file in taken}
        self.moves = {file: new for file, new in places.items() if file != new}

    def files(self, number: int) -> dict[str, str]:
        """Paths and texts that patch `number` (from 0) adds or changes."""
        return {
            self.series.place(file): self.text(file, number)
            for file in self.series.files(number, self.homes)
        }

    def text(self, file: str, number: int) -> str:
        text = (self.root / file).read_text()
        if file in self.seams:
            return self._folded(file, reworded(text), number)
        rule = self.series.rules.get(file, Rule())
        new = reworded(rewritten(replaced(text, file, rule), file, self.moves))
        return tidied(new) if new != text and file.endswith(".py") else new

    def _folded(self, file: str, text: str, number: int) -> str:
        base = self.wheel.read(file).decode()
        rule = self.series.rules.get(file, Rule())
        wanted = self.series.takes(file, number, self.homes)
        return fold(file, base, text, rule, wanted, self.mixins, self.private_names)

    @cached_property
    def mixins(self) -> dict[str, set[str]]:
        """The classes of our additions, with the names that they define."""
        return {
            node.name: bound_names(node.body)
            for file in self.homes
            if file.startswith("vllm/") and file.endswith(".py")
            if file not in self.seams
            for node in ast.parse((self.root / file).read_text()).body
            if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def private_names(self) -> set[str]:
        """Names with an underscore in front that any file of the base has."""
        texts = (self.wheel.read(n) for n in self.wheel.namelist() if n.endswith(".py"))
        return {
            name.decode()
            for text in texts
            for name in re.findall(rb"\b_[a-zA-Z]\w*", text)
        }
