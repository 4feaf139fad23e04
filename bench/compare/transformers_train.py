"""Times training steps of the comparison model in `transformers` and prints one JSON line.

The model: 4 layers, D=256, 8 experts, K=2, F=512, byte vocabulary, S=256, batch 16, AdamW, pooled balance loss.
One process measures one way, so that a way's memory is its own.
"""

import argparse
import json
import resource
import statistics
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def build(experts: str) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=258, hidden_size=256, intermediate_size=1024, moe_intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False, output_router_logits=True,
        router_aux_loss_coef=0.01, decoder_sparse_step=1, mlp_only_layers=[],
    )
    config._experts_implementation = experts
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", default="grouped_mm", choices=["eager", "grouped_mm", "batched_mm"])
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--data", required=True, help="a text file; its bytes are the tokens")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = torch.frombuffer(bytearray(open(args.data, "rb").read()), dtype=torch.uint8).long()
    model = build(args.experts).train().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch, seq = 16, 256
    times, losses = [], []
    for step in range(args.steps + 2):
        starts = torch.randint(0, len(data) - seq - 1, (batch,), generator=torch.Generator().manual_seed(step))
        ids = torch.stack([data[s : s + seq + 1] for s in starts]).to(args.device)
        start = time.perf_counter()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            output = model(input_ids=ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(output.logits.float().flatten(0, 1), ids[:, 1:].flatten())
            loss = loss + 0.01 * output.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[2:])
    print(json.dumps({
        "way": f"transformers {args.experts}", "precision": args.precision, "tokens_per_s": batch * seq / step_s,
        "step_s": step_s, "last_loss": losses[-1], "experts": model.config._experts_implementation,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "torch": torch.__version__,
    }))


if __name__ == "__main__":
    main()
