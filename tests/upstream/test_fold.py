# SPDX-License-Identifier: Apache-2.0
"""Each shape of a seam folded into a small base, and the shapes that are refused."""

from textwrap import dedent

import pytest

from tools.upstream.fold import Rule, fold, replaced
from tools.upstream.text import FoldError

BASE = '''\
"""The base."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

FLAG = True
if FLAG:
    ORDER = ["base"]


def value(x):
    # Doubles.
    y = x * 2
    return y


def many(x):
    if x:
        return 1
    return 2


def items(n):
    yield from range(n)


class Thing(object):
    """A thing."""

    # How large it is.
    size: int = 1
    """In units."""

    def __init__(self, size: int = 1, *, name="n"):
        """Makes one."""
        self.size = size

    def area(self) -> int:
        return self.size**2

    @property
    def double(self) -> int:
        return self.size * 2

    @staticmethod
    def parse(text):
        return int(text)

    def uses(self):
        return value(self.size), many(0), list(items(2))
'''
SEAM = "from vllm._upstream import stand_on\n\nupstream = stand_on(__name__)\n"
PATH = "vllm/part.py"


def folded(body: str, **more) -> str:
    return fold(PATH, BASE, SEAM + dedent(body), **more)


def run(body: str, **more) -> dict:
    """The names of the folded module; the base's own code is in it."""
    names: dict = {}
    exec(compile(folded(body, **more), PATH, "exec"), names)
    return names


def added(body: str, **more) -> list[str]:
    """Lines that the fold adds or removes, in order."""
    import difflib

    lines = difflib.ndiff(BASE.splitlines(), folded(body, **more).splitlines())
    return [line for line in lines if line[0] in "+-" and line[2:].strip()]


def test_what_stands_before_the_call_goes_before_the_body():
    body = """
        def value(x):
            # None is nothing.
            if x is None:
                return 0
            return upstream.value(x)

        upstream.value = value
    """
    assert added(body) == [
        "+     # None is nothing.",
        "+     if x is None:",
        "+         return 0",
    ]
    names = run(body)
    assert (names["value"](None), names["value"](2)) == (0, 4)


def test_what_stands_after_the_call_goes_after_the_body():
    body = """
        _value = upstream.value

        def value(x):
            y = _value(x)
            return y + 1

        upstream.value = value
    """
    assert added(body) == ["-     return y", "+     return y + 1"]
    assert run(body)["Thing"](3).uses()[0] == 7


def test_an_argument_that_changes():
    body = """
        class Thing(upstream.Thing):
            @staticmethod
            def parse(text):
                return upstream.Thing.parse(text.strip("x"))

        upstream.Thing = Thing
    """
    assert added(body) == ['+         text = text.strip("x")']
    assert run(body)["Thing"].parse("x7x") == 7


def test_methods_of_a_subclass():
    body = """
        class Thing(upstream.Thing):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.more = self.bonus()

            def bonus(self):
                return 5

            def area(self):
                if self.size < 0:
                    return 0
                return super().area()

            @property
            def double(self):
                if self.size > 9:
                    return 0
                return super().double

        upstream.Thing = Thing
    """
    text = folded(body)
    assert "super()" not in text and text.count("class Thing") == 1
    Thing = run(body)["Thing"]
    assert (Thing(3).more, Thing(3).area(), Thing(-1).area()) == (5, 9, 0)
    assert (Thing(3).double, Thing(10).double) == (6, 0)


def test_methods_that_are_set():
    body = """
        Thing = upstream.Thing
        _area = Thing.area

        def _area_of_none(self: Thing) -> int:
            if self.size is None:
                return 0
            return _area(self)

        Thing.area = _area_of_none
    """
    assert added(body) == ["+         if self.size is None:", "+             return 0"]
    assert run(body)["Thing"](None).area() == 0


def test_fields_and_mixins():
    body = """
        from vllm.other import Mixin

        class Thing(Mixin, upstream.Thing):
            size: int | None = None
            \"\"\"In other units.\"\"\"
            weight: int = 2
            \"\"\"New.\"\"\"

        upstream.Thing = Thing
    """
    lines = added(body, mixins={"Mixin": {"helper"}})
    assert "+ class Thing(Mixin, object):" in lines
    assert "+ from vllm.other import Mixin" in lines
    text = folded(body, mixins={"Mixin": {"helper"}})
    assert text.index("# How large it is.") < text.index("size: int | None = None")
    assert text.index("In other units.") < text.index("weight: int = 2")
    assert "In units." not in text
    with pytest.raises(FoldError, match="Mixin and the base's class both define area"):
        folded(body, mixins={"Mixin": {"area"}})


