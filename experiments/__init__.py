"""Commands: absl flags to one frozen config to one call. `python -m experiments` lists them."""

import sys

from txl_jax.errors import UserError
from txl_jax.version import check_jax

# Before a command imports anything else: with an old jax the import itself would fail, with a
# traceback.
try:
    check_jax()
except UserError as error:
    sys.exit(f"error: {error}")
