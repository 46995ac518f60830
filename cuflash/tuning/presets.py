"""Attention shapes of well-known models, as their published configurations give them."""

from __future__ import annotations

from typing import Any

# name -> arguments of describe_problem; batch and lengths are the user's.
MODELS: dict[str, dict[str, Any]] = {
    "bert-base": dict(nheads_q=12, head_dim=64),
    "deepseek-v3": dict(nheads_q=128, head_dim=192, head_dim_v=128, causal=True),
    "flux": dict(nheads_q=24, head_dim=128),
    "gemma-2-9b": dict(nheads_q=16, nheads_k=8, head_dim=256, causal=True, softcap=50.0),
    "gpt-2": dict(nheads_q=12, head_dim=64, causal=True),
    "gpt-oss": dict(nheads_q=64, nheads_k=8, head_dim=64, causal=True, sink=True),
    "llama-3-8b": dict(nheads_q=32, nheads_k=8, head_dim=128, causal=True),
    "llama-3-70b": dict(nheads_q=64, nheads_k=8, head_dim=128, causal=True),
    "mistral-7b": dict(nheads_q=32, nheads_k=8, head_dim=128, causal=True, window_size=(4095, 0)),
    "mixtral-8x7b": dict(nheads_q=32, nheads_k=8, head_dim=128, causal=True),
    "phi-3-mini": dict(nheads_q=32, head_dim=96, causal=True),
    "qwen-2.5-7b": dict(nheads_q=28, nheads_k=4, head_dim=128, causal=True),
    "sdxl": dict(nheads_q=10, head_dim=64),
    "vit-large": dict(nheads_q=16, head_dim=64),
    "whisper-large": dict(nheads_q=20, head_dim=64),
}
