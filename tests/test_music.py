"""Tests docs/examples/music.py: pieces, their ids and back, splits and measures."""

import runpy
from types import SimpleNamespace

import numpy as np
import pytest

from support import ROOT

pytestmark = pytest.mark.full
N_PIECE = 20


@pytest.fixture(scope="module")
def music():
    """The script's names."""
    pytest.importorskip("miditok")
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "examples" / "music.py")))


@pytest.fixture(scope="module")
def tokenizer(music):
    return music.new_tokenizer()


@pytest.fixture(scope="module")
def pieces(music):
    return [music.compose(seed) for seed in range(N_PIECE)]


def score_of(music, notes, *, program=0, ticks=480):
    """A score of one track with these notes: start and duration in beats, and pitch."""
    track = music.Track(program=program)
    for start, duration, pitch in notes:
        track.notes.append(music.Note(int(start * ticks), int(duration * ticks), pitch, 80))
    score = music.Score(ticks)
    score.tracks.append(track)
    return score


def bass_of(bar):
    """The lowest pitch of a bar."""
    return min(pitch for _, pitch, _, _ in bar)


# Composing


def test_a_piece_depends_on_its_seed_only(music, pieces):
    assert [music.compose(seed) for seed in range(N_PIECE)] == pieces
    assert len({str(music.bars_of(piece)) for piece in pieces}) == N_PIECE


def test_a_piece_follows_the_rules(music, pieces):
    """16 bars, of which the second 8 repeat the first 8, and only notes of one major scale."""
    for piece in pieces:
        bars = music.bars_of(piece)
        assert len(bars) == 16
        assert bars[8:] == bars[:8]
        # Bar 4 has the dominant, 7 semitones above the tonic of bar 8.
        assert (bass_of(bars[3]) - bass_of(bars[7])) % 12 == 7
        assert len(set(bars[:8])) > 4, "the bars of a theme are not all alike"
    assert music.repeated_bars(pieces) == 1
    assert music.notes_in_key(pieces) == 1


def test_degrees_of_a_major_scale(music):
    """C major, from the tonic to the tonic above it, and the leading note below."""
    assert [music.pitch_of(0, degree) for degree in range(8)] == [0, 2, 4, 5, 7, 9, 11, 12]
    assert music.pitch_of(0, -1) == -1
    assert music.pitch_of(7, 2) == 11, "the third of G major is B"


# Ids


def test_ids_of_a_piece_give_the_same_notes(music, tokenizer, pieces):
    for piece in pieces:
        ids = music.encode(tokenizer, piece)
        decoded = music.decode(tokenizer, ids)
        assert music.bars_of(decoded) == music.bars_of(piece)
        assert music.encode(tokenizer, decoded) == ids


def test_a_sample_ends_at_the_first_end_id_after_its_prompt(music, tokenizer, pieces):
    end = tokenizer[music.END]
    first = music.encode(tokenizer, pieces[0])
    second = music.encode(tokenizer, pieces[1])
    decoded = music.decode(tokenizer, [end, *first, end, *second])
    assert music.bars_of(decoded) == music.bars_of(pieces[0])


def test_a_sample_that_is_cut_off_keeps_its_whole_notes(music, tokenizer, pieces):
    ids = music.encode(tokenizer, pieces[0])
    n_note = pieces[0].note_num()
    assert music.decode(tokenizer, ids[:-1]).note_num() == n_note - 1
    assert music.decode(tokenizer, []).note_num() == 0


