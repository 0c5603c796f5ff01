"""A static cache is a cache."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engines.transformers_backend.folded_attention import folded_attention_in
from engines.transformers_backend.model import cache_argument
from engines.transformers_backend.static_cache import StaticKv


@torch.inference_mode()
def test_passes_over_it_equal_one_pass_also_behind_a_rollback():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (1, 12))
    expected = model(ids).logits[0]
    cache = StaticKv(config, capacity=16, dtype=torch.float32, device=torch.device("cpu"))

    def forward(token_ids, start):
        cache.positions = torch.arange(start, start + token_ids.shape[1])
        with folded_attention_in(model):
            return model(
                token_ids,
                position_ids=cache.positions[None],
                attention_mask=cache.mask(cache.positions),
                **{cache_argument(model): cache},
            ).logits[0]

    first = forward(ids[:, :7], 0)
    forward(ids.flip(1)[:, :5], 7)  # a draft that is dropped
    logits = torch.cat([first, forward(ids[:, 7:8], 7), forward(ids[:, 8:], 8)])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
