def qualifiers(scores: list[int], places: int) -> list[int]:
    return sorted(scores, reverse=True)[:places]
