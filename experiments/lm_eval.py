r"""Evaluates a trained model with EleutherAI's lm-evaluation-harness.

    pip install '.[lm-eval]'
    python -m experiments.lm_eval --model_path=runs/wt103 --tasks=lambada_openai,wikitext
    python -m experiments.lm_eval --model_path=runs/mine --tasks=mine --include_path=tasks --output=scores.json

It registers the model "txl_jax" and calls the harness. A document begins with an empty memory and
the token --first; docs/lm-eval.md has the details, and tasks on files of yours.
"""

import json
import sys

from absl import flags

from txl_jax.cli import runner
from txl_jax.errors import UserError
from txl_jax.runtime.storage import as_path, is_remote, write

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags, and runs the tasks."""
    flags.DEFINE_string("model_path", None, "Workdir of a run, or folder of converted weights.")
    flags.DEFINE_string("ensemble_member", None, "Member of an ensemble, by name.")
    flags.DEFINE_list("tasks", [], "Tasks and groups of the harness, or paths of YAML files.")
    flags.DEFINE_string("include_path", None, "Folder with YAML files of more tasks.")
    flags.DEFINE_integer("num_fewshot", None, "Examples in the context; default: as the task has it.", lower_bound=0)
    flags.DEFINE_float("limit", None, "Documents of each task: a number, or a part below 1; default: all.")
    flags.DEFINE_integer("batch_size", 8, "Texts that are scored or continued side by side.", lower_bound=1)
    flags.DEFINE_string("first", None, "Text of the token that precedes a document; default: a line mark or a newline.")
    flags.DEFINE_string("output", None, "File for the results, as JSON; default: the table alone.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    if not FLAGS.model_path or not FLAGS.tasks:
        raise UserError("no model or no task was given; set --model_path=FOLDER and --tasks=NAME,NAME")
    if is_remote(FLAGS.include_path or ""):
        raise UserError(f"--include_path is {FLAGS.include_path}, and the harness reads folders of this machine alone")
    output = as_path(FLAGS.output or "")  # A URL that nothing can open is refused before the tasks run.
    try:
        from txl_jax import lm_eval_model
    except ImportError as error:
        raise UserError(f"the harness is not installed ({error}); run pip install '.[lm-eval]'") from None
    model = lm_eval_model.HarnessModel(
        FLAGS.model_path, member=FLAGS.ensemble_member, batch_size=FLAGS.batch_size, first=FLAGS.first
    )
    limit = int(FLAGS.limit) if FLAGS.limit and FLAGS.limit >= 1 else FLAGS.limit
    results = lm_eval_model.evaluate(
        model, FLAGS.tasks, include_path=FLAGS.include_path, num_fewshot=FLAGS.num_fewshot, limit=limit
    )
    if FLAGS.output:
        write(output, (json.dumps(results, indent=2, default=str) + "\n").encode())
        print(f"results   {FLAGS.output}")
    return 0


if __name__ == "__main__":
    main()
