"""Tables as HTML; on a narrow screen each row becomes a list of names and values."""

import html
from collections.abc import Sequence


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, classes: Sequence[str] = (), text: Sequence[str] = ()
) -> str:
    """Returns a table; the first column names the rows.

    Args:
      columns: their headings.
      rows: the cells.
      classes: of each row; empty: none.
      text: headings of the columns that are aligned as text, beside the first; others hold numbers.
    """
    kinds = [' class="text"' if i == 0 or name in text else "" for i, name in enumerate(columns)]
    head = "".join(f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    lines = ["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for number, row in enumerate(rows):
        own = f' class="{classes[number]}"' if classes and classes[number] else ""
        cells = "".join(
            f'<td{kind} data-label="{html.escape(name)}">{html.escape(cell)}</td>'
            for name, kind, cell in zip(columns[1:], kinds[1:], row[1:], strict=True)
        )
        lines.append(f'<tr{own}><th scope="row" class="text">{breakable(row[0])}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


def breakable(name: str) -> str:
    """Escapes a run's name, which may be broken into lines between its settings.

    >>> breakable("seed=1+rate=0.1")
    'seed=1+<wbr>rate=0.1'
    """
    return html.escape(name).replace("+", "+<wbr>")


def breakable_command(command: str) -> str:
    """Escapes a command, which is broken into lines between its words rather than after a hyphen.

    >>> breakable_command("python -m x")
    '<span>python</span> <span>-m</span> <span>x</span>'
    """
    return " ".join(f"<span>{html.escape(word)}</span>" for word in command.split(" "))


def folded(summary: str, content: str, *, rows: int) -> str:
    """Returns the content, folded behind a line if it is long.

    Args:
      summary: the line.
      content: HTML.
      rows: of the content; more than 12 are long.
    """
    return f"<details><summary>{html.escape(summary)}</summary>\n{content}\n</details>" if rows > 12 else content
