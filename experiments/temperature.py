"""The temperature that suits a trained run best: chosen on the validation text, reported on the test text beside 1.

    python -m experiments.temperature --workdir=runs/ptb
    python -m experiments.temperature --workdir=runs/ptb --temperatures=1,1.02,1.04,1.06,1.08,1.1

It writes temperature.json into the workdir: scores of the validation text at every temperature, and of the test text at 1
and at the best. All else is scored as --mode=eval does. With a full softmax only.
"""

import functools
import sys

from absl import flags

from experiments.cli import flag_tree, hosts, runner
from txl_jax.config import ExperimentConfig
from txl_jax.jobs import temperature

FLAGS = flags.FLAGS
_TEMPERATURES = [f"{1 + k / 50:g}" for k in range(-5, 11)]  # 0.9, 0.92, .., 1.2


def main() -> None:
    """Parses the flags and scores."""
    runner.define_workdir()
    runner.define_data_folders()
    hosts.define_flags()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_list("temperatures", _TEMPERATURES, "What is tried on the validation text, beside 1.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run, begin=hosts.join))


def _run() -> int:
    runner.check_same_flags("temperatures")
    workdir = runner.given_workdir()
    config, text = runner.trained_config(workdir)
    try:
        temperatures = [float(word) for word in FLAGS.temperatures]
    except ValueError:
        raise ValueError(f"--temperatures is {','.join(FLAGS.temperatures)!r}; give numbers, as 1,1.05,1.1") from None
    temperature.at_temperatures(config, temperatures)  # Before a text is read.
    job = functools.partial(temperature.run, temperatures=temperatures)
    return runner.score_trained(job, workdir, config, text, stopped="nothing was written")


if __name__ == "__main__":
    main()
