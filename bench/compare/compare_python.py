"""The Python package beside transformers' own experts, in one process with the same threads, in turns.

Parts (`--parts`, all by default):

- experts: a class of experts of transformers with its weights, computed by `moeworks`, `grouped_mm`, `batched_mm` and `eager`: the four
  shapes of `bench/compare/run moe` at 1, 16, 512 and 4,096 tokens, in f32 and bf16, forward alone and forward and backward.
  `batched_mm` copies a matrix for each row and is left out over 16 tokens.
- models: two layers of OLMoE, Mixtral, Qwen3-MoE and GPT-OSS with the vocabulary cut to 1,024: a training step of 512 tokens, and 16
  tokens decoded one by one.
- lora: a training step of OLMoE's two layers with PEFT's adapters (rank 16) on the stacked experts and all else frozen.
- overhead: a call of tiny experts with one token, which is all overhead.
- threads (only if asked for): shape d with 16 tokens alone, and directly after an operation of PyTorch's, whose OpenMP threads then wait
  busily; with OMP_WAIT_POLICY=PASSIVE in the environment they do not.

Ways take turns within a cell, several rounds; a time is the median of a way's runs after one that warms up. Ours is compared with the
best other way of the cell; ways that take half as long again as the best in the first round are not run further. `--thp` runs everything
with PyTorch's own switch for huge pages (THP_MEM_ALLOC_ENABLE=1), `--divide N` with all widths divided by N. The package is that of
`PYTHONPATH`, or the installed one.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from types import SimpleNamespace

SHAPES = {
    "a": (2048, 1024, 64, 8, True),
    "b": (1024, 3584, 8, 2, True),
    "c": (768, 3072, 64, 1, False),
    "d": (1024, 384, 128, 8, True),
}
OTHERS = ("grouped_mm", "batched_mm", "eager")
# Least seconds of a way's runs in a round, and the most runs.
SECONDS, RUNS = 0.3, 50


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["experts", "models", "lora", "overhead"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 512, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--passes", nargs="+", default=["forward", "both"])
    parser.add_argument("--ways", nargs="+", default=list(OTHERS), choices=OTHERS, help="of transformers")
    parser.add_argument("--models", nargs="+", default=["olmoe", "mixtral", "qwen3", "gpt-oss"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: one on each core")
    parser.add_argument("--divide", type=int, default=1)
    parser.add_argument("--thp", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="processor time, with --threads 1 on a machine that is busy")
    return parser.parse_args()


args = arguments()
if args.thp and os.environ.get("THP_MEM_ALLOC_ENABLE") != "1":
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch  # noqa: E402
import transformers  # noqa: E402

import moeworks  # noqa: E402
import moeworks.transformers  # noqa: E402
from moeworks import ops  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
results = []


def measure(call, seconds):
    """Times of single runs: at least one, until `seconds` are over."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    found, start = [], clock()
    while not found or (clock() - start < seconds and len(found) < RUNS):
        before = clock()
        call()
        found.append(clock() - before)
    return found


def compare(cell, ways):
    """Times `ways`, functions by name of which `moeworks` is one, in turns, and prints a line."""
    times = {name: [] for name in ways}
    for call in ways.values():
        call()
    for round_number in range(args.rounds):
        if round_number == 1:
            best = min(statistics.median(of) for name, of in times.items() if name != "moeworks")
            slow = {name for name, of in times.items() if statistics.median(of) > 1.5 * best}
            ways = {name: call for name, call in ways.items() if name == "moeworks" or name not in slow}
        for name, call in ways.items():
            times[name] += measure(call, SECONDS)
    medians = {name: statistics.median(of) for name, of in times.items()}
    best = min((name for name in medians if name != "moeworks"), key=medians.get)
    ratio = medians[best] / medians["moeworks"]
    results.append((cell, ratio))
    shown = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in medians.items())
    print(f"{cell}: {shown}; {ratio:.2f} times {best}", flush=True)


