"""Times training steps of a model (models.py) in `transformers` and prints one JSON line: AdamW, pooled balance loss.

One process measures one way, so that a way's memory is its own.
"""

import argparse
import json
import resource
import statistics
import time

import torch

from models import MODELS, transformers_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="comparison", choices=list(MODELS))
    parser.add_argument("--experts", default="grouped_mm", choices=["eager", "grouped_mm", "batched_mm"])
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--data", required=True, help="a text file; its bytes are the tokens")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = torch.frombuffer(bytearray(open(args.data, "rb").read()), dtype=torch.uint8).long()
    with torch.device(args.device):
        model = transformers_model(args.model, args.experts).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batch, seq = MODELS[args.model]["tokens"]
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
