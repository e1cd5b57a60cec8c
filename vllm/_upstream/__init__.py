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


class Seam(ModuleType):
    """A module that defines some names and shows an upstream module's for the rest."""

    __upstream__: ModuleType

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.__dict__["__upstream__"], name)
        except AttributeError:
            message = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(message) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and name in vars(self.__upstream__):
            setattr(self.__upstream__, name, value)
        else:
            super().__setattr__(name, value)

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
    upstream = import_module(f"{__name__}.{name.removeprefix(_PREFIX)}")
    module = sys.modules[name]
    module.__upstream__ = upstream
    module.__class__ = Seam
    return upstream
