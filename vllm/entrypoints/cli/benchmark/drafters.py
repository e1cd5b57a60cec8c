# SPDX-License-Identifier: Apache-2.0
"""The `drafters` subcommand of `vllm bench`."""

import argparse

from vllm.benchmarks.drafters.command import add_cli_args, main
from vllm.entrypoints.cli.benchmark.base import BenchmarkSubcommandBase
from vllm.utils.argparse_utils import FlexibleArgumentParser


class BenchmarkDraftersSubcommand(BenchmarkSubcommandBase):
    """Compares speculative decoding with each of some drafters to no speculation."""

    name = "drafters"
    help = "Compare drafters with no speculation: speed, acceptance, and output."

    @classmethod
    def add_cli_args(cls, parser: FlexibleArgumentParser) -> None:
        add_cli_args(parser)

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        main(args)
