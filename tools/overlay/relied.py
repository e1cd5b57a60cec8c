# SPDX-License-Identifier: Apache-2.0
"""What our files rely on of a base: each property, and why it does not hold, if so.

Read off the syntax trees: that what we call takes the arguments we pass, that what we
override takes no more than ours does, that what we read of an inherited `self`, and of
parameters annotated with a class of the base, is there. What no call or name shows,
`TEXTS` lists by hand. What a tree cannot tell is left out: types, meanings, timing.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .sources import Sources, defined, members, set_on_self, upstream_names

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, int, int, str]  # our file, line, column, what

# A member of the base, and what its text must contain, without white space.
TEXTS = [
    (
        "vllm/config/vllm.py",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        '"parallel drafting for EAGLE speculative decoding"',
    ),
    (
        "vllm/v1/worker/gpu/model_runner.py",
        "GPUModelRunner.initialize_kv_cache",
        "speculator.set_attn(self.model_state, self.kv_cache_config, self.block_tables",
    ),
    (
        "vllm/v1/worker/gpu/model_runner.py",
        "GPUModelRunner.sample_tokens",
        "num_speculative_tokens=num_spec_tokens",
    ),
    (
        "vllm/v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        "self.dynamic_sd_lookup[",
    ),
]


@dataclass(frozen=True)
class Property:
    """Something of the base that a line of ours relies on.

    Attributes:
        name: the base's member.
        place: the base's file.
        detail: what of it we rely on, e.g. names of parameters that we pass by place.
        problem: why it does not hold; None if it does.
    """

    name: str
    place: str
    detail: str = ""
    problem: str | None = None


def properties(sources: Sources) -> dict[Key, Property]:
    """All that can be read off the trees, by the line of ours that relies on it."""
    found: dict[Key, Property] = {}
    for path in sources.ours:
        tree = sources.tree(path)
        found |= dict(_calls(sources, path, tree, None))
        found |= dict(_overridden_functions(sources, path))
        for _, node in defined(tree.body):
            if isinstance(node, ast.ClassDef):
                found |= dict(_of_class(sources, path, node))
        found |= dict(_annotated(sources, path, tree))
    return found | dict(_texts(sources))


def losses(old: dict[Key, Property], new: dict[Key, Property]) -> dict[Key, str | None]:
    """For each property of a base why it does not hold of another; None if it does.

    What does not seem to hold of the first one, the trees cannot tell.
    """
    found: dict[Key, str | None] = {}
    for key, before in old.items():
        after = new.get(key)
        if before.problem is not None:
            continue
        if after is None:
            found[key] = "is gone"
        elif after.problem is None and after.detail != before.detail:
            found[key] = f"we pass {before.detail}, which it takes as {after.detail}"
        else:
            found[key] = after.problem
    return found


# What we call.


def _calls(
    sources: Sources, path: str, tree: ast.AST, owner: ast.ClassDef | None
) -> Iterator[tuple[Key, Property]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        found = _target(sources, path, node.func, owner)
        if found is None or not isinstance(place := sources.places[found[0]], str):
            continue
        parameters = _parameters(sources, *found, bound=owner is not None)
        if parameters is not None:
            name = ast.unparse(node.func)
            key = (path, node.lineno, node.col_offset, f"call of `{name}`")
            detail, problem = _bind(node, parameters)
            yield key, Property(found[1].name, place, detail, problem)


def _target(
    sources: Sources, path: str, node: ast.expr, owner: ast.ClassDef | None
) -> tuple[str, ast.stmt] | None:
    if owner is not None:
        return _inherited(sources, path, node, owner)
    if isinstance(node, ast.Name):
        return sources.find(path, node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        place = sources.module_named(path, node.value.id)
        return sources.find(place, node.attr) if place else None
    return None


def _inherited(
    sources: Sources, path: str, node: ast.expr, owner: ast.ClassDef
) -> tuple[str, ast.stmt] | None:
    """What `super().x` or `self.x` means, where none of our classes defines x."""
    if not isinstance(node, ast.Attribute):
        return None
    receiver = ast.unparse(node.value)
    if receiver not in ("super()", "self"):
        return None
    lineage = list(sources.lineage(path, owner))
    for place, parent in lineage[receiver == "super()" :]:
        for name, part in defined(parent.body):
            if name == node.attr:
                return place, part
    return None


@dataclass
class _Parameters:
    by_place: list[str]
    by_name: list[str]
    required: list[str]
    takes_more: bool  # *args
    takes_any: bool  # **kwargs


def _parameters(
    sources: Sources, path: str, node: ast.stmt, bound: bool
) -> _Parameters | None:
    """What a function, or a class, is called with; None where nothing shows it."""
    if isinstance(node, Function):
        return _of_function(node, skip=bound and not _is_static(node))
    if not isinstance(node, ast.ClassDef):
        return None
    for place, parent in sources.lineage(path, node):
        for name, part in defined(parent.body):
            if name == "__init__" and isinstance(part, Function):
                return _of_function(part, skip=True)
        if _is_record(parent):
            return _of_record(sources, place, parent)
    return None


def _is_static(node: Function) -> bool:
    return any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)


def _is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(mark) for mark in [*node.decorator_list, *node.bases]]
    return any(mark.split("(")[0] in ("dataclass", "NamedTuple") for mark in marks)


def _of_function(node: Function, skip: bool) -> _Parameters:
    arguments = node.args
    placed = [a.arg for a in [*arguments.posonlyargs, *arguments.args]][skip:]
    named = [a.arg for a in arguments.kwonlyargs]
    has_default = len(arguments.defaults)
    required = placed[: len(placed) - has_default] if has_default else list(placed)
    required += [
        name
        for name, default in zip(named, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return _Parameters(
        placed,
        placed + named,
        required,
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _of_record(sources: Sources, path: str, node: ast.ClassDef) -> _Parameters:
    names: list[str] = []
    required = []
    for _, parent in reversed(list(sources.lineage(path, node))):
        for part in parent.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.append(part.target.id)
                required += [] if part.value else [part.target.id]
    names = list(dict.fromkeys(names))
    return _Parameters(names, names, required, False, False)


def _bind(call: ast.Call, parameters: _Parameters) -> tuple[str, str | None]:
    """Names of the parameters that we pass, and what keeps the call from binding."""
    stars = any(isinstance(argument, ast.Starred) for argument in call.args)
    placed = len([a for a in call.args if not isinstance(a, ast.Starred)])
    names = [keyword.arg for keyword in call.keywords if keyword.arg]
    opened = stars or len(names) < len(call.keywords)
    given = parameters.by_place[:placed]
    unknown = [name for name in names if name not in parameters.by_name]
    missing = [n for n in parameters.required if n not in {*given, *names}]
    problem = None
    if placed > len(parameters.by_place) and not parameters.takes_more:
        problem = f"takes {len(parameters.by_place)} arguments by place, not {placed}"
    elif unknown and not parameters.takes_any:
        problem = f"has no parameter {', '.join(unknown)}"
    elif missing and not opened:
        problem = f"now needs {', '.join(missing)}"
    return ", ".join([*given, *(f"{name}=" for name in names)]), problem


# What we override and inherit.


def _of_class(
    sources: Sources, path: str, node: ast.ClassDef
) -> Iterator[tuple[Key, Property]]:
    bases = [
        (place, parent)
        for place, parent in sources.lineage(path, node)
        if isinstance(sources.places[place], str)
    ]
    if not bases:
        return
    yield from _calls(sources, path, node, node)
    for name, part in defined(node.body):
        over = next((f for f in _definitions(bases, name)), None)
        # What constructs an object of ours knows that it is ours.
        is_method = isinstance(part, Function) and name != "__init__"
        if is_method and over and isinstance(over[1], Function):
            key = (path, part.lineno, 0, f"override `{node.name}.{name}`")
            problem = _not_taken(part, over[1])
            label = f"{over[2]}.{name}"
            yield key, Property(label, sources.places[over[0]], "", problem)
    yield from _read_of_self(sources, path, node, bases)


def _definitions(bases: list, name: str) -> Iterator[tuple[str, ast.stmt, str]]:
    for place, parent in bases:
        for known, part in defined(parent.body):
            if known == name:
                yield place, part, parent.name


def _not_taken(ours: Function, theirs: Function) -> str | None:
    """Parameters that the base's callers may pass and ours does not take."""
    mine, base = _of_function(ours, skip=False), _of_function(theirs, skip=False)
    if mine.takes_any and mine.takes_more:
        return None
    more = [name for name in base.by_name if name not in mine.by_name]
    if mine.takes_any:
        more = [name for name in more if name in base.required]
    if mine.takes_more and not set(more) - set(base.by_place[len(mine.by_place) :]):
        return None
    renamed = len(mine.by_place) >= len(base.by_place) and len(more) == len(
        [n for n in mine.by_name if n not in base.by_name]
    )
    return f"ours does not take {', '.join(more)}" if more and not renamed else None


