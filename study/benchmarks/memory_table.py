"""The table of docs/hardware.md: what training takes on a card, in GiB, for 1,024 tokens of a rollout."""

# weights, layers, width, what the KV cache keeps of a token in a layer, adapter weights
MODELS = {
    "SmolLM2-135M": (0.135e9, 30, 576, 384, 4.9e6),
    "Qwen2.5-0.5B": (0.494e9, 24, 896, 256, 8.8e6),
    "Qwen2.5-1.5B": (1.54e9, 28, 1536, 512, 18.5e6),
    "Qwen2.5-3B": (3.09e9, 36, 2048, 512, 29.9e6),
    "Qwen2.5-7B": (7.62e9, 28, 3584, 1024, 40.4e6),
}


def gib(model, trained, reference, rollouts, micro_batch):
    weights, layers, width, kept, _ = model
    # bfloat16 weights and gradients, float32 master weights and two moments: 2 + 2 + 4 + 8
    stays = 2 * weights + 14 * trained + 2 * reference
    kv_cache = 2 * rollouts * 1024 * layers * kept  # on a card it stays
    # the input of each layer, of as many tokens of prompts, too; one layer that is computed again,
    # and six chunks of the LM head
    activations = 2 * micro_batch * width * (2 * layers + 34) + 6 * 2**27
    update = 2 * trained  # the optimizer's gradients are float32, too
    return (stays + kv_cache + max(activations, update)) / 2**30


print("| model | usual | --kl 0 | less, --kl 0 | less, --lora-rank 16 |\n|---|---|---|---|---|")
for name, model in MODELS.items():
    weights = model[0]
    adapter = model[-1]
    sizes = [
        gib(model, weights, weights, 96, 4096),
        gib(model, weights, 0, 96, 4096),
        gib(model, weights, 0, 32, 1024),
        gib(model, adapter, 0, 32, 1024),
    ]
    cells = [f"{size:.1f}" for size in sizes]
    print(f"| {name} | {' | '.join(cells)} |")
