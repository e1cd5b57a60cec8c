# SPDX-License-Identifier: Apache-2.0
"""A seam is a live view of the upstream module: on a small upstream, end to end."""

import pytest

from tests.overlay.fakes import composed, seam

STATE = """\
import builtins
builtins.loads = getattr(builtins, "loads", 0) + 1
_PRIVATE = "private"
NOTHING = None
COUNT = 0

def bump():
    global COUNT
    COUNT += 1

def count():
    return COUNT

class Plain:
    pass

class Thing:
    def who(self):
        return "upstream"

def make():
    return Thing()
"""
STATE_SEAM = """
class Thing(upstream.Thing):
    def who(self):
        return f"seam on {super().who()}"


upstream.Thing = Thing


def both():
    return upstream.count(), upstream.COUNT
"""
PACK = """\
EARLY = "early"
from .inner import value
from . import inner

def seen():
    return value, inner.who()
"""
INNER = """\
from . import EARLY
value = EARLY + " seen"

def who():
    return "upstream"
"""
INNER_SEAM = """
def who():
    return "seam"
"""
LISTED = "__all__ = ['_shown']\n_shown = 1\nhidden = 2\n"
BASE = {
    "vllm/state.py": STATE,
    "vllm/pack/__init__.py": PACK,
    "vllm/pack/inner.py": INNER,
    "vllm/pack/plain.py": "from vllm.pack.inner import who\n",
    "vllm/deep/er/__init__.py": "from vllm.deep.er.part import Part\n",
    "vllm/deep/er/part.py": "import vllm.deep.er\nclass Part:\n    pass\n",
    "vllm/listed.py": LISTED,
}
SUBCLASS = "\nclass Part(upstream.Part):\n    pass\n"
BODIES = {
    "vllm/state.py": STATE_SEAM,
    "vllm/pack/__init__.py": "",
    "vllm/pack/inner.py": INNER_SEAM,
    "vllm/deep/er/part.py": SUBCLASS,
    "vllm/listed.py": "mine = 3\n",
}
OVERLAY = {path: seam(path, body) for path, body in BODIES.items()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return composed(tmp_path_factory.mktemp("seam"), BASE, OVERLAY)


def test_names(tree):
    code = """
        from vllm.state import _PRIVATE, NOTHING, Plain, bump
        import vllm.state as s
        print(_PRIVATE, NOTHING, Plain.__module__, "bump" in dir(s), "both" in dir(s))
    """
    assert tree.run(code) == "private None vllm._upstream.state True True"


def test_unknown_name(tree):
    code = """
        import vllm.state
        try:
            vllm.state.unknown
        except AttributeError as error:
            print(error, hasattr(vllm.state, "__path__"))
    """
    expected = "module 'vllm.state' has no attribute 'unknown' False"
    assert tree.run(code) == expected


def test_state_exists_once(tree):
    code = """
        import vllm.state as s
        s.bump()
        print(s.COUNT, s.both())
        s.COUNT = 7
        print(s.count(), s.both())
        s.later = 5
        print(s.upstream.later)
        del s.later
        print(hasattr(s.upstream, "later"))
    """
    assert tree.run(code).splitlines() == ["1 (1, 1)", "7 (7, 7)", "5", "False"]


def test_patching_is_undone(tree):
    code = """
        from unittest import mock
        import vllm.state as s
        with mock.patch("vllm.state.COUNT", 9), mock.patch("vllm.state.both", None):
            print(s.count(), s.both)
        print(s.both(), "COUNT" in vars(s))
    """
    assert tree.run(code).splitlines() == ["9 None", "(0, 0) False"]


def test_star_import(tree):
    code = """
        from vllm.state import *
        from vllm.listed import *
        print(Thing().who(), bump.__name__, both.__name__, "_PRIVATE" in globals())
        print(_shown, mine, "hidden" in globals())
    """
    expected = ["seam on upstream bump both False", "1 3 False"]
    assert tree.run(code).splitlines() == expected


def test_overridden_class(tree):
    code = """
        import vllm.state as s
        made = s.make()  # upstream's function finds the seam's class
        print(made.who(), isinstance(made, s.Thing), type(made).__module__)
    """
    assert tree.run(code) == "seam on upstream True vllm.state"


def test_pickling_between_processes(tree):
    script = tree.folder / "spawns.py"
    script.write_text(
        "import multiprocessing\n"
        "def name(*things):\n"
        "    return [f'{type(t).__module__}.{type(t).__name__}' for t in things]\n"
        "if __name__ == '__main__':\n"
        "    import vllm.state as s, vllm._upstream.deep.er.part as p\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(name, (p.Part(), s.Plain(), s.Thing())))\n"
    )
    expected = [
        "vllm._upstream.deep.er.part.Part",
        "vllm._upstream.state.Plain",
        "vllm.state.Thing",
    ]
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert tree.run(code) == str(expected)


def test_source(tree):
    code = """
        import inspect, vllm.state as s
        print(inspect.getsource(s.bump), inspect.getsource(s.both), end="")
        print(inspect.getsourcefile(s.Plain))
    """
    shown = tree.run(code)
    assert "    COUNT += 1" in shown and "def both():" in shown
    assert shown.endswith("vllm/_upstream/state.py")


def test_loaded_once(tree):
    code = """
        import builtins, vllm.state, vllm._upstream.state as u
        print(builtins.loads, vllm.state.upstream is u, vllm.state.__upstream__ is u)
    """
    assert tree.run(code) == "1 True True"


def test_package_seam(tree):
    """Its submodules see early names, and a submodule's seam is what it shows."""
    code = """
        import vllm.pack, vllm.pack.plain
        from vllm.pack import inner, value
        print(vllm.pack.seen(), vllm.pack.plain.who())
        print(inner.__name__, vllm.pack.inner is inner, vllm.pack.EARLY)
    """
    assert tree.run(code).splitlines() == [
        "('early seen', 'seam') seam",
        "vllm.pack.inner True early",
    ]


@pytest.mark.parametrize(
    "module", ["state", "pack", "pack.inner", "deep.er.part", "deep.er", "listed"]
)
def test_moved_module_first(tree, module):
    code = f"""
        import builtins, importlib
        first = importlib.import_module("vllm._upstream.{module}")
        theirs = importlib.import_module("vllm.{module}")
        print(getattr(theirs, "upstream", first) is first or first.__path__ != [])
        print(getattr(builtins, "loads", 1))
    """
    assert tree.run(code).splitlines() == ["True", "1"]


def test_linked_tree_is_live(tmp_path):
    tree = composed(tmp_path, BASE, OVERLAY, link=True)
    code = "import vllm.pack.inner as i; print(i.who(), i.value)"
    assert tree.run(code) == "seam early seen"
    source = tree.root / "vllm/pack/inner.py"
    source.write_text(source.read_text().replace('"seam"', '"edited"'))
    assert tree.run(code) == "edited early seen"
