"""Sampling on a card: one CUDA graph replays a whole token of all rollouts.

Launching 1,500 kernels per token from Python takes longer than running them. A graph launches them all,
and finds its tensors where they were: weights, which the optimizer changes in place, and a KV cache of
a fixed size. Without a card the same code runs without a graph, so its tokens can be compared on a CPU.
"""

import math
import sys
import warnings
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

import rollout
from fast.lean import lean
from fast.update import cache_of
from rollout import Decoded, Policy, Rollouts, SamplingOptions, draw, lm_logits

LOOK_EVERY = 8  # tokens, after which the host looks at what was drawn
ROOM_STEP = 64  # places of a KV cache, so that few graphs fit all prompts
SMALLEST_BATCH = 8  # fewer rollouts take as long
TOLERANCE = 0.1  # of the logits' spread; bfloat16 rounds by 0.03, a wrong mask changes far more

workspaces: WeakKeyDictionary[PreTrainedModel, "Workspace"] = WeakKeyDictionary()
refused: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # and why


def sample(policy: Policy, prompts: list[str], G: int, options: SamplingOptions) -> Rollouts:
    """`rollout.sample`; on a card a token of all rollouts is one CUDA graph."""
    if policy.device.type == "cuda":
        return rollout.sample(policy, prompts, G, options, decode)
    return rollout.sample(policy, prompts, G, options)


def decode(
    policy: Policy, ids: Tensor, lengths: list[int], uniform: Tensor, options: SamplingOptions
) -> Decoded:
    """Sample the rollouts of P prompts. Arguments and result are those of `rollout.decode`.

    For a model that cannot be captured one line says so, and `rollout.decode` goes on.
    """
    if policy.model not in refused:
        try:
            return decode_with_graphs(policy, ids, lengths, uniform, options)
        except torch.OutOfMemoryError:  # the next batch may fit
            print("this batch is sampled without a CUDA graph: out of memory", file=sys.stderr)
        except Exception as error:  # of capture and unusual models there are many kinds
            reason = " ".join(str(error).split())[:200]
            refused[policy.model] = f"{type(error).__name__}, {reason}"
            print("sampling goes on without a CUDA graph:", refused[policy.model], file=sys.stderr)
        workspaces.pop(policy.model, None)
    return rollout.decode(policy, ids, lengths, uniform, options)


def decode_with_graphs(
    policy: Policy, ids: Tensor, lengths: list[int], uniform: Tensor, options: SamplingOptions
) -> Decoded:
    """The same, or an error. The host looks at the tokens now and then, and cuts what follows an end.

    When half of the rollouts have ended, the others go on in a batch of half the size.
    """
    B, T = uniform.shape
    L = ids.shape[1]
    ends = torch.tensor(policy.eos_ids)
    tokens = torch.full((B, T), policy.eos_ids[0])
    logprobs = torch.zeros(B, T, device=ids.device)
    n_sampled = torch.zeros(B, dtype=torch.long)
    has_ended = torch.zeros(B, dtype=torch.bool)

    # 1. the prompts, and the first token of each rollout
    space = begin(policy.model, ids, lengths, uniform, options.temperature)
    rows = torch.arange(B)  # those in the batch, b of them
    is_alive = torch.ones(B, dtype=torch.bool)  # (b) those of them that go on
    for first in range(0, T, LOOK_EVERY):
        # 2. some tokens of each rollout
        b = len(rows)
        end = min(first + LOOK_EVERY, T)
        for _ in range(max(first, 1), end):
            space.next_token(policy.model, b, options.temperature)

        # 3. who has ended, token by token
        columns = slice(L + first, L + end)  # of these tokens, behind the prompt
        logprobs[rows.to(ids.device), first:end] = space.logprobs[:b, columns]
        fresh = space.tokens[:b, columns].cpu()
        for t, newest in enumerate(fresh.T, first):
            tokens[rows, t] = torch.where(is_alive, newest, policy.eos_ids[0])
            n_sampled[rows] += is_alive
            is_alive &= ~torch.isin(newest, ends)
            if options.stop:
                is_alive &= ~options.stop(tokens[rows, : t + 1], is_alive)
        has_ended[rows] = ~is_alive
        n_alive = int(is_alive.sum())
        if n_alive == 0:
            break

        # 4. the living, first in a smaller batch
        while 2 * n_alive <= b and b > SMALLEST_BATCH:
            b = math.ceil(b / 2)
        if b < len(rows):
            keep = is_alive.byte().argsort(descending=True, stable=True)[:b]
            rows = rows[keep]
            is_alive = is_alive[keep]
            space.keep(keep.to(ids.device))

    is_sampled = torch.arange(T, device=ids.device) < n_sampled.to(ids.device)[:, None]
    return Decoded(tokens, logprobs.where(is_sampled, 0.0), n_sampled, has_ended)


