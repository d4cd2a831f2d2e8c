"""Learning curves of a model and of the same one without the part in question: a file, a table and a picture."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from txl_jax import plots
from txl_jax.runtime.storage import as_path, make_folder, write_json

UPDATES_PER_POINT = 10


def write(out: str, curves: Mapping[str, Sequence[float]], *, measure: str, bounds: str, title: str) -> None:
    """Writes curves.json and curves.png, and prints the mean of each curve's last three points.

    Args:
      out: folder, made if missing.
      curves: by name, the measure of every `UPDATES_PER_POINT` updates.
      measure: its name.
      bounds: what is the best possible.
      title: of the picture.
    """
    folder = as_path(out)
    make_folder(folder)
    points = {
        name: {UPDATES_PER_POINT * number: value for number, value in enumerate(curve, start=1)}
        for name, curve in curves.items()
    }
    write_json(os.path.join(folder, "curves.json"), points)
    print(f"\n{measure}, mean of the last {3 * UPDATES_PER_POINT} updates ({bounds})")
    for name, curve in curves.items():
        print(f"  {name:<16} {np.mean(curve[-3:]):.3f}")
    if plots.can_draw():
        plots.curves(points, os.path.join(folder, "curves.png"), title=title, xlabel="updates", ylabel=measure)
        print(f"picture {os.path.join(folder, 'curves.png')}")
