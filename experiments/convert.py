r"""Converts trained weights between this project's formats and other implementations'.

    python -m experiments.convert --from=transfo-xl-wt103 --to=wt103
    python -m experiments.convert --from=runs/mine --to=mine
    python -m experiments.convert --from=runs/mine --to=mine-hf --to_format=huggingface
    python -m experiments.convert --from=runs/mine --to=mine-original --to_format=original

--from is a run's workdir, a portable checkpoint, or a file or directory from another
implementation, whose format is detected. Unpickling executes no code: it accepts only tensors and
plain values.

--to is a new directory, in one of three formats: native, a portable checkpoint for `txl_jax.load`,
which you can publish; huggingface, for TransfoXLLMHeadModel of transformers 4.35.2; or original,
with the names of the authors' PyTorch release. The files are read back and compared, tensors and
losses, before the directory is renamed into place.

huggingface and original do not have a layer norm after the last layer. To convert a pre-norm model
to them, such as --flagfile=own_bytes or the quickstart, train it with
--model.compat.final_norm=false.
"""

import dataclasses

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.runs.convert import TargetFormat, convert


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Source and target of the conversion."""

    from_: str = setting(
        "",
        "Workdir, portable checkpoint, or another implementation's weights.",
        path=True,
        required=True,
    )
    to: str = setting("", "Directory to create.", path=True, required=True)
    to_format: TargetFormat = setting(TargetFormat.NATIVE, "Format of --to.")
    ensemble_member: str | None = setting(
        None, "Name of the ensemble member, if --from is an ensemble's workdir."
    )


def run(plan: Plan, _job: cli.Job) -> None:
    """Converts the weights and verifies the result."""
    convert(plan.from_, plan.to, to_format=plan.to_format, member=plan.ensemble_member)


if __name__ == "__main__":
    cli.main(run, Plan)
