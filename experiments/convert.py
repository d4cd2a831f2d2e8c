r"""Converts trained weights between the formats of this project and of other implementations.

    python -m experiments.convert --from=transfo-xl-wt103 --to=wt103
    python -m experiments.convert --from=runs/mine --to=mine
    python -m experiments.convert --from=runs/mine --to=mine-hf --to_format=huggingface
    python -m experiments.convert --from=runs/mine --to=mine-original --to_format=original

--from is a run's workdir, a portable folder, or a file or folder of another implementation, which is recognised
(--from_format names it). Pickles run nothing: tensors and plain values are read, all else is refused.

--to is a new folder. Its formats: native, the portable folder that `txl_jax.load` opens and that can be published;
huggingface, which TransfoXLLMHeadModel of transformers 4.35.2 opens; original, the names of the authors' PyTorch
release. What was written is read back and compared, tensors and losses, before the folder gets its name.
"""

import sys

from absl import flags

from txl_jax.cli import runner
from txl_jax.errors import UserError
from txl_jax.interop import formats
from txl_jax.runs.convert import NATIVE, TargetFormat, convert

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and converts."""
    flags.DEFINE_string("from", None, "What is converted: a workdir, a portable folder, or foreign weights.")
    flags.DEFINE_string("to", None, "The new folder.")
    flags.DEFINE_enum("to_format", TargetFormat.NATIVE, list(TargetFormat), "Format of --to.")
    flags.DEFINE_enum("from_format", None, [NATIVE, *formats.Format], "Format of --from; default: recognised.")
    flags.DEFINE_string("ensemble_member", None, "Member of an ensemble, if --from is the workdir of one.")
    runner.parse_or_exit(groups=(), required=("from", "to"))
    sys.exit(runner.guarded(_run))


def _run() -> int:
    source, target = (_given(name) for name in ("from", "to"))
    convert(
        source,
        target,
        to_format=TargetFormat(FLAGS.to_format),
        from_format=FLAGS.from_format,
        member=FLAGS.ensemble_member,
    )
    return 0


def _given(name: str) -> str:
    """Returns the value of a flag; raises `UserError` if it was not given."""
    value: str = FLAGS[name].value or ""
    if not value:
        raise UserError(f"no path was given; give --{name}=PATH")
    return value


if __name__ == "__main__":
    main()
