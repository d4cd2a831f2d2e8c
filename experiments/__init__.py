"""Programs: absl flags to one frozen config to one call. `python -m experiments` lists them."""
