"""The version of this package, and the oldest one of jax that it works with."""

import re
import sys

from txl_jax.errors import UserError

__version__ = "0.2.0"
OLDEST_JAX = "0.7.2"  # As in setup.cfg. With 0.7.0 Orbax cannot save the arrays of several devices.


def check_jax() -> None:
    """Raises `UserError` on Windows, or if jax is missing or too old.

    It does not import jax: with an old one the import of what this package needs would fail.
    """
    if sys.platform == "win32":
        raise UserError("txl_jax does not run on Windows itself; use it in WSL, or on Linux or macOS")
    import importlib.metadata  # Slow to import.

    try:
        found = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"jax is not installed, and txl_jax needs {OLDEST_JAX} or newer; {_INSTALL}") from None
    if _numbers(found) < _numbers(OLDEST_JAX):
        raise UserError(f"jax is {found}, and txl_jax needs {OLDEST_JAX} or newer; {_INSTALL}")


_INSTALL = f"install it with pip install -U 'jax>={OLDEST_JAX}'"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