def begin(
    model: PreTrainedModel, ids: Tensor, lengths: list[int], uniform: Tensor, temperature: float
) -> "Workspace":
    """The model's workspace, with P prompts, each computed once for its group, and B first tokens.

    Raises ValueError for a model that takes no ready mask as others do, tried once.
    """
    B, T = uniform.shape
    P, L = ids.shape
    G = B // P
    room = math.ceil((L + T) / ROOM_STEP) * ROOM_STEP
    cache = DynamicCache(config=model.config)
    mask = rollout.prompt_mask(ids, lengths)  # (P, L)
    hidden = rollout.hidden_states(model, ids, mask, cache)[:, -1]  # (P, H)
    logits = lm_logits(model, hidden).repeat_interleave(G, 0)  # (B, V)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    space = workspaces.get(model)
    is_new = space is None or not space.fits(B, room, addresses)
    if is_new:
        n_rows, n_places = space.tokens.shape if space else (0, 0)
        del space
        workspaces.pop(model, None)  # gives back its memory before the new one takes some
        space = Workspace(addresses, cache, max(B, n_rows), max(room, n_places))
    space.room = room
    space.take_prompts(cache, mask, uniform)
    space.record(*draw(logits / temperature, uniform[:, 0]))
    if is_new:
        ours = space.logits(model, B)[::G]  # (P, V) of the second token
        token = space.tokens[:B:G].index_select(1, space.place)  # (P, 1)
        mask = torch.cat([mask, torch.ones_like(token, dtype=torch.bool)], 1)
        plain = lm_logits(model, rollout.hidden_states(model, token, mask, cache)[:, -1])
        if not (ours - plain).std() <= TOLERANCE * plain.std():  # nor if they are not numbers
            raise ValueError(f"{type(model).__name__} gives other logits with a ready mask")
    workspaces[model] = space
    return space


class FixedLayer(DynamicLayer):
    """A layer of a KV cache whose keys and values (b, heads, room, head size) stay where they are.

    Args:
        place: (1) where those of the newest token are written.
    """

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor):
        super().__init__()
        self.keys = keys
        self.values = values
        self.place = place
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, keys)
        self.values.index_copy_(2, self.place, values)
        return self.keys, self.values


