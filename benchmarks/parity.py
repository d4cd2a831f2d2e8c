"""Compares how this package and the authors' PyTorch release learn, from the same weights.

    RUN="python benchmarks/parity.py train --data_dir=data --comparison=float64 --text=enwik8"
    $RUN --side=original --seed=1
    $RUN --side=ours --seed=1
    python benchmarks/parity.py compare
    python benchmarks/parity.py draw --out=docs/parity.png

`train` makes one run of one side, and adds its losses to a CSV file when it is finished. Runs that
differ only in the side begin with the same weights and read the same batches. A run that the file
has is not made again. After a kill, the same command makes the unfinished run from its start.

`compare` prints the differences, and exits with code 1 if one is above its bound. `draw` makes the
figure.

The original is the release's own model, from the clone that --original or TXL_ORIGINAL names. It
needs torch (pip install '.[peer]'), and is trained as by the release's train.py with Adam, a
warm-up and a cosine. Ours is a run with --compat=pytorch.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import enum
import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from txl_jax import plots
from txl_jax.config import (
    AttentionPath,
    CorpusName,
    DataConfig,
    DropoutConfig,
    DType,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    config_tree,
)
from txl_jax.config.experiment import apply_preset
from txl_jax.data.corpus import read_corpus
from txl_jax.data.published import default_data
from txl_jax.data.segments import SegmentReader, evaluation_segments, training_segments
from txl_jax.errors import UserError
from txl_jax.evaluation.streaming import evaluate
from txl_jax.interop import original as original_format
from txl_jax.recurrence import Segments
from txl_jax.runs.build import Built, build
from txl_jax.runtime.environment import device_kind

ROOT = Path(__file__).resolve().parents[1]
CSV = ROOT / "benchmarks" / "parity.csv"
# The release's repository as one file, where the nightly tests find it too, and its last commit.
BUNDLE = ROOT.parent / "shared" / "original.bundle"
ORIGINAL_COMMIT = "44781ed"

BATCH_SIZE = 8
SEGMENT_LEN = 32
MEM_LEN = 32
UPDATES_PER_CALL = 10
# The validation loss is computed after every so many updates, on so many tokens of the split.
VALID_EVERY = 100
VALID_TOKENS = BATCH_SIZE * SEGMENT_LEN * 40


class Side(enum.StrEnum):
    """The two implementations."""

    ORIGINAL = "original"
    OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What both sides do."""

    dtype: DType
    dropout: float  # Rate of all dropouts, that of the attention probabilities too.
    learning_rate: float  # The peak.
    warmup: int  # Updates of the warm-up.
    updates: int
    window: int  # Number of updates whose mean loss is one row of the file.


_EXACT = Comparison(
    DType.FLOAT64,
    dropout=0.0,
    # That of the release's run_enwik8_base.sh.
    learning_rate=0.00025,
    warmup=10,
    updates=200,
    window=1,
)
COMPARISONS = {
    "float64": _EXACT,
    "float32": dataclasses.replace(_EXACT, dtype=DType.FLOAT32),
    "dropout": Comparison(
        DType.FLOAT32,
        dropout=0.1,
        # Higher, so that a small model learns something in so few updates.
        learning_rate=0.001,
        warmup=100,
        updates=2000,
        window=100,
    ),
}
TEXTS = {"enwik8": CorpusName.ENWIK8, "ptb": CorpusName.PTB}

SEEDS = (1, 2, 3)  # Of the comparison with dropout. The others have the first one only.

