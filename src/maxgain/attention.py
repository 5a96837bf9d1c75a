"""``nn.MultiheadAttention`` as four dense layers, so that each of its projections has a gain of its own.

It multiplies by its projections inside one operation. From outside one sees neither what three of them make of their
inputs nor what enters the last one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import MaxGainError, UnsupportedLayerError


class SplitAttention(nn.Module):
    """Takes and returns what an ``nn.MultiheadAttention`` does."""

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.kdim, self.vdim = packed.embed_dim, packed.kdim, packed.vdim
        self.num_heads, self.head_dim = packed.num_heads, packed.head_dim
        self.dropout, self.batch_first = packed.dropout, packed.batch_first
        weights: tuple[Tensor, ...] = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        if packed.in_proj_weight is not None:
            weights = packed.in_proj_weight.chunk(3)
        biases = (None,) * 3 if packed.in_proj_bias is None else packed.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(dense, weights, biases)
        self.out_proj = dense(packed.out_proj.weight, packed.out_proj.bias)
        self.train(packed.training)
        # TransformerEncoderLayer reads these, and does not take its fused path.
        self.in_proj_weight = self.in_proj_bias = None
        self._qkv_same_embed_dim = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the attention's output and, with ``need_weights``, its weights; ``is_causal`` is a hint alone."""
        if is_causal and attn_mask is None:  # as nn.MultiheadAttention does
            raise MaxGainError("is_causal says that attn_mask is a causal mask. Pass attn_mask too.")
        batch = None if query.dim() == 2 else 0 if self.batch_first else 1

        def heads(x: Tensor) -> Tensor:
            """(batch, heads, length, head_dim)."""
            x = x.unsqueeze(0) if batch is None else x.movedim(batch, 0)
            return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(query)), heads(self.k_proj(key)), heads(self.v_proj(value))
        mask, dropout = None, self.dropout if self.training else 0.0
        if attn_mask is not None:
            mask = _additive(attn_mask, q)
            mask = mask if mask.dim() == 2 else mask.view(len(q), self.num_heads, *mask.shape[-2:])
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q).view(len(q), 1, 1, -1)
            mask = padding if mask is None else mask + padding
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if batch is None else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        joined = mixed.transpose(1, 2).flatten(2)
        return self.out_proj(joined.squeeze(0) if batch is None else joined.movedim(0, batch)), weights


def dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a dense layer with copies of these."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")  # draws no random numbers
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return layer


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """What is added to the scores for a mask: -inf where a boolean one is True."""
    is_boolean = mask.dtype == torch.bool
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf) if is_boolean else mask.to(like)


def split_attention(model: nn.Module) -> nn.Module:
    """Replace every ``nn.MultiheadAttention`` of a model by four dense layers, in place, and return the model.

    The model computes the same, but for rounding, and constraints and reports see ``q_proj``, ``k_proj``, ``v_proj``
    and ``out_proj``. The weights are copied into new parameters: load a checkpoint before, and make the optimizer
    afterwards. Torch's fused path for evaluation is not taken any more.

    Args:
        model: The model to change; an ``nn.MultiheadAttention`` itself is returned as another module.

    Examples:
        >>> layer = split_attention(nn.TransformerEncoderLayer(8, nhead=2))
        >>> [name for name, _ in layer.self_attn.named_children()]
        ['q_proj', 'k_proj', 'v_proj', 'out_proj']
    """
    made: dict[nn.Module, SplitAttention] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            has_own_forward = type(module).forward is not nn.MultiheadAttention.forward
            if has_own_forward or module.bias_k is not None or module.add_zero_attn:
                reason = "it has a forward of its own" if has_own_forward else "add_bias_kv or add_zero_attn is set"
                raise UnsupportedLayerError(f"layer {name!r} ({type(module).__name__}) cannot be split: {reason}.")
            made[module] = SplitAttention(module)
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its layers' fused path alone can take one
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in made:
                module._modules[name] = made[child]
    return made.get(model, model)
