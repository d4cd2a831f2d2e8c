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

import dataclasses

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.runs.convert import SourceFormat, TargetFormat, convert


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """What is converted, and to what."""

    from_: str = setting(
        "", "What is converted: a workdir, a portable folder, or foreign weights.", path=True, required=True
    )
    to: str = setting("", "The new folder.", path=True, required=True)
    to_format: TargetFormat = setting(TargetFormat.NATIVE, "Format of --to.")
    from_format: SourceFormat | None = setting(None, "Format of --from; none: recognised.")
    ensemble_member: str | None = setting(None, "Member of an ensemble, if --from is the workdir of one.")


def run(plan: Plan, job: cli.Job) -> None:
    """Converts."""
    del job
    convert(plan.from_, plan.to, to_format=plan.to_format, from_format=plan.from_format, member=plan.ensemble_member)


if __name__ == "__main__":
    cli.main(run, Plan)
