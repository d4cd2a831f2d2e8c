"""Trains nanoGPT and this package on the same text for the same time, and compares their scores.

    git clone https://github.com/karpathy/nanoGPT
    RUN="python -m benchmarks.nanogpt run --text=data/enwik8 --bytes=4150000 --seconds=240"
    $RUN --core=0 --side=ours & $RUN --core=1 --side=nanogpt --nanogpt=nanoGPT; wait
    python -m benchmarks.nanogpt compare

`run` makes all runs of one side, each on one core with one thread, and adds each to a CSV file when
it ends. It skips the runs that the file has, so the same command continues after an interruption.
`compare` prints the runs of each side as a table. The training time is CPU time of the process, so
that other work on the core does not take steps from a side. On a quiet core it is the time of a
clock on the wall, which the file has too. nanoGPT's side needs torch.

Equal on both sides: the text and its splits (90, 5 and 5 percent, by position), bytes as tokens,
about 3.5 million parameters, the training time, the number of tokens of a step, no dropout,
float32, and compiled training steps (torch.compile, jax.jit). Compilation is not part of the
training time, and neither are the steps that are timed before it, which are discarded. Each side
has three learning rates on one seed, and its best one by the validation split on two more seeds.

Not equal: our side is the preset own_bytes as `--minutes` would train it (Muon and Adam, a linear
decay to zero, rows of 32 bytes with a memory). nanoGPT's side is model.py from the clone with the
settings of its config/train_shakespeare_char.py (AdamW with betas 0.9 and 0.99, weight decay 0.1,
a warm-up and a cosine to a tenth of the rate, gradients clipped at 1), except for the model's size
and the dropout, and with the best of three batch shapes. Its loop is repeated here, since train.py
trains when it is imported. On both sides the learning rate reaches its end when the time does: each
step computes its rate for the number of steps that the time has room for at the pace so far.

Each side is scored with its best context among a few, chosen on the first bytes of the validation
split: nanoGPT in windows of its block size, of which each scores the last `stride` bytes, ours with
a memory. Both score every byte of the test split but the first.
"""

import argparse
import csv
import dataclasses
import enum
import importlib.metadata
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from benchmarks import records
from txl_jax.cli.plans import PRE_NORM_STEPS
from txl_jax.config import NormPlace, config_tree
from txl_jax.config.experiment import preset
from txl_jax.data.segments import training_segments
from txl_jax.errors import UserError
from txl_jax.runs.build import Built, build
from txl_jax.runs.score import score

CSV = Path(__file__).with_name("nanogpt.csv")
VOCAB_SIZE = 256  # Bytes.
VALID_BYTES = 50_000  # First bytes of the validation split, for all choices.
SECONDS_TO_TIME = 5.0  # Steps are timed for at least so long before the training.


class Side(enum.StrEnum):
    """The two implementations."""

    OURS = "ours"
    NANOGPT = "nanogpt"


class Splits(NamedTuple):
    """The splits of a text, uint8 [T] each."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a training batch."""

    rows: int
    length: int  # Bytes of a row: nanoGPT's block size, our segment length.

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of one side. Its fields identify it in the file."""

    side: Side
    text: str  # Name of the file.
    n_bytes: int  # First bytes of the file that are used.
    budget_seconds: float  # Training time, CPU seconds.
    shape: Shape
    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run reached."""

    parameters: int
    steps: int
    training_seconds: float  # CPU time of the process.
    wall_seconds: float  # The same by a clock on the wall.
    settings: str  # Settings that follow from the number of steps.
    context: str  # The context of the scores.
    valid_bpc: float  # On the first `VALID_BYTES`.
    test_bpc: float


# The plan of a side's runs


