# SPDX-License-Identifier: Apache-2.0
"""How the commands of tools/ end."""

import argparse
import sys

from .base import OverlayError


def run(args: argparse.Namespace) -> int:
    """Runs the command that was parsed; returns the exit status. What the person at
    the keyboard can put right is one line, without a traceback."""
    try:
        return args.run(args)
    except OverlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
