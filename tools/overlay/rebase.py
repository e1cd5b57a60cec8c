# SPDX-License-Identifier: Apache-2.0
"""The rebase report: what another release of the base would change for this tree."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, Base, fetch, find_wheel, load_config, pinned_base
from .dependencies import dependency_changes, metadata_changes
from .relied import Key, Property, losses, properties
from .seams import lock_problems
from .sources import Sources, Stand, members, stands
from .trial import Trial, try_out


@dataclass
class Report:
    """Markdown; `clean` if it lists nothing to do."""

    text: str
    clean: bool


@dataclass
class Pair:
    """This overlay over the pinned base and over the other one."""

    old: Sources
    new: Sources
    root: Path


def rebase(
    version: str,
    device: str,
    new_wheel: Path | None = None,
    *,
    old_wheel: Path | None = None,
    root: Path = ROOT,
) -> Report:
    """Compares the pinned base with another version, fetching what is not given."""
    config = load_config(root)
    project, pinned = config[device]["project"], config["version"]
    old_wheel = old_wheel or find_wheel(pinned_base(device, root))
    new_wheel = new_wheel or fetch(Base(project, version, device, sha256=None))
    before = try_out(old_wheel, pinned, root)
    after = try_out(new_wheel, version, root)
    with ZipFile(old_wheel) as old, ZipFile(new_wheel) as new:
        pair = Pair(Sources(old, root), Sources(new, root), root)
        known = properties(pair.old)
        lost = losses(known, properties(pair.new))
        sections = {
            "What we rely on that no longer holds": list(lost_lines(known, lost)),
            "Files we stand on that changed": list(file_changes(pair)),
            "Names we import that are gone": list(names_gone(pair)),
            "Composing": list(compose_problems(pair, after)),
            "Importing": list(import_problems(before, after)),
            "Dependencies": list(requirement_changes(pair, device)),
            "Metadata": metadata_changes(old, new),
        }
    parts = [f"# {project} {pinned} to {version}\n"]
    parts += [f"- {name}: {len(found)}" for name, found in sections.items()]
    for name, found in sections.items():
        parts += [f"\n## {name}\n", *(found or ["Nothing to do."])]
    parts += ["\n## What we rely on that holds\n", *kept_lines(known, lost)]
    return Report("\n".join(parts) + "\n", clean=not any(sections.values()))


def lost_lines(
    known: dict[Key, Property], lost: dict[Key, str | None]
) -> Iterator[str]:
    for key, problem in sorted(lost.items()):
        if problem is not None:
            path, line, _, what = key
            place = f"`{path}:{line}`, " if line else ""
            yield f"- {place}{what}: {problem} (`{known[key].place}`)"


def kept_lines(
    known: dict[Key, Property], lost: dict[Key, str | None]
) -> Iterator[str]:
    """By file of the base, so that a file that changed can be looked up."""
    kept: dict[str, set[str]] = {}
    for key, problem in lost.items():
        if problem is None:
            kept.setdefault(known[key].place, set()).add(known[key].name)
    for place, names in sorted(kept.items()):
        yield f"- `{place}`: {', '.join(f'`{name}`' for name in sorted(names))}"


def file_changes(pair: Pair) -> Iterator[str]:
    """A subsection for each base file under our seams and classes that differs."""
    before, after = stands(pair.old), stands(pair.new)
    for path in sorted(before.keys() | after.keys()):
        stand, now = before.get(path, Stand()), after.get(path, Stand())
        # What we override in the other base, and not in ours, is a clash of names.
        both = stand | now
        old, new = (
            side.wheel.read(path).decode() if path in side.wheel.namelist() else ""
            for side in (pair.old, pair.new)
        )
        if old != new:
            body = changes(path, both, old, new) if new else moved(path, pair)
            by = ", ".join(f"`{name}`" for name in sorted(both.by))
            yield "\n".join([f"### `{path}`\n", f"Stood on by {by}.\n", *body, ""])


def changes(path: str, stand: Stand, old: str, new: str) -> Iterator[str]:
    """Diffs of the members we stand on; the other changes only by name."""
    before, after = members(old), members(new)
    for name in sorted(stand.members):
        if before.get(name) != after.get(name):
            word = "" if name in after else " is gone"
            yield f"- `{name}`{word}\n\n```diff\n{diff(before, after, name)}```\n"
    plus, minus = count_lines(old, new)
    yield f"- In all +{plus}/−{minus} lines."
    for word, names in (
        ("changed", [n for n in before if n in after and before[n] != after[n]]),
        ("new", [name for name in after if name not in before]),
        ("gone", [name for name in before if name not in after]),
    ):
        shown = {n for n in names if n.count(".") == (n.split(".")[0] in stand.classes)}
        if others := sorted(shown - stand.members):
            yield f"- Other names {word}: {', '.join(f'`{n}`' for n in others)}."


def diff(before: dict[str, str], after: dict[str, str], name: str) -> str:
    sides = (side.get(name, "").splitlines(keepends=True) for side in (before, after))
    return "".join(list(unified_diff(*sides, n=3))[2:])


def count_lines(old: str, new: str) -> tuple[int, int]:
    lines = list(unified_diff(old.splitlines(), new.splitlines(), n=0))[2:]
    return sum(s[0] == "+" for s in lines), sum(s[0] == "-" for s in lines)


def moved(path: str, pair: Pair) -> Iterator[str]:
    """Where a file that vanished may be: the same text, or classes of its names."""
    yield "- The file is gone."
    content = pair.old.wheel.read(path)
    tree = ast.parse(content)
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    classes = re.compile(rb"^class (%s)\b" % "|".join(names).encode(), re.MULTILINE)
    digest = hashlib.sha256(content).digest()
    for place in sorted(n for n in pair.new.wheel.namelist() if n.endswith(".py")):
        text = pair.new.wheel.read(place)
        if hashlib.sha256(text).digest() == digest:
            yield f"- The same text is now `{place}`."
        elif names and (found := {m.decode() for m in classes.findall(text)}):
            listed = ", ".join(f"`{name}`" for name in sorted(found))
            yield f"- `{place}` has {listed}."


def names_gone(pair: Pair) -> Iterator[str]:
    for path in pair.old.ours:
        for _, module, name in pair.old.imports(path):
            if pair.old.has(module, name) and not pair.new.has(module, name):
                yield f"- `{path}`: `from {module} import {name}`"


def compose_problems(pair: Pair, trial: Trial) -> Iterator[str]:
    """Why it does not compose strictly, and what of it does not even compile."""
    for line in lock_problems(pair.new.seams, pair.new.wheel, pair.root):
        yield f"- {line}"
    for line in trial.broken:
        yield f"- {line}"


def import_problems(old: Trial, new: Trial) -> Iterator[str]:
    for name, error in new.errors.items():
        known = "environment, as with the pinned base: " if name in old.errors else ""
        yield f"- `{name}`: {known}{error}"


def requirement_changes(pair: Pair, device: str) -> Iterator[str]:
    """New differences; those that the pinned base has too are on purpose."""
    known = dependency_changes(pair.old.wheel, device, pair.root)
    for line in dependency_changes(pair.new.wheel, device, pair.root):
        yield f"- {line}" + (" (as with the pinned base)" if line in known else "")
