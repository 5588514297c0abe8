"""Attention of the text decoder: grouped-query and multi-head latent, each as self-attention and cross-attention.

Self-attention reads the earlier text, with rotary position embedding (RoPE). Cross-attention reads image tokens, which
already contain their position. The configuration chooses the kind of each: `kv_latent_size` and `image_latent_size`
make it latent. `docs/attention.md` compares them, and `docs/how_it_works.ipynb` goes through them step by step.

Shapes: B rows of text, L tokens, P image tokens (154), S keys to read (past + L of the text, or P), H query heads,
K key/value heads, D head size, C hidden size.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_traffic_vlm import KeyValues
from .configuration_traffic_vlm import TrafficVLMTextConfig


Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each [B,1,L,D/2]


class TrafficVLMRMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight, in float32 or float64 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        precise = torch.promote_types(hidden_states.dtype, torch.float32)
        x = hidden_states.to(precise)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * self.weight.to(precise)).to(hidden_states.dtype)


def rotary_embedding(position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines of position · theta^(-2i/D), each [B,1,L,D/2] (RoPE, https://arxiv.org/abs/2104.09864).

    The frequencies are not kept in a buffer: a buffer that is not saved would be uninitialized after
    `from_pretrained`, and `model.to(bfloat16)` would round it.
    """
    precise = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=precise, device=position_ids.device) / head_dim
    angles = position_ids[:, None, :, None].to(precise) * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, rotary: Rotary, interleaved: bool = False) -> torch.Tensor:
    """Rotate pairs of head dimensions of x [B,H,L,D] by the angles of `rotary_embedding`.

    Pairs are (i, i + D/2), or (2i, 2i + 1) if interleaved; the two layouts are permutations of each other.
    """
    cos, sin = rotary
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """softmax(q kᵀ · scaling + mask) [B,H,L,S] in float32, of query [B,H,L,D] and key [B,K,S,D].

    Each of the K key heads is shared by H/K consecutive query heads. attention_mask: [B,1,L,S], added to the scores;
    or bool, False at keys that a query must not read.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # [B,K,S,D] → [B,H,S,D]
    scores = query @ key.transpose(2, 3) * scaling  # [B,H,L,S]
    lowest = torch.finfo(scores.dtype).min
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        scores = scores + attention_mask
        attention_mask = attention_mask > lowest  # the same mask as bool: the added number is `lowest` at hidden keys
    if attention_mask is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    weights = scores.masked_fill(~attention_mask, lowest).softmax(dim=-1, dtype=torch.float32)
    return weights.masked_fill(~attention_mask, 0.0)  # all zero if every key is hidden, as in sdpa


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention: weights · values, of query [B,H,L,D], key and value [B,K,S,D].

    Returns:
        the attended values [B,L,H,D] and the attention weights [B,H,L,S].
    """
    weights = attention_weights(query, key, attention_mask, scaling).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)  # [B,K,S,D] → [B,H,S,D]
    return (weights @ value).transpose(1, 2).contiguous(), weights


