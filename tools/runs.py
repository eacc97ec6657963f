"""Train the runs of data/runs/ again: every recipe of moe_lib.runs.SETTINGS with every seed. Half a minute a run on two cores.

python tools/runs.py [name…]     e.g. python tools/runs.py "no help" "bias 0.01"; without a name: all of them
"""

import sys
import time

from moe_lib import runs
from moe_lib.corpus import make_corpus
from moe_lib.toy import train


def main(names):
    corpus = make_corpus()
    for name in names or runs.SETTINGS:
        recipe, start = runs.SETTINGS[name], time.time()
        found = [train(recipe, corpus, seed=seed, progress=sys.stderr.isatty())[1] for seed in runs.SEEDS]
        runs.save_runs(runs.path_of(name), recipe, runs.SEEDS, found, corpus)
        told = ", ".join(f"{run.held_out_loss:.4f}" for run in found)
        print(f"{name}: held-out loss {told}; {(time.time() - start) / len(found):.0f} s a run", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
