# SPDX-License-Identifier: Apache-2.0
"""Every error of this tree is listed for users, or says here why none sees it."""

import pytest

from tools.docs.raises import Raise, is_excerpt, listed_errors, raises, words

LOADER = "vllm/model_executor/model_loader"
UNIFIED = "vllm/v1/worker/gpu/spec_decode/unified"
INTERNAL = "the layout is made from settings that have been checked; a slip of ours"
OF_THE_BASE = "goes on as it came"
HOSTILE = "a remedy for each error of the base, a row each in tests/config/bad_*.py"
CAUGHT = "caught, and told as a warning that says what is done without it"
# Raises that no user sees, or that have no text of their own, by file, function and
# class, and why.
UNSEEN = {
    (
        "vllm/_upstream/__init__.py",
        "__getattr__",
        "AttributeError",
    ): "Python's protocol",
    (f"{UNIFIED}/layout.py", "__post_init__", "ValueError"): INTERNAL,
    (f"{UNIFIED}/native.py", "_open", "OSError"): CAUGHT,
    ("vllm/config/drafter/features.py", "_read", "_Unfit"): CAUGHT,
    ("vllm/config/drafter/resolve.py", "_named_errors", ""): OF_THE_BASE,
    ("vllm/config/drafter/resolve.py", "_named_errors", "ValueError"): HOSTILE,
    (f"{LOADER}/draft_weights.py", "checked", ""): OF_THE_BASE,
}
RAISES = list(raises())


def key_of(found: Raise) -> tuple[str, str, str]:
    return found.path, found.function, found.error


@pytest.mark.parametrize("found", RAISES, ids=lambda r: f"{r.path}:{r.line}")
def test_is_listed_or_unseen(found: Raise):
    assert key_of(found) in UNSEEN or found.is_listed(listed_errors()), (
        f"add a row to docs/troubleshooting.md: {found.text}"
    )


def test_what_is_unseen_exists():
    unseen = [found for found in RAISES if key_of(found) in UNSEEN]
    assert {key_of(found) for found in unseen} == UNSEEN.keys()


@pytest.mark.parametrize(
    ("excerpt", "text", "fits"),
    [
        ("a is broken: mend it", "a is broken: mend it, or buy another", True),
        ("is broken: mend", "… is broken: mend it", True),
        ('no key "a…": remove it', 'no key "…": …', True),
        ("of … has … rows", "… of … has … rows, but …", True),
        ("is broken: mend it", "… is lost: mend it", False),
        ("mend it", "… is broken: mend it", False),  # the remedy alone
        ("rows, but … make it …", "… of … has … rows, but … make it …", False),
        ("is broken: buy it", "… is broken: mend it", False),
        ("is broken", "…", False),  # a message that cannot be read
    ],
)
def test_excerpts(excerpt: str, text: str, fits: bool):
    assert is_excerpt(words(excerpt), words(text)) is fits


def test_raise_statements_are_read(tmp_path):
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "near.py").write_text('AGAIN = "try again"\n')
    (folder / "some.py").write_text(
        "from vllm.near import AGAIN\n"
        "def f(x):\n"
        '    raise ValueError(f"{x:.1f} of 3: {AGAIN}. " "Or not")\n'
        "def g(x):\n"
        "    def h():\n"
        "        raise x\n"
        "    raise\n"
    )
    found = [(r.function, r.line, r.error, r.text) for r in raises(tmp_path)]
    assert found == [
        ("f", 3, "ValueError", "… of 3: try again. Or not"),
        ("h", 6, "x", "…"),
        ("g", 7, "", "…"),
    ]
