"""float64 for a part of a test."""

import jax
import jax.experimental

# jax 0.7 has it in jax.experimental only, jax 0.12 in jax only.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
