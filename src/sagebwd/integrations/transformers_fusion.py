"""``config.sagebwd = {"fuse": True}``: a layer's norms, rotary embedding and attention in one, `sagebwd.norm_rope`.

Attention is given what the projections make, and beside it ``norm_rope``: the arguments by keyword that
`qk_norm_rope` and `qk_norm_rope_attention` share. Where there is a KV cache it is given normalised and rotated rows.

Transformers calls an attention function with queries and keys that are normalised and rotated already, so the layer's
forward is another one where its class is known: where its own forward, its module's rotary embedding and its norms are
written, statement for statement, as here. Most decoders are, since they are generated from a few models (Llama, Qwen3,
Gemma 3, OLMo 2, GLM 4.5). The class of any other layer stays as it is, and its call is refused by name.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sagebwd.integrations.transformers_settings import NAME, is_fused, settings_of
from sagebwd.integrations.transformers_torch import say
from sagebwd.norm_rope import qk_norm_rope
from sagebwd.reference.norm_rope import HALF, INTERLEAVED

# Norms of Q and K before their rotation: of each head; the same where the layer says so; of all heads together.
NONE, HEADS, HEADS_IF_ASKED, ALL_HEADS = "none", "heads", "heads if asked", "all heads"


def _by_side(*statements: str, sides: tuple[str, ...] = ("query", "key", "value")) -> list[str]:
    return [statement.format(side=side, letter=side[0]) for statement in statements for side in sides]


_SHAPES = ["input_shape = hidden_states.shape[:-1]", "hidden_shape = (*input_shape, -1, self.head_dim)"]
_PROJECTED = _by_side("{side}_states = self.{letter}_proj(hidden_states).view(hidden_shape).transpose(1, 2)")
_NORMED = _by_side("{side}_states = self.{letter}_norm({side}_states)", sides=("query", "key"))
_PROLOGUES = (
    (NONE, _PROJECTED),
    (
        HEADS,
        _by_side(
            "{side}_states = self.{letter}_norm(self.{letter}_proj(hidden_states).view(hidden_shape)).transpose(1, 2)",
            sides=("query", "key"),
        )
        + _PROJECTED[2:],
    ),
    (HEADS, _PROJECTED + _NORMED),
    (
        HEADS_IF_ASKED,
        [
            *_by_side("{side}_states = self.{letter}_proj(hidden_states).view(hidden_shape)"),
            "if self.use_qk_norm:\n" + textwrap.indent("\n".join(_NORMED), "    "),
            *_by_side("{side}_states = {side}_states.transpose(1, 2)"),
        ],
    ),
    (
        ALL_HEADS,
        [
            *_by_side("{side}_states = self.{letter}_norm(self.{letter}_proj(hidden_states))", sides=("query", "key")),
            "value_states = self.v_proj(hidden_states)",
            *_by_side("{side}_states = {side}_states.view(hidden_shape).transpose(1, 2)"),
        ],
    ),
)
_ROTATION = [
    "cos, sin = position_embeddings",
    "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
    "if past_key_values is not None:\n"
    "    key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)",
]
_EPILOGUE = [
    "attn_output = attn_output.reshape(*input_shape, -1).contiguous()",
    "attn_output = self.o_proj(attn_output)",
    "return (attn_output, attn_weights)",
]
_CALLED = "self", "query_states", "key_states", "value_states", "attention_mask"
# Keywords of the call of the attention function, each with what it may be.
_KEYWORDS = {
    "dropout": (
        "0.0 if not self.training else self.attention_dropout", "self.attention_dropout if self.training else 0.0",
    ),
    "scaling": ("self.scaling",),
    "sliding_window": ("self.sliding_window", "getattr(self.config, 'sliding_window', None)"),
    None: ("kwargs",),
}  # fmt: skip
_ALWAYS = "dropout", "scaling", None
_PARAMETERS = "self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"

_UNSQUEEZED = ["cos = cos.unsqueeze(unsqueeze_dim)", "sin = sin.unsqueeze(unsqueeze_dim)"]
_TURNED = ["q_embed = q * cos + rotate_half(q) * sin", "k_embed = k * cos + rotate_half(k) * sin"]
_PARTLY = [
    "rotary_dim = cos.shape[-1]",
    "q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])",
    "k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])",
    "q_embed = q_rot * cos + rotate_half(q_rot) * sin",
    "k_embed = k_rot * cos + rotate_half(k_rot) * sin",
    "q_embed = torch.cat([q_embed, q_pass], dim=-1)",
    "k_embed = torch.cat([k_embed, k_pass], dim=-1)",
]
_REPEATED = [
    "cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)",
    "sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)",
]
_RETURNED = ["return (q_embed, k_embed)"]
# Whether the first half of cos is repeated for pairs side by side; and the rotary embedding.
_ROTARY_EMBEDDINGS = (
    (False, [*_UNSQUEEZED, *_TURNED, *_RETURNED]),
    (False, [*_UNSQUEEZED, *_PARTLY, *_RETURNED]),
    (True, [*_UNSQUEEZED, *_REPEATED, *_PARTLY, *_RETURNED]),
    (
        False,
        [
            "q_type, k_type = (q.dtype, k.dtype)",
            *_UNSQUEEZED,
            *_TURNED,
            "return (q_embed.to(q_type), k_embed.to(k_type))",
        ],
    ),
)
_HALVES = {
    HALF: [
        "x1 = x[..., :x.shape[-1] // 2]", "x2 = x[..., x.shape[-1] // 2:]", "return torch.cat((-x2, x1), dim=-1)",
    ],
    INTERLEAVED: ["x1 = x[..., 0::2]", "x2 = x[..., 1::2]", "return torch.stack((-x2, x1), dim=-1).flatten(-2)"],
}  # fmt: skip

_SQUARES = [
    "input_dtype = hidden_states.dtype",
    "hidden_states = hidden_states.to(torch.float32)",
    "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
    "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
]
_NORM = ["return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"]
_GAIN_OVER_ONE = [
    "output = self._norm(x.float())",
    "output = output * (1.0 + self.weight.float())",
    "return output.type_as(x)",
]
# How a norm multiplies: by its weight, or by 1 + weight.
WEIGHT, ONE_PLUS_WEIGHT = "weight", "1 + weight"


class Form(NamedTuple):
    """What a class of attention layers computes: its norms, of which kind each class is, and its rotary embedding."""

    norms: str
    kinds: tuple[tuple[type, str], ...]
    rope: str
    repeats: bool
    slides: bool  # it hands sliding_window on


def install(model_class: type[PreTrainedModel]) -> None:
    """Have attention layers of a model's module follow ``fuse`` of their config, read at every call.

    Those whose class is not known stay as they are, and so does every layer whose config does not ask.
    """
    for base in model_class.__mro__:
        if ".modeling_" not in base.__module__:
            continue
        for found in list(vars(sys.modules[base.__module__]).values()):
            if inspect.isclass(found) and issubclass(found, nn.Module) and found.__name__.endswith("Attention"):
                _install(found)


def follows(module: nn.Module) -> bool:
    """Whether a layer's forward is one that follows ``fuse``."""
    return hasattr(type(module).forward, "form")


