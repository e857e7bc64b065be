"""The card of a trained language model, for who publishes its weights: docs/model_card.md.

    python study/model_card.py            the card of VPO on headlines
    python study/model_card.py grpo       that of another method

All numbers are computed from the stored results.
"""

import os
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.doors import as_command
from engine.tasks import load_task
from report.looks import look_of
from report.markdown import markdown
from rewards import Problem, UserError
from study.entries import START_MODEL, Entry
from study.grid import HEADLINE, Cell, cells
from study.store import RESULTS, Store, load_stored
from study.stored import Stored, TaskResults
from vpo import answers_per_rollout

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
MEASURES = ("best@1", "best@3", "best@30", "W@30", "diversity")
TEXT = """\
# Model card: {title} on headlines

{model} was fine-tuned with the SFT warm-up of `train.py` and then with {title}. It reads a short text that tells six facts and writes a headline of a few words. It is an exhibit of an experiment, and not useful on other texts.

- **Base model:** [{base}](https://huggingface.co/{base}), Apache-2.0. The weights that were trained are a 4-bit copy of it in float32.
- **Training:** `{command}`, seeds {seeds}, {steps} steps, no KL term, {tokens:,} sampled tokens a run, on {machines}, version {version} of this software.
- **Data:** texts that a program makes; `tasks/headline.py` holds its words. Nothing personal is in them.
- **Licence:** the base model's for weights, [MIT](../LICENSE) for this software.

## Measures

Means over seeds, with the lowest and the highest, 40 held-out texts, 30 candidates each at temperature 0.7. The [reference](reference.md#what-evalpy-prints) explains the measures.

{table}

## How to load

A checkpoint is an ordinary folder of transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "runs/headline-seed0/{method}/checkpoint-{steps:06}"
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
text = "On Friday mice led to an alarm at the zoo. A pilot and nine other people saw it.\\n{request}"
messages = [{{"role": "user", "content": text}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + "1."
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
ids = model.generate(**inputs, max_new_tokens=48, do_sample=True, temperature=0.7, top_k=0)
print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))
```

This card is the output of `python study/model_card.py`.
"""


def card(stored: Stored, store: Store, method: str) -> str:
    """The card of a method as Markdown. Raises UserError if no run of it is stored."""
    records = {}
    for cell, record in store.current(cells()).items():
        if cell == Cell(HEADLINE, method, cell.seed):
            records[cell.seed] = record
    if not records:
        raise UserError(
            f"{method}: no run on headlines is stored; name grpo, vpo or another method"
        )
    task = stored.task(HEADLINE)
    last = records[max(records)]  # the run of seed 0 stores answers during training, too
    words = last["command"]
    without_seed = words[: words.index("--seed")] + words[words.index("--seed") + 2 :]
    machines = Counter(record["gpu"] or "a CPU core" for record in records.values())
    tokens = sum(record["tokens"] for record in records.values())
    n_answers = answers_per_rollout(method, 3)
    request = load_task("headline").prompt(Problem("", {"text": ""}), n_answers).strip()
    return TEXT.format(
        request=request,
        title=look_of(method).title,
        method=method,
        model=BASE.partition("/")[2],
        base=BASE,
        command=" ".join(["python train.py", *without_seed]),
        seeds=", ".join(map(str, sorted(records))),
        steps=last["steps"],
        tokens=tokens // len(records),
        machines=" and ".join(f"{name} ({n} runs)" for name, n in machines.items()),
        version=last["version"],
        table=measures_table(task, method),
    )


def measures_table(task: TaskResults, method: str) -> str:
    """The method beside the start model, with the lowest and the highest seed."""
    rows = []
    for entry in (START_MODEL, Entry("start_sets"), Entry(method)):
        row = [entry.title]
        for measure in MEASURES:
            of_seeds = task.values(entry, measure).mean(1)  # (seeds)
            low, high = of_seeds.aminmax()
            row.append(f"{of_seeds.mean():.3f} ({low:.3f} to {high:.3f})")
        rows.append(row)
    return markdown(["", *MEASURES], rows)


def main(argv: list[str]) -> None:
    method = argv[0] if argv else "vpo"
    store = Store(RESULTS)
    as_command(
        "study/model_card.py", lambda: print(card(load_stored(store), store, method), end="")
    )


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    main(sys.argv[1:])