class TrafficVLMAttention(nn.Module):
    """Grouped-query attention (https://arxiv.org/abs/2305.13245), the base of self-attention and cross-attention."""

    def __init__(self, config: TrafficVLMTextConfig, layer_idx: int, key_value_size: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.rope_interleaved = config.rope_interleaved  # a copy: reading a configuration is slow in a decoding step
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.add_key_value_projections(key_value_size)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def add_key_value_projections(self, key_value_size: int) -> None:
        """Called by the constructor, so that latent attention can have other projections."""
        size = self.config.num_key_value_heads * self.head_dim
        self.k_proj = nn.Linear(key_value_size, size, bias=False)
        self.v_proj = nn.Linear(key_value_size, size, bias=False)

    def query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Queries [B,H,L,D] of states [B,L,C], before RoPE."""
        return self.split_heads(self.q_proj(hidden_states))

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """States [B,L,C] of the heads' outputs [B,L,H,D]."""
        return self.o_proj(heads.flatten(2))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B,L,H·D] → [B,H,L,D]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States [B,L,C], and the attention weights [B,H,L,S] if the implementation returns them, else None."""
        dropout = self.config.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        if query.shape[2] == 1 and implementation == "sdpa":
            # One token, as in a decoding step: the H/K query heads that share a key head become H/K rows of that head.
            # Several times faster than H products of one row.
            query = query.unflatten(1, (key.shape[1], -1))[:, :, :, 0]  # [B,H,1,D] → [B,K,H/K,D]
            grouped = nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout, scale=self.scaling)
            return self.output(grouped.flatten(1, 2)[:, None]), None  # [B,K,H/K,D] → [B,1,H,D] → [B,1,C]
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        heads, weights = attention(self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.output(heads), weights


class TrafficVLMSelfAttention(TrafficVLMAttention):
    """Causal attention: each token reads itself and the earlier tokens of its question."""

    is_causal = True

    def __init__(self, config: TrafficVLMTextConfig, layer_idx: int):
        super().__init__(config, layer_idx, key_value_size=config.hidden_size)

    def query_key_value(
        self, hidden_states: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B,H,L,D], and keys and values [B,K,L,D], of states [B,L,C]; queries and keys are rotated."""
        query = apply_rotary(self.query(hidden_states), rotary, self.rope_interleaved)
        key = apply_rotary(self.split_heads(self.k_proj(hidden_states)), rotary, self.rope_interleaved)
        return query, key, self.split_heads(self.v_proj(hidden_states))

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: Rotary,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.query_key_value(hidden_states, rotary)
        if past_key_values is not None:
            # [B,K,L,D] → [B,K,past+L,D]; cached keys are already rotated
            key, value = past_key_values.update(key, value, self.layer_idx)
        return self.attend(query, key, value, attention_mask, **kwargs)


