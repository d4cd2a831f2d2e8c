"""Plants anomalies in a real log, and counts how many are found at which rate of false alarms.

    cut -d' ' -f3- /var/log/dpkg.log > dpkg.txt  # Any Debian machine has one. Without the times.
    python -m benchmarks.log_anomalies split dpkg.txt --out=log
    python -m experiments.text --workdir=runs/log ...  # Train on log/train (docs/streams.md).
    python -m benchmarks.log_anomalies tune runs/log --log=log
    python -m benchmarks.log_anomalies score runs/log --log=log --learning_rate=4e-4
    python -m benchmarks.log_anomalies latency runs/log --log=log

`split` cuts a log into the files train, valid and test: the first 3,500 lines, the next 1,200 and
the rest. `tune` prints how many nats the validation lines need at several learning rates.
`score` plants `PER_KIND` anomalies of each of `KINDS` in the test lines, with three seeds, scores
validation and test lines with each method, and replaces the rows of a CSV file. A row has the
fraction of anomalies that a threshold finds. Thresholds are of two kinds: a quantile of the
validation lines, as a user would choose it, and the best one for the test lines at a rate of false
alarms, which compares the scores by themselves. `latency` starts docs/examples/score_lines.py, and
measures the time from a line to its record.

An anomaly is found if one of its lines alerts. The line that follows an anomaly counts neither as
an anomaly nor as a false alarm.
"""

import argparse
import collections
import io
import json
import math
import random
import re
import runpy
import shlex
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import txl_jax
from benchmarks import records

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "docs" / "examples" / "score_lines.py"
CSV = ROOT / "benchmarks" / "log_anomalies.csv"
COLUMNS = (
    "machine",
    "date",
    "versions",
    "command",
    "lines",
    "method",
    "score",
    "threshold",
    "seed",
    "anomalies",
    "false alarms",
    "found",
)
TRAIN_LINES = 3500
VALID_LINES = 1200
SEEDS = (1, 2, 3)
PER_KIND = 9
APART = 5  # Fewest lines between the places of two anomalies.
QUANTILES = (0.99, 0.999)  # Of the validation lines, for thresholds.
RATES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)  # Of false alarms among the test lines.
LEARNING_RATES = (5e-5, 2e-4, 4e-4, 8e-4)
ZLIB_WINDOW = 32 << 10  # Bytes that deflate can refer to.
BURST = 8  # Times that a line of a burst is there.
LATENCY_LINES = 500
# Scores of a line.
PER_LINE = "nats per line"
PER_BYTE = "nats per byte"
LARGEST = "largest nats of a byte"


# Kinds of anomalies. Each function gets the lines of a log, a place in it and a source of random
# numbers. It returns the lines to plant there and how many lines of the log they replace, or None
# if the place does not suit.
Plant = tuple[list[bytes], int] | None


