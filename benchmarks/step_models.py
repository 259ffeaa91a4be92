"""The models whose steps `python -m benchmarks step` times: of published sizes, with random weights in BF16.

A model may be timed with fewer layers than it has, since compiling it and its optimiser's memory grow with them. Its
vocabulary is then cut in the same proportion, so that the embedding and the loss keep their share of a step.

Layers of experts have as many as a token takes. With random weights rounding decides which experts a token takes of
many, and gradients of attention then differ as much between any two exact attentions as between wrong ones.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from sagebwd import block_masks

CHUNKED, PLAIN = LOSSES = "chunked", "plain"
"""Logits of `CHUNK` tokens at a time, made again in backward, or all at once by the model's own loss."""
CHUNK = 4096
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
"""Sizes on a CPU, where steps are made to try the command out."""
SMALL_LAYERS, SMALL_VOCABULARY = 2, 256
VIDEO_FRAME = 30, 52
"""Rows and columns of tokens of a frame of 480 x 832 pixels in Wan 2.1."""
TEXT = 512


@dataclass
class Trained:
    """A model and the loss of a batch of random tokens, by its seed.

    mask: what is visible, where that is no causal mask of Transformers.
    """

    model: nn.Module
    loss: Callable[[int], Tensor]
    layers: int
    batch: int
    tokens: int
    vocabulary: int | None = None
    mask: BlockMask | None = None


