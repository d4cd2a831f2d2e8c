r"""Trains, evaluates and samples on your own text: bytes, characters, words, subwords, token ids.

    python -m experiments.text --flagfile=own_bytes --minutes=10 --workdir=runs/mine \
        --data.file=book.txt
    python -m experiments.text --flagfile=own_words --minutes=30 --workdir=runs/mine \
        --train='shards/*.txt' --valid=valid.txt --test=test.txt
    python -m experiments.text --flagfile=own_words --workdir=runs/subwords --tokenizer=subword \
        --data.tokenizer.vocab_size=4000 --data.file=book.txt
    python -m experiments.text --flagfile=own_words --workdir=runs/ids --tokenizer=id \
        --train=train.bin --valid=val.bin
    python -m experiments.text --mode=generate --workdir=runs/mine --generate.prompt='Once upon'
    python -m experiments.text --mode=score --workdir=runs/mine --input=lines.txt > scores.jsonl

One file is split 90/5/5 by position. A directory or glob pattern with three or more files is split
between files. Lists are joined in the order you pass, patterns in the order of names. --train,
--valid, --test and --tokenizer are short for --data.train, --data.valid, --data.test and
--data.tokenizer.kind.
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.TEXT))

if __name__ == "__main__":
    splits = {split: f"data.{split}" for split in ("train", "valid", "test")}
    train_main(DEFAULTS, aliases=splits | {"tokenizer": "data.tokenizer.kind"})