@pytest.mark.parametrize("name, argument, results", [("many", 0, 102), ("items", 2, 1)])
def test_else_ours_calls_the_base_by_a_private_name(name, argument, results):
    """Several returns, or a generator: the two bodies cannot be one."""
    body = f"""
        def {name}(x):
            result = upstream.{name}(x)
            return result + 100 if {name!r} == "many" else sum(result)

        upstream.{name} = {name}
    """
    assert f"- def {name}(" in "\n".join(added(body))
    assert f"def _{name}(" in folded(body)
    assert run(body)[name](argument) == results


def test_a_function_that_the_base_imports():
    base = "from os.path import (\n    basename,\n    join,\n)\n\n\ndef f(x):\n"
    base += "    return join(x, basename(x))\n"
    body = """
        from os import sep

        _join = upstream.join

        def join(x, *more):
            return _join(sep.join(("ours", "own")), *more)

        upstream.join = join
    """
    text = fold(PATH, base, SEAM + dedent(body))
    assert "from os.path import join as _join" in text or "join as _join," in text
    names: dict = {}
    exec(text, names)
    assert names["f"]("a/b") == "ours/own/b"
    assert text.index("import sep") < text.index("def join")


def test_a_private_name_that_nothing_has():
    body = """
        def many(x):
            return upstream.many(x) + upstream.many(0)

        upstream.many = many
    """
    assert "def _plain_many(" in folded(body, taken={"_many"})
    with pytest.raises(FoldError, match="the base has _many, _plain_many"):
        folded(body, taken={"_many", "_plain_many"})


def test_names_that_would_mean_two_things_are_kept_apart():
    body = """
        def value(x):
            y = 1
            z = upstream.value(x)
            return y + z

        upstream.value = value
    """
    assert "def _value(" in folded(body)
    assert run(body)["value"](2) == 5


def test_a_parameter_that_the_base_changes_is_kept():
    base = BASE.replace("y = x * 2", "x = y = x * 2").replace("return y", "print(x)")
    body = """
        def value(x):
            upstream.value(x)
            seen.append(x)

        seen = []
        upstream.value = value
    """
    text = fold(PATH, base, SEAM + dedent(body))
    names: dict = {}
    exec(text, names)
    names["value"](2)
    assert names["seen"] == [2]


def test_statements_come_after_the_last_mention():
    body = """
        import sys

        LIMIT = sys.maxsize
        if LIMIT:
            upstream.ORDER = [*upstream.ORDER, "ours"]
    """
    text = folded(body)
    assert text.index('ORDER = ["base"]') < text.index('"ours"') < text.index("def ")
    assert text.index("LIMIT =") < text.index("FLAG = True")
    assert run(body)["ORDER"] == ["base", "ours"]


def test_parts_of_a_seam():
    body = """
        class Thing(upstream.Thing):
            def first(self):
                return 1

            def second(self):
                return 2

        upstream.Thing = Thing
    """
    text = folded(body, wanted=lambda name: name != "Thing.second")
    assert "def first" in text and "def second" not in text


def test_rules_of_an_addition():
    rule = Rule(replace={"    here()\n": ""})
    assert replaced("def f():\n    here()\n    there()\n", "a.py", rule) == (
        "def f():\n    there()\n"
    )
    with pytest.raises(FoldError, match=r"a\.py: has .* 2 times"):
        replaced("    here()\n    here()\n", "a.py", rule)


def test_rules():
    rule = Rule(drop=("upstream.FLAG",), replace={"FLAG = True": "FLAG = False"})
    assert run("upstream.FLAG = False", rule=rule)["FLAG"] is False
    with pytest.raises(FoldError, match="'nowhere' 0 times"):
        folded("", rule=Rule(replace={"nowhere": ""}))


@pytest.mark.parametrize(
    "body, error",
    [
        (
            "def value(x):\n    return 0\n",
            "line 52 of the base uses value: set upstream",
        ),
        (
            "def value(x):\n    return map(upstream.value, x)\n"
            "upstream.value = value\n",
            "uses the base's value other than to call it",
        ),
        ("upstream.value = len\n", "sets the base's value: define len in the seam"),
        ("FLAG = False\n", "defines the base's FLAG: set it through the base"),
        (
            "from a import os\n\ndef value(x):\n    os.f()\n"
            "    return upstream.value(x)\n\nupstream.value = value\n",
            "the base has another os",
        ),
        ("print(upstream)\n", "still mentions"),
    ],
)
def test_refusals(body: str, error: str):
    with pytest.raises(FoldError, match=error):
        folded(body)