# Bounds of the relative difference of an update's loss.
FIRST_BOUND = 1e-9  # float64, the first update.
FLOAT64_BOUND = 1e-6  # float64, all updates.
FLOAT32_BOUND = 1e-5  # float32, the first updates, before rounding has grown.
FLOAT32_UPDATES = 30
# With dropout, the share of places at which our mean must be in the original's band. It was chosen
# after the runs were seen, by what chance alone gives (`share_outside_by_chance`, 14%).
SHARE_BOUND = 0.85


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one side. Its fields name it in the file."""

    comparison: str
    text: str
    side: Side
    seed: int
    # Our implementation of attention. Empty for the original.
    attention: str

    @property
    def command(self) -> str:
        """The command that makes the run, without the places of files on this machine."""
        words = ["python", "benchmarks/parity.py", "train"]
        words += [f"--comparison={self.comparison}", f"--text={self.text}"]
        words += [f"--side={self.side}", f"--seed={self.seed}"]
        if self.attention:
            words.append(f"--attention={self.attention}")
        return " ".join(words)


class Losses(NamedTuple):
    """A row of the file."""

    update: int  # Number of updates done.
    nats: float  # Mean training loss of the updates since the row before.
    valid_nats: float | None  # Validation loss after these updates, or None if it is not due.


class Trainer(Protocol):
    """One side, which holds its weights, its optimizer's state and its memory."""

    versions: str

    def updates(self, segments: Segments) -> np.ndarray:
        """Makes S updates, and returns their mean losses [S] in nats."""

    def valid_nats(self, reader: SegmentReader) -> float:
        """Returns the mean loss of a text in nats, without dropout, from an empty memory."""


# Runs


def settings(comparison: Comparison, text: str, *, seed: int, attention: str) -> ExperimentConfig:
    """Returns the settings of a run. Both sides are made from them."""
    lengths: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "segment_len": SEGMENT_LEN,
        "mem_len": MEM_LEN,
        "clamp_len": None,
        "same_length": False,
    }
    model = ModelConfig(
        n_layer=3,
        d_model=64,
        n_head=4,
        d_head=16,
        d_inner=256,
        # Larger than the release's defaults, 0.02 and 0.01, with which small models of words can
        # take thousands of updates to become better than the frequencies of words.
        init_std=0.05,
        projection_init_std=0.05,
        dropout=DropoutConfig(rate=comparison.dropout, attention=comparison.dropout),
        dtype=comparison.dtype,
        attention=AttentionPath(attention or AttentionPath.REFERENCE),
    )
    if text == "ptb":
        # The adaptive softmax, with smaller embeddings for rare words, shared as for WikiText-103.
        clusters = {"cutoffs": (1000, 4000), "div_val": 2, "tie_projs": (False, True, True)}
        model = config_tree.replace(model, clusters)
    config = ExperimentConfig(
        seed=seed,
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=comparison.learning_rate,
            warmup_steps=comparison.warmup,
            clip_norm=0.25,
        ),
        train=TrainConfig(
            steps=comparison.updates,
            segments_per_call=UPDATES_PER_CALL,
            log_every=comparison.updates,
            eval_every=comparison.updates,
            checkpoint_every=comparison.updates,
            **lengths,
        ),
        eval=EvalConfig(**lengths),
    )
    return apply_preset(config, "pytorch")


def train(trainer: Trainer, comparison: Comparison, texts: "Texts") -> Iterator[Losses]:
    """Trains one side, and yields a row per window of updates."""
    window: list[float] = []
    for first_update in range(0, comparison.updates, UPDATES_PER_CALL):
        losses = trainer.updates(texts.train.segments(first_update, UPDATES_PER_CALL))
        for update, nats in enumerate(losses.tolist(), start=first_update + 1):
            window.append(nats)
            if update % comparison.window:
                continue
            valid_nats = None
            # Updates are made in calls, so the weights are those of a call's last update.
            if update % VALID_EVERY == 0:
                valid_nats = trainer.valid_nats(texts.valid)
            yield Losses(update, float(np.mean(window)), valid_nats)
            window.clear()


class Texts(NamedTuple):
    """The batches of both sides."""

    train: SegmentReader
    valid: SegmentReader
    vocab_size: int


