"""Says where the programs are: `python -m txl_jax`."""

from txl_jax.version import __version__

if __name__ == "__main__":
    print(
        f"txl_jax {__version__}, a library. Its programs (training, scoring, studies, benchmarks) run from a clone of "
        "the repository: python -m experiments lists them there."
    )
