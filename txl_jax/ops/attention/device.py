"""The device that a call of attention is for, as no mesh need be given."""

import jax


def default_device() -> jax.Device:
    """Returns the device that jax places arrays on."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    found: jax.Device = device if isinstance(device, jax.Device) else jax.devices()[0]
    return found
