"""vLLM's CPU build with weights that a trainer can replace: import this, or run a script with it.

python tests/vllm_cpu.py examples/trl_vpo.py FLAGS
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
