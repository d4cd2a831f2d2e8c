"""Lists the programs: `python -m experiments`."""

from txl_jax.__main__ import main

if __name__ == "__main__":
    main()
