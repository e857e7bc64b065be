"""The other cures: what a KL term, an entropy bonus, a temperature or a low rate does for variety."""

from examples.markdown import markdown
from study.entries import GRPO_KL, Entry
from study.grid import CURES, LR, LR_AT_30, MAIN_METHODS, cures
from study.result_tables import CHOSEN_BY, cures_of, low_grpo
from study.stored import TEMPERATURES, Stored, TaskResults

TASKS = ("maze", "code")
MEASURES = ("best@1", "best@3", "best@10", "best@30", "W@30", "diversity")
FEW = ("best@1", "best@3")  # measures of few candidates
MANY = ("best@30", "W@30")
WITH_SETS = ("max_at_k", "vpo", "group_vpo")
PAIRS = (("vpo", "max_at_k"), ("group_vpo", "max_at_k"), ("group_vpo", "vpo"))
NOISE = 0.005  # of a mean over 100 validation problems


# The choice, on validation problems.


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
    for name in TASKS:
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


def best_for_few(
    task: TaskResults, method: str, compared: list[Entry], measure: str = "best@1"
) -> Entry:
    """The first setting that is within the noise of the best, by what chooses the method's rate.

    Args:
        measure: the one that chooses where a method has none of its own, as GRPO.
    """
    measure = CHOSEN_BY.get(method, measure)
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
    return entry.setting if entry.flags else f"rate {entry.lr:g}"


# Five seeds of what was chosen, on held-out problems.


def own(stored: Stored, name: str, method: str, measure: str) -> Entry:
    """A method with the cure that validation chose for few candidates or for thirty, as a measure asks.

    GRPO's is the best of all its cures, its low rate among them. The others have a KL term alone.
    """
    if name not in TASKS:
        return Entry(method)
    task = stored.task(name, tuning=True)
    compared = settings(task, method)
    chosen = best_for_few(task, method, compared, measure if measure in FEW else FEW[0])
    if measure not in FEW:
        chosen = best_for_many(task, chosen, compared)
    return Entry(method) if chosen == default(name, method) else chosen


def five_seeds(task: TaskResults) -> str:
    """The main methods with and without each cure, the mean over five seeds."""
    rows = []
    for entry in compared_entries(task):
        means = [task.mean(entry, measure) for measure in MEASURES]
        rows.append([entry.title, *means])
    return markdown(["method", *MEASURES], rows)


def compared_entries(task: TaskResults) -> list[Entry]:
    """The start model, and the main methods with and without each cure."""
    entries = [Entry("start")]
    for method in MAIN_METHODS:
        entries.append(Entry(method))
        if method == "grpo":
            entries.append(low_grpo(task))
        entries += cures_of(task, method)
    return [entry for entry in entries if task.runs(entry)]


def by_temperature(task: TaskResults) -> str:
    """best@1, best@30 and W@30 of the same checkpoints at each temperature of the evaluation."""
    measures = ("best@1", "best@30", "W@30")
    head = ["method"]
    for measure in measures:
        head += [f"{measure} at {temperature}" for temperature in TEMPERATURES]
    rows = []
    for entry in compared_entries(task):
        row = [entry.title]
        for measure in measures:
            row += [task.mean(entry, measure, temperature) for temperature in TEMPERATURES]
        rows.append(row)
    return markdown(head, rows)


def own_leads(stored: Stored) -> str:
    """Who is ahead of whom where each method has its own cure for few candidates, or for thirty.

    The rows with a fixed weight hold the sets against GRPO with this weight in both tasks.
    """
    head = ["minus"]
    for name in TASKS:
        head += [f"{name} {measure}" for measure in (*FEW, *MANY)]
    rows = []
    for ours in WITH_SETS:
        rows.append(lead_row(stored, ours, "grpo", None))
        rows.append(lead_row(stored, ours, "grpo", GRPO_KL))
    for ours, theirs in PAIRS:
        rows.append(lead_row(stored, ours, theirs, None))
    return markdown(head, rows)


def lead_row(stored: Stored, ours: str, theirs: str, rival: Entry | None) -> list[str]:
    """One method with its own cure minus another one with its own, or minus `rival`."""
    title = rival.title if rival else Entry(theirs).title
    row = [f"{Entry(ours).title} - {title}"]
    for name in TASKS:
        for measure in (*FEW, *MANY):
            our_best = own(stored, name, ours, measure)
            their_best = rival or own(stored, name, theirs, measure)
            row.append(stored.task(name).difference(our_best, their_best, measure).short)
    return row


def own_settings(stored: Stored) -> str:
    """Which setting each method has in each column of `own_leads`."""
    columns = (*FEW, "thirty")
    rows = []
    for method in MAIN_METHODS:
        row = [Entry(method).title]
        for name in TASKS:
            for column in columns:
                entry = own(stored, name, method, column)
                row.append(entry.setting or "KL 0.001")
        rows.append(row)
    return markdown(["", *(f"{name} {column}" for name in TASKS for column in columns)], rows)


def gains(stored: Stored) -> str:
    """What each cure changes against the method's default."""
    measures = (*FEW, *MANY, "diversity")
    rows = []
    for name in TASKS:
        task = stored.task(name)
        for method in MAIN_METHODS:
            entries = cures_of(task, method)
            if method == "grpo":
                entries.insert(0, low_grpo(task))
            for entry in entries:
                cells = [task.difference(entry, Entry(method), key).short for key in measures]
                rows.append([name, Entry(method).title, setting_title(entry), *cells])
    return markdown(["task", "method", "cure", *measures], rows)