class Workspace:
    """Tensors that the graphs of a model read and write: B rollouts with `room` places for prompt and tokens.

    A graph for fewer rollouts or places takes the first ones.
    """

    def __init__(self, addresses: list[int], cache: DynamicCache, B: int, room: int):
        self.addresses = addresses  # of the weights, which a graph reads there
        self.room = room  # places that are used now
        device = cache.layers[0].keys.device
        self.graphs: dict[tuple[int, int, float], Callable[[], object]] = {}
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":  # all graphs share one, and their scratch memory
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()
        self.tokens = torch.zeros(B, room, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(B, room, device=device)
        self.uniform = torch.zeros(B, room, device=device)
        self.padding = torch.zeros(B, 1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)  # of the newest token
        self.layers = []  # keys and values, each (B, heads, room, head size)
        for layer in cache.layers:
            heads = layer.keys.shape[1]
            keys = layer.keys.new_zeros(B, heads, room, layer.keys.shape[-1])
            values = layer.values.new_zeros(B, heads, room, layer.values.shape[-1])
            self.layers.append((keys, values))

    def fits(self, B: int, room: int, addresses: list[int]) -> bool:
        """Whether B rollouts with so many places have room, and the weights lie where graphs read them."""
        n_rows, n_places = self.tokens.shape
        return n_rows >= B and n_places >= room and self.addresses == addresses

    def take_prompts(self, cache: DynamicCache, mask: Tensor, uniform: Tensor) -> None:
        """Take over P prompts, their mask (P, L), and the random numbers (B, T) of their rollouts."""
        B, T = uniform.shape
        P, L = mask.shape
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            kept = slice(L - layer.keys.shape[2], L)  # a sliding window keeps the last alone
            keys[:B, :, kept] = layer.keys.repeat_interleave(B // P, 0)
            values[:B, :, kept] = layer.values.repeat_interleave(B // P, 0)
        self.uniform[:B, L : L + T] = uniform
        self.padding[B:] = 0  # rows that no rollout uses see something, too
        self.padding[:B, 0] = (~mask).sum(1).repeat_interleave(B // P, 0)
        self.place.fill_(L - 1)

    def record(self, token: Tensor, logprob: Tensor) -> None:
        """Write the next token (b) and its log-probability."""
        self.place.add_(1)
        self.tokens[: len(token)].index_copy_(1, self.place, token[:, None])
        self.logprobs[: len(token)].index_copy_(1, self.place, logprob[:, None])

    def keep(self, rows: Tensor) -> None:
        """Move these rows to the front."""
        tensors = [self.tokens, self.uniform, self.padding]
        for keys, values in self.layers:
            tensors += [keys, values]
        for tensor in tensors:
            tensor[: len(rows)] = tensor[rows]

    def logits(self, model: PreTrainedModel, b: int) -> Tensor:
        """Logits (b, V) of what follows the newest tokens of the first b rollouts."""
        n = self.room
        layers = []
        for keys, values in self.layers:
            layers.append(FixedLayer(keys[:b, :, :n], values[:b, :, :n], self.place))
        padding = self.padding[:b]
        places = torch.arange(n, device=padding.device)
        seen = (places >= padding) & (places <= self.place)  # (b, room)
        with lean(model):
            hidden = model.base_model(
                input_ids=self.tokens[:b].index_select(1, self.place),
                attention_mask=ready_mask(model, seen[:, None, None], self.place - places),
                position_ids=self.place - padding,
                past_key_values=cache_of(layers),
                use_cache=True,
            ).last_hidden_state
        return lm_logits(model, hidden[:, -1])

    def next_token(self, model: PreTrainedModel, b: int, temperature: float) -> None:
        """Draw the next token of the first b rollouts."""

        def draw_token() -> None:
            logits = self.logits(model, b)
            uniform = self.uniform[:b].index_select(1, self.place + 1)[:, 0]  # (b)
            self.record(*draw(logits / temperature, uniform))

        b = math.ceil(b / SMALLEST_BATCH) * SMALLEST_BATCH  # so that few graphs do
        b = min(b, len(self.tokens))
        key = (b, self.room, temperature)
        if key not in self.graphs:
            self.graphs[key] = captured(draw_token, self)
        self.graphs[key]()


def captured(function: Callable[[], None], space: Workspace) -> Callable[[], object]:
    """A function that draws a token, as a CUDA graph; without a card the function itself."""
    if space.stream is None:
        return function
    here = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    space.stream.wait_stream(here)
    try:
        with torch.cuda.stream(space.stream):
            function()
            space.place.sub_(1)  # the next trial draws the same token
            # A model that asks its host cannot be captured. To learn it here leaves nothing half done.
            with warnings.catch_warnings(action="ignore"):  # the mode says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            space.place.sub_(1)
        with torch.cuda.graph(graph, pool=space.pool, stream=space.stream):  # nothing runs
            function()
    finally:
        torch.cuda.set_stream(here)  # a capture that fails leaves the other one
        here.wait_stream(space.stream)  # before anybody reuses the memory of the trials
    return graph.replay


def ready_mask(
    model: PreTrainedModel, seen: Tensor, distance: Tensor
) -> Tensor | dict[str, Tensor]:
    """A mask that no host need look at, or one for each kind of attention that the model has.

    Args:
        seen: bool (b, 1, 1, room), the places that may be seen.
        distance: (room), from each place to the newest.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    masks = {"full_attention": seen}
    if window and (not kinds or "sliding_attention" in kinds):
        masks["sliding_attention"] = seen & (distance < window)
    low = torch.finfo(model.dtype).min  # a mask is added, or each layer makes numbers of booleans
    masks = {kind: (~mask).to(model.dtype) * low for kind, mask in masks.items()}
    if kinds and len(masks) > 1:
        return masks
    return list(masks.values())[-1]
