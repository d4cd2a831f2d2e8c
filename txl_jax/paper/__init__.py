"""Tables and figures of the paper: a `Plan` of settings and a `run` for each, and their mathematics."""
