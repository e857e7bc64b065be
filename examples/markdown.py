"""Tables as Markdown."""


def markdown(head: list[str], rows: list[list]) -> str:
    """A Markdown table, floats with three digits."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
