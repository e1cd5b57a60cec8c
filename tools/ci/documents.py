# SPDX-License-Identifier: Apache-2.0
"""YAML files whose errors name file and line."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

SCHEMA = Path(__file__).with_name("schema.yaml")
Where = tuple[str | int, ...]  # keys and indices from the top of a document


class PipelineError(Exception):
    """What is wrong with the pipelines, one line each: `path:line: what to do`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass
class Document:
    """One YAML file: its data, and the node of each part, which knows its line."""

    name: str
    data: Any
    node: yaml.Node | None

    def line(self, where: Where = (), key: str | None = None) -> int:
        """Line of the part at `where`, or of `key` in it; 1 for an empty file."""
        node = self.node
        for step in where:
            node = child(node, step)
        if key is not None and isinstance(node, yaml.MappingNode):
            node = next((k for k, _ in node.value if k.value == key), node)
        return node.start_mark.line + 1 if node else 1

    def problem(self, what: str, *where: str | int) -> str:
        return f"{self.name}:{self.line(where)}: {what}"


def child(node: yaml.Node | None, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
        return node.value[step]
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), node)
    return node


def read(path: Path, root: Path, schema: str) -> Document:
    """Reads a file and checks it.

    Args:
        path: the file.
        root: errors name the file from here.
        schema: what it must be, `area`, `config` or `first` of `schema.yaml`.

    Raises:
        PipelineError: it is missing, is no YAML, or is not what the schema says.
    """
    name = path.relative_to(root).as_posix()
    try:
        document = parse(name, path.read_text())
    except FileNotFoundError:
        raise PipelineError(f"{name}:1: there is no such file") from None
    problems = list(schema_problems(document, schema))
    if problems:
        raise PipelineError(*problems)
    return document


def parse(name: str, text: str) -> Document:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        twice = [
            f"{name}:{key.start_mark.line + 1}: `{key.value}` is given twice, "
            "remove one of them"
            for key in repeated_keys(node)
        ]
        if twice:
            raise PipelineError(*twice)
        data = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PipelineError(f"{name}:{mark.line + 1}: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PipelineError(f"{name}:{line}: {error.reason}") from None
    return Document(name, data, node)


def repeated_keys(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Keys that a mapping has already: YAML would silently take the last one."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from repeated_keys(item)
    elif isinstance(node, yaml.MappingNode):
        known = set()
        for key, value in node.value:
            if isinstance(key.value, str) and key.value in known:
                yield key
            known.add(key.value if isinstance(key.value, str) else id(key))
            yield from repeated_keys(value)


def schema_problems(document: Document, schema: str) -> Iterator[str]:
    rules = yaml.safe_load(SCHEMA.read_text()) | {"$ref": f"#/$defs/{schema}"}
    errors = Draft202012Validator(rules).iter_errors(document.data)
    for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path))):
        where = tuple(error.absolute_path)
        for key, what in explained(error):
            yield f"{document.name}:{document.line(where, key)}: {what}"


def explained(error: ValidationError) -> Iterator[tuple[str | None, str]]:
    """What an error says to a person, and the key that it is about."""
    what = f"`{error.absolute_path[-1]}`" if error.absolute_path else "the file"
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        for key in map(str, error.instance.keys() - known.keys()):
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"use {', '.join(known)}"
            yield key, f"unknown key `{key}`, {hint}"
    elif error.validator == "type":
        wanted = error.validator_value
        names = wanted if isinstance(wanted, str) else " or ".join(wanted)
        yield None, f"{what} must be {names}, is {json.dumps(error.instance)}"
    elif error.validator == "required":
        missing = error.message.split("'")[1]
        yield None, f"`{missing}` is missing"
    else:
        yield None, f"{what}: {error.message}"
