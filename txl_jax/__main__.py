"""Tells where the commands are: `python -m txl_jax`."""

from txl_jax.version import __version__

if __name__ == "__main__":
    print(
        f"txl_jax {__version__}, a library. Its commands (training, scoring, studies, benchmarks) "
        "run from a clone of the repository. To list them, run python -m experiments in the clone."
    )