def _install(layer_class: type[nn.Module]) -> None:
    original = layer_class.forward
    form = None if hasattr(original, "form") else form_of(layer_class)
    if form is None:
        return

    @wraps(original)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        if not is_fused(self.config):
            return original(self, *args, **kwargs)
        return fused_forward(self, form, *args, **kwargs)

    forward.form = form
    layer_class.forward = forward


def fused_forward(
    module: nn.Module,
    form: Form,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: object = None,
    past_key_values: object = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """A layer's forward: hidden_states (batch, tokens, width), position_embeddings cos and sin (batch, tokens, R)."""
    shape = hidden_states.shape[:-1]
    query, key, value = (getattr(module, f"{side}_proj")(hidden_states) for side in "qkv")
    if form.norms == ALL_HEADS:  # of other rows than the heads'
        query, key = module.q_norm(query), module.k_norm(key)
    query, key, value = (x.view(*shape, -1, module.head_dim).transpose(1, 2) for x in (query, key, value))
    cos, sin = position_embeddings
    if form.repeats:
        cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    norm_rope = {"cos": cos, "sin": sin, "rope": form.rope}
    if form.norms == HEADS or (form.norms == HEADS_IF_ASKED and module.use_qk_norm):
        (q_weight, eps), (k_weight, k_eps) = (_weight_and_eps(module, name, form) for name in ("q_norm", "k_norm"))
        if eps != k_eps:
            raise NotImplementedError(f"config.sagebwd: fuse: {type(module).__name__} has norms with two eps")
        norm_rope |= {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}
    if past_key_values is None:
        kwargs["norm_rope"] = norm_rope
    else:  # which keeps rows
        if module.training and query.requires_grad:
            say(
                "config.sagebwd: fuse: norm and rotary embedding run before attention and not with it, for the KV "
                "cache that use_cache=True keeps; give use_cache=False in training"
            )
        query, key = qk_norm_rope(query, key, impl=settings_of(module)["impl"], **norm_rope)
        key, value = past_key_values.update(key, value, module.layer_idx)
    if form.slides:
        of_config = getattr(module.config, "sliding_window", None)
        kwargs["sliding_window"] = getattr(module, "sliding_window", of_config)
    dropout = module.attention_dropout if module.training else 0.0
    scaling = module.scaling
    attend = AttentionInterface()[NAME]
    out, weights = attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return module.o_proj(out.reshape(*shape, -1).contiguous()), weights


def of_packed(norm_rope: dict[str, object], batch: int, real: Tensor | None = None) -> dict[str, object]:
    """The same of (batch * tokens, heads, head_dim), or of its rows ``real``: tables (batch or 1, tokens, R) too."""
    tables = {name: norm_rope[name].expand(batch, -1, -1).flatten(0, 1) for name in ("cos", "sin")}
    return norm_rope | {name: x if real is None else x[real] for name, x in tables.items()}


def _weight_and_eps(module: nn.Module, name: str, form: Form) -> tuple[Tensor | None, float]:
    """What a norm multiplies by, and its eps. Raises NotImplementedError for one that is not known."""
    norm = getattr(module, name)
    for norm_class, kind in form.kinds:
        if type(norm) is norm_class and not norm._forward_hooks and not norm._forward_pre_hooks:
            eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
            return (1 + norm.weight.float() if kind == ONE_PLUS_WEIGHT else norm.weight), eps
    raise NotImplementedError(
        f"config.sagebwd: fuse: {name} of {type(module).__name__} is a {type(norm).__name__} that is not known or has "
        "hooks; leave fuse out"
    )


def form_of(layer_class: type[nn.Module]) -> Form | None:
    """The form of a class of attention layers; None where it is not known."""
    names = vars(sys.modules[layer_class.__module__])
    statements, rotation = statements_of(layer_class.forward), statements_of(names.get("apply_rotary_pos_emb"))
    repeats = next((repeats for repeats, known in _ROTARY_EMBEDDINGS if rotation == known), None)
    half = statements_of(names.get("rotate_half"))
    rope = next((rope for rope, known in _HALVES.items() if half == known), None)
    if statements is None or len(statements) <= len(_EPILOGUE) or repeats is None or rope is None:
        return None
    slides = _hands_sliding_window_on(statements[-len(_EPILOGUE) - 1])
    if slides is None or tuple(inspect.signature(layer_class.forward).parameters) != _PARAMETERS:
        return None
    for norms, known in _PROLOGUES:
        # between the two is the attention function, which is chosen and called
        head = [*_SHAPES, *known, *_ROTATION]
        if statements[: len(head)] == head and statements[len(head) + 2 :] == _EPILOGUE:
            kinds = ((x, _kind_of(x)) for x in names.values() if inspect.isclass(x) and issubclass(x, nn.Module))
            return Form(norms, tuple((x, kind) for x, kind in kinds if kind), rope, repeats, slides)
    return None


def statements_of(function: Callable | None) -> list[str] | None:
    """The statements of a function as Python writes them, without comments and docstring; None without a source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body
    except (OSError, TypeError, AttributeError, SyntaxError):  # no source, or no function's
        return None
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return [ast.unparse(x) for x in body[documented:]]


def _hands_sliding_window_on(statement: str) -> bool | None:
    """Whether a call of the attention function gives it sliding_window; None where it is another statement."""
    call = getattr(ast.parse(statement).body[0], "value", None)
    if not isinstance(call, ast.Call) or not statement.startswith("attn_output, attn_weights = attention_interface("):
        return None
    keywords = {x.arg: ast.unparse(x.value) for x in call.keywords}
    known = all(text in _KEYWORDS.get(name, ()) for name, text in keywords.items())
    if not known or [ast.unparse(x) for x in call.args] != list(_CALLED) or not {*_ALWAYS} <= keywords.keys():
        return None
    return "sliding_window" in keywords


def _kind_of(norm_class: type[nn.Module]) -> str | None:
    """How a class of norms multiplies; None of what is no RMS norm that is known."""
    if norm_class is nn.RMSNorm:
        return WEIGHT
    if not norm_class.__name__.endswith("RMSNorm"):
        return None
    statements = statements_of(norm_class.forward)
    for product in ("self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states).to(input_dtype)"):
        if statements == [*_SQUARES, f"return {product}"]:
            return WEIGHT
    norm = statements_of(getattr(norm_class, "_norm", None))
    return ONE_PLUS_WEIGHT if (statements, norm) == (_GAIN_OVER_ONE, _NORM) else None
