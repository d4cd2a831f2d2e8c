r"""Compresses a file with a trained model that learns from it, and decompresses it.

    python -m experiments.compress book.txt --model=runs/mine --out=book.txl
    python -m experiments.compress --decompress book.txl --model=runs/mine --out=book.txt
    python -m experiments.compress - --model=runs/mine --out=- < book.txt > book.txl

The model predicts each byte, a range coder writes it in -log2(probability) bits, and after each
segment the model learns from it, as in dynamic evaluation (docs/dynamic.md). Decompressing needs
the same model, and the same numbers to the last bit: the same versions of JAX, and a processor with
the same instructions. Both are checked before anything is decoded. docs/compression.md shows sizes
and speed, and the sizes of compressors that have also read the model's training text.

If compression would not make a file smaller, it is stored unchanged. Nothing is overwritten, and a
file gets its name only when it is complete and, if it was decompressed, has the right SHA-256.
"""

import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.compression import codec, file_format, range_coder
from txl_jax.compression.file_format import Coding, Environment, Header
from txl_jax.compression.predictor import Predictor
from txl_jax.errors import UserError, first_line, one_line, rephrased
from txl_jax.metrics import Measure
from txl_jax.runs.scoring_progress import Interrupted, progress_bar
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import cpu_threads, environment, storage
from txl_jax.runtime.compilation_cache import processor
from txl_jax.runtime.output import say
from txl_jax.version import __version__

# Standard input or standard output.
STANDARD = "-"
# Flags that set how a text is coded. When decompressing, they come from the file.
CODING_FLAGS = ("streams", "segment_len", "learning_rate", "decay", "epsilon", "threads")


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The model, the output, and the settings of the prediction."""

    decompress: bool = setting(False, "Decompress the file instead of compressing it.")
    model: str = setting(
        "",
        "The model: a workdir or a portable checkpoint. Not needed for files that were stored.",
        path=True,
    )
    ensemble_member: str | None = setting(
        None, "Name of the ensemble member, if --model is an ensemble's workdir."
    )
    out: str = setting("", "File to write, or - for standard output.", required=True)
    streams: int = setting(
        8,
        "Number of pieces of the file that are predicted in parallel. A single one needs fewer "
        "bits, but takes two to four times as long.",
        at_least=1,
        at_most=file_format.MAX_STREAMS,
    )
    segment_len: int = setting(
        32,
        "Segment length: bytes of each stream between two updates of the model.",
        at_least=1,
        at_most=file_format.MAX_SEGMENT_LEN,
    )
    # The same defaults as `experiments.quickstart.LEARNING`.
    learning_rate: float = setting(
        7e-4, "Learning rate of the updates. 0 disables learning.", at_least=0
    )
    decay: float = setting(2e-3, "Strength of the pull toward the trained parameters.", at_least=0)
    epsilon: float = setting(1e-8, "Added to the root of squared gradients.", above=0)
    threads: int | None = setting(
        None,
        "Number of threads. none means one per available core.",
        at_least=1,
        at_most=file_format.MAX_THREADS,
    )

    stopped: ClassVar[str] = "nothing was written"


def run(plan: Plan, job: cli.Job) -> None:
    """Compresses or decompresses one file."""
    if len(job.words) != 1:
        words = " ".join(job.words) or "none"
        raise UserError(f"pass one file, or - for standard input, got {words}")
    [source] = job.words
    _check_output(plan.out)
    content = _read(source)
    # Human-readable lines must not get into the result.
    log = _to_standard_error if plan.out == STANDARD else say

    try:
        with job.stop:
            if plan.decompress:
                result = _decompress(plan, job, content, name=source, log=log)
            else:
                result = _compress(plan, job, content, log=log)
    except Interrupted as interrupted:
        log(f"stopped   on request in {interrupted}, {plan.stopped}")
        return
    except Exception as error:
        if not environment.is_out_of_memory(error):
            raise
        advice = "Lower --streams or --segment_len"
        if plan.decompress:
            # The file says how many there are.
            advice = "Use a machine with more memory"
        raise UserError(f"too little memory ({first_line(error)}). {advice}.") from error

    if plan.out == STANDARD:
        sys.stdout.buffer.write(result)
    else:
        storage.write_new(plan.out, result)
        log(f"written   {plan.out}")


def _compress(plan: Plan, job: cli.Job, text: bytes, *, log: Callable[[str], None]) -> bytes:
    """Returns the compressed file of a text."""
    if not plan.model:
        raise UserError("--model must name the model that compresses. Pass a run's workdir.")
    range_coder.require_package()
    threads = plan.threads or cpu_threads.available()
    cpu_threads.use_cpu(threads)
    trained = open_weights(plan.model, member=plan.ensemble_member)
    coding = Coding(
        streams=plan.streams,
        segment_len=plan.segment_len,
        mem_len=trained.config.eval.mem_len,
        learning_rate=plan.learning_rate,
        decay=plan.decay,
        epsilon=plan.epsilon,
        threads=threads,
    )
    with rephrased("the text cannot be coded with %s", ValueError):
        file_format.check_coding(coding)
    predictor = Predictor(trained, coding, log=log)
    # A byte that is not in the vocabulary is an error before the work begins.
    predictor.vocabulary.encode(text)
    _describe(trained, coding, log)
    header = Header(
        text_bytes=len(text),
        text_sha256=file_format.sha256(text),
        coding=coding,
        environment=_environment(),
        weights_sha256=predictor.weights_sha256(),
        probe_sha256=predictor.probe(stop_requested=lambda: job.stop),
    )

    began = time.monotonic()
    with _progress(job, "compressing", len(text), log) as progress:
        payload = codec.compress(text, predictor, progress=progress)
    seconds = time.monotonic() - began
    result = file_format.dump(header, payload)
    stored = file_format.dump(Header.of_stored(text), text)
    if len(stored) <= len(result):
        log("note      coding would not make the file smaller, so the text is stored as it is")
        result = stored
    # Fails now, rather than when decompressing.
    file_format.load(result, name=plan.out)
    log(
        f"result    {len(text):,} bytes to {len(result):,} "
        f"({8 * len(result) / max(len(text), 1):.3f} bits per byte) "
        f"in {environment.duration(seconds)}, {_speed(len(text), seconds)}"
    )
    return result


def _decompress(
    plan: Plan, job: cli.Job, content: bytes, *, name: str, log: Callable[[str], None]
) -> bytes:
    """Returns the text of a compressed file, after checking the text's SHA-256."""
    # `places` has the flags that were set.
    typed = [flag for flag in CODING_FLAGS if flag in job.places]
    if typed:
        raise UserError(
            f"with --decompress the file contains the coding settings. Omit --{', --'.join(typed)}."
        )
    header, payload = file_format.load(content, name=name)
    # Both are present, or the text was stored.
    if header.coding is None or header.environment is None:
        text = payload
    else:
        if not plan.model:
            raise UserError(f"--model must name the model that compressed {name}.")
        range_coder.require_package()
        cpu_threads.use_cpu(header.coding.threads)
        trained = open_weights(plan.model, member=plan.ensemble_member)
        predictor = Predictor(trained, header.coding, log=log)
        # `load` checked the length for the largest vocabulary. This one allows less.
        vocab_size = predictor.vocabulary.size
        file_format.check_length(header, payload, name=name, vocab_size=vocab_size)
        _check_weights(predictor, header, name=name, model=plan.model)
        _describe(trained, header.coding, log)
        probe_sha256 = predictor.probe(stop_requested=lambda: job.stop)
        _check_numbers(probe_sha256, header, header.environment, name=name)
        began = time.monotonic()
        with _progress(job, "decompressing", header.text_bytes, log) as progress:
            text = codec.decompress(payload, header.text_bytes, predictor, progress=progress)
        seconds = time.monotonic() - began
        log(
            f"result    {len(text):,} bytes in {environment.duration(seconds)}, "
            f"{_speed(len(text), seconds)}"
        )
    if file_format.sha256(text) != header.text_sha256:
        raise UserError(
            f"{name} was decoded to a text with another SHA-256, so nothing was written. "
            "It was compressed on a machine that computes other numbers, or was not written "
            "by experiments.compress."
        )
    return text