@dataclasses.dataclass(frozen=True)
class Plan:
    """The search of a side: its rates at the first shape, then the other shapes, then seeds."""

    side: Side
    shapes: tuple[Shape, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...] = (1, 2, 3)

    def next_run(self, template: Run, results: dict[Run, Result]) -> Run | None:
        """Returns the first run that has no result yet, or None if all have one.

        Args:
          template: A run with the text and the budget. Its other fields are replaced.
          results: The results of all runs so far.
        """
        for run in self._runs(template, results):
            if run not in results:
                return run
        return None

    def final_runs(self, template: Run, results: dict[Run, Result]) -> list[Run]:
        """Returns the runs of all seeds with the best rate and shape.

        Raises:
          UserError: If a run of the search or of a seed is missing.
        """
        missing = self.next_run(template, results)
        if missing is not None:
            raise UserError(f"the file must have all runs of {self.side}, but it lacks {missing}")
        return list(self._runs(template, results))[-len(self.seeds) :]

    def _runs(self, template: Run, results: dict[Run, Result]) -> Iterator[Run]:
        """Yields the runs in order. A run is only yielded when those before it have results."""
        first = dataclasses.replace(
            template, side=self.side, shape=self.shapes[0], seed=self.seeds[0]
        )
        search = []
        for learning_rate in self.learning_rates:
            run = dataclasses.replace(first, learning_rate=learning_rate)
            yield run
            search.append(run)

        best_rate = best_run(search, results).learning_rate
        for shape in self.shapes[1:]:
            run = dataclasses.replace(first, shape=shape, learning_rate=best_rate)
            yield run
            search.append(run)

        best = best_run(search, results)
        for seed in self.seeds:
            yield dataclasses.replace(best, seed=seed)


def best_run(runs: Sequence[Run], results: dict[Run, Result]) -> Run:
    """Returns the run that needs the fewest bits on the validation split."""
    return min(runs, key=lambda run: results[run].valid_bpc)


# own_bytes has the middle rate, and the search shows whether it is best here.
OUR_PLAN = Plan(Side.OURS, shapes=(Shape(64, 32),), learning_rates=(0.005, 0.01, 0.02))
# nanoGPT's configuration for small models has the lowest rate. All shapes are 2,048 bytes.
NANOGPT_PLAN = Plan(
    Side.NANOGPT,
    shapes=(Shape(16, 128), Shape(32, 64), Shape(64, 32)),
    learning_rates=(0.001, 0.002, 0.004),
)
PLANS = {Side.OURS: OUR_PLAN, Side.NANOGPT: NANOGPT_PLAN}


# The training time


@dataclasses.dataclass(frozen=True)
class Pace:
    """Projects how many steps a training time has room for."""

    budget_seconds: float
    # Steps that were timed before the training, and their seconds.
    timed_steps: int
    timed_seconds: float

    def steps_left(self, done: int, elapsed: float) -> int:
        """Returns how many more steps fit, at the mean pace of all steps so far.

        The last step begins if at least half of it fits, so the training time is exceeded as often
        as it is not reached.

        Args:
          done: Steps of the training so far.
          elapsed: Their seconds.
        """
        step_seconds = (self.timed_seconds + elapsed) / (self.timed_steps + done)
        return max(math.floor((self.budget_seconds - elapsed) / step_seconds + 0.5), 0)

    @property
    def planned_steps(self) -> int:
        """Steps of the whole training, by the timed ones."""
        return self.steps_left(0, 0.0)


class Trainer(Protocol):
    """One side: a model with its optimizer's state."""

    versions: str
    parameters: int
    settings: str

    def prepare(self, pace: Pace) -> None:
        """Fits the settings to the number of steps, and returns to the initial state."""

    def step(self, done: int, total: int) -> None:
        """Makes a training step, and waits for it.

        Args:
          done: Steps before it.
          total: Projected steps of the whole training.
        """

    def contexts(self) -> Sequence[Any]:
        """Returns the contexts to choose from, for `score`."""

    def describe(self, context: Any) -> str:
        """Returns a context in words."""

    def score(self, tokens: np.ndarray, context: Any) -> float:
        """Returns the bits per byte of a text, without its first byte."""


