"""Commands. Each builds one frozen config from its flags. `python -m experiments` lists them."""

import sys

from txl_jax.errors import UserError
from txl_jax.version import check_jax

# Checked before a command imports anything else: with an old jax the import itself would fail with
# a traceback.
try:
    check_jax()
except UserError as error:
    sys.exit(f"error: {error}")
