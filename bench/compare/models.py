"""The models whose training is compared: what Moeworks calls their settings, and the same in `transformers`.

`comparison`: 4 layers, D=256, 8 experts, K=2, F=512, byte vocabulary; 1b: OLMoE's kind with a billion weights, 16 layers, D=1024,
32 experts, K=8, F=512 and OLMoE's vocabulary, of which bytes use the first.
"""

MODELS = {
    "comparison": {
        "tokens": (16, 256),
        "layers": 4, "width": 256, "heads": 4, "head": 64, "experts": 8, "k": 2, "expert_width": 512, "vocabulary": None,
        "is_olmoe": False,
    },
    "1b": {
        "tokens": (16, 1024),
        "layers": 16, "width": 1024, "heads": 16, "head": 64, "experts": 32, "k": 8, "expert_width": 512, "vocabulary": 50304,
        "is_olmoe": True,
    },
}


def settings(name):
    """Moeworks' settings of a model and of the tokens of a step."""
    model = MODELS[name]
    batch, seq = model["tokens"]
    return {
        "model.num_layers": model["layers"], "model.width": model["width"], "model.num_heads": model["heads"],
        "model.num_kv_heads": model["heads"], "model.head_dim": model["head"], "model.num_experts": model["experts"],
        "model.top_k": model["k"], "model.expert_width": model["expert_width"], "model.vocab_size": model["vocabulary"] or 0,
        "model.qk_norm": "whole" if model["is_olmoe"] else "head",
        "model.normalize_weights": str(not model["is_olmoe"]).lower(),
        "train.batch_size": batch, "train.seq_len": seq,
    }


def transformers_model(name, experts):
    """The model in `transformers`, with random weights; `experts` is how these are computed."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = MODELS[name]
    shape = dict(
        hidden_size=model["width"], num_hidden_layers=model["layers"], num_attention_heads=model["heads"],
        num_key_value_heads=model["heads"], num_experts=model["experts"], num_experts_per_tok=model["k"],
        norm_topk_prob=not model["is_olmoe"], max_position_embeddings=1024, tie_word_embeddings=False,
        output_router_logits=True, router_aux_loss_coef=0.01, vocab_size=model["vocabulary"] or 258,
    )
    if model["is_olmoe"]:
        config = OlmoeConfig(intermediate_size=model["expert_width"], eos_token_id=1, **shape)
    else:
        config = Qwen3MoeConfig(
            intermediate_size=1024, moe_intermediate_size=model["expert_width"], head_dim=model["head"],
            decoder_sparse_step=1, mlp_only_layers=[], **shape,
        )
    config._experts_implementation = experts
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return (OlmoeForCausalLM if model["is_olmoe"] else Qwen3MoeForCausalLM)(config)