def train(trainer: Trainer, pace: Pace, clock: Callable[[], float]) -> tuple[int, float]:
    """Trains for the time of a pace.

    Returns:
      (number of steps, seconds).
    """
    began = clock()
    elapsed = 0.0
    done = 0
    while left := pace.steps_left(done, elapsed):
        trainer.step(done, done + left)
        done += 1
        elapsed = clock() - began
    return done, elapsed


def time_steps(trainer: Trainer, budget_seconds: float, clock: Callable[[], float]) -> Pace:
    """Compiles a side's training step, and times some steps."""
    # What these steps change is discarded by `prepare`, so any schedule will do. The first ones
    # compile and fill buffers.
    total = 1000
    for done in range(2):
        trainer.step(done, total)
    began = clock()
    timed_steps = 0
    while timed_steps < 2 or clock() - began < SECONDS_TO_TIME:
        trainer.step(timed_steps, total)
        timed_steps += 1
    return Pace(budget_seconds, timed_steps, clock() - began)


def warmup_of(steps: int, most: int) -> int:
    """Returns the steps of the warm-up: a tenth of all steps, and not more than `most`."""
    return min(most, steps // 10)


# Ours


class Ours:
    """The preset own_bytes, with the choices that `--minutes` makes for the number of steps."""

    # Lengths of the memory while a text is scored.
    MEMORIES = (32, 64, 128)

    def __init__(self, run: Run, train_tokens: np.ndarray) -> None:
        self._config = config_tree.replace(
            preset("own_bytes"),
            {
                "seed": run.seed,
                # Only for the config's own checks. The text is read by `read_splits`.
                "data.file": run.text,
                "optimizer.learning_rate": run.learning_rate,
                "train.batch_size": run.shape.rows,
                "train.segment_len": run.shape.length,
                # The time is checked after each update.
                "train.segments_per_call": 1,
            },
        )
        self._reader = training_segments(
            train_tokens.astype(np.int32),
            batch_size=run.shape.rows,
            segment_len=run.shape.length,
        )
        self.versions = records.describe_versions("jax", "flax", "optax")
        self.settings = ""
        self._compile()

    def _compile(self) -> None:
        """Builds the config's model, and compiles its training step."""
        self._built: Built = build(self._config, vocab_size=VOCAB_SIZE)
        self._compilation = self._built.compile_step()
        self._state = self._built.init_state()
        self.parameters = self._built.num_parameters

    def prepare(self, pace: Pace) -> None:
        """Chooses the warm-up and the place of the layer norms, and returns to the initial state.

        The choices match `cli.plans.TimedPlan.fit_steps`.
        """
        planned = pace.planned_steps
        warmup = warmup_of(planned, self._config.optimizer.warmup_steps)
        changes: dict[str, Any] = {"optimizer.warmup_steps": warmup}
        if planned < PRE_NORM_STEPS:
            changes["model.layer_norm"] = NormPlace.POST
        self._config = config_tree.replace(self._config, changes)
        self.settings = f"warm-up {warmup}, {self._config.model.layer_norm}-norm"
        self._compile()
        # The step of the chosen model fills its buffers too before the time begins.
        self.step(0, planned)
        self._state = self._built.init_state()

    def step(self, done: int, total: int) -> None:
        """Makes a training step, and waits for it."""
        # The lengths of the schedule are data of the compiled step. The decay is longer than 0.
        steps = max(total, self._config.optimizer.warmup_steps + 1)
        config = config_tree.replace(self._config, {"train.steps": steps})
        lengths = dataclasses.replace(self._built, config=config).step_values()
        segments = self._built.place(self._reader.segments(done, 1))
        self._state, metrics = self._compilation.executable(*lengths, self._state, segments)
        jax.block_until_ready((self._state, metrics))

    def contexts(self) -> Sequence[int]:
        """Returns lengths of the memory."""
        return self.MEMORIES

    def describe(self, context: int) -> str:
        """Returns a length of the memory in words."""
        return f"a memory of {context}"

    def score(self, tokens: np.ndarray, context: int) -> float:
        """Returns the bits per byte of a text, read with a memory of `context` bytes."""
        config = config_tree.replace(self._config, {"eval.mem_len": context})
        built = build(config, vocab_size=VOCAB_SIZE)
        totals = score(
            built, self._state.params, tokens.astype(np.int32), name="text", log=lambda line: None
        )
        return totals.nats / totals.tokens / math.log(2)


# nanoGPT


class NanoGPT:
    """The model of a clone of nanoGPT, trained as by its train.py."""

    # Sizes with about as many parameters as own_bytes, in as many layers and heads.
    N_LAYER = 4
    N_HEAD = 4
    N_EMBD = 264
    # As in config/train_shakespeare_char.py, where there are so many of 5,000.
    MOST_WARMUP = 100
    BETAS = (0.9, 0.99)
    WEIGHT_DECAY = 0.1
    CLIP_NORM = 1.0
    # Parts of the block size, the strides of the windows in which a text is scored.
    STRIDE_PARTS = (1, 2, 4)
    WINDOWS_PER_CALL = 32

    def __init__(self, run: Run, train_tokens: np.ndarray, clone: Path) -> None:
        # One core is all that this process has, for the compiler too.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(run.seed)
        self._torch = torch
        self._run = run
        self._tokens = train_tokens.astype(np.int64)
        module = import_model(clone)
        config = module.GPTConfig(
            block_size=run.shape.length,
            vocab_size=VOCAB_SIZE,
            dropout=0.0,
            bias=False,
            n_layer=self.N_LAYER,
            n_head=self.N_HEAD,
            n_embd=self.N_EMBD,
        )
        self._model = module.GPT(config)
        self._initial = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._compiled = torch.compile(self._model)
        self._warmup = 0
        self._optimizer = self._make_optimizer()
        self.parameters = sum(tensor.numel() for tensor in self._model.parameters())
        self.versions = f"{records.describe_versions('torch')}, nanoGPT {commit_of(clone)}"
        self.settings = ""

    def _make_optimizer(self) -> Any:
        return self._model.configure_optimizers(
            self.WEIGHT_DECAY, self._run.learning_rate, self.BETAS, "cpu"
        )

    def prepare(self, pace: Pace) -> None:
        """Chooses the warm-up, and returns to the initial state."""
        self._warmup = warmup_of(pace.planned_steps, self.MOST_WARMUP)
        self.settings = f"warm-up {self._warmup}"
        self._model.load_state_dict(self._initial)
        self._optimizer = self._make_optimizer()
        self._torch.manual_seed(self._run.seed)

    def step(self, done: int, total: int) -> None:
        """Makes a training step on random places of the text."""
        share = share_of_rate(done, total, warmup=self._warmup)
        rate = self._run.learning_rate * share
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self._batch()
        _, loss = self._compiled(inputs, targets)
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _batch(self) -> tuple[Any, Any]:
        """Returns inputs and targets, int64 [rows, length], from random places of the text."""
        length = self._run.shape.length
        n_place = len(self._tokens) - length
        starts = self._torch.randint(n_place, (self._run.shape.rows,)).numpy()
        places = starts[:, None] + np.arange(length)
        inputs = self._torch.from_numpy(self._tokens[places])
        targets = self._torch.from_numpy(self._tokens[places + 1])
        return inputs, targets

    def contexts(self) -> Sequence[int]:
        """Returns strides of the windows."""
        return [self._run.shape.length // part for part in self.STRIDE_PARTS]

    def describe(self, context: int) -> str:
        """Returns a stride in words."""
        return f"windows of {self._run.shape.length}, stride {context}"

    def score(self, tokens: np.ndarray, context: int) -> float:
        """Returns the bits per byte of a text, read in windows with a stride of `context`."""
        torch = self._torch
        ids = tokens.astype(np.int64)
        block = self._run.shape.length
        windows = list(windows_of(len(ids), block=block, stride=context))
        nats = 0.0
        self._model.eval()
        with torch.no_grad():
            for first in range(0, len(windows), self.WINDOWS_PER_CALL):
                group = windows[first : first + self.WINDOWS_PER_CALL]
                places = np.array([window.start for window in group])[:, None] + np.arange(block)
                targets = torch.from_numpy(ids[places + 1])
                logits, _ = self._model(torch.from_numpy(ids[places]), targets)
                losses = torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), targets, reduction="none"
                )
                for window, window_losses in zip(group, losses, strict=True):
                    nats += window_losses[block - window.n_scored :].sum().item()
        self._model.train()
        return nats / (len(ids) - 1) / math.log(2)