def read_texts(text: str, data_dir: str, *, enwik8: str, cache_dir: str | None) -> Texts:
    """Reads a text, and cuts it into batches.

    Args:
      text: A key of `TEXTS`.
      data_dir: Directory of the Penn Treebank's files, and of `enwik8`.
      enwik8: File of the first bytes of enwik8, in `data_dir`.
      cache_dir: Directory for token ids, or None for `prepared` in `data_dir`.
    """
    data: DataConfig = default_data(TEXTS[text])
    if text == "enwik8":
        data = config_tree.replace(data, {"file": str(Path(data_dir, enwik8))})
    corpus = read_corpus(data, data_dir, cache_dir or str(Path(data_dir, "prepared")))
    return make_texts(corpus.train, corpus.valid, corpus.vocabulary.size)


def make_texts(train_ids: np.ndarray, valid_ids: np.ndarray, vocab_size: int) -> Texts:
    """Cuts two splits into batches."""
    return Texts(
        train=training_segments(train_ids, batch_size=BATCH_SIZE, segment_len=SEGMENT_LEN),
        # The rows are of whole segments, so that a mean over segments is a mean over tokens.
        valid=evaluation_segments(
            valid_ids[: VALID_TOKENS + 1], batch_size=BATCH_SIZE, segment_len=SEGMENT_LEN
        ),
        vocab_size=vocab_size,
    )


# Ours


class Ours:
    """A run of this package."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._state = built.state_from_params(built.init_params())
        self._step = built.compile_step().program
        self.versions = describe_versions("jax", "flax", "optax")

    def updates(self, segments: Segments) -> np.ndarray:
        """Makes S updates, and returns their mean losses [S] in nats."""
        self._state, metrics = self._step(self._state, self._built.place(segments))
        return np.asarray(metrics.nats, np.float64) / np.asarray(metrics.tokens)

    def valid_nats(self, reader: SegmentReader) -> float:
        """Returns the mean loss of a text in nats, without dropout, from an empty memory."""
        prepared = self._built.prepare_params(self._state.params)
        totals = evaluate(
            self._built.eval_step,
            prepared,
            self._built.init_memory(prepared),
            reader,
            place=self._built.place,
        )
        return totals.nats / totals.tokens


# The authors' release


class Original:
    """The release's model, trained as its train.py does.

    The script itself cannot be imported: it trains when it is read, and calls functions that torch
    no longer has. `updates` and `valid_nats` repeat its loops, line by line.
    """

    def __init__(self, built: Built, params: Any, *, clone: Path, threads: int) -> None:
        # `experiments` is not installed with the package: it is found from this repository's
        # directory, which `main` adds to Python's path.
        from experiments.bench import peers

        model_class, torch = peers.import_original(clone / "pytorch", flag="--original")
        config = built.config
        self._torch = torch
        self._config = config

        torch.set_num_threads(threads)
        is_double = config.model.dtype is DType.FLOAT64
        torch.set_default_dtype(torch.float64 if is_double else torch.float32)
        # Of the dropout.
        torch.manual_seed(config.seed)

        self._model = model_class(
            **original_format.arguments_of(
                config.model, config.eval, vocab_size=built.model.vocab_size
            )
        )
        host_params = jax.tree.map(np.asarray, params)
        arrays = original_format.from_flax(host_params, config.model)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._model.load_state_dict(tensors)
        self._model.train()

        rate = config.optimizer.learning_rate
        self._adam = torch.optim.Adam(self._model.parameters(), lr=rate)
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self._adam, config.train.steps, eta_min=0.0
        )
        self._train_step = 0
        # The memory begins empty. The end of an epoch, where train.py empties it, is not reached.
        self._memory: tuple[Any, ...] = ()
        self.versions = f"{describe_versions('torch')}, release {ORIGINAL_COMMIT}"

    def updates(self, segments: Segments) -> np.ndarray:
        """Makes S updates, and returns their mean losses [S] in nats."""
        losses = [
            self._update(*self._tensors(inputs, targets))
            for inputs, targets in zip(segments.inputs, segments.targets, strict=True)
        ]
        return np.array(losses)

    def _update(self, data: Any, target: Any) -> float:
        """Makes one update. All of it is the body of the loop in train.py's `train`."""
        optimizer = self._config.optimizer
        self._model.zero_grad()
        loss, *memory = self._model(data, target, *self._memory)
        self._memory = tuple(memory)
        # Without the script's `.float()`, which is for 16 bits and would round 64 to 32.
        loss = loss.mean()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._model.parameters(), optimizer.clip_norm)
        self._adam.step()

        # The script sets the rate after the update, for the next one. So the first update has the
        # peak rate, warm-up or not.
        self._train_step += 1
        if self._train_step < optimizer.warmup_steps:
            rate = optimizer.learning_rate * self._train_step / optimizer.warmup_steps
            self._adam.param_groups[0]["lr"] = rate
        else:
            with warnings.catch_warnings():
                # About the argument, which the script passes.
                warnings.simplefilter("ignore", UserWarning)
                self._scheduler.step(self._train_step)
        return loss.item()

    def valid_nats(self, reader: SegmentReader) -> float:
        """Returns the mean loss of a text in nats, as train.py's `evaluate` does."""
        self._model.eval()
        total_nats = 0.0
        memory: tuple[Any, ...] = ()
        with self._torch.no_grad():
            segments = reader.segments(0, reader.n_segments)
            for inputs, targets in zip(segments.inputs, segments.targets, strict=True):
                loss, *new_memory = self._model(*self._tensors(inputs, targets), *memory)
                memory = tuple(new_memory)
                total_nats += loss.mean().item()
        self._model.train()
        # All segments have as many tokens (`make_texts`), so their mean is the mean over tokens.
        return total_nats / reader.n_segments

    def _tensors(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
        """Returns ids [B, L] as the release takes them: int64 [L, B]."""
        data = self._torch.from_numpy(np.ascontiguousarray(inputs.T, np.int64))
        target = self._torch.from_numpy(np.ascontiguousarray(targets.T, np.int64))
        return data, target


@contextlib.contextmanager
def clone_of_original(path: str | None) -> Iterator[Path]:
    """Gives a clone of the release: `path`, TXL_ORIGINAL's, or one made from the bundle.

    Raises:
      UserError: If there is none of them.
    """
    path = path or os.environ.get("TXL_ORIGINAL")
    if path:
        yield Path(path)
        return
    if not BUNDLE.exists():
        raise UserError(
            "--original or TXL_ORIGINAL must name a clone of the authors' repository, got neither. "
            "Run git clone https://github.com/kimiyoung/transformer-xl, and pass "
            "--original=transformer-xl."
        )
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch, "original")
        subprocess.run(["git", "clone", "--quiet", str(BUNDLE), str(clone)], check=True)
        checkout = ["git", "-C", str(clone), "checkout", "--quiet", ORIGINAL_COMMIT]
        subprocess.run(checkout, check=True)
        yield clone