def _overridden_functions(
    sources: Sources, path: str
) -> Iterator[tuple[Key, Property]]:
    """Functions of a seam in the place of the base's: by their name, or assigned."""
    if path not in sources.seams:
        return
    tree = sources.tree(path)
    local = {name: n for name, n in defined(tree.body) if isinstance(n, Function)}
    pairs = [(name, name) for name in local]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            owner, _, member = ast.unparse(node.targets[0]).rpartition(".")
            if owner not in upstream_names(tree) and isinstance(node.value, ast.Name):
                pairs.append((node.value.id, f"{owner}.{member}"))
    base = sources.places[path.replace("vllm/", "vllm/_upstream/", 1)]
    for ours, theirs in pairs:
        over = _member(sources, base, theirs)
        if ours in local and isinstance(over, Function):
            key = (path, local[ours].lineno, 0, f"override `{theirs}`")
            yield key, Property(theirs, base, "", _not_taken(local[ours], over))


def _member(sources: Sources, place: str, name: str) -> ast.stmt | None:
    body = ast.parse(sources.wheel.read(place)).body
    found = None
    for part in name.split("."):
        found = next((node for known, node in defined(body) if known == part), None)
        body = getattr(found, "body", [])
    return found


def _read_of_self(
    sources: Sources, path: str, node: ast.ClassDef, bases: list
) -> Iterator[tuple[Key, Property]]:
    lineage = list(sources.lineage(path, node))
    ours = [c for place, c in lineage if not isinstance(sources.places[place], str)]
    own = set().union(*map(_attributes, ours))
    theirs = set().union(*(_attributes(parent) for _, parent in bases))
    place, parent = bases[0]
    for part in ast.walk(node):
        if not (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)):
            continue
        if ast.unparse(part.value) == "self" and part.attr not in own:
            key = (path, part.lineno, part.col_offset, f"read of `self.{part.attr}`")
            problem = None if part.attr in theirs else "is not there"
            name = f"{parent.name}.{part.attr}"
            yield key, Property(name, sources.places[place], "", problem)


