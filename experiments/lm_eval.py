r"""Evaluates a trained model with EleutherAI's lm-evaluation-harness.

    pip install '.[lm-eval]'
    python -m experiments.lm_eval --model_path=runs/wt103 --tasks=lambada_openai,wikitext
    python -m experiments.lm_eval --model_path=runs/mine --tasks=mine --include_path=tasks \
        --output=scores.json

Registers the model "txl_jax" and calls the harness. A document starts with an empty memory and
the token --first. docs/lm-eval.md has the details, and shows how to define tasks on your own files.
"""

import dataclasses
import json

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.errors import UserError, rephrased
from txl_jax.runtime import storage


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The model and the tasks."""

    model_path: str = setting(
        "", "Workdir of a run, or portable checkpoint.", path=True, required=True
    )
    ensemble_member: str | None = setting(None, "Name of the ensemble member to use.")
    tasks: tuple[str, ...] = setting(
        (), "The harness's tasks and groups, or paths of YAML files.", required=True
    )
    include_path: str | None = setting(
        None,
        "Directory with YAML files of more tasks. Python functions in that directory, which the "
        "files may name, are run.",
        path=True,
        loads_code=True,
    )
    num_fewshot: int | None = setting(
        None, "Examples in the context. none means the task's own number.", at_least=0
    )
    limit: float | None = setting(
        None, "Documents per task: a number, or a fraction below 1. none means all."
    )
    batch_size: int = setting(8, "Documents scored or continued in parallel.", at_least=1)
    first: str | None = setting(
        None, "Text of the token before a document. none means a line mark or a newline."
    )
    output: str | None = setting(
        None, "JSON file for the results. none only prints the table.", path=True
    )


def run(plan: Plan, _job: cli.Job) -> None:
    """Runs the tasks and prints the harness's tables."""
    if storage.is_remote(plan.include_path or ""):
        raise UserError(f"--include_path must be a local directory, got {plan.include_path}")
    with rephrased("the harness is not installed (%s). Run pip install '.[lm-eval]'.", ImportError):
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        from txl_jax.lm_eval_model import HarnessModel
    model = HarnessModel(
        plan.model_path, member=plan.ensemble_member, batch_size=plan.batch_size, first=plan.first
    )

    manager = TaskManager(include_path=plan.include_path)
    unknown = []
    for name in plan.tasks:
        is_file = name.endswith((".yaml", ".yml"))
        if not is_file and name not in manager.all_tasks:
            unknown.append(name)
    if unknown:
        raise UserError(
            f"unknown tasks: {', '.join(unknown)}. Use the harness's names, or "
            "--include_path=DIRECTORY."
        )

    # The harness takes a float for a fraction of the documents, and an integer for their number.
    limit = plan.limit
    if limit is not None and limit >= 1:
        limit = int(limit)
    results = simple_evaluate(
        model,
        tasks=list(plan.tasks),
        task_manager=manager,
        num_fewshot=plan.num_fewshot,
        limit=limit,
        log_samples=False,
    )
    assert results is not None  # It is None only in processes other than the first.

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if plan.output:
        # The texts of the tasks are long, and the model in the settings is not JSON.
        omitted = ("samples", "config")
        scores = {name: value for name, value in results.items() if name not in omitted}
        content = json.dumps(scores, indent=2, default=str) + "\n"
        storage.write(plan.output, content.encode())
        print(f"results   {plan.output}")


if __name__ == "__main__":
    cli.main(run, Plan)
