"""Machines of Google Cloud: a notice of maintenance or of a preemption stops the program as SIGTERM does."""

import os
from collections.abc import Mapping
from pathlib import Path

from txl_jax.runtime import maintenance, preemption

_PRODUCT = Path("/sys/class/dmi/id/product_name")  # Of the machine, by its firmware; "Google Compute Engine" there.


def stop_on_notice() -> None:
    """Starts to wait for notices in the background where this is a machine of Google Cloud; elsewhere does nothing."""
    server = metadata_server(os.environ, _PRODUCT)
    if server is not None:
        maintenance.watch(server, preemption.request_stop)


def metadata_server(environment: Mapping[str, str], product: Path) -> str | None:
    """Returns host, or host:port, of this machine's metadata server; None: it has none.

    The two variables are those of Google's own libraries. No network is used to answer.

    Args:
      environment: environment variables.
      product: the file with the machine's name in its firmware.
    """
    if environment.get("NO_GCE_CHECK", "").lower() == "true":
        return None
    if server := environment.get("GCE_METADATA_HOST"):
        return server
    try:
        is_google = product.read_text().startswith("Google")
    except OSError:
        return None
    return "metadata.google.internal" if is_google else None
