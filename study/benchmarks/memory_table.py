"""The computed tables of docs/hardware.md: what training takes on a card, and what a laptop's card gets."""

from dataclasses import dataclass

GIB = 2**30


@dataclass
class Model:
    """The shape of a language model."""

    weights: float
    layers: int
    width: int
    kept: int  # numbers that the KV cache keeps of a token in a layer
    adapter: float  # weights of an adapter of rank 16


MODELS = {
    "SmolLM2-135M": Model(0.135e9, 30, 576, 384, 4.9e6),
    "Qwen2.5-0.5B": Model(0.494e9, 24, 896, 256, 8.8e6),
    "Qwen2.5-1.5B": Model(1.54e9, 28, 1536, 512, 18.5e6),
    "Qwen2.5-3B": Model(3.09e9, 36, 2048, 512, 29.9e6),
    "Qwen2.5-7B": Model(7.62e9, 28, 3584, 1024, 40.4e6),
}


def gib(model: Model, trained: float, reference: float, rollouts: int, micro_batch: int) -> float:
    """What training takes, for 1,024 tokens of a rollout.

    Args:
        trained, reference: weights that are trained, and those of the reference policy.
        micro_batch: tokens.
    """
    # bfloat16 weights; float32 gradients, master weights and two moments: 4 + 4 + 8
    stays = 2 * model.weights + 16 * trained + 2 * reference
    kv_cache = 2 * rollouts * 1024 * model.layers * model.kept  # on a card it stays
    # the input of each layer, of as many tokens of prompts, too; one layer that is computed again,
    # and six chunks of the LM head
    activations = 2 * micro_batch * model.width * (2 * model.layers + 34) + 6 * 2**27
    return (stays + kv_cache + activations) / GIB


def fits() -> str:
    """What training takes, in GiB, for 1,024 tokens of a rollout."""
    lines = [
        "| model | usual | --kl 0 | less, --kl 0 | less, --lora-rank 16 |",
        "|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        usual = gib(model, model.weights, model.weights, 96, 4096)
        without_kl = gib(model, model.weights, 0, 96, 4096)
        less = gib(model, model.weights, 0, 32, 1024)
        lora = gib(model, model.adapter, 0, 32, 1024)
        lines.append(f"| {name} | {usual:.1f} | {without_kl:.1f} | {less:.1f} | {lora:.1f} |")
    return "\n".join(lines)


@dataclass
class Laptop:
    """A card, and a run of headlines on it."""

    gib: int
    bandwidth: float  # bytes per second
    model: str
    flags: str = ""  # of train.py, besides --task headline --method vpo


LORA = "--lora-rank 16 --lr 2e-4"
LAPTOPS = [
    Laptop(6, 192e9, "SmolLM2-135M"),
    Laptop(6, 192e9, "Qwen2.5-0.5B", LORA),
    Laptop(8, 256e9, "Qwen2.5-1.5B", LORA),
    Laptop(12, 432e9, "Qwen2.5-0.5B"),
    Laptop(12, 432e9, "Qwen2.5-3B", LORA),
    Laptop(16, 576e9, "Qwen2.5-0.5B", "--kl 0.001"),
    Laptop(16, 576e9, "Qwen2.5-3B", LORA),
]

# Measured on an H200, see docs/hardware.md. Kernels of a token are so short that any card takes as long.
TOKEN_SECONDS = 0.0031 / 24  # of a layer, in a graph
# A gradient of 25,776 tokens in bfloat16 took 0.218 s for 0.135e9 weights, and 0.477 s for 0.494e9.
GRADIENT_SECONDS = 0.121 / 25_776  # of a token
WEIGHT_SECONDS = 0.72e-9 / 25_776  # and of a weight
AGAIN = 4 / 3  # layers are computed twice
HOST_SECONDS = 0.3  # what else a step of headlines took
H200_BANDWIDTH = 4.8e12  # NVIDIA's, as those of the laptops
# Headlines: 6 prompts a step, 8 rollouts each, three answers of 16 tokens
STEPS = 60  # of the warm-up, and of VPO
T = 3 * 16
ROLLOUTS = 48
PROMPT = 150
EVALUATION = 5  # batches of rollouts: 40 texts, 30 candidates each, two policies
LOADING = 40  # seconds


def resident(row: Laptop) -> float:
    """Bytes that stay: weights, gradients, moments and masters of what is trained, reference policy."""
    model = MODELS[row.model]
    if "--lora-rank" in row.flags:
        return 2 * model.weights + 16 * model.adapter
    n_models = 2 if "--kl" in row.flags else 1
    return (4 * n_models + 4 + 8) * model.weights  # a warm-up makes all float32


def step_seconds(row: Laptop) -> tuple[float, float, float]:
    """Seconds of a token of all rollouts, of a step of the warm-up, and of a step of VPO."""
    model = MODELS[row.model]
    is_adapter = "--lora-rank" in row.flags
    size = 2 if is_adapter else 4  # bytes of a weight
    trained = model.adapter if is_adapter else model.weights
    cache = ROLLOUTS * (PROMPT + T) * model.layers * model.kept
    token = TOKEN_SECONDS * model.layers + size * (model.weights + cache) / row.bandwidth
    slower = H200_BANDWIDTH / row.bandwidth * size / 2
    gradient = AGAIN * slower * (GRADIENT_SECONDS + WEIGHT_SECONDS * model.weights)  # of a token
    update = 30 * trained / row.bandwidth + HOST_SECONDS
    warm_up = gradient * 8 * (PROMPT + 16) + update
    return token, warm_up, T * token + gradient * (6 * PROMPT + ROLLOUTS * T) + update


def laptops() -> str:
    """What a card gets: memory that stays, a step, and the time until the first comparison."""
    head = "| card, GiB | GB/s | model | flags | stays, GiB | a step, s | first result, min |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in LAPTOPS:
        token, warm_up, step = step_seconds(row)
        minutes = (LOADING + STEPS * (warm_up + step) + EVALUATION * T * token) / 60
        lines.append(
            f"| {row.gib} | {row.bandwidth / 1e9:.0f} | {row.model} | {row.flags} "
            f"| {resident(row) / GIB:.1f} | {step:.1f} | {minutes:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(fits(), laptops(), sep="\n\n")
