"""Pure functions of arrays, without parameters or state."""
