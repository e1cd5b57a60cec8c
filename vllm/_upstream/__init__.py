# SPDX-License-Identifier: Apache-2.0
"""Where the upstream modules live that this tree's seams stand on.

A seam is a module of ours at the path of an upstream one. Composing the tree moves
the upstream module to the same path below `vllm._upstream`; `stand_on` makes the
seam a live view of it. Whatever the seam does not define itself is read from, and
written to, the upstream module: each piece of state exists once, and a name that
upstream sets later is seen through the seam too.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_PREFIX = "vllm."
_NOTHING = object()


def _upstream_name(name: str) -> str:
    return f"{__name__}.{name.removeprefix(_PREFIX)}"


def _submodule(package: str, name: str) -> Any:
    return sys.modules.get(f"{package}.{name}", _NOTHING)


class Seam(ModuleType):
    """A module that defines some names and shows an upstream module's for the rest."""

    @property
    def __upstream__(self) -> ModuleType:
        return sys.modules[_upstream_name(self.__name__)]

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self.__upstream__, name)
        except (AttributeError, KeyError):
            value = _NOTHING
        # A package's moved submodule stays behind the seam of that submodule.
        hidden = _submodule(_upstream_name(self.__name__), name)
        if value is _NOTHING or value is hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        is_submodule = value is _submodule(self.__name__, name)
        if name in self.__dict__ or name.startswith("__") or is_submodule:
            super().__setattr__(name, value)
        else:
            setattr(self.__upstream__, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.__upstream__, name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *dir(self.__upstream__)})

    @property
    def __all__(self) -> list[str]:
        own = [name for name in self.__dict__ if not name.startswith("_")]
        theirs = getattr(self.__upstream__, "__all__", None) or [
            name for name in vars(self.__upstream__) if not name.startswith("_")
        ]
        return sorted({*own, *theirs})


def stand_on(name: str) -> ModuleType:
    """Makes the calling module a seam; to be called at its top, with `__name__`.

    Args:
        name: full name of the seam, e.g. `vllm.config.speculative`.

    Returns:
        The upstream module. A seam that overrides a name which upstream's own
        functions look up as a global assigns it there too.
    """
    # First a seam: what upstream imports may already ask the seam for upstream's names.
    sys.modules[name].__class__ = Seam
    return import_module(_upstream_name(name))
