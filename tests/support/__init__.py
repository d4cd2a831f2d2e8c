"""Support for the tests: oracles, tiny models and runs, several processes, programs with faults."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
# For processes that import the support of tests.
ON_PATH = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
# The bucket of the object storage that tests start.
BUCKET = "bucket-one"
