#!/usr/bin/env python3
"""Test a running router against its OpenAPI document with schemathesis, with allowed and with invalid requests.

The test looks for answers with status 5xx and for statuses that the document does not list. Instances are fake, so
every answer is the router's. It needs schemathesis in PATH or in SCHEMATHESIS; it is not a dependency: `pip install
schemathesis` in any environment.
"""

import argparse
import asyncio
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from baton_serve.bench.router.targets import baton  # noqa: E402

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


async def check(program: str, options: argparse.Namespace) -> int:
    """Run schemathesis against a new router and return its exit status."""
    async with baton(log_level=options.log_level) as router:
        url = f"http://127.0.0.1:{router.port}/openapi.json"
        command = [program, "run", url, "--checks", CHECKS, "--max-examples", str(options.examples), "--no-color"]
        command += ["--seed", "1", "--phases", "examples,coverage,fuzzing", "--continue-on-failure"]
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=30, help="number of examples per operation")
    parser.add_argument("--log-level", default="error", help="log level of the router")
    program = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
    if program is None:
        sys.stderr.write("check_api: schemathesis is not installed (pip install schemathesis)\n")
        return 2
    return asyncio.run(check(program, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
