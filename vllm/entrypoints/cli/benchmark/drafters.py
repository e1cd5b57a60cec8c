# SPDX-License-Identifier: Apache-2.0
"""The `drafters` subcommand of `vllm bench`."""

import argparse
import sys

from vllm.benchmarks.drafters.ahead import import_ahead
from vllm.entrypoints.cli.benchmark.base import BenchmarkSubcommandBase
from vllm.utils.argparse_utils import FlexibleArgumentParser

# What this process imports from here on takes seconds, and so it does for engines.
if sys.argv[1:3] == ["bench", "drafters"] and not {"-h", "--help"} & {*sys.argv}:
    import_ahead()

from vllm.benchmarks.drafters.command import add_cli_args, main


class BenchmarkDraftersSubcommand(BenchmarkSubcommandBase):
    """Speculative decoding by each of some drafters, beside none."""

    name = "drafters"
    help = "Compare drafters with no speculation: speed, acceptance, and output."

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> None:
        add_cli_args(parser)

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        main(args)
