"""Pure functions of arrays: no parameters, no state."""