def describe_versions(*packages: str) -> str:
    """Returns the versions of Python and of packages."""
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return ", ".join([*versions, f"Python {platform.python_version()}"])


# The file of losses

COLUMNS = (
    "machine",
    "date",
    "versions",
    "command",
    "comparison",
    "text",
    "side",
    "attention",
    "seed",
    "dtype",
    "dropout",
    "update",
    "nats",
    "valid_nats",
)


def read_losses(path: Path) -> dict[Run, list[Losses]]:
    """Returns the rows of each run in a file. Without a file there are no runs."""
    runs: dict[Run, list[Losses]] = {}
    if not path.exists():
        return runs
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            run = Run(
                comparison=row["comparison"],
                text=row["text"],
                side=Side(row["side"]),
                seed=int(row["seed"]),
                attention=row["attention"],
            )
            valid_nats = None
            if row["valid_nats"]:
                valid_nats = float(row["valid_nats"])
            losses = Losses(int(row["update"]), float(row["nats"]), valid_nats)
            runs.setdefault(run, []).append(losses)
    return runs


def add_losses(path: Path, run: Run, losses: Sequence[Losses], *, versions: str) -> None:
    """Adds a finished run to a file, all rows or, if the process is killed, none.

    A run that the file has already, since another process made it meanwhile, is not added.
    """
    comparison = COMPARISONS[run.comparison]
    common = {
        "machine": device_kind(),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "command": run.command,
        "comparison": run.comparison,
        "text": run.text,
        "side": run.side,
        "attention": run.attention,
        "seed": run.seed,
        "dtype": comparison.dtype,
        "dropout": comparison.dropout,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        if run in read_losses(path):
            return
        # The new file is written beside the old one, and then takes its name.
        beside = path.with_name(f".{path.name}.part")
        with beside.open("w", newline="") as file:
            if path.exists():
                file.write(path.read_text())
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if not path.exists():
                writer.writeheader()
            for row in losses:
                writer.writerow(common | _format(row, comparison.dtype))
        beside.replace(path)


def _format(row: Losses, dtype: DType) -> dict[str, str]:
    """Returns the numbers of a row, with all digits that the dtype has."""
    digits = 17 if dtype is DType.FLOAT64 else 9
    valid_nats = ""
    if row.valid_nats is not None:
        valid_nats = f"{row.valid_nats:.{digits}g}"
    return {
        "update": str(row.update),
        "nats": f"{row.nats:.{digits}g}",
        "valid_nats": valid_nats,
    }


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process is in this block for the same directory."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Closing the descriptor, or the end of the process, gives it back.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# The comparison


class MissingRunsError(UserError):
    """Runs that a comparison needs and the file does not have."""

    def __init__(self, path: Path, runs: Sequence[Run]) -> None:
        commands = "\n".join(f"    {run.command} --data_dir=data" for run in runs)
        super().__init__(f"{path} must have the runs of these commands. Run them:\n{commands}")


def runs_of(comparison: str, text: str) -> dict[str, list[Run]]:
    """Returns the runs of a comparison by the name of their line, seed by seed."""
    lines = {"original": (Side.ORIGINAL, ""), "ours": (Side.OURS, "reference")}
    if comparison == "float32":
        # How far rounding alone leads two ways to compute the same function apart.
        lines["ours, tiled"] = (Side.OURS, "tiled")
    seeds = SEEDS if comparison == "dropout" else SEEDS[:1]
    runs = {}
    for name, (side, attention) in lines.items():
        runs[name] = [Run(comparison, text, side, seed, attention) for seed in seeds]
    return runs


class Curves(NamedTuple):
    """The losses of a line's runs."""

    update: np.ndarray  # int [T]
    nats: np.ndarray  # float64 [seeds, T]
    valid_nats: np.ndarray  # float64 [seeds, T], nan where no validation was due.

    @classmethod
    def of(cls, runs: Sequence[Sequence[Losses]]) -> "Curves":
        """Returns the curves of runs that have the same updates."""
        update = np.array([row.update for row in runs[0]])
        nats = [[row.nats for row in run] for run in runs]
        valid_nats = []
        for run in runs:
            valid_nats.append([np.nan if row.valid_nats is None else row.valid_nats for row in run])
        return cls(update, np.array(nats), np.array(valid_nats))


def read_curves(path: Path) -> dict[tuple[str, str], dict[str, Curves]]:
    """Returns the curves of all comparisons, by comparison and text, and then by line.

    Raises:
      MissingRunsError: If the file does not have all of them.
    """
    losses = read_losses(path)
    wanted = {
        (comparison, text): runs_of(comparison, text)
        for comparison in COMPARISONS
        for text in TEXTS
    }
    missing = []
    for lines in wanted.values():
        for runs in lines.values():
            missing += [run for run in runs if run not in losses]
    if missing:
        raise MissingRunsError(path, missing)

    curves = {}
    for key, lines in wanted.items():
        curves[key] = {
            name: Curves.of([losses[run] for run in runs]) for name, runs in lines.items()
        }
    return curves


def relative_difference(ours: Curves, theirs: Curves) -> np.ndarray:
    """Returns the relative difference of the training loss, of the first seed, [T]."""
    return np.abs(ours.nats[0] - theirs.nats[0]) / theirs.nats[0]


class Band(NamedTuple):
    """The losses between which our mean is to be, [T] each."""

    low: np.ndarray
    high: np.ndarray


def band_of(nats: np.ndarray) -> Band:
    """Returns the original's band: its seeds' range, widened by their standard deviation.

    Args:
      nats: The original's losses, [seeds, T]. At each of the T places, the band reaches from the
        lowest seed minus the sample standard deviation of the seeds to the highest one plus it.
    """
    deviation = nats.std(axis=0, ddof=1)
    return Band(low=nats.min(axis=0) - deviation, high=nats.max(axis=0) + deviation)


def count_inside(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Returns at how many places our mean over seeds is in the original's band."""
    band = band_of(theirs)
    mean = ours.mean(axis=0)
    return int(np.sum((band.low <= mean) & (mean <= band.high)))


def share_outside_by_chance() -> float:
    """Returns the share of places at which our mean is outside the band if both sides are equal.

    It is computed from 100,000 places, at which the losses of all seeds are drawn from one normal
    distribution.
    """
    n_place = 100_000
    equal_sides = np.random.default_rng(0).normal(size=(2, len(SEEDS), n_place))
    return 1 - count_inside(*equal_sides) / n_place


def compare(path: Path) -> bool:
    """Prints the differences of all comparisons, and returns whether they are within bounds."""
    within = True
    for (comparison, text), lines in read_curves(path).items():
        print(f"\n{comparison}, {text}")
        if comparison == "dropout":
            within &= _compare_seeds(lines["ours"], lines["original"])
        else:
            within &= _compare_updates(comparison, lines)
    print(f"\n{'all' if within else 'not all'} differences are within their bounds")
    return within


def _compare_updates(comparison: str, lines: Mapping[str, Curves]) -> bool:
    """Prints relative differences update by update. Returns whether they are within bounds."""
    difference = relative_difference(lines["ours"], lines["original"])
    if comparison == "float64":
        checks = [
            ("update 1", difference[0], FIRST_BOUND),
            (f"updates 1 to {len(difference)}", difference.max(), FLOAT64_BOUND),
        ]
    else:
        first = difference[:FLOAT32_UPDATES].max()
        checks = [(f"updates 1 to {FLOAT32_UPDATES}", first, FLOAT32_BOUND)]
    for name, largest, bound in checks:
        print(f"  {name}: largest relative difference {largest:.1e}, bound {bound:.0e}")
    if "ours, tiled" in lines:
        paths = relative_difference(lines["ours, tiled"], lines["ours"])
        print(f"  updates 1 to {len(difference)}: {difference.max():.1e}, without a bound")
        print(f"  the same between two of our attention paths: {paths.max():.1e}")
    return all(largest <= bound for _, largest, bound in checks)


def _compare_seeds(ours: Curves, theirs: Curves) -> bool:
    """Prints where our mean is in the original's band. Returns whether it is at enough places."""
    within = True
    for name in ("nats", "valid_nats"):
        our_nats = getattr(ours, name)
        their_nats = getattr(theirs, name)
        n_inside = count_inside(our_nats, their_nats)
        n_place = our_nats.shape[1]
        within &= n_inside >= SHARE_BOUND * n_place
        last = [
            f"{nats[:, -1].mean():.4f} ({nats[:, -1].std(ddof=1):.4f})"
            for nats in (our_nats, their_nats)
        ]
        label = "training" if name == "nats" else "validation"
        print(f"  {label}: our mean is in the band at {n_inside} of {n_place} places")
        print(f"  {label}, last place: {last[0]} nats, original {last[1]}")
    print(
        f"  at least {SHARE_BOUND:.0%} of the places must be inside. By chance alone "
        f"{share_outside_by_chance():.0%} would be outside"
    )
    return within


# The figure

_ORIGINAL_COLOR = "#d55e00"
_OUR_COLOR = "#0072b2"
_GREY = "#7f7f7f"
_TITLES = {"enwik8": "enwik8, bytes", "ptb": "Penn Treebank, words"}


def draw(path: Path, out: Path) -> None:
    """Draws the learning curves and the differences of all comparisons."""
    curves = read_curves(path)
    drawing = plots.figure(10.5, width=11)
    panels = drawing.subplots(3, 2, squeeze=False)
    for column, text in enumerate(TEXTS):
        with_dropout = curves["dropout", text]
        _draw_learning(panels[0, column], with_dropout, title=_TITLES[text])
        _draw_seeds(panels[1, column], with_dropout)
        _draw_rounding(panels[2, column], curves["float64", text], curves["float32", text])
    for panel in panels.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=9)
    plots.save(drawing, str(out))


def _draw_learning(panel: Any, lines: Mapping[str, Curves], *, title: str) -> None:
    """Draws the losses of training and validation: each seed of the original, and our mean."""
    theirs = lines["original"]
    ours = lines["ours"]
    for name, dashes in (("nats", "-"), ("valid_nats", "--")):
        kind = "training" if name == "nats" else "validation"
        for number, seed_nats in enumerate(getattr(theirs, name)):
            label = f"original, {kind}, {len(SEEDS)} seeds" if number == 0 else None
            panel.plot(
                theirs.update, seed_nats, dashes, color=_ORIGINAL_COLOR, linewidth=1, label=label
            )
        mean = getattr(ours, name).mean(axis=0)
        panel.plot(
            ours.update, mean, dashes, color=_OUR_COLOR, linewidth=1.4, label=f"ours, {kind}, mean"
        )
    panel.set(title=title, ylabel="nats per token", xlabel="updates, with dropout")


def _draw_seeds(panel: Any, lines: Mapping[str, Curves]) -> None:
    """Draws the validation losses minus the original's mean, with the original's band."""
    theirs = lines["original"]
    ours = lines["ours"]
    center = theirs.valid_nats.mean(axis=0)
    band = band_of(theirs.valid_nats)
    panel.fill_between(
        theirs.update,
        band.low - center,
        band.high - center,
        color=_ORIGINAL_COLOR,
        alpha=0.18,
        linewidth=0,
        label="original's seeds, widened by their deviation",
    )
    for number, seed_nats in enumerate(ours.valid_nats):
        label = f"ours, {len(SEEDS)} seeds" if number == 0 else None
        panel.plot(
            ours.update, seed_nats - center, color=_OUR_COLOR, alpha=0.35, linewidth=1, label=label
        )
    mean = ours.valid_nats.mean(axis=0)
    panel.plot(ours.update, mean - center, color=_OUR_COLOR, linewidth=2, label="ours, mean")
    panel.axhline(0, color=_GREY, linewidth=0.8)
    panel.set(ylabel="validation nats, minus\nthe original's mean", xlabel="updates, with dropout")


def _draw_rounding(panel: Any, double: Mapping[str, Curves], single: Mapping[str, Curves]) -> None:
    """Draws the largest relative difference of the training loss up to each update."""
    lines = {
        "original and ours, float32": (single["ours"], single["original"], _ORIGINAL_COLOR),
        "two of our attention paths, float32": (single["ours, tiled"], single["ours"], _GREY),
        "original and ours, float64": (double["ours"], double["original"], _OUR_COLOR),
    }
    for label, (one, other, color) in lines.items():
        # Single updates may have equal losses, for which an axis of powers of 10 has no place.
        largest = np.maximum.accumulate(relative_difference(one, other))
        panel.plot(one.update, largest, color=color, linewidth=1.6, label=label)
    panel.set_yscale("log")
    panel.set(
        ylabel="largest relative difference\nof the loss so far",
        xlabel="updates, without dropout",
        ylim=(1e-14, 1e-2),
    )


# Commands


def train_command(arguments: argparse.Namespace) -> int:
    """Makes one run, unless the file has it. Returns the exit code."""
    attention = ""
    if arguments.side is Side.OURS:
        attention = arguments.attention
    run = Run(arguments.comparison, arguments.text, arguments.side, arguments.seed, attention)
    if run in read_losses(arguments.csv):
        print(f"{arguments.csv} has this run: {run.command}")
        return 0

    # XLA reads the size of its thread pool when JAX computes for the first time.
    os.environ["NPROC"] = str(arguments.threads)
    texts = read_texts(
        run.text, arguments.data_dir, enwik8=arguments.enwik8, cache_dir=arguments.cache_dir
    )
    with contextlib.ExitStack() as stack:
        clone = None
        if run.side is Side.ORIGINAL:
            clone = stack.enter_context(clone_of_original(arguments.original))
        losses, versions = make_run(run, texts, clone=clone, threads=arguments.threads)
    add_losses(arguments.csv, run, losses, versions=versions)
    print(f"added to {arguments.csv}: {run.command}")
    return 0


def make_run(
    run: Run, texts: Texts, *, clone: Path | None, threads: int
) -> tuple[list[Losses], str]:
    """Makes a run. Returns its rows, and the versions of what made it.

    `clone` is the release's, and None for our side.
    """
    comparison = COMPARISONS[run.comparison]
    jax.config.update("jax_enable_x64", comparison.dtype is DType.FLOAT64)
    config = settings(comparison, run.text, seed=run.seed, attention=run.attention)
    trainer = make_trainer(config, texts, clone=clone, threads=threads)
    rows = []
    for row in train(trainer, comparison, texts):
        print(f"update {row.update}: {row.nats:.6f} nats", flush=True)
        rows.append(row)
    return rows, trainer.versions


def make_trainer(
    config: ExperimentConfig, texts: Texts, *, clone: Path | None, threads: int = 1
) -> Trainer:
    """Returns our side, or the original with a clone of the release."""
    built = build(config, vocab_size=texts.vocab_size)
    if clone is None:
        return Ours(built)
    # Our initial weights, so that both sides have the same for a seed.
    return Original(built, built.init_params(), clone=clone, threads=threads)


def compare_command(arguments: argparse.Namespace) -> int:
    """Prints the differences. Returns the exit code."""
    return 0 if compare(arguments.csv) else 1


def draw_command(arguments: argparse.Namespace) -> int:
    """Makes the figure. Returns the exit code."""
    draw(arguments.csv, arguments.out)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    training = commands.add_parser("train", help="Make one run and add its losses to the file.")
    training.set_defaults(command=train_command)
    add = training.add_argument
    add(
        "--comparison",
        choices=list(COMPARISONS),
        required=True,
        help="float64 and float32: 200 updates without dropout. dropout: 2,000 with dropout.",
    )
    add("--text", choices=list(TEXTS), required=True, help="Bytes of enwik8, or words of PTB.")
    add("--side", type=Side, choices=list(Side), required=True, help="Implementation to train.")
    add("--seed", type=int, default=1, help="Seed of the initial weights and of dropout.")
    add(
        "--attention",
        choices=["reference", "tiled"],
        default="reference",
        help="Attention path of our side. float64 has only reference.",
    )
    add("--data_dir", required=True, help="Directory of enwik8's first bytes and of PTB's files.")
    add("--enwik8", default="enwik8-4150k", help="File name of enwik8's first bytes.")
    add("--cache_dir", help="Directory for token ids. Without it, DATA_DIR/prepared.")
    add("--original", help="Clone of the authors' repository. Without it, TXL_ORIGINAL.")
    add("--threads", type=int, default=1, help="Threads of the matmuls.")

    comparing = commands.add_parser("compare", help="Print the differences, and check the bounds.")
    comparing.set_defaults(command=compare_command)

    drawing = commands.add_parser("draw", help="Make the figure, which needs matplotlib.")
    drawing.set_defaults(command=draw_command)
    drawing.add_argument("--out", type=Path, required=True, help="File to write: PNG or SVG.")

    for command in (training, comparing, drawing):
        command.add_argument("--csv", type=Path, default=CSV, help="File of the losses.")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code."""
    arguments = make_parser().parse_args(words)
    try:
        return arguments.command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # The package `experiments` is beside this directory, which Python does not search.
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
