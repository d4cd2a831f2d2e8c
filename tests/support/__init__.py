"""Support for the tests: oracles, tiny models and runs, several processes, programs with faults."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BUCKET = "bucket-one"  # Of the object storage that tests start.