def share_of_rate(done: int, total: int, *, warmup: int) -> float:
    """Returns nanoGPT's learning rate of a step as a share of the peak.

    It rises linearly for `warmup` steps, and falls like a cosine to a tenth at step `total`.
    """
    if done < warmup:
        return (done + 1) / (warmup + 1)
    progress = min((done - warmup) / max(total - warmup, 1), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return 0.1 + 0.9 * cosine


class Window(NamedTuple):
    """A window of a text, of which the last tokens are scored."""

    start: int  # Its first input.
    n_scored: int  # Number of its last targets that count.


def windows_of(n_token: int, *, block: int, stride: int) -> Iterator[Window]:
    """Yields windows of `block` inputs in which each token except the first is scored once.

    A window scores the next `stride` tokens that earlier windows have not scored. The first window
    scores all of its targets.

    Raises:
      UserError: If the text is shorter than one window.
    """
    if n_token < block + 1:
        raise UserError(f"a text must have at least {block + 1} bytes to be scored, got {n_token}")
    yield Window(0, block)
    # Targets of a window are the tokens start + 1, ..., start + block.
    scored_end = block + 1
    while scored_end < n_token:
        n_scored = min(stride, n_token - scored_end)
        scored_end += n_scored
        yield Window(scored_end - 1 - block, n_scored)


def import_model(clone: Path) -> Any:
    """Imports model.py from a clone of nanoGPT.

    Raises:
      UserError: If the directory does not have it.
    """
    path = clone / "model.py"
    if not path.exists():
        raise UserError(
            f"--nanogpt must be a clone of nanoGPT, got {clone} without model.py. Run git clone "
            "https://github.com/karpathy/nanoGPT."
        )
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The compiler looks the module of a function up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def commit_of(clone: Path) -> str:
    """Returns the short hash of a clone's commit."""
    command = ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


# A run


def read_splits(path: Path, n_bytes: int) -> Splits:
    """Reads the first bytes of a file as three splits of 90, 5 and 5 percent, by position.

    Raises:
      UserError: If the file has fewer bytes.
    """
    with path.open("rb") as file:
        text = np.frombuffer(file.read(n_bytes), np.uint8)
    if len(text) < n_bytes:
        raise UserError(f"--bytes must be at most the size of {path}, {len(text)}, got {n_bytes}")
    train_end = n_bytes * 90 // 100
    valid_end = n_bytes * 95 // 100
    return Splits(text[:train_end], text[train_end:valid_end], text[valid_end:])


def make_run(trainer: Trainer, run: Run, splits: Splits) -> Result:
    """Trains and scores one side."""
    pace = time_steps(trainer, run.budget_seconds, time.process_time)
    trainer.prepare(pace)
    print(f"training {run.budget_seconds:g} s, about {pace.planned_steps} steps", flush=True)
    wall_began = time.perf_counter()
    steps, seconds = train(trainer, pace, time.process_time)
    wall_seconds = time.perf_counter() - wall_began

    valid = splits.valid[:VALID_BYTES]
    valid_bits = {context: trainer.score(valid, context) for context in trainer.contexts()}
    for context, bits in valid_bits.items():
        print(f"validation, {trainer.describe(context)}: {bits:.4f} bits per byte", flush=True)
    best_context = min(valid_bits, key=lambda context: valid_bits[context])
    test_bits = trainer.score(splits.test, best_context)
    print(f"test: {test_bits:.4f} bits per byte", flush=True)
    return Result(
        parameters=trainer.parameters,
        steps=steps,
        training_seconds=seconds,
        wall_seconds=wall_seconds,
        settings=trainer.settings,
        context=trainer.describe(best_context),
        valid_bpc=valid_bits[best_context],
        test_bpc=test_bits,
    )


def make_trainer(run: Run, splits: Splits, clone: Path | None) -> Trainer:
    """Returns the side of a run. `clone` is nanoGPT's, and None for ours."""
    if run.side is Side.OURS:
        return Ours(run, splits.train)
    assert clone is not None
    return NanoGPT(run, splits.train, clone)


# The file

COLUMNS = (
    "machine",
    "date",
    "versions",
    "command",
    "side",
    "text",
    "bytes",
    "budget seconds",
    "rows",
    "length",
    "learning rate",
    "seed",
    "parameters",
    "steps",
    "training seconds",
    "wall seconds",
    "settings",
    "context",
    "valid bpc",
    "test bpc",
)


def read_results(path: Path) -> dict[Run, Result]:
    """Returns the results in a file. If the file does not exist, the result is empty."""
    results: dict[Run, Result] = {}
    if not path.exists():
        return results
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            run = Run(
                side=Side(row["side"]),
                text=row["text"],
                n_bytes=int(row["bytes"]),
                budget_seconds=float(row["budget seconds"]),
                shape=Shape(int(row["rows"]), int(row["length"])),
                learning_rate=float(row["learning rate"]),
                seed=int(row["seed"]),
            )
            results[run] = Result(
                parameters=int(row["parameters"]),
                steps=int(row["steps"]),
                training_seconds=float(row["training seconds"]),
                wall_seconds=float(row["wall seconds"]),
                settings=row["settings"],
                context=row["context"],
                valid_bpc=float(row["valid bpc"]),
                test_bpc=float(row["test bpc"]),
            )
    return results


def add_result(path: Path, run: Run, result: Result, *, versions: str) -> None:
    """Adds a row to a file. Both sides may add theirs at the same time."""
    origin = records.origin(_command_of(run), versions, note="1 core")
    records.append(path, COLUMNS, [origin | _columns_of_run(run) | _columns_of_result(result)])


def _command_of(run: Run) -> str:
    """Returns the command that makes a run. Paths of this machine are not part of it."""
    command = (
        f"python -m benchmarks.nanogpt run --text={run.text} --bytes={run.n_bytes} "
        f"--seconds={run.budget_seconds:g} --side={run.side}"
    )
    if run.side is Side.NANOGPT:
        command += " --nanogpt=nanoGPT"
    return command


def _columns_of_run(run: Run) -> dict[str, Any]:
    """Returns the columns that tell runs apart."""
    return {
        "side": run.side,
        "text": run.text,
        "bytes": run.n_bytes,
        "budget seconds": f"{run.budget_seconds:g}",
        "rows": run.shape.rows,
        "length": run.shape.length,
        "learning rate": run.learning_rate,
        "seed": run.seed,
    }


def _columns_of_result(result: Result) -> dict[str, Any]:
    """Returns the columns of what a run has measured."""
    return {
        "parameters": result.parameters,
        "steps": result.steps,
        "training seconds": f"{result.training_seconds:.1f}",
        "wall seconds": f"{result.wall_seconds:.1f}",
        "settings": result.settings,
        "context": result.context,
        "valid bpc": f"{result.valid_bpc:.4f}",
        "test bpc": f"{result.test_bpc:.4f}",
    }


# The table


def comparison(results: dict[Run, Result], template: Run) -> list[str]:
    """Returns the comparison as lines of Markdown.

    Raises:
      UserError: If a run is missing.
    """
    lines = [
        "| | parameters | batch | rate | context | steps | bytes read | test, bits per byte |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan in PLANS.values():
        # The runs differ only in their seeds.
        runs = plan.final_runs(template, results)
        run = runs[0]
        of_seeds = [results[seed_run] for seed_run in runs]

        contexts = sorted({result.context for result in of_seeds})
        n_step = round(statistics.mean(result.steps for result in of_seeds))
        n_read = n_step * run.shape.rows * run.shape.length
        mean_bpc = statistics.mean(result.test_bpc for result in of_seeds)
        bpc_of_seeds = ", ".join(f"{result.test_bpc:.3f}" for result in of_seeds)
        test_bpc = f"{mean_bpc:.3f} ({bpc_of_seeds})"
        cells = [
            str(plan.side),
            f"{of_seeds[0].parameters:,}",
            str(run.shape),
            f"{run.learning_rate:g}",
            " or ".join(contexts),
            f"{n_step:,}",
            f"{n_read:,}",
            test_bpc,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# Commands


def run_command(arguments: argparse.Namespace) -> None:
    """Makes the runs of a side that the file does not have.

    Raises:
      UserError: If the side needs a clone and --nanogpt is not set.
    """
    if arguments.side is Side.NANOGPT and arguments.nanogpt is None:
        raise UserError("--nanogpt must be set for --side=nanogpt. Pass the path of a clone.")
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    # XLA reads the size of its thread pool when JAX computes for the first time.
    os.environ["NPROC"] = "1"

    splits = read_splits(arguments.text, arguments.bytes)
    plan = PLANS[arguments.side]
    template = template_of(arguments)
    while run := plan.next_run(template, read_results(arguments.csv)):
        print(f"{run.side}: {run.shape}, rate {run.learning_rate:g}, seed {run.seed}", flush=True)
        trainer = make_trainer(run, splits, arguments.nanogpt)
        result = make_run(trainer, run, splits)
        add_result(arguments.csv, run, result, versions=trainer.versions)
    print(f"{arguments.csv} has all runs of {arguments.side}")


def compare_command(arguments: argparse.Namespace) -> None:
    """Prints the comparison."""
    print("\n".join(comparison(read_results(arguments.csv), template_of(arguments))))


def template_of(arguments: argparse.Namespace) -> Run:
    """Returns a run with the text and the budget of the command line."""
    return Run(
        side=Side.OURS,
        text=arguments.text.name,
        n_bytes=arguments.bytes,
        budget_seconds=arguments.seconds,
        shape=OUR_PLAN.shapes[0],
        learning_rate=0.0,
        seed=0,
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="Make the runs of one side.")
    running.set_defaults(command=run_command)
    running.add_argument("--side", type=Side, choices=list(Side), required=True)
    running.add_argument("--nanogpt", type=Path, help="Clone of nanoGPT, for --side=nanogpt.")
    running.add_argument(
        "--core", type=int, help="Number of the core that the runs use. Without it, any core."
    )
    comparing = commands.add_parser("compare", help="Print the runs of both sides as a table.")
    comparing.set_defaults(command=compare_command)
    for command in (running, comparing):
        command.add_argument(
            "--text", type=Path, default=Path("enwik8"), help="File whose first bytes are used."
        )
        command.add_argument("--bytes", type=int, default=4_150_000, help="Number of them.")
        command.add_argument(
            "--seconds", type=float, default=240, help="Training time of a run, in CPU seconds."
        )
        command.add_argument("--csv", type=Path, default=CSV, help="File of the runs.")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code."""
    arguments = make_parser().parse_args(words)
    try:
        arguments.command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
