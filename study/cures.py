"""The other cures: what a KL term, an entropy bonus, a temperature or a low rate does for variety."""

from report.markdown import markdown
from study.entries import Entry
from study.grid import CURES, LR, LR_AT_30, MAIN_METHODS, cures
from study.result_tables import CHOSEN_BY
from study.stored import Stored, TaskResults

MEASURES = ("best@1", "best@3", "best@10", "best@30", "W@30", "diversity")
NOISE = 0.005  # of a mean over 100 validation problems


def validation(stored: Stored, name: str) -> str:
    """Every setting of every method on the validation problems of a task."""
    task = stored.task(name, tuning=True)
    rows = []
    for method in MAIN_METHODS:
        for entry in settings(task, method):
            means = [task.mean(entry, measure) for measure in MEASURES]
            rows.append([Entry(method).title, setting_title(entry), *means])
    return markdown(["method", "setting", *MEASURES], rows)


def chosen(stored: Stored) -> str:
    """The setting of each cure that is best for few and for thirty candidates, by task and method."""
    rows = []
    for name in ("maze", "code"):
        task = stored.task(name, tuning=True)
        for method in MAIN_METHODS:
            for cure, title in CURES.items():
                compared = of_cure(task, method, cure)
                if len(compared) == 1:
                    continue  # the default alone
                few = best_for_few(task, method, compared)
                many = best_for_many(task, few, compared)
                cells = [setting_title(few), setting_title(many)]
                rows.append([name, Entry(method).title, title, *cells])
    return markdown(["task", "method", "cure", "for few", "for thirty"], rows)


def settings(task: TaskResults, method: str) -> list[Entry]:
    """The default of a method, its rate for thirty candidates, and its cures, as far as they are stored."""
    found = [default(task.name, method)]
    if method in LR_AT_30[task.name]:
        found.append(Entry(method, LR_AT_30[task.name][method]))
    for name, value in cures(task.name, method):
        found.append(Entry(method, flags=((name, value),)))
    return [entry for entry in found if task.runs(entry)]


def default(task_name: str, method: str) -> Entry:
    """A method at its own rate for few candidates."""
    return Entry(method, LR[task_name][method])


def of_cure(task: TaskResults, method: str, cure: str) -> list[Entry]:
    """The default of a method and its stored settings of one cure, the weakest first."""
    found = [entry for entry in settings(task, method) if cure in dict(entry.flags)]
    return [default(task.name, method), *found]


def best_for_few(task: TaskResults, method: str, compared: list[Entry]) -> Entry:
    """The first setting that is within the noise of the best, by what chooses the method's rate."""
    measure = CHOSEN_BY.get(method, "best@1")
    means = [task.mean(entry, measure) for entry in compared]
    close = [mean >= max(means) - NOISE for mean in means]
    return compared[close.index(True)]


def best_for_many(task: TaskResults, few: Entry, compared: list[Entry]) -> Entry:
    """The setting with the highest best@30, or that for few candidates if it is within the noise."""
    best = max(compared, key=lambda entry: task.mean(entry, "best@30"))
    if task.mean(few, "best@30") >= task.mean(best, "best@30") - NOISE:
        return few
    return best


def setting_title(entry: Entry) -> str:
    """A setting as a table shows it, such as "KL 0.1"."""
    if entry.lr is not None:
        return f"rate {entry.lr:g}"
    [(name, value)] = entry.flags
    return f"{CURES[name]} {value:g}"