def garbled(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """A line in which four bytes are replaced by random printable ones."""
    line = bytearray(lines[place])
    for position in rng.sample(range(len(line) - 1), 4):
        line[position] = rng.randrange(33, 127)
    return [bytes(line)], 1


def unknown_action(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """A line whose first word is an action that dpkg does not have."""
    action, rest = lines[place].split(b" ", 1)
    if action not in (b"install", b"configure", b"upgrade"):
        return None
    unknown = rng.choice([b"quarantine", b"replace", b"inject", b"patch", b"disable"])
    return [unknown + b" " + rest], 1


def downgrade(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """An upgrade of the package that was just installed, to a lower version."""
    if not lines[place - 1].startswith(b"status installed "):
        return None
    _, _, package, version = lines[place - 1].split()
    digits = [number for number, byte in enumerate(version) if byte in b"123456789"]
    if not digits:
        return None
    lower = bytearray(version)
    lower[rng.choice(digits)] -= 1
    return [b"upgrade %s %s %s\n" % (package, version, lower)], 0


def odd_package(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """The installation of a package that Debian does not have."""
    if not lines[place].startswith(b"install "):
        return None
    name = rng.choice([b"xmrig", b"reverse-shell", b"keylogger", b"nc-backdoor", b"cryptolocker"])
    return [b"install %s:amd64 <none> %d.%d\n" % (name, rng.randrange(9), rng.randrange(90))], 0


def missing_line(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """A package that is installed without having been half-configured: that line is missing."""
    del rng
    if not lines[place].startswith(b"status half-configured "):
        return None
    if place + 1 == len(lines) or not lines[place + 1].startswith(b"status installed "):
        return None
    return [lines[place + 1]], 2


def other_program(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """A line of another program."""
    del lines, place
    line = rng.choice(
        [
            b"sshd[%d]: Failed password for root from 203.0.113.9 port 4242 ssh2\n",
            b"kernel: Out of memory: Killed process %d (python3)\n",
            b"CRON[%d]: (root) CMD (run-parts /etc/cron.daily)\n",
            b"systemd[1]: Started session-%d.scope\n",
            b'127.0.0.1 - - "GET /index.html HTTP/1.1" 200 %d\n',
        ]
    )
    return [line % rng.randrange(1000, 60000)], 0


def burst(lines: Sequence[bytes], place: int, rng: random.Random) -> Plant:
    """A line that is repeated, as by a program in a loop."""
    del rng
    return [lines[place]] * (BURST - 1), 0


KINDS: dict[str, Callable[[Sequence[bytes], int, random.Random], Plant]] = {
    "garbled": garbled,
    "unknown action": unknown_action,
    "downgrade": downgrade,
    "odd package": odd_package,
    "missing line": missing_line,
    "other program": other_program,
    "burst": burst,
}


class Log(NamedTuple):
    """A log with planted anomalies."""

    lines: list[bytes]  # Each ends with a newline.
    # int [n], the number of the anomaly that each line belongs to, or NORMAL or AFTER.
    anomaly: np.ndarray
    # Name of each anomaly's kind.
    kinds: list[str]


NORMAL = -1
AFTER = -2  # The line of the log that follows an anomaly.


def plant(lines: Sequence[bytes], seed: int) -> Log:
    """Plants `PER_KIND` anomalies of each kind, at least `APART` lines apart."""
    rng = random.Random(seed)
    places = list(range(APART, len(lines) - APART))
    rng.shuffle(places)

    planted: dict[int, tuple[list[bytes], int]] = {}
    kind_at: dict[int, str] = {}
    for kind, make in KINDS.items():
        n_left = PER_KIND
        for place in places:
            is_free = all(abs(place - taken) >= APART for taken in planted)
            made = make(lines, place, rng) if is_free and n_left else None
            if made is not None:
                planted[place] = made
                kind_at[place] = kind
                n_left -= 1
        assert n_left == 0, f"the log has too few places for {kind}"

    result = Log([], np.zeros(0, int), [])
    anomaly: list[int] = []
    place = 0
    while place < len(lines):
        follows = False
        if place in planted:
            new_lines, n_replaced = planted[place]
            result.lines.extend(new_lines)
            anomaly.extend([len(result.kinds)] * len(new_lines))
            result.kinds.append(kind_at[place])
            place += n_replaced
            follows = True
        result.lines.append(lines[place])
        anomaly.append(AFTER if follows else NORMAL)
        place += 1
    return result._replace(anomaly=np.array(anomaly))


# Methods. Each has `read(lines)`, which returns the scores of the lines by name, floats [n], higher
# for unlikely lines. It continues after the lines that it has read. `fork` returns a copy that
# continues there too.
Scores = dict[str, np.ndarray]


def _scores(nats: Sequence[float], lines: Sequence[bytes]) -> Scores:
    """Returns the two scores that are made of the nats of lines."""
    per_line = np.array(nats)
    return {PER_LINE: per_line, PER_BYTE: per_line / [len(line) for line in lines]}


class ModelMethod:
    """The nats of each line, by the model of docs/examples/score_lines.py."""

    def __init__(self, scorer: Any, *, has_memory: bool = True) -> None:
        """Begins with an empty memory. Without memory, every line does."""
        self.scorer = scorer
        self.state = scorer.start()
        self.has_memory = has_memory

    def read(self, lines: Sequence[bytes]) -> Scores:
        """Scores lines."""
        nats = []
        largest = []
        for line in lines:
            if not self.has_memory:
                self.state = self.scorer.start()
            [(score, self.state)] = self.scorer.scores(self.state, io.BytesIO(line))
            nats.append(score.nats)
            largest.append(score.max_nats)
        return _scores(nats, lines) | {LARGEST: np.array(largest)}

    def fork(self) -> "ModelMethod":
        """Returns a copy that has read the same lines."""
        copy = ModelMethod(self.scorer, has_memory=self.has_memory)
        copy.state = self.state
        return copy


class ZlibMethod:
    """The length of each line after deflate, which may refer to the bytes before it."""

    def __init__(self, before: bytes, *, window: int) -> None:
        """Begins after some bytes, of which the last `window` can be referred to."""
        self.before = before
        self.window = window

    def read(self, lines: Sequence[bytes]) -> Scores:
        """Scores lines by their compressed bits, in nats."""
        nats = []
        for line in lines:
            history = self.before[len(self.before) - self.window :]
            compressor = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=history)
            size = len(compressor.compress(line) + compressor.flush())
            nats.append(8 * size * math.log(2))
            self.before = (self.before + line)[-ZLIB_WINDOW:]
        return _scores(nats, lines)

    def fork(self) -> "ZlibMethod":
        """Returns a copy that has read the same lines."""
        return ZlibMethod(self.before, window=self.window)


class TemplateMethod:
    """Minus the log probability of each line's template after the template of the line before.

    A template is the line with * for each word that has a digit or a colon. Its probabilities are
    from the counts of the training lines.
    """

    def __init__(self, counts: Any, previous: str) -> None:
        """Begins after a template. `counts` has the number of each pair of training templates."""
        self.counts = counts
        self.previous = previous

    @classmethod
    def of(cls, training_lines: Sequence[bytes]) -> "TemplateMethod":
        """Counts pairs of templates."""
        counts: Any = collections.defaultdict(collections.Counter)
        previous = ""
        for line in training_lines:
            template = cls._template(line)
            counts[previous][template] += 1
            previous = template
        return cls(counts, previous)

    @staticmethod
    def _template(line: bytes) -> str:
        return re.sub(r"\S*[\d:]\S*", "*", line.decode(errors="replace"))

    def read(self, lines: Sequence[bytes]) -> Scores:
        """Scores lines by the nats of their templates. An unseen pair counts as half a pair."""
        nats = []
        for line in lines:
            template = self._template(line)
            after = self.counts.get(self.previous, {})
            n_seen = after.get(template, 0)
            total = sum(after.values())
            nats.append(-math.log((n_seen + 0.5) / (total + 1)))
            self.previous = template
        return {PER_LINE: np.array(nats)}

    def fork(self) -> "TemplateMethod":
        """Returns a copy that has read the same lines."""
        return TemplateMethod(self.counts, self.previous)


def make_methods(arguments: argparse.Namespace, train: Sequence[bytes]) -> dict[str, Any]:
    """Returns all methods by name."""
    program = runpy.run_path(str(PROGRAM))
    model = txl_jax.load(arguments.workdir)
    scorer = program["LineScorer"](model)
    learner = program["LineScorer"](model, dynamic=_rule(arguments.learning_rate))
    return {
        "model with memory and learning": ModelMethod(learner),
        "model with memory": ModelMethod(scorer),
        "model without memory": ModelMethod(scorer, has_memory=False),
        "zlib after 32 KB": ZlibMethod(b"".join(train)[-ZLIB_WINDOW:], window=ZLIB_WINDOW),
        "zlib": ZlibMethod(b"", window=0),
        "template pairs": TemplateMethod.of(train),
    }


def _rule(learning_rate: float) -> txl_jax.DynamicConfig:
    return txl_jax.DynamicConfig(rule="rmsprop", learning_rate=learning_rate)


class Result(NamedTuple):
    """What a threshold finds."""

    false_alarms: float  # Fraction of the normal lines.
    found: float  # Fraction of the anomalies.
    of_kind: dict[str, int]  # Number of anomalies that were found, by kind.


def result_of(log: Log, scores: np.ndarray, threshold: float) -> Result:
    """Counts the lines whose score is above a threshold."""
    alerts = scores > threshold
    found_numbers = set(log.anomaly[alerts]) - {NORMAL, AFTER}
    found_kinds = collections.Counter(log.kinds[number] for number in found_numbers)
    return Result(
        false_alarms=float(alerts[log.anomaly == NORMAL].mean()),
        found=len(found_numbers) / len(log.kinds),
        of_kind={kind: found_kinds[kind] for kind in KINDS},
    )


def thresholds(
    log: Log, scores: np.ndarray, valid_scores: np.ndarray
) -> Iterable[tuple[str, float]]:
    """Yields the name and the value of each threshold."""
    for quantile in QUANTILES:
        value = float(np.quantile(valid_scores, quantile, method="higher"))
        yield f"valid quantile {quantile}", value
    # At most this fraction of the normal test lines is above the threshold.
    normal = np.sort(scores[log.anomaly == NORMAL])[::-1]
    for rate in RATES:
        yield f"test rate {rate}", float(normal[int(rate * len(normal))])


def write_splits(arguments: argparse.Namespace) -> None:
    """Writes the files train, valid and test."""
    lines = arguments.file.read_bytes().splitlines(keepends=True)
    splits = {
        "train": lines[:TRAIN_LINES],
        "valid": lines[TRAIN_LINES : TRAIN_LINES + VALID_LINES],
        "test": lines[TRAIN_LINES + VALID_LINES :],
    }
    arguments.out.mkdir(parents=True)
    for name, split in splits.items():
        (arguments.out / name).write_bytes(b"".join(split))
        print(f"{name:6} {len(split):,} lines")


def read_split(arguments: argparse.Namespace, name: str) -> list[bytes]:
    """Returns the lines of a split."""
    return (arguments.log / name).read_bytes().splitlines(keepends=True)


def tune(arguments: argparse.Namespace) -> None:
    """Prints the nats of the validation lines at each learning rate."""
    program = runpy.run_path(str(PROGRAM))
    model = txl_jax.load(arguments.workdir)
    valid = read_split(arguments, "valid")
    n_bytes = len(b"".join(valid))
    for rate in (0.0, *LEARNING_RATES):
        scorer = program["LineScorer"](model, dynamic=_rule(rate) if rate else None)
        nats = ModelMethod(scorer).read(valid)[PER_LINE].sum()
        bits = nats / math.log(2) / n_bytes
        print(f"learning rate {rate:g}: {bits:.3f} bits per byte", flush=True)


def score(arguments: argparse.Namespace) -> None:
    """Scores all methods, and writes the table."""
    valid = read_split(arguments, "valid")
    test = read_split(arguments, "test")
    logs = {seed: plant(test, seed) for seed in SEEDS}

    rows = []
    for name, method in make_methods(arguments, read_split(arguments, "train")).items():
        valid_scores = method.read(valid)
        for seed, log in logs.items():
            for score_name, scores in method.fork().read(log.lines).items():
                rows += _rows(name, score_name, seed, log, scores, valid_scores[score_name])
        print(name, flush=True)

    command = shlex.join(["python", "-m", "benchmarks.log_anomalies", *sys.argv[1:]])
    origin = records.origin(command, records.describe_versions("jax"))
    # The file has one experiment, which replaces the last one.
    arguments.csv.unlink(missing_ok=True)
    records.append(arguments.csv, [*COLUMNS, *KINDS], [origin | row for row in rows])
    _print_table(rows)


def _rows(
    method: str, score_name: str, seed: int, log: Log, scores: np.ndarray, valid_scores: np.ndarray
) -> list[dict[str, Any]]:
    """Returns a row for each threshold."""
    rows = []
    for name, threshold in thresholds(log, scores, valid_scores):
        result = result_of(log, scores, threshold)
        row = {
            "lines": int((log.anomaly == NORMAL).sum()),
            "method": method,
            "score": score_name,
            "threshold": name,
            "seed": seed,
            "anomalies": len(log.kinds),
            "false alarms": f"{result.false_alarms:.4f}",
            "found": f"{result.found:.4f}",
        }
        rows.append(row | result.of_kind)
    return rows


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the means over seeds."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["threshold"], row["method"], row["score"]].append(row)
    for names, group in sorted(groups.items()):
        false_alarms = np.mean([float(row["false alarms"]) for row in group])
        found = np.mean([float(row["found"]) for row in group])
        kinds = [f"{kind} {np.sum([row[kind] for row in group])}" for kind in KINDS]
        print(f"{' | '.join(names):70} {false_alarms:.4f} {found:.3f}  {', '.join(kinds)}")


def latency(arguments: argparse.Namespace) -> None:
    """Prints the time from a line to its record, and the lines per second of a whole file."""
    lines = read_split(arguments, "test")[: LATENCY_LINES + 1]
    mean_bytes = np.mean([len(line) for line in lines[1:]])
    learning = [f"--learning_rate={arguments.learning_rate}"]
    for name, flags in (("", []), (", learning", learning)):
        command = [sys.executable, str(PROGRAM), arguments.workdir, "--threshold=1000", *flags]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            seconds = []
            for line in lines:
                before = time.perf_counter()
                process.stdin.write(line)
                process.stdin.flush()
                json.loads(process.stdout.readline())
                seconds.append(time.perf_counter() - before)
            process.stdin.close()

        # The first line includes loading the model and compiling.
        ms = 1000 * np.array(seconds[1:])
        median = np.median(ms)
        slowest = np.quantile(ms, 0.99)
        print(
            f"{len(ms)} lines of {mean_bytes:.0f} bytes{name}: "
            f"median {median:.2f} ms, 99 % below {slowest:.2f} ms, "
            f"{1000 / ms.mean():.0f} lines/s; first line after {seconds[0]:.1f} s",
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> None:
    """Runs one of the four commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    split = commands.add_parser("split", help="cut a log into train, valid and test")
    split.add_argument("file", type=Path, help="the log")
    split.add_argument("--out", type=Path, required=True, help="the directory of the files")
    split.set_defaults(act=write_splits)

    for name, act, text in (
        ("tune", tune, "try learning rates on the validation lines"),
        ("score", score, "plant anomalies and count how many are found"),
        ("latency", latency, "measure the time from a line to its record"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("workdir", help="the run that was trained on the training lines")
        command.add_argument("--log", type=Path, required=True, help="the directory of the splits")
        command.add_argument("--learning_rate", type=float, default=4e-4, help="while reading")
        command.add_argument("--csv", type=Path, default=CSV, help="the table")
        command.set_defaults(act=act)

    arguments = parser.parse_args(words)
    arguments.act(arguments)


if __name__ == "__main__":
    main()
