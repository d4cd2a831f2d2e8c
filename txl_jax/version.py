"""The version of this package, and the oldest version of jax that it supports."""

import re
import sys

from txl_jax.errors import UserError

__version__ = "0.1.0"
OLDEST_JAX = "0.7.2"  # As in setup.cfg. With 0.7.0 Orbax cannot save the arrays of several devices.


def check_jax() -> None:
    """Raises `UserError` on Windows, or if jax is missing or too old.

    It does not import jax, because this package's imports would fail with an old version.
    """
    if sys.platform == "win32":
        raise UserError("txl_jax does not support native Windows. Use WSL, Linux or macOS")
    import importlib.metadata  # Slow to import.

    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"jax must be {OLDEST_JAX} or newer, but is not installed for {sys.executable}. "
            "Activate the environment of txl_jax (source .venv/bin/activate), or install jax: "
            f"pip install -U 'jax>={OLDEST_JAX}'"
        ) from None
    if _numbers(found) < _numbers(OLDEST_JAX):
        raise UserError(f"jax must be {OLDEST_JAX} or newer, got {found}. {_INSTALL}")


_INSTALL = f"Install it with pip install -U 'jax>={OLDEST_JAX}'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
