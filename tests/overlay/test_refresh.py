# SPDX-License-Identifier: Apache-2.0
"""Changes by hand in a composed tree become edits that compose to the same tree."""

from zipfile import ZipFile

import pytest

from tests.overlay.fakes import HEAD, composed, edit
from tests.overlay.test_edits import PATH, PLACES, TEXT
from tools.overlay.base import OverlayError, find_wheel, pinned_base
from tools.overlay.edits import NOTE, parse
from tools.overlay.edits import composed as composed_text
from tools.overlay.members import Source
from tools.overlay.refresh import refresh, refreshed
from tools.overlay.tree import Release, edit_files

SOURCE = Source(PATH, TEXT)
ASK = "# Why: ?\n# Patch: ?\n# Until: ?\n"


def hunks_of(old: str, new: str, before: str = "") -> str:
    """The edit file, without its first line, after a change of the composed text."""
    known = parse(PATH, before)
    text = composed_text(SOURCE, known.hunks())
    assert text.count(old) == 1
    changed = text.replace(old, new)
    found = refreshed(SOURCE, known, changed + NOTE.format(path=PATH))
    assert composed_text(SOURCE, found.hunks()) == changed
    return found.text().partition("\n")[2]


FIRST = "    first = 1\n"


@pytest.mark.parametrize(("header", "lines", "_"), PLACES)
def test_new_hunk(header, lines, _):
    hunk = f"@@ {header}\n{lines}"
    text = composed_text(SOURCE, parse(PATH, HEAD + hunk).hunks())
    found = refreshed(SOURCE, parse(PATH, ""), text + NOTE.format(path=PATH))
    assert found.text().endswith(f"{ASK}{hunk}")


def test_reverted_change_leaves_no_hunk():
    replaced = edit("@@ make, replacing line 3\n    a\n")
    assert hunks_of("    a\n", FIRST, replaced) == ""


KNOWN = edit("@@ make, after line 3\n    b = 1\n@@ LIMIT, after line 1\nX = 1\n")


def test_hunks_keep_section_and_header():
    assert f"{HEAD}{hunks_of('b = 1', 'c = 1', KNOWN)}".count("# Why: a reason.") == 2
    for old, new in [("    b = 1\n", "    b = 1\n    c = 1\n"), ("b = 1", "c = 1")]:
        found = hunks_of(old, new, KNOWN)
        assert found == KNOWN.partition("\n")[2].replace(old, new)
    grown = hunks_of("    b = 1\n    return first\n", "    return 3\n", KNOWN)
    assert "@@ make, replacing line 4\n    return 3\n" in grown
    second = hunks_of("second):\n", "second):\n    a = 1\n", KNOWN)
    assert "@@ make, after line 2\n    a = 1\n@@ make, after line 3\n" in second
    assert "?" not in grown + second


def test_new_hunk_under_existing_reason_is_reported(capsys):
    hunks_of("    b = 1\n", "    b = 2\n", KNOWN)
    hunks_of(FIRST, "    a\n")
    assert capsys.readouterr().out == ""
    hunks_of("second):\n", "second):\n    a = 1\n", KNOWN)
    assert "new below this reason, or move it:\n# Why: a reason." in (
        capsys.readouterr().out
    )


def test_hunks_are_removed_with_their_lines():
    assert "make" not in hunks_of("    b = 1\n", "", KNOWN)
    only = edit("@@ make, after line 3\n    b = 1\n")
    assert refreshed(SOURCE, parse(PATH, only), TEXT).sections == []


def test_lines_of_two_hunks_belong_to_the_first():
    other = "\n" + HEAD.partition("\n")[2].replace("slug", "other")
    both = edit(
        f"@@ make, after line 3\n    b = 1\n{other}@@ make, at the end\n    c\n"
    )
    found = hunks_of("    b = 1\n    return first\n    c\n", "    d = 1\n", both)
    assert found.endswith(
        "slug\n# Until: then.\n@@ make, replacing line 4\n    d = 1\n"
    )


def test_round_trip(tmp_path):
    """Composing, then refreshing reproduces every edit file of this repository."""
    with ZipFile(find_wheel(pinned_base("cpu"))) as wheel:
        release = Release(wheel)
        for known in edit_files():
            source = release.source(known.path)
            text = composed_text(source, known.hunks())
            assert refreshed(source, known, text).text() == known.text()
            assert refreshed(source, parse(known.path, ""), text).hunks()


def test_refresh_tree(tmp_path):
    overlay = {f"{PATH}.edit": KNOWN}
    tree = composed(tmp_path, {PATH: TEXT}, overlay, link=True)
    changed, new = tree.folder / PATH, tree.folder / "vllm/new.py"
    with ZipFile(tree.wheel) as wheel:
        release = Release(wheel)
        assert refresh(release, tree.folder, tree.root) == []
        changed.write_text(changed.read_text().replace("b = 1", "c = 1"))
        new.write_text("x = 1\n")
        with pytest.raises(OverlayError, match=r"(?s)new\.py.*part\.py.*refresh"):
            tree.compose(link=True)
        written = refresh(release, tree.folder, tree.root)
        assert written == ["vllm/new.py", f"{PATH}.edit"]
    assert "c = 1" in (tree.root / f"{PATH}.edit").read_text()
    assert new.is_symlink() and (tree.root / "vllm/new.py").read_text() == "x = 1\n"
    tree.compose(link=True)
    assert "    c = 1\n" in changed.read_text()
