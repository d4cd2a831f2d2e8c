"""Turns MIDI files into token ids for `experiments.text`, and generated ids into MIDI files.

    pip install miditok
    python docs/examples/music.py compose midi --pieces=2000  # Or use your own directory.
    python docs/examples/music.py encode midi ids
    python -m experiments.text --tokenizer=id --train=ids/train.npy ...  # `encode` prints it.
    python docs/examples/music.py decode runs/music/sample-seed0.txt piece.mid
    python docs/examples/music.py measure midi

MidiTok writes a score as REMI tokens (Huang and Yang, 2020): bars, positions in a bar, pitches,
velocities, durations, instruments, tempos and time signatures. docs/music.md shows the whole way.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

try:
    from miditok import REMI, TokenizerConfig, TokSequence
    from symusic import Note, Score, Tempo, TimeSignature, Track
except ImportError as error:
    sys.exit(f"docs/examples/music.py needs MidiTok ({error}). Run pip install miditok.")

# File in the directory of ids with the settings of the tokenizer, for `decode`.
TOKENIZER_FILE = "midi-tokenizer.json"
# Token that ends each piece. As a prompt, it begins a new piece.
END = "EOS_None"
# Token that begins each bar.
BAR = "Bar_None"
# What `experiments.text` writes between the samples of a file.
NEXT_SAMPLE = "--- next sample ---"

TICKS_PER_BEAT = 480
BEATS_PER_BAR = 4
TICKS_PER_BAR = BEATS_PER_BAR * TICKS_PER_BEAT
# Semitones of the degrees of a major scale above its tonic.
SCALE = (0, 2, 4, 5, 7, 9, 11)
# Chords of the first four bars of a theme, which end on the dominant, as degrees from 0.
OPENINGS = ((0, 5, 3, 4), (0, 3, 1, 4), (5, 3, 0, 4), (0, 2, 5, 4))
# Chords of its last four bars, which end on the tonic.
CLOSINGS = ((5, 3, 4, 0), (0, 3, 4, 0), (3, 1, 4, 0), (2, 5, 4, 0))
THEME_BARS = 8
# Beats of the notes of a bar.
RHYTHMS = ((1, 1, 1, 1), (2, 1, 1), (1, 1, 2), (1.5, 0.5, 1, 1), (1, 0.5, 0.5, 2))
# Steps of a melody in degrees of the scale. Small steps are more frequent.
STEPS = (-2, -1, -1, 1, 1, 2)
PIANO = 0  # General MIDI programs.
VIOLIN = 40


# Composing


def compose(seed: int) -> Score:
    """Composes a piece of 16 bars in 4/4 for violin and piano: a theme of 8 bars, played twice.

    The theme is a period in a major key. Its first half ends on the dominant, its second half on
    the tonic. Each bar has one chord and a melody that begins on a note of this chord and moves by
    small steps of the scale.
    """
    rng = random.Random(seed)
    tonic = rng.randrange(12)
    chords = rng.choice(OPENINGS) + rng.choice(CLOSINGS)
    melody = [melody_of_bar(rng, chord) for chord in chords[:-1]]
    melody.append([(0, BEATS_PER_BAR)])  # The theme closes with a long tonic.

    violin = Track(program=VIOLIN, name="violin")
    piano = Track(program=PIANO, name="piano")
    for bar in range(2 * THEME_BARS):
        start = bar * TICKS_PER_BAR
        chord = chords[bar % THEME_BARS]
        for third in (0, 2, 4):
            pitch = 48 + pitch_of(tonic, chord + third)
            piano.notes.append(Note(start, TICKS_PER_BAR, pitch, 56))
        for degree, beats in melody[bar % THEME_BARS]:
            duration = int(beats * TICKS_PER_BEAT)
            violin.notes.append(Note(start, duration, 60 + pitch_of(tonic, degree), 88))
            start += duration

    score = Score(TICKS_PER_BEAT)
    score.tempos.append(Tempo(0, qpm=100))
    score.time_signatures.append(TimeSignature(0, BEATS_PER_BAR, 4))
    score.tracks.append(violin)
    score.tracks.append(piano)
    return score


def melody_of_bar(rng: random.Random, chord: int) -> list[tuple[int, float]]:
    """Returns the notes of one bar as degrees of the scale, from 0, and beats."""
    degree = chord + rng.choice((0, 2, 4))
    notes = []
    for beats in rng.choice(RHYTHMS):
        notes.append((degree, beats))
        degree += rng.choice(STEPS)
    return notes


def pitch_of(tonic: int, degree: int) -> int:
    """Returns semitones above C for a degree of the major scale of a tonic. May be negative."""
    octave, step = divmod(degree, len(SCALE))
    return tonic + 12 * octave + SCALE[step]


# MIDI files to ids and back


def new_tokenizer() -> REMI:
    """Returns the tokenizer of `encode`, one stream of tokens for all instruments of a piece.

    Notes begin and end at multiples of 1/8 of a beat, and long notes at coarser ones. To keep
    triplets, pass `beat_res={(0, 12): 12}` as well.
    """
    config = TokenizerConfig(
        num_velocities=16,
        use_programs=True,
        program_changes=True,  # A token where the instrument changes, instead of one per note.
        use_tempos=True,
        use_time_signatures=True,
    )
    return REMI(config)


def encode(tokenizer: REMI, score: Score) -> list[int]:
    """Returns the ids of a piece, without an end id. They are the same in every process."""
    return tokenizer(score).ids


def decode(tokenizer: REMI, ids: Iterable[int]) -> Score:
    """Returns the piece that ids describe, up to their first end id.

    End ids before the piece are skipped. Ids that do not form notes are ignored, such as the last
    ids of a piece that was cut off within a note.
    """
    end = tokenizer[END]
    piece: list[int] = []
    for token in ids:
        if token != end:
            piece.append(token)
        elif piece:
            break
    return tokenizer.decode(TokSequence(ids=piece))


def midi_files(folder: Path) -> list[Path]:
    """Returns the MIDI files in a directory and below it, sorted by name."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".mid", ".midi"))


