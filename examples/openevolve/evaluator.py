"""OpenEvolve with a trained policy: it proposes programs, the sandbox judges them test by test.

    pip install -r requirements.txt -r examples/requirements.txt "transformers[serving]==5.23.0"
    grep '"lists-045"' tasks/open_cases.jsonl > one.jsonl
    grep -v '"lists-045"' tasks/open_cases.jsonl > others.jsonl
    python train.py --task code --data others.jsonl --test-data one.jsonl --method grpo --m 1 --steps 2 \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --lr 2e-5 --kl 0 --prompts-per-step 2 --group-size 4 \
        --max-new-tokens 128 --eval-problems 0 --out runs/code
    cp -r runs/code/grpo/checkpoint-000002 served
    echo '{"do_sample": true, "eos_token_id": 2}' > served/generation_config.json
    transformers serve --port 8123 --device cpu    # in a terminal of its own
    (cd examples/openevolve && openevolve-run initial_program.py evaluator.py --config config.yaml --target-score 1 \
        --primary-model served --api-base http://localhost:8123/v1 --iterations 10 --output ../../runs/openevolve)
    # Beside it, our own search with the same model and as many candidates:
    python examples/search.py runs/code --problems 1 --among 1 --screen 0 --policies grpo --budget 10 --temperature 1

The served model needs a chat template; its own generation_config.json holds its eos_token_id. Training
samples from the whole distribution, and `transformers serve` samples only if that file says "do_sample":
true. It also follows a top_k, top_p or repetition_penalty there. docs/own.md says what came of it.

For another problem change PROBLEM here, the text and the features (one per test) in config.yaml,
and initial_program.py.
"""

import argparse
import http.client
import json
import multiprocessing
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.code import job
from tasks.code_files import read_problems
from tasks.sandbox import Sandbox

DATA = Path(__file__).resolve().parents[2] / "tasks/open_cases.jsonl"
PROBLEM = "lists-045"  # held out by train.py --task code --data tasks/open_cases.jsonl
PROBLEMS = {problem["id"]: problem for problem in read_problems(str(DATA))}


def evaluate(program_path: str) -> dict[str, float]:
    """A metric per test of a program, and their mean, which OpenEvolve maximises."""
    program = Path(program_path).read_text("utf-8")
    with Sandbox(1) as sandbox:
        (passed,) = sandbox.run([job(PROBLEMS[PROBLEM], program)])
    metrics = {"combined_score": sum(passed) / len(passed)}
    for number, verdict in enumerate(passed, 1):
        metrics[f"test_{number}"] = float(verdict)
    return metrics


def check_server() -> None:
    """Exit with one line if the model that openevolve-run will ask does not answer.

    OpenEvolve would fail only after all its iterations.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--api-base", required=True)
    parser.add_argument("--primary-model", required=True)
    flags, _ = parser.parse_known_args()
    address = flags.api_base
    model = flags.primary_model
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        request = urllib.request.Request(
            f"{address}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer none"},
        )
        urllib.request.urlopen(request, timeout=120).close()
    except urllib.error.HTTPError as error:
        reply = error.read(200).decode(errors="replace")
        raise SystemExit(
            f"{address}: refuses the model {model} ({error}: {reply}); "
            "name the one that is served with --primary-model"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SystemExit(
            f"{address}: no model answers there ({error}); start vllm serve or transformers serve, or "
            "name another address with --api-base"
        ) from error


if multiprocessing.parent_process() is None:  # once, not in each worker
    check_server()
