r"""Exports a trained model with jax.export, for programs without this project, on CPU, TPU and GPU.

    python -m experiments.export --from=runs/mine --to=mine-exported
    python -m experiments.export --from=runs/mine --to=mine-exported --rows=8

--from is a run's workdir or a portable folder. --to is a new folder: scoring of segments and a generation step as
StableHLO, with the memory as argument and result, the weights as safetensors, and a manifest. The lengths are those of
eval in the run's settings. What was written is read back and compared with the model before the folder gets its name.
docs/export.md has a program that runs it with jax, numpy, safetensors and flatbuffers alone.
"""

import sys

from absl import flags

from experiments.cli import runner, stored_types
from txl_jax.errors import UserError
from txl_jax.jobs.export_model import export_model

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and exports."""
    flags.DEFINE_string("from", None, "What is exported: a workdir or a portable folder.")
    flags.DEFINE_string("to", None, "The new folder.")
    flags.DEFINE_integer("rows", 1, "Rows of a batch, fixed in what is exported.")
    flags.DEFINE_string("ensemble_member", None, "Member of an ensemble, if --from is the workdir of one.")
    stored_types.define()
    runner.parse_or_exit(groups=(), required=("from", "to"))
    sys.exit(runner.guarded(_run))


def _run() -> int:
    source, target = (_given(name) for name in ("from", "to"))
    export_model(source, target, rows=FLAGS.rows, member=FLAGS.ensemble_member, **stored_types.given())
    return 0


def _given(name: str) -> str:
    """Returns the value of a flag; raises `UserError` if it was not given."""
    value: str = FLAGS[name].value or ""
    if not value:
        raise UserError(f"no path was given; give --{name}=PATH")
    return value


if __name__ == "__main__":
    main()