def split(pieces: Sequence[list[int]], end: int) -> dict[str, np.ndarray]:
    """Splits pieces at random into train (90 %), valid and test (5 % each), at least one each.

    Returns:
      The ids of each split, uint16 [T]. Each piece is followed by the id `end`.
    """
    if len(pieces) < 3:
        sys.exit(f"encode must have at least 3 MIDI files with notes, got {len(pieces)}. Add some.")
    order = list(pieces)
    random.Random(0).shuffle(order)
    n_heldout = max(1, len(order) // 20)
    splits = {
        "test": order[:n_heldout],
        "valid": order[n_heldout : 2 * n_heldout],
        "train": order[2 * n_heldout :],
    }
    return {
        name: np.concatenate([np.array([*piece, end], np.uint16) for piece in members])
        for name, members in splits.items()
    }


# Measures


def bars_of(score: Score) -> list[frozenset[tuple[int, int, int, int]]]:
    """Returns the notes that begin in each bar of a piece in 4/4.

    A note is its instrument, pitch, start within the bar and duration, both in 1/8 of a beat.
    """
    units_per_bar = BEATS_PER_BAR * 8
    bars: list[set[tuple[int, int, int, int]]] = []
    for track in score.tracks:
        for note in track.notes:
            start = round(note.start * 8 / score.ticks_per_quarter)
            duration = round(note.duration * 8 / score.ticks_per_quarter)
            bar, start_in_bar = divmod(start, units_per_bar)
            while len(bars) <= bar:
                bars.append(set())
            bars[bar].add((track.program, note.pitch, start_in_bar, duration))
    return [frozenset(bar) for bar in bars]


def repeated_bars(scores: Iterable[Score]) -> float:
    """Returns the fraction of bars, from the 9th of a piece on, equal to the bar 8 bars before.

    NaN if no piece has more than 8 bars.
    """
    repeats = []
    for score in scores:
        bars = bars_of(score)
        for earlier, later in zip(bars, bars[THEME_BARS:], strict=False):
            repeats.append(bool(later) and earlier == later)
    return float(np.mean(repeats)) if repeats else float("nan")


def notes_in_key(scores: Iterable[Score]) -> float:
    """Returns the fraction of notes that are in the major scale that fits their piece best.

    NaN without notes.
    """
    n_in_key = 0
    n_note = 0
    for score in scores:
        classes = [note.pitch % 12 for track in score.tracks for note in track.notes]
        counts = np.bincount(np.array(classes, int), minlength=12)
        n_in_key += max(sum(counts[(tonic + step) % 12] for step in SCALE) for tonic in range(12))
        n_note += len(classes)
    return n_in_key / n_note if n_note else float("nan")


# Commands


def compose_command(folder: Path, pieces: int, seed: int) -> None:
    """Writes composed pieces into a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(pieces):
        compose(seed * 1_000_000 + number).dump_midi(folder / f"piece-{number:05}.mid")
    print(f"{pieces:,} pieces in {folder}")


def encode_command(folder: Path, out: Path) -> None:
    """Writes the ids of a directory's MIDI files, one file per split, and the tokenizer.

    Prints the number of ids, and the flags of `experiments.text` that they need.
    """
    tokenizer = new_tokenizer()
    pieces = []
    for path in midi_files(folder):
        try:
            ids = encode(tokenizer, Score(path))
        # Collections of MIDI files contain broken ones, which raise nearly any exception.
        except Exception as error:  # noqa: BLE001
            print(f"skipped {path}: {error}")
            continue
        # A file without notes may still have a bar.
        if decode(tokenizer, ids).note_num():
            pieces.append(ids)
        else:
            print(f"skipped {path}: no notes")

    end = tokenizer[END]
    splits = split(pieces, end)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out / TOKENIZER_FILE)
    for name, ids in splits.items():
        np.save(out / f"{name}.npy", ids)
        print(f"{name}: {np.count_nonzero(ids == end):,} pieces, {len(ids):,} ids")
    n_bar = np.count_nonzero(splits["train"] == tokenizer[BAR])
    print(f"{len(splits['train']) / n_bar:.0f} ids per bar")
    print(
        f"python -m experiments.text --tokenizer=id --data.reset_at={end} "
        f"--data.tokenizer.vocab_size={len(tokenizer)} "
        f"--train={out}/train.npy --valid={out}/valid.npy --test={out}/test.npy ..."
    )


def decode_command(samples: Path, tokenizer_file: Path, out: Path) -> None:
    """Writes a MIDI file for each sample of ids: out.mid, out-2.mid, ..."""
    tokenizer = REMI(params=tokenizer_file)
    for number, sample in enumerate(samples.read_text().split(NEXT_SAMPLE), start=1):
        score = decode(tokenizer, map(int, sample.split()))
        path = out if number == 1 else out.with_stem(f"{out.stem}-{number}")
        score.dump_midi(path)
        seconds = score.to("second").end()
        print(f"{path}: {score.note_num()} notes, {seconds:.1f} s")


def measure_command(folder: Path) -> None:
    """Prints both measures of a directory's MIDI files."""
    scores = [Score(path) for path in midi_files(folder)]
    n_bar = sum(len(bars_of(score)) for score in scores)
    print(
        f"{len(scores)} pieces, {n_bar} bars: {repeated_bars(scores):.3f} of the bars from the 9th "
        f"on repeat the bar 8 bars before, {notes_in_key(scores):.3f} of the notes are in key"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description="MIDI files to token ids and back.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("compose", help="write small pieces that follow musical rules")
    command.add_argument("folder", type=Path)
    command.add_argument("--pieces", type=int, default=2000)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("encode", help="write the ids of a directory of MIDI files")
    command.add_argument("folder", type=Path)
    command.add_argument("out", type=Path)
    command = commands.add_parser("decode", help="write generated ids as MIDI files")
    command.add_argument("samples", type=Path, help="file of ids, as --mode=generate writes it")
    command.add_argument("out", type=Path)
    command.add_argument("--tokenizer", type=Path, default=Path("ids") / TOKENIZER_FILE)
    command = commands.add_parser("measure", help="print how much of the pieces repeats and fits")
    command.add_argument("folder", type=Path)

    parsed = parser.parse_args(arguments)
    if parsed.command == "compose":
        compose_command(parsed.folder, parsed.pieces, parsed.seed)
    elif parsed.command == "encode":
        encode_command(parsed.folder, parsed.out)
    elif parsed.command == "decode":
        decode_command(parsed.samples, parsed.tokenizer, parsed.out)
    else:
        measure_command(parsed.folder)


if __name__ == "__main__":
    main()