@dataclass(frozen=True)
class Decoder:
    """A language model of Transformers: ``family``ForCausalLM.

    whole: layers that it has; layers, as many as are timed unless told; sizes, what its config is given; text, how its
    config is called behind the family; float8, its layers' linears by torchao.
    """

    family: str
    whole: int
    layers: int
    vocabulary: int
    sizes: Mapping[str, object] = field(hash=False)
    text: str = ""
    float8: bool = False

    def build(self, layers: int | None, tokens: int, total: int, device: str, compiled: bool, loss: str) -> Trained:
        """The model, its batches and its loss; compiled, by ``torch.compile`` of all of it.

        Raises ImportError for what is not installed, and what Transformers raises.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        transformers = importlib.import_module("transformers")
        small = device == "cpu"
        layers, vocabulary = self.timed(layers, device)
        sizes = {name: SMALL.get(name, x) if small and x is not None else x for name, x in self.sizes.items()}
        if "first_k_dense_replace" in sizes:
            sizes["first_k_dense_replace"] = layers
        config = getattr(transformers, f"{self.family}{self.text}Config")(
            vocab_size=vocabulary, num_hidden_layers=layers, use_cache=False, pad_token_id=None, bos_token_id=None,
            eos_token_id=None, **sizes,
        )  # fmt: skip
        with torch.device(device):  # where numbers are drawn sooner
            model = getattr(transformers, f"{self.family}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
        model.train()
        if self.float8:
            importlib.import_module("torchao.float8").convert_to_float8_training(model.model)
        batch = max(1, total // tokens)

        def drawn(seed: int) -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randint(vocabulary, (2, batch, tokens), generator=generator, device=device)

        make = torch.compile if compiled else lambda x: x
        if loss == PLAIN:
            whole = make(model)

            def plain(seed: int) -> Tensor:
                ids = drawn(seed)[0]
                return whole(input_ids=ids, labels=ids).loss

            return Trained(model, plain, layers, batch, tokens, vocabulary)
        body, of_chunk = make(model.model), make(_sum_of_cross_entropies)

        def chunked(seed: int) -> Tensor:
            ids, labels = drawn(seed)
            hidden = body(input_ids=ids).last_hidden_state.flatten(0, 1)
            pieces = zip(hidden.split(CHUNK), labels.flatten().split(CHUNK))
            weight = model.lm_head.weight
            return sum(checkpoint(of_chunk, x, weight, y, use_reentrant=False) for x, y in pieces) / labels.numel()

        return Trained(model, chunked, layers, batch, tokens, vocabulary)

    def timed(self, layers: int | None, device: str) -> tuple[int, int]:
        """Layers and vocabulary."""
        if device == "cpu":
            return layers or min(self.layers, SMALL_LAYERS), SMALL_VOCABULARY
        layers = layers or self.layers
        return layers, -(-self.vocabulary * layers // self.whole // 64) * 64


@dataclass(frozen=True)
class Video:
    """A transformer of Wan 2.1 in Diffusers, whose self-attention is masked for teacher forcing: a clean video and the
    same noisy, each frame of which is denoised after clean ones (`sagebwd.block_masks.teacher_forcing`)."""

    whole: int
    layers: int
    heads: int
    width: int

    def build(self, layers: int | None, tokens: int, total: int, device: str, compiled: bool, loss: str) -> Trained:
        """As `Decoder.build`; tokens, about as many as there are: whole frames of both videos. The loss is the mean
        square to random numbers."""
        diffusers = importlib.import_module("diffusers")
        small = device == "cpu"
        layers = layers or (min(self.layers, SMALL_LAYERS) if small else self.layers)
        rows, columns = (2, 2) if small else VIDEO_FRAME
        heads, head_dim, text = (2, 24, 8) if small else (self.heads, 128, TEXT)
        frames = max(1, tokens // (2 * rows * columns))
        tokens = 2 * frames * rows * columns
        batch, width = max(1, total // tokens), 96 if small else self.width
        text_width = 32 if small else 4096
        with torch.device(device):
            model = diffusers.WanTransformer3DModel(
                num_attention_heads=heads, attention_head_dim=head_dim, ffn_dim=width, num_layers=layers,
                text_dim=text_width,
            )  # fmt: skip
        model.to(torch.bfloat16).train()
        called = torch.compile(model) if compiled else model

        def squares(seed: int) -> Tensor:
            video, noise = _normal(seed, device, (2, batch, 16, 2 * frames, 2 * rows, 2 * columns))
            words = _normal(seed + 1, device, (batch, text, text_width))
            times = torch.full((batch,), 500, device=device)
            found = called(video, times, words, return_dict=False)[0]
            return F.mse_loss(found.float(), noise.float())

        mask = block_masks.teacher_forcing(frames, rows * columns, device=device)
        return Trained(model, squares, layers, batch, tokens, mask=mask)


@dataclass(frozen=True)
class Joint:
    """Flux's transformer in Diffusers: text and image attend to each other as one sequence, in blocks of two streams
    and twice as many of one."""

    whole: int
    layers: int
    heads: int

    def build(self, layers: int | None, tokens: int, total: int, device: str, compiled: bool, loss: str) -> Trained:
        """As `Video.build`; tokens, of image and text together."""
        diffusers = importlib.import_module("diffusers")
        small = device == "cpu"
        layers = layers or self.layers
        heads, head_dim, text, text_width = (2, 16, 8, 32) if small else (self.heads, 128, TEXT, 4096)
        batch, image = max(1, total // tokens), max(1, tokens - text)
        axes = (4, 6, 6) if small else (16, 56, 56)
        with torch.device(device):
            model = diffusers.FluxTransformer2DModel(
                num_layers=layers // 3, num_single_layers=layers - layers // 3, num_attention_heads=heads,
                attention_head_dim=head_dim, joint_attention_dim=text_width, axes_dims_rope=axes,
            )  # fmt: skip
        model.to(torch.bfloat16).train()
        called = torch.compile(model) if compiled else model
        places = torch.arange(image, device=device, dtype=torch.float32)[:, None].repeat(1, 3)

        def squares(seed: int) -> Tensor:
            latents, noise = _normal(seed, device, (2, batch, image, 64))
            words = _normal(seed + 1, device, (batch, text, text_width))
            found = called(
                hidden_states=latents, encoder_hidden_states=words, timestep=torch.full((batch,), 0.5, device=device),
                pooled_projections=_normal(seed + 2, device, (batch, 768)), img_ids=places,
                txt_ids=torch.zeros(text, 3, device=device), return_dict=False,
            )[0]  # fmt: skip
            return F.mse_loss(found.float(), noise.float())

        return Trained(model, squares, layers, batch, image + text)


Model = Decoder | Video | Joint


def _sum_of_cross_entropies(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def _normal(seed: int, device: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def _sizes(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, **more: object) -> dict:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, **more,
    }  # fmt: skip


_LLAMA_8B = _sizes(4096, 14336, 32, 8, 128)
MODELS: dict[str, Model] = {
    "llama-1b-128": Decoder("Llama", 16, 16, 32000, _sizes(2048, 8192, 16, 8, 128)),
    "llama-1b-64": Decoder("Llama", 16, 16, 32000, _sizes(2048, 8192, 32, 8, 64)),
    "llama-8b": Decoder("Llama", 32, 4, 128256, _LLAMA_8B),
    "llama-8b-float8": Decoder("Llama", 32, 4, 128256, _LLAMA_8B, float8=True),
    "qwen3-4b": Decoder("Qwen3", 36, 4, 151936, _sizes(2560, 9728, 32, 8, 128, tie_word_embeddings=True)),
    # five layers of its window, then one of all tokens
    "gemma3-4b": Decoder("Gemma3", 34, 6, 262208, _sizes(2560, 10240, 8, 4, 256, sliding_window=1024), text="Text"),
    "gpt-oss-20b": Decoder("GptOss", 24, 4, 201088, _sizes(2880, 2880, 64, 8, 64, sliding_window=128)
                           | {"num_local_experts": 4, "num_experts_per_tok": 4}),  # of 32: each token takes all
    # attention of DeepSeek-V2-Lite, its first layer's MLP in all
    "mla-192-128": Decoder("DeepseekV3", 27, 4, 102400, {
        "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": None,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 0,
    }),
    "wan-1.3b": Video(30, 4, 12, 8960),
    "flux": Joint(57, 3, 24),
}  # fmt: skip
"""Those of 1B have 16 layers and Llama 2's vocabulary, as in TinyLlama; the others are published models'."""
DEFAULT = "llama-1b-128", "llama-1b-64", "llama-8b", "qwen3-4b", "gemma3-4b"
