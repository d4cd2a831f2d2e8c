"""`--mode=score --input=FILE|-`: scores documents of a file or of the standard input, as JSON on standard output."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from absl import flags

from txl_jax.data.sources.input_text import InputFormat, InputReader, open_input
from txl_jax.errors import UserError
from txl_jax.jobs import score_input
from txl_jax.jobs.pretrained import Pretrained
from txl_jax.jobs.score import Interrupted
from txl_jax.runtime import distributed
from txl_jax.runtime.preemption import StopRequest

FLAGS = flags.FLAGS
FLAG_NAMES = ("input", "input_format", "per_token")


def define_flags() -> None:
    """Defines the flags of the input."""
    flags.DEFINE_string("input", None, "With --mode=score: scores the documents of this file; -: of standard input.")
    flags.DEFINE_enum("input_format", "lines", [str(form) for form in InputFormat], "Documents of the input.")
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
    name = "standard input" if FLAGS.input == "-" else FLAGS.input
    records = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), StopRequest() as stop:

        def check_stop() -> None:
            if stop:
                raise Interrupted(name)

        def write(lines: str) -> None:
            records.write(lines)
            records.flush()
            check_stop()

        pretrained = opened()
        reader = InputReader(open_input(FLAGS.input), InputFormat(FLAGS.input_format), after_poll=check_stop)
        try:
            score_input.run(pretrained, reader, name=name, per_token=FLAGS.per_token, write=write)
        except Interrupted:
            print(f"stopped   on request in {name}; the records written are complete")
            return 128 + stop.signal_number
        except BrokenPipeError:  # Whoever reads the records has enough, as in `| head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
            return 128 + signal.SIGPIPE
    return 0