def _check_weights(predictor: Predictor, header: Header, *, name: str, model: str) -> None:
    """Raises `UserError` if the file was compressed with another model."""
    if predictor.weights_sha256() != header.weights_sha256:
        raise UserError(
            f"{name} was compressed with another model than {model}. Pass its model as --model."
        )


def _check_numbers(probe_sha256: str, header: Header, there: Environment, *, name: str) -> None:
    """Raises `UserError` if this machine computes other numbers than the one that compressed."""
    if probe_sha256 != header.probe_sha256:
        differences = _environment().differences(there)
        known = "; ".join(differences) or "versions and processor are the same"
        raise UserError(
            f"this machine computes other numbers than the one that compressed {name}, which "
            f"would give a wrong text ({known}). Decompress it with the same versions and "
            "environment variables (XLA_FLAGS, JAX_...), on a processor with the same instructions."
        )


def _check_output(out: str) -> None:
    """Raises `UserError` if the output exists already, or is a terminal."""
    if out != STANDARD:
        folder = os.path.dirname(out) or "."
        if not os.path.isdir(folder):
            raise UserError(f"--out={out} must be in a directory that exists, got {folder}")
        # Checked before hours of work, not after them.
        storage.check_new_file(out)
    elif sys.stdout.isatty():
        raise UserError("--out=- must be a file or a pipe, got a terminal. Add > FILE.")


def _read(source: str) -> bytes:
    """Returns the content of a file, or of standard input."""
    if source == STANDARD:
        return sys.stdin.buffer.read()
    with rephrased(f"cannot read {source} (%s). For standard input, pass -.", OSError):
        return storage.read(source)


def _describe(trained: TrainedModel, coding: Coding, log: Callable[[str], None]) -> None:
    log(f"model     {trained.description}")
    log(
        f"coding    streams {coding.streams}, segments of {coding.segment_len}, memory "
        f"{coding.mem_len}, learning rate {coding.learning_rate:g}, decay {coding.decay:g}, "
        f"threads {coding.threads}"
    )
    log("probe     compiling, and computing numbers that both directions must share")


def _progress(job: cli.Job, name: str, n_bytes: int, log: Callable[[str], None]) -> Any:
    """Returns the progress bar of `n_bytes`."""
    return progress_bar(
        name,
        n_bytes,
        unit="byte",
        measure=Measure.BPB,
        log=log,
        stop_requested=lambda: job.stop,
    )


def _environment() -> Environment:
    """Returns the versions and settings that the numbers of this process may depend on."""
    versions = [f"txl_jax {__version__}"]
    for package in ("jax", "jaxlib", "numpy", "constriction"):
        versions.append(f"{package} {importlib.metadata.version(package)}")
    return Environment(
        device=environment.device_kind(), processor=processor(), versions=", ".join(versions)
    )


def _speed(n_bytes: int, seconds: float) -> str:
    return f"{n_bytes / max(seconds, 1e-9) / 1000:.2f} kB/s"


def _to_standard_error(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.main(run, Plan, takes_words=True)
