# SPDX-License-Identifier: Apache-2.0
"""Several engines, one after the other, in one process: `families_job.py JOBS RESULT`.

JOBS maps a name to a job of `engine_job`; an engine that does not start has its error
as result. What the log says of the drafter comes with each result.
"""

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

from engine_job import run

from vllm.distributed import cleanup_dist_env_and_memory


class Lines(logging.Filter):
    """Keeps the log's lines that name a drafter; a filter outlasts reconfiguring."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.getMessage()
        if line.startswith("Drafter "):
            self.lines.append(line)
        return True


def run_alone(job: dict[str, Any]) -> dict[str, Any]:
    # The base collects garbage a dozen times an engine: half a second each time over
    # all that is imported.
    gc.freeze()
    lines, logger = Lines(), logging.getLogger("vllm.config.drafter.resolve")
    logger.addFilter(lines)
    try:
        result = run(job)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeFilter(lines)
    gc.collect()
    cleanup_dist_env_and_memory()
    return result | {"lines": lines.lines}


if __name__ == "__main__":
    jobs_file, result_file = map(Path, sys.argv[1:])
    jobs = json.loads(jobs_file.read_text())
    results = {name: run_alone(job) for name, job in jobs.items()}
    result_file.write_text(json.dumps(results))