def experts_module(d, f, e, is_gated, dtype):
    """Returns experts of transformers with random weights: Mixtral's, or NemotronH's with GELU."""
    settings = {"hidden_size": d, "intermediate_size": f, "moe_intermediate_size": f, "num_local_experts": e, "n_routed_experts": e}
    config = SimpleNamespace(
        **settings, hidden_act="silu", mlp_hidden_act="gelu", moe_latent_size=None, _experts_implementation="eager"
    )
    if is_gated:
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as cls
    else:
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts as cls
    module = cls(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    return module


def experts_way(module, inputs, dy, way):
    """Returns a function that computes `module` by `way`, and its gradients if there is `dy`."""

    def call():
        module.config._experts_implementation = way
        if dy is None:
            with torch.no_grad():
                module(*inputs)
            return
        module.zero_grad(set_to_none=True)
        inputs[0].grad = inputs[2].grad = None
        module(*inputs).backward(dy)

    return call


def experts_part():
    for shape in args.shapes:
        d, f, e, k, is_gated = SHAPES[shape]
        d, f = d // args.divide, f // args.divide
        for dtype in args.dtypes:
            torch.manual_seed(0)
            module = experts_module(d, f, e, is_gated, DTYPES[dtype])
            for tokens in args.tokens:
                x = torch.randn(tokens, d, dtype=DTYPES[dtype]).requires_grad_()
                weights, ids = torch.randn(tokens, e).softmax(-1).topk(k, dim=-1)
                weights = weights.to(DTYPES[dtype]).requires_grad_()
                others = [way for way in args.ways if tokens <= 16 or way != "batched_mm"]
                for name in args.passes:
                    dy = torch.randn_like(x) if name == "both" else None
                    ways = {way: experts_way(module, (x, ids, weights), dy, way) for way in ["moeworks", *others]}
                    compare(f"experts {shape} {dtype} T={tokens} {name}", ways)
            del module


def model(name, way):
    """Returns two layers of a model with random weights, in bf16."""
    usual = {
        "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": None,
        "bos_token_id": None,
    }  # fmt: skip
    n = args.divide
    if name == "olmoe":
        config = transformers.OlmoeConfig(hidden_size=2048 // n, intermediate_size=1024 // n, **usual)
    elif name == "mixtral":
        config = transformers.MixtralConfig(hidden_size=4096 // n, intermediate_size=14336 // n, **usual)
    elif name == "qwen3":
        sizes = {"hidden_size": 2048 // n, "moe_intermediate_size": 768 // n, "num_attention_heads": 32, "num_key_value_heads": 4}
        config = transformers.Qwen3MoeConfig(**sizes, head_dim=128 // n, num_experts=128, num_experts_per_tok=8, **usual)
    else:
        sizes = {"hidden_size": 2880 // n, "intermediate_size": 2880 // n, "head_dim": 64}
        config = transformers.GptOssConfig(**sizes, num_local_experts=32, num_experts_per_tok=4, **usual)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=way, dtype=torch.bfloat16)
    return made.eval()


def decoding(net):
    ids = torch.arange(1, 9).view(1, 8)

    def call():
        net.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)

    return call


def training(net):
    ids = torch.arange(512).view(2, 256) % 1000 + 1

    def call():
        net.zero_grad(set_to_none=True)
        net(input_ids=ids, labels=ids).loss.backward()

    return call


def by_way(net, call, ways):
    """Returns `call` once for each way of computing the experts of `net`."""

    def of(way):
        def run():
            net.set_experts_implementation(way)
            call()

        return run

    return {way: of(way) for way in ways}


def without_copies():
    """Returns the other ways for many tokens."""
    return [way for way in args.ways if way != "batched_mm"]


def models_part():
    for name in args.models:
        net = model(name, "moeworks")
        compare(f"model {name} training step", by_way(net, training(net), ["moeworks", *without_copies()]))
        net.zero_grad(set_to_none=True)
        with torch.no_grad():
            compare(f"model {name} decoding", by_way(net, decoding(net), ["moeworks", *args.ways]))
        del net


def lora_part():
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    net = model("olmoe", "moeworks")
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=[], target_parameters=names)
    net = peft.get_peft_model(net, config)
    ways = by_way(net.base_model.model, training(net), ["moeworks", *without_copies()])
    compare("LoRA on the experts of olmoe, training step", ways)


def overhead_part():
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(1, 16), torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    trained = [gate_up.clone().requires_grad_(), down.clone().requires_grad_()]
    cases = {
        "without gradients": lambda: ops.experts(x, gate_up, down, ids, weights),
        "with gradients": lambda: ops.experts(x, *trained, ids, weights),
    }
    for name, call in cases.items():
        with torch.no_grad() if name == "without gradients" else contextlib.nullcontext():
            for _ in range(200):
                call()
            found = []
            clock = time.process_time if args.cpu_time else time.perf_counter
            for _ in range(2000):
                before = clock()
                call()
                found.append(clock() - before)
        print(f"overhead of a call {name}: median {1e6 * statistics.median(found):.1f} us, least {1e6 * min(found):.1f} us")


def threads_part():
    d, f, e, k, _ = SHAPES["d"]
    torch.manual_seed(0)
    x, wide = torch.randn(16, d), torch.randn(2048, 2048)
    weights, ids = torch.randn(16, e).softmax(-1).topk(k, dim=-1)
    gate_up, down = torch.randn(e, 2 * f, d) * 0.02, torch.randn(e, d, f) * 0.02
    found = {"alone": [], "after an operation": []}
    with torch.no_grad():
        for turn in range(400):
            name = list(found)[turn % 2]
            if name != "alone":
                wide.mul_(1.0)
            else:
                # Until the threads of the turn before have stopped waiting.
                time.sleep(0.02)
            before = time.perf_counter()
            ops.experts(x, gate_up, down, ids, weights)
            found[name].append(time.perf_counter() - before)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    shown = ", ".join(f"{name} {1e3 * statistics.median(of):.3f} ms" for name, of in found.items())
    print(f"threads, OMP_WAIT_POLICY {policy}: {shown}")


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    about = moeworks.describe() | {
        "torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads(),
        "thp": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1", "divide": args.divide, "clock": "cpu" if args.cpu_time else "wall",
    }  # fmt: skip
    print(json.dumps(about), flush=True)
    parts = {"experts": experts_part, "models": models_part, "lora": lora_part, "overhead": overhead_part, "threads": threads_part}
    for part in args.parts:
        parts[part]()
    if results:
        mean = math.exp(statistics.mean(math.log(ratio) for _, ratio in results))
        slower = [cell for cell, ratio in results if ratio < 1.0]
        print(f"{len(results)} cells, geometric mean {mean:.2f}, slower: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
