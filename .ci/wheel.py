"""Uses the installed wheel, outside the clone and without any extra.

`.ci/run` calls it in an empty environment.
"""

import dataclasses
import importlib.util
from importlib.metadata import entry_points, files

import txl_jax
from txl_jax.config import config_tree
from txl_jax.runs.convert import convert

TINY = {
    "model.n_layer": 1,
    "model.d_model": 8,
    "model.n_head": 2,
    "model.d_head": 4,
    "model.d_inner": 8,
}
ONE_CALL = {
    "steps": 2,
    "batch_size": 2,
    "segments_per_call": 2,
    "log_every": 2,
    "eval_every": 2,
    "checkpoint_every": 2,
}

folders = {file.parts[0].partition("-")[0] for file in files("txl_jax") or ()}
assert folders == {"txl_jax"}, f"the wheel must contain txl_jax alone, got {sorted(folders)}"
for name in ("experiments", "launch"):
    assert importlib.util.find_spec(name) is None, f"{name} must stay in the clone"

with open("text.txt", "w") as file:
    file.write("one two three four five six seven\n" * 500)
config = config_tree.replace(
    txl_jax.preset("small"), TINY | {"data.file": "text.txt", "optimizer.warmup_steps": 1}
)
config = dataclasses.replace(config, train=dataclasses.replace(config.train, **ONE_CALL))
txl_jax.train(config, "run")
convert("run", "portable")
[loss] = txl_jax.load("portable").score(["one two three"])
assert loss.tokens == 12 and loss.nats > 0, loss

[entry] = entry_points(group="lm_eval.models", name="txl_jax")
assert importlib.util.find_spec(entry.module) is not None, entry
