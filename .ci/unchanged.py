"""Checks that `pip install '.[plots]'` would leave packages as they are.

Usage: `python .ci/unchanged.py constraints/colab.txt`.

Run by the Python of an environment that has the file's packages, as Colab has. Ends with an error
and the names of those that pip would replace.
"""

import json
import subprocess
import sys
from pathlib import Path


def pinned(path: Path) -> set[str]:
    """Returns the names of a constraints file, in pip's spelling."""
    lines = (
        line.partition("==")[0].strip()
        for line in path.read_text().splitlines()
        if not line.startswith("#")
    )
    return {line.lower().replace("_", "-") for line in lines if line}


def main() -> None:
    """Asks pip for its plan and compares it with the file."""
    root = Path(__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        "-",
        f"{root}[plots]",
    ]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    names = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in plan["install"]
    }
    assert "txl-jax" in names, "the plan is not of this package"
    if replaced := sorted(names.keys() & pinned(Path(sys.argv[1]))):
        sys.exit(
            f"error: pip would install {', '.join(f'{name} {names[name]}' for name in replaced)}"
        )
    added = ", ".join(f"{name} {version}" for name, version in sorted(names.items()))
    print(f"pip would install {added}, and replace none of {sys.argv[1]}")


if __name__ == "__main__":
    main()