def _attributes(node: ast.ClassDef) -> set[str]:
    return {name for name, _ in defined(node.body)} | set_on_self(node)


# What we read of the base's objects.


def _annotated(
    sources: Sources, path: str, tree: ast.AST
) -> Iterator[tuple[Key, Property]]:
    """Attributes of parameters whose annotation is a class of the base."""
    for function in ast.walk(tree):
        if not isinstance(function, Function):
            continue
        for argument in [*function.args.args, *function.args.kwonlyargs]:
            found = _class_meant(sources, path, argument.annotation)
            if found is None or not isinstance(sources.places[found[0]], str):
                continue
            lineage = [parent for _, parent in sources.lineage(*found)]
            known = set().union(*map(_attributes, lineage))
            for node in ast.walk(function):
                if not isinstance(node, ast.Attribute):
                    continue
                if ast.unparse(node.value) == argument.arg:
                    what = f"read of `{argument.arg}.{node.attr}`"
                    key = (path, node.lineno, node.col_offset, what)
                    problem = None if node.attr in known else "is not there"
                    name = f"{found[1].name}.{node.attr}"
                    yield key, Property(name, sources.places[found[0]], "", problem)


def _class_meant(
    sources: Sources, path: str, node: ast.expr | None
) -> tuple[str, ast.ClassDef] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):  # X | None
        node = node.left
    return sources.find_class(path, node) if isinstance(node, ast.expr) else None


def _texts(sources: Sources) -> Iterator[tuple[Key, Property]]:
    for place, name, text in TEXTS:
        if place not in sources.wheel.namelist():
            continue
        found = members(sources.wheel.read(place).decode()).get(name, "")
        holds = "".join(text.split()) in "".join(found.split())
        problem = None if holds else f"no longer contains {text}"
        yield (place, 0, 0, f"text of `{name}`"), Property(name, place, "", problem)
