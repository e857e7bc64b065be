"""What validation problems chose: learning rates, and the settings of the other cures of the collapse."""

from study.entries import Entry
from study.grid import LR, LR_AT_30, cures
from study.stored import Stored, TaskResults

TASKS = ("maze", "code")  # in which other cures were tried
FEW = ("best@1", "best@3")  # measures of few candidates; the others are of thirty
NOISE = 0.005  # of a mean over 100 validation problems
# By what a setting for few candidates is chosen; for all other methods by best@1.
CHOSEN_BY = {"vpo": "W@3", "group_vpo": "W@3", "max_at_k": "best@3"}


def first_close(validation: TaskResults, compared: list[Entry], measure: str) -> Entry:
    """The first policy whose mean is within the noise of the best."""
    means = [validation.mean(entry, measure) for entry in compared]
    close = [mean >= max(means) - NOISE for mean in means]
    return compared[close.index(True)]


def own(stored: Stored, name: str, method: str, measure: str) -> Entry:
    """A method with the cure that validation chose for few candidates or for thirty, as a measure asks.

    For few it is the first within the noise of the best, for thirty the best by best@30, or that for
    few if it is within the noise. GRPO's is the best of all its cures, its low rate among them. The
    others have a KL term alone.
    """
    if name not in TASKS:
        return Entry(method)
    validation = stored.task(name, tuning=True)
    default = Entry(method, LR[name][method])
    compared = [default]
    if method in LR_AT_30[name]:
        compared.append(Entry(method, LR_AT_30[name][method]))
    compared += [Entry(method, flags=(cure,)) for cure in cures(name, method)]
    chooser = CHOSEN_BY.get(method, measure if measure in FEW else "best@1")
    chosen = first_close(validation, compared, chooser)
    if measure not in FEW:
        best = max(compared, key=lambda entry: validation.mean(entry, "best@30"))
        lead = validation.mean(best, "best@30") - validation.mean(chosen, "best@30")
        chosen = best if lead > NOISE else chosen
    return Entry(method) if chosen == default else chosen
