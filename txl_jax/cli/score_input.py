"""`--mode=score --input=FILE`: scores the documents of a file, as JSON on standard output."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from absl import flags

from txl_jax.errors import UserError
from txl_jax.runs import score
from txl_jax.runs.score import InputFormat, Interrupted, documents, open_input
from txl_jax.runs.weights import Pretrained
from txl_jax.runtime import distributed
from txl_jax.runtime.stop import StopRequest

FLAGS = flags.FLAGS
FLAG_NAMES = ("input", "input_format", "per_token")


def define_flags() -> None:
    """Defines the flags of the input."""
    flags.DEFINE_string("input", None, "With --mode=score: file whose documents are scored.")
    flags.DEFINE_enum("input_format", "lines", [str(form) for form in InputFormat], "What a document of the input is.")
    flags.DEFINE_bool("per_token", False, "With --input: writes a record per token instead of one per document.")


def run(mode: str, opened: Callable[[], Pretrained]) -> int:
    """Scores the input that the flags name; only records go to standard output. Returns the exit code.

    Args:
      mode: the job that was asked for.
      opened: returns the trained model.

    Raises:
      UserError: another job; several processes; no such run or input; a document that cannot be encoded.
    """
    if mode != "score":
        raise UserError(f"--input is given and --mode is {mode}; only --mode=score reads an input")
    if distributed.is_multiprocess():
        raise UserError("--input is given and there are several processes; score an input with one")
    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), StopRequest() as stop:

        def write(lines: str) -> None:
            records.write(lines)
            records.flush()
            if stop:
                raise Interrupted(FLAGS.input)

        pretrained = opened()
        try:
            with open_input(FLAGS.input) as file:
                texts = documents(file, InputFormat(FLAGS.input_format))
                score.score_documents(pretrained, texts, name=FLAGS.input, per_token=FLAGS.per_token, write=write)
        except Interrupted:
            print(f"stopped   on request in {FLAGS.input}; the records written are complete")
            return 128 + stop.signal_number
        except BrokenPipeError:  # Whoever reads the records has enough, as in `| head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
            return 128 + signal.SIGPIPE
    return 0
