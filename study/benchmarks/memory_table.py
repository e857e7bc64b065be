"""The computed tables of docs/hardware.md: what training takes on a card, and what a laptop's card gets."""

from dataclasses import dataclass

GIB = 2**30


@dataclass
class Model:
    """The shape of a language model."""

    kind: str  # its name in transformers
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int  # of keys and values
    words: int
    weights: float = 0.0
    adapter: float = 0.0  # weights of an adapter of rank 16

    @property
    def kept(self) -> int:
        """Numbers that the KV cache keeps of a token in a layer."""
        return 2 * self.kv_heads * self.width // self.heads


MODELS = {
    "SmolLM2-135M": Model("llama", 30, 576, 1536, 9, 3, 49152, 0.135e9, 4.9e6),
    "Qwen2.5-0.5B": Model("qwen2", 24, 896, 4864, 14, 2, 151936, 0.494e9, 8.8e6),
    "Qwen2.5-1.5B": Model("qwen2", 28, 1536, 8960, 12, 2, 151936, 1.54e9, 18.5e6),
    "Qwen2.5-3B": Model("qwen2", 36, 2048, 11008, 16, 2, 151936, 3.09e9, 29.9e6),
    "Qwen2.5-7B": Model("qwen2", 28, 3584, 18944, 28, 4, 152064, 7.62e9, 40.4e6),
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


def laptops() -> str:
    """What a card gets: memory that stays, a step, and the time until the first comparison.

    Speed is computed from that of an H200, in docs/hardware.md. Kernels of a token are so short that
    any card takes as long. Of headlines a step has 6 prompts and 48 rollouts of three answers of 16 tokens.
    """
    lines = [
        "| card, GiB | GB/s | model | flags | stays, GiB | a step, s | first result, min |",
        "|---|---|---|---|---|---|---|",
    ]
    T = 3 * 16
    for row in LAPTOPS:
        # 1. what stays: weights, reference policy; gradients, moments and masters of what is trained
        model = MODELS[row.model]
        is_adapter = row.flags == LORA
        trained = model.adapter if is_adapter else model.weights
        size = 2 if is_adapter else 4  # bytes of a weight: a warm-up makes all float32
        n_models = 2 if "--kl" in row.flags else 1
        stays = size * n_models * model.weights + (16 if is_adapter else 12) * trained

        # 2. a token of all rollouts: 0.0031 s for the kernels of 24 layers, and reading
        cache = 48 * (150 + T) * model.layers * model.kept
        token = 0.0031 / 24 * model.layers + size * (model.weights + cache) / row.bandwidth

        # 3. the gradient of a token: 25,776 in bfloat16 took 0.218 s for 0.135e9 weights, and 0.477 s
        # for 0.494e9. Here layers are computed twice, at another bandwidth
        on_h200 = (0.121 + 0.72e-9 * model.weights) / 25_776
        gradient = 4 / 3 * on_h200 * 4.8e12 / row.bandwidth * size / 2

        # 4. a step, of the warm-up and of VPO, in which the host takes 0.3 s
        update = 30 * trained / row.bandwidth + 0.3
        warm_up = gradient * 8 * (150 + 16) + update
        step = T * token + gradient * (6 * 150 + 48 * T) + update

        # 5. loading, 60 steps of each, and an evaluation of five batches of rollouts
        minutes = (40 + 60 * (warm_up + step) + 5 * T * token) / 60
        lines.append(
            f"| {row.gib} | {row.bandwidth / 1e9:.0f} | {row.model} | {row.flags} "
            f"| {stays / GIB:.1f} | {step:.1f} | {minutes:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(fits(), laptops(), sep="\n\n")
