"""Tables as Markdown, and the same for a terminal."""


def markdown(head: list[str], rows: list[list]) -> str:
    """A Markdown table, floats with three digits."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(text: str) -> str:
    """The table of a Markdown text for a terminal: columns of equal width, no bars."""
    lines = text.split("\n")
    rows = [cells_of(line) for line in lines if line.startswith("|")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    printed = []
    for line in lines:
        if not line.startswith("|"):
            printed.append(line)
        elif not line.startswith("| ---"):
            first, *others = cells_of(line)
            cells = [first.ljust(widths[0])]
            for cell, width in zip(others, widths[1:], strict=True):
                cells.append(cell.rjust(width))
            printed.append("  ".join(cells).rstrip())
    return "\n".join(printed)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]