class TrafficVLMCrossAttention(TrafficVLMAttention):
    """Each token reads the whole image, without RoPE: image tokens already contain their position."""

    is_causal = False

    def __init__(self, config: TrafficVLMTextConfig, layer_idx: int):
        super().__init__(config, layer_idx, key_value_size=cast(int, config.encoder_hidden_size))

    def project(self, encoder_hidden_states: torch.Tensor) -> KeyValues:
        """Keys and values [B,K,P,D] of image tokens [B,P,encoder_hidden_size], computed once per image."""
        key, value = self.k_proj(encoder_hidden_states), self.v_proj(encoder_hidden_states)
        return self.split_heads(key), self.split_heads(value)

    def attention_weights(
        self, hidden_states: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention weights [B,H,L,P] in float32 of states [B,L,C] on image keys [B,K,P,D], computed anew.

        attention_mask: [B,P], 0 at hidden image tokens.
        """
        visible = None if attention_mask is None else attention_mask[:, None, None].bool()
        return attention_weights(self.query(hidden_states), key, visible, self.scaling)

    def forward(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attend(self.query(hidden_states), key, value, attention_mask, **kwargs)


class TrafficVLMHeadLinear(nn.Module):
    """One linear map per head, without bias: [B,H,L,in] → [B,H,L,out]."""

    def __init__(self, num_heads: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhli,hio->bhlo", x, self.weight)  # `x @ weight` would copy the weight for each row


class TrafficVLMLatentAttention(TrafficVLMAttention):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434), the base of self-attention and cross-attention.

    A token s has one latent c_s = norm(W_D x_s), shared by all heads. Head i has the key W_UK_i c_s and the value
    W_UV_i c_s. Neither is ever computed, because its matrix can be moved to the side of the query or the output:

        q_i · (W_UK_i c_s) = (W_UK_iᵀ q_i) · c_s            score of query head i and token s
        Σ_s w_s (W_UV_i c_s) = W_UV_i (Σ_s w_s c_s)         output of head i with attention weights w_s

    So the matrices are "absorbed", and what remains is multi-query attention: c_s is the one key and the one value of
    all heads, and the only thing to cache. It is cached as the key; the value in the cache has width 0.

    The two subclasses take `forward` from the grouped-query classes, and replace projections, `query`, `attend` and
    `output`. LoRA can adapt their linear layers, but not the matrices of each head (`TrafficVLMHeadLinear`).
    """

    def add_latent_projections(self, key_value_size: int, latent_size: int) -> None:
        """Add W_D, W_UK and W_UV for tokens of width `key_value_size`."""
        heads = self.config.num_attention_heads
        self.num_key_value_groups = heads  # all heads share one key
        self.latent_size = latent_size
        self.kv_down_proj = nn.Linear(key_value_size, latent_size, bias=False)  # W_D
        self.kv_norm = TrafficVLMRMSNorm(latent_size, self.config.rms_norm_eps)
        self.k_up_proj = TrafficVLMHeadLinear(heads, self.head_dim, latent_size)  # W_UKᵀ, applied to the query
        self.v_up_proj = TrafficVLMHeadLinear(heads, latent_size, self.head_dim)  # W_UV, applied to the output

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        """Latents [B,1,S,latent_size] of tokens [B,S,key_value_size]."""
        return self.kv_norm(self.kv_down_proj(x))[:, None]

    def query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Absorbed queries [B,H,L,latent_size] of states [B,L,C], to compare with latents."""
        return self.k_up_proj(super().query(hidden_states))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # The key is also the value. In self-attention it has rotated dimensions behind the latent, which `output`
        # drops: fast kernels need keys and values of one width, and a slice of the key would be slower.
        return super().attend(query, key, key, mask, **kwargs)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """States [B,L,C] of each head's weighted sum of keys [B,L,H,latent_size or more]."""
        latents = heads[..., : self.latent_size].transpose(1, 2)  # [B,H,L,latent_size]
        return super().output(self.v_up_proj(latents).transpose(1, 2))


class TrafficVLMLatentSelfAttention(TrafficVLMLatentAttention, TrafficVLMSelfAttention):
    """Causal latent attention with decoupled RoPE.

    RoPE would rotate q_i and W_UK_i c. A rotation that depends on the position would stand between q_i and W_UK_i, so
    W_UK_i could not be absorbed. So the latent has no position. Instead, each query and the one key get rope_head_dim
    more dimensions, computed from the states x by q_rope_proj and k_rope_proj, and only these are rotated:

        query of head i  [W_UK_iᵀ q_i ; rotated q_R_i]        key  [c ; rotated k_R]        value  c

    The cache holds the key: kv_latent_size + rope_head_dim numbers for each token. The scale is that of unabsorbed
    queries and keys, 1/√(head_dim + rope_head_dim).
    """

    def add_key_value_projections(self, key_value_size: int) -> None:
        config = self.config
        self.scaling = (config.head_dim + config.rope_head_dim) ** -0.5
        self.add_latent_projections(key_value_size, cast(int, config.kv_latent_size))
        query_size = config.num_attention_heads * config.rope_head_dim
        self.q_rope_proj = nn.Linear(key_value_size, query_size, bias=False)  # q_R of each head
        self.k_rope_proj = nn.Linear(key_value_size, config.rope_head_dim, bias=False)  # k_R, shared by all heads

    def query_key_value(
        self, hidden_states: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B,H,L,kv_latent_size + rope_head_dim], keys [B,1,L,the same] and values of width 0, of states."""
        query_rope = self.q_rope_proj(hidden_states).unflatten(-1, (-1, self.config.rope_head_dim)).transpose(1, 2)
        query_rope = apply_rotary(query_rope, rotary, self.rope_interleaved)  # [B,H,L,rope_head_dim]
        key_rope = apply_rotary(self.k_rope_proj(hidden_states)[:, None], rotary, self.rope_interleaved)
        query = torch.cat([self.query(hidden_states), query_rope], dim=-1)
        key = torch.cat([self.latent(hidden_states), key_rope], dim=-1)
        return query, key, key[..., :0]


class TrafficVLMLatentCrossAttention(TrafficVLMLatentAttention, TrafficVLMCrossAttention):
    """Each token reads the latents of the whole image, without RoPE: a key is a latent alone."""

    def add_key_value_projections(self, key_value_size: int) -> None:
        self.add_latent_projections(key_value_size, cast(int, self.config.image_latent_size))

    def project(self, encoder_hidden_states: torch.Tensor) -> KeyValues:
        """Latents [B,1,P,image_latent_size] of image tokens as keys, and values [B,1,P,0]."""
        latent = self.latent(encoder_hidden_states)
        return latent, latent[..., :0]
