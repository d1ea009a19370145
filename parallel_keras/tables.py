"""Tables as text and as HTML, for what the package shows of a model. Pure."""

import html


def aligned(rows, left):
    """Lines of columns; the first row is the head.

    Args:
        rows: Iterable of rows of strings.
        left: The heads of the columns that are words: these are set to the left, and
            numbers to the right.

    >>> aligned([("layer", "bytes"), ("a", "1024"), ("bc", "8")], left=("layer",))
    ['layer  bytes', '────────────', 'a       1024', 'bc         8']
    """
    rows = [tuple(row) for row in rows]
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    to_left = [column[0] in left for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, to_left, strict=True)
        lines.append("  ".join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in cells))
    lines.insert(1, "─" * len(lines[0]))
    return lines


def as_html(head, rows):
    """An HTML table; what is in the cells is text."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
