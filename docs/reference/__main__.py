"""Writes the generated parts of the pages again: `python -m docs.reference`."""

from docs.reference.pages import PAGES, filled


def main() -> None:
    """Writes each page whose generated parts have changed, and prints its path."""
    for path in PAGES:
        text = path.read_text()
        new_text = filled(text)
        if new_text != text:
            path.write_text(new_text)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
