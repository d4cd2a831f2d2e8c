"""`experiments.prepare` where miniatures count as the corpora; run as a program by its tests."""

import runpy

from support import miniature

if __name__ == "__main__":
    miniature.install()
    runpy.run_module("experiments.prepare", run_name="__main__")
