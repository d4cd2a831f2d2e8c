"""Trains, evaluates and samples on One Billion Word: shuffled news sentences, 0.8e9 words.

    python -m experiments.lm1b --flagfile=lm1b_base --workdir=runs/lm1b_base --data_dir=data

--data_dir must contain 1-billion-word-language-modeling-benchmark-r13output.tar.gz
(http://www.statmt.org/lm-benchmark). `python -m experiments.prepare --corpus=lm1b` prepares it.

Words that occur fewer than 3 times in the training split become <unk>. Sentences, with one <S>
between them, are reshuffled in each epoch. The published perplexities use another protocol, from
the original TensorFlow release:

    --data.tokenizer.line_mark=double_s  <S> before and after each sentence, so that the easy <S>
                                         after <S> is scored
    --data.heldout=published             validation on the test split instead of another shard
"""

from txl_jax.cli.train_command import train_main
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import default_data

DEFAULTS = ExperimentConfig(data=default_data(CorpusName.LM1B))

if __name__ == "__main__":
    train_main(DEFAULTS)
