# SPDX-License-Identifier: Apache-2.0
"""In the installed tree, all that we add or change can be imported."""

from tools.overlay.rebase import import_errors, module_names
from tools.overlay.tree import additions, edit_files


def test_modules():
    names = module_names([*additions(), *(edit.path for edit in edit_files())])
    assert import_errors(names, TRITON_INTERPRET="0") == {}
