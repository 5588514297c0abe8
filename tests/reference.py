"""The decoder written from its formulas: one row in float64, head by head and token by token, nothing absorbed."""

import math

import torch

from traffic_vlm.modeling_traffic_vlm import TrafficVLMTextModel


def reference_decoder(model: TrafficVLMTextModel, ids: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
    """States [L,C] of ids [L], with cross-attention to image tokens [P,W] unless they are None."""
    c = model.config
    weight = {name: tensor.double() for name, tensor in model.state_dict().items()}
    image = None if image is None else image.double()

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight[f"{name}.weight"]

    def rotate(vector, position):
        half, out = len(vector) // 2, vector.clone()
        for i in range(half):
            angle = position * c.rope_parameters["rope_theta"] ** (-i / half)
            first, second = (2 * i, 2 * i + 1) if c.rope_interleaved else (i, i + half)
            out[first] = vector[first] * math.cos(angle) - vector[second] * math.sin(angle)
            out[second] = vector[second] * math.cos(angle) + vector[first] * math.sin(angle)
        return out

    def attend(name, x, source, is_self):
        is_latent = (c.kv_latent_size if is_self else c.image_latent_size) is not None

        def project(projection, h, i, size):  # head i of a linear projection
            return weight[f"{name}.{projection}.weight"][i * size : (i + 1) * size] @ h

        def key_and_value(s, i):
            if not is_latent:
                group = i // (c.num_attention_heads // c.num_key_value_heads)
                key = project("k_proj", source[s], group, c.head_dim)
                return rotate(key, s) if is_self else key, project("v_proj", source[s], group, c.head_dim)
            latent = norm(weight[f"{name}.kv_down_proj.weight"] @ source[s], f"{name}.kv_norm")
            key = weight[f"{name}.k_up_proj.weight"][i] @ latent
            if is_self:
                key = torch.cat([key, rotate(weight[f"{name}.k_rope_proj.weight"] @ source[s], s)])
            return key, weight[f"{name}.v_up_proj.weight"][i].T @ latent

        rows = []
        for t in range(len(x)):
            heads = []
            for i in range(c.num_attention_heads):
                query = project("q_proj", x[t], i, c.head_dim)
                if is_self and is_latent:
                    query = torch.cat([query, rotate(project("q_rope_proj", x[t], i, c.rope_head_dim), t)])
                elif is_self:
                    query = rotate(query, t)
                pairs = [key_and_value(s, i) for s in range(t + 1 if is_self else len(source))]
                scores = torch.stack([query @ key for key, _ in pairs]) / math.sqrt(len(query))
                heads.append(scores.softmax(0) @ torch.stack([value for _, value in pairs]))
            rows.append(weight[f"{name}.o_proj.weight"] @ torch.cat(heads))
        return torch.stack(rows)

    x = weight["embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        name = f"layers.{i}"
        h = norm(x, f"{name}.self_attn_norm")
        x = x + attend(f"{name}.self_attn", h, h, is_self=True)
        if image is not None:
            x = x + attend(f"{name}.cross_attn", norm(x, f"{name}.cross_attn_norm"), image, is_self=False)
        h = norm(x, f"{name}.mlp_norm")
        gate, up = (h @ weight[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + gate * gate.sigmoid() * up @ weight[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "norm")
