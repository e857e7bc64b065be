"""OpenEvolve on a checkpoint of ours: the policy proposes programs, our sandbox judges them, a feature per test.

    pip install -r examples/requirements.txt
    vllm serve MODEL --generation-config vllm        on a GPU; on a CPU, after pip install "transformers[serving]":
    transformers serve MODEL
    cd examples/openevolve && openevolve-run initial_program.py evaluator.py --config config.yaml --target-score 1
        --primary-model MODEL --api-base http://localhost:8000/v1 --iterations 100 --output ../../runs/openevolve

MODEL is a language model's checkpoint with a chat template, as runs/code-qwen/vpo/checkpoint-000200. Training samples
from the whole distribution: `transformers serve` samples at all only where generation_config.json says "do_sample":
true, and heeds a top_k, top_p or repetition_penalty in it. So serve a copy of the checkpoint with do_sample and the
eos_token_id alone in that file.

Another problem: its id here, its text and a feature per test in config.yaml, a first program in initial_program.py.
"""

import argparse
import http.client
import json
import multiprocessing
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tasks.code import job
from tasks.code_files import read_problems
from tasks.sandbox import Sandbox

HERE = Path(__file__).resolve().parent
PROBLEM = "lists-045"  # held out by train.py --task code --data tasks/open_cases.jsonl
problem = next(
    record
    for record in read_problems(str(HERE.parents[1] / "tasks/open_cases.jsonl"))
    if record["id"] == PROBLEM
)


def evaluate(program_path: str) -> dict[str, float]:
    """The reward vector of a program, a metric per test, and their mean, which OpenEvolve climbs."""
    with Sandbox(1) as sandbox:
        (passed,) = sandbox.run([job(problem, Path(program_path).read_text())])
    return {"combined_score": sum(passed) / len(passed)} | {
        f"test_{i}": float(x) for i, x in enumerate(passed, 1)
    }


def told() -> tuple[str, str]:
    """Where openevolve-run was told to find which model: its flags, or its configuration."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--api-base")
    flags.add_argument("--primary-model")
    flags.add_argument("--config", "-c", default=HERE / "config.yaml")
    given, _ = flags.parse_known_args()
    if given.api_base and not given.primary_model:
        raise SystemExit(
            f"--api-base {given.api_base}: OpenEvolve heeds it only with --primary-model; give both"
        )
    if not Path(given.config).is_file():
        raise SystemExit(f"--config {given.config}: no such file")
    known = yaml.safe_load(Path(given.config).read_text())["llm"]
    return given.api_base or known["api_base"], given.primary_model or known["primary_model"]


def check_server(address: str, model: str) -> None:
    """Exit with one line if the model does not answer there: OpenEvolve would go on, and end with the initial
    program."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        urllib.request.urlopen(
            urllib.request.Request(
                f"{address}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": "Bearer none"},
            ),
            timeout=120,
        ).close()
    except urllib.error.HTTPError as error:
        raise SystemExit(
            f"{address}: refuses the model {model} ({error}: {error.read(200).decode(errors='replace')}); "
            "name the one that is served with --primary-model"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SystemExit(
            f"{address}: no model answers there ({error}); start vllm serve or transformers serve, or "
            "name another address with --api-base"
        ) from error


if multiprocessing.parent_process() is None:  # once, not in each worker
    check_server(*told())