def test_ids_in_any_order_are_a_score(music, tokenizer):
    """An untrained model generates such ids."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        # The end id would end the piece.
        ids = rng.integers(3, len(tokenizer), size=300).tolist()
        score = music.decode(tokenizer, ids)
        assert score.note_num() <= 300 // 3, "a note has three tokens"


def test_splits_have_each_piece_once_before_an_end_id(music):
    pieces = [[number, 500] for number in range(10, 50)]
    splits = music.split(pieces, end=2)

    assert {name: len(ids) // 3 for name, ids in splits.items()} == {
        "test": 2,
        "valid": 2,
        "train": 36,
    }
    rows = np.concatenate([*splits.values()]).reshape(-1, 3)
    assert sorted(rows.tolist()) == [[number, 500, 2] for number in range(10, 50)]
    again = music.split(pieces, end=2)
    for name, ids in splits.items():
        np.testing.assert_array_equal(again[name], ids)


def test_two_pieces_are_too_few_for_three_splits(music):
    with pytest.raises(SystemExit, match=r"\b3\b.*\bgot 2\b"):
        music.split([[5], [6]], end=2)


# Measures


def test_a_bar_repeats_if_instrument_pitch_start_and_duration_are_the_same(music):
    # One note in each of the bars 1 to 8, then in bars 9 to 12: the same, another pitch, another
    # start, another duration.
    notes = [(4 * bar, 1, 60) for bar in range(8)]
    notes += [(32, 1, 60), (36, 1, 61), (41, 1, 60), (44, 2, 60)]
    piece = score_of(music, notes)

    assert music.repeated_bars([piece]) == 1 / 4
    short = score_of(music, notes[:8])
    assert np.isnan(music.repeated_bars([short]))
    # The pieces are weighted by their bars.
    assert music.repeated_bars([piece, short, score_of(music, notes[:9])]) == 2 / 5


def test_silence_does_not_repeat(music):
    """Bars without notes, before the only note in bar 17."""
    assert music.repeated_bars([score_of(music, [(64, 1, 60)])]) == 0


def test_notes_in_key_are_those_of_the_scale_that_fits_best(music):
    c_major = score_of(music, [(0, 1, pitch) for pitch in (60, 62, 64, 65, 67, 69, 71)])
    assert music.notes_in_key([c_major]) == 1
    # Twelve notes of which any scale has seven.
    chromatic = score_of(music, [(0, 1, pitch) for pitch in range(60, 72)])
    assert music.notes_in_key([chromatic]) == 7 / 12
    assert music.notes_in_key([c_major, chromatic]) == 14 / 19
    assert np.isnan(music.notes_in_key([score_of(music, [])]))


# Commands


def test_from_a_directory_of_midi_files_to_ids_and_back(music, tmp_path, capsys):
    """Broken files, and files without notes, are named and skipped."""
    folder = tmp_path / "midi"
    ids = tmp_path / "ids"
    music.main(["compose", str(folder), "--pieces=5", "--seed=3"])
    (folder / "broken.mid").write_bytes(b"MThd, but nothing else")
    score_of(music, []).dump_midi(folder / "silent.mid")
    capsys.readouterr()

    music.main(["encode", str(folder), str(ids)])
    printed = capsys.readouterr().out
    assert f"skipped {folder}/broken.mid" in printed
    assert f"skipped {folder}/silent.mid: no notes" in printed
    assert "train: 3 pieces" in printed
    assert "--data.reset_at=2 " in printed
    assert f"--data.tokenizer.vocab_size={len(music.new_tokenizer())} " in printed

    # A file as `--mode=generate` writes it, with a piece of the test split and one of the
    # validation split, each after the end id as its prompt.
    texts = []
    for split in ("test", "valid"):
        piece = np.load(ids / f"{split}.npy")
        texts.append(" ".join(map(str, [2, *piece.tolist()])))
    samples = tmp_path / "sample-seed0.txt"
    samples.write_text("\n\n--- next sample ---\n\n".join(texts) + "\n")
    out = tmp_path / "pieces"
    out.mkdir()
    music.main(
        [
            "decode",
            str(samples),
            str(out / "piece.mid"),
            f"--tokenizer={ids / music.TOKENIZER_FILE}",
        ]
    )
    capsys.readouterr()

    assert sorted(path.name for path in out.iterdir()) == ["piece-2.mid", "piece.mid"]
    music.main(["measure", str(out)])
    printed = capsys.readouterr().out
    assert "2 pieces, 32 bars: 1.000" in printed
    assert "1.000 of the notes" in printed
