"""Lists the programs: `python -m txl_jax`."""

# The one list of programs and their descriptions. A test compares it with the files.
PROGRAMS = {
    "Train, evaluate, score and generate (--mode)": {
        "experiments.quickstart": "a small model on Python's own source text, in under three minutes",
        "experiments.text": "your own text: bytes, characters, words or SentencePiece pieces",
        "experiments.enwik8": "enwik8, bytes of Wikipedia",
        "experiments.text8": "text8, letters of Wikipedia",
        "experiments.wikitext103": "WikiText-103 and WikiText-2, words",
        "experiments.ptb": "Penn Treebank, words",
        "experiments.lm1b": "One Billion Word, shuffled sentences",
    },
    "Helpers": {
        "experiments.prepare": "read, check and encode a corpus ahead of a run",
        "experiments.ensemble": "train several runs of one model at once (seeds, learning rates, dropout)",
        "experiments.temperature": "the softmax temperature that suits a trained run",
    },
    "Tables and figures of the paper": {
        "experiments.paper.ablation": "tables 6, 7 and 10: recurrence, encoding and loss",
        "experiments.paper.recl": "table 8: relative effective context length of several runs",
        "experiments.paper.table9": "table 9: speed beside a sliding window",
        "experiments.paper.context_length": "figure 4: scores by attention length",
        "experiments.paper.attention": "figures 5 to 7: attention weights of a trained run",
        "experiments.paper.continuation": "appendix E: generated continuations beside the text's own",
    },
    "Benchmarks": {
        "experiments.bench.speed": "tokens per second of training, evaluation and generation",
        "experiments.bench.softmax_speed": "time and memory of the adaptive softmax beside a full one",
        "experiments.bench.estimate": "memory, FLOPs and least time of a configuration on a TPU slice",
    },
    "Launchers": {
        "launch.local": "several processes of one run on this machine",
        "launch.sweep": "runs of all combinations of some settings",
    },
}


def main() -> None:
    """Prints the programs."""
    print("Programs: python -m NAME; python -m NAME --help lists the flags.")
    width = max(len(name) for programs in PROGRAMS.values() for name in programs)
    for heading, programs in PROGRAMS.items():
        print(f"\n{heading}:")
        for name, description in programs.items():
            print(f"  {name:<{width}}  {description}")


if __name__ == "__main__":
    main()
