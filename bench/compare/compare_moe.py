"""The MoE layer on the CPU or on a GPU: Moeworks against every way that PyTorch has, cell by cell, in turn.

A cell is a shape (D, F, E, K), a type, a number of tokens and forward alone or forward and backward. Both programs keep the
weights of a shape and take turns within a cell, several rounds; each side's time is the median of all its runs, after one
that warms up. Moeworks is compared with the best PyTorch way of the cell; ways that take half as long again as the best in
the first round are not run in further ones. The ways:

- transformers' sparse MoE block of Mixtral with its eager and its grouped_mm experts (gated shapes only),
- a loop over the experts that got tokens, each with linear layers of its own,
- one sort by expert, a split, and a linear layer an expert,
- torch._grouped_mm by hand on the sorted rows.

Gradients of weights in bf16 are bf16, as PyTorch's are.

With `--device cuda` both compute on the GPU, shapes and numbers of tokens are others, our layer is also timed with experts that multiply
in eight-bit floats (`fp8`, against PyTorch's in bf16), and lines have the shares of a dense bf16
product's rate, which PyTorch is timed at first, and the share of our layer's time that all but its experts' products takes alone, by the
same operations (router, dispatch and combine; `"part": "routing"` of `moeworks bench moe`). The counting sort of 65,536 tokens' 8 choices of 256 experts comes last.
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F

from moeworks_bench import Moeworks

SHAPES = {
    "a": (2048, 1024, 64, 8, "swiglu"),
    "b": (1024, 3584, 8, 2, "swiglu"),
    "c": (768, 3072, 64, 1, "gelu"),
    "d": (1024, 384, 128, 8, "swiglu"),
}
GPU_SHAPES = {
    "olmoe": (2048, 1024, 64, 8, "swiglu"),
    "mixtral": (4096, 14336, 8, 2, "swiglu"),
    "qwen3-30b": (2048, 768, 128, 8, "swiglu"),
    "deepseek-v3": (7168, 2048, 256, 8, "swiglu"),
}
# What names a cell.
KEY = ["shape", "dtype", "tokens", "pass"]
# What PyTorch computes in; its ways have no training in eight-bit floats.
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class Layer(torch.nn.Module):
    """An MoE layer whose experts' weights are stacked or apart; `way` is how its experts are computed."""

    def __init__(self, d, f, e, k, activation, dtype, way, gate_up, down):
        super().__init__()
        self.k, self.activation, self.way = k, activation, way
        self.router = torch.nn.Parameter(torch.randn(e, d) * 0.02)
        if way == "grouped":
            self.gate_up, self.down = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        else:
            self.gate_ups = torch.nn.ParameterList(torch.nn.Parameter(w) for w in gate_up)
            self.downs = torch.nn.ParameterList(torch.nn.Parameter(w) for w in down)

    def act(self, h):
        if self.activation == "gelu":
            return F.gelu(h)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    def expert(self, e, x):
        return F.linear(self.act(F.linear(x, self.gate_ups[e])), self.downs[e])

    def forward(self, x):
        probs = F.linear(x.float(), self.router).softmax(-1)
        weights, ids = probs.topk(self.k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.way == "loop":
            y = torch.zeros_like(x)
            for e in ids.unique().tolist():
                token, choice = torch.where(ids == e)
                y.index_add_(0, token, self.expert(e, x[token]) * weights[token, choice, None])
            return y
        order = ids.flatten().argsort(stable=True)
        rows = x[order // self.k]
        counts = ids.flatten().bincount(minlength=len(self.router))
        if self.way == "split":
            parts = rows.split(counts.tolist())
            out = torch.cat([self.expert(e, part) for e, part in enumerate(parts) if len(part)])
        else:
            offsets = counts.cumsum(0).to(torch.int32)
            h = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=offsets)
            out = torch._grouped_mm(self.act(h), self.down.transpose(1, 2), offs=offsets)
        out = out * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // self.k, out)


def wait(device):
    """Waits until what was asked of the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()


def dense_rate(device):
    """FLOP/s of a product of 8,192 x 8,192 bf16 matrices."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(20):
        wait(device)
        start = time.perf_counter()
        a @ b
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * 8192**3 / statistics.median(seconds[5:])


def layer_flops(shape, tokens, both):
    """Of the experts' products: two or three a row, each of them thrice with backward."""
    d, f, _, k, activation = shape
    return 2 * tokens * k * d * f * (3 if activation == "swiglu" else 2) * (3 if both else 1)


def mixtral(d, f, e, k, dtype, implementation, gate_up, down):
    """The sparse MoE block of transformers with the same experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=d, intermediate_size=f, num_local_experts=e, num_experts_per_tok=k)
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = MixtralSparseMoeBlock(config)
    block.experts.gate_up_proj = torch.nn.Parameter(gate_up)
    block.experts.down_proj = torch.nn.Parameter(down)
    block.gate.weight = torch.nn.Parameter((torch.randn(e, d, device=down.device) * 0.02).to(dtype))
    return lambda x: block(x[None]), block


def ways(shape, dtype, device):
    """Each way's name, function and module. The experts' numbers are shared; parameters are views of them."""
    d, f, e, k, activation = shape
    gate_up = torch.randn(e, f * (2 if activation == "swiglu" else 1), d, device=device, dtype=dtype) * 0.02
    down = torch.randn(e, d, f, device=device, dtype=dtype) * 0.02
    for way in ["loop", "split", "grouped"]:
        layer = Layer(d, f, e, k, activation, dtype, way, gate_up, down).to(device)
        yield way, layer, layer
    if activation == "swiglu":
        for implementation in ["eager", "grouped_mm"]:
            try:
                function, block = mixtral(d, f, e, k, dtype, implementation, gate_up, down)
            except Exception as error:  # another version of transformers
                print(f"  transformers {implementation}: {type(error).__name__}: {error}")
                continue
            yield f"transformers {implementation}", function, block


def timed(function, module, x, dy, both):
    if both:
        module.zero_grad(set_to_none=True)
        x.grad = None
    wait(x.device.type)
    start = time.perf_counter()
    if both:
        y = function(x)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy.view_as(y))
    else:
        with torch.no_grad():
            function(x)
    wait(x.device.type)
    return time.perf_counter() - start


def torch_times(function, module, x, dy, both, seconds):
    timed(function, module, x, dy, both)
    times = [timed(function, module, x, dy, both)]
    count = min(20, int(seconds / times[0]))
    times += [timed(function, module, x, dy, both) for _ in range(count)]
    module.zero_grad(set_to_none=True)
    return times


def near_best(contenders, times):
    """The contenders whose median is within half as much again of the best's."""
    medians = {way: statistics.median(times[way]) for way, _, _ in contenders if way in times}
    return [c for c in contenders if c[0] in medians and medians[c[0]] <= 1.5 * min(medians.values())]


def our_times(ours, shape, dtype, tokens, is_both, **rest):
    """Ours, with gradients of the type that PyTorch's have."""
    return ours.times(shape, dtype, tokens, both=is_both, gradients="f32" if dtype == "f32" else "bf16", **rest)


def measured(args, ours, contenders, case, tokens, is_both):
    """Each side's times of a cell of one shape."""
    shape, dtype = args.all_shapes[case[0]], case[1]
    draw = lambda: torch.randn(tokens, shape[0], device=args.device, dtype=DTYPES[dtype])
    x, dy, times = draw().requires_grad_(is_both), draw(), {}
    for round in range(args.rounds):
        times.setdefault("moeworks", []).extend(our_times(ours, shape, dtype, tokens, is_both))
        running = contenders if round == 0 else near_best(contenders, times)
        for way, function, module in running:
            try:
                found = torch_times(function, module, x, dy, is_both, 0.1 if args.quick else 0.3)
            except (RuntimeError, NotImplementedError) as error:
                if way not in times:
                    print(f"  {way}: {str(error).splitlines()[0]}")
                continue
            times.setdefault(way, []).extend(found)
            time.sleep(0.02)  # PyTorch's threads look for work for a while
    return times


def cell_of(key, times, routing):
    """What a cell's times say, and those of all that is not the experts' in our layer where they were taken."""
    medians = {way: statistics.median(found) for way, found in times.items()}
    mine = medians.pop("moeworks")
    best = min(medians, key=medians.get)
    cell = dict(zip(KEY, key), moeworks_s=mine, pytorch_s=medians, best=best, ratio=medians[best] / mine)
    return cell | ({"routing_s": statistics.median(routing)} if routing else {})


def line_of(cell, args):
    times = f"{cell['moeworks_s'] * 1e3:11.3f}{cell['pytorch_s'][cell['best']] * 1e3:11.3f}{cell['ratio']:8.2f}"
    if args.dense:
        flops = layer_flops(args.all_shapes[cell["shape"]], cell["tokens"], cell["pass"] == "both")
        times += f"{flops / cell['moeworks_s'] / args.dense:8.0%}{flops / cell['pytorch_s'][cell['best']] / args.dense:8.0%}"
        times += f"{cell['routing_s'] / cell['moeworks_s']:9.1%}" if "routing_s" in cell else f"{'':9}"
    return f"{cell['shape']:20}{cell['dtype']:6}{cell['pass']:9}{cell['tokens']:6}{times}  {cell['best']}"


def summary(cells):
    mean = math.exp(statistics.mean(math.log(cell["ratio"]) for cell in cells))
    worst = min(cells, key=lambda cell: cell["ratio"])
    where = f"{worst['shape']} {worst['dtype']} {worst['pass']} T={worst['tokens']}"
    return mean, f"geometric mean of {len(cells)} ratios {mean:.2f}, least {worst['ratio']:.2f} ({where})"


def shape_of(name):
    """A shape by its name, or by its sizes and activation; ValueError says what would be right."""
    known = SHAPES | GPU_SHAPES
    if name in known:
        return known[name]
    *sizes, activation = name.split(",") if name.count(",") == 4 else [*name.split(","), "swiglu"]
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) > 0 for size in sizes) or activation not in ("swiglu", "gelu"):
        raise ValueError(f"shape {name}: one of {', '.join(known)}, or D,F,E,K with or without swiglu or gelu behind them")
    d, f, e, k = map(int, sizes)
    if k > e:
        raise ValueError(f"shape {name}: {k} choices of {e} experts")
    return (d, f, e, k, activation)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    names = ", ".join([*SHAPES, *GPU_SHAPES])
    parser.add_argument("--shapes", nargs="*", metavar="SHAPE", help=f"{names}, or sizes as in 512,2048,16,2,gelu (D,F,E,K; swiglu)")
    parser.add_argument("--dtypes", nargs="*", choices=list(DTYPES))
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--passes", nargs="*", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one round, shape d, up to 512 tokens")
    parser.add_argument("--json", type=pathlib.Path, help="write each cell to this file; those already there are not run again")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.shapes, args.tokens = 1, ["d"], [1, 16, 512]
    is_cpu = args.device == "cpu"
    args.shapes = args.shapes or list(SHAPES if is_cpu else GPU_SHAPES)
    try:
        args.all_shapes = {name: shape_of(name) for name in args.shapes}
    except ValueError as error:
        parser.error(str(error))
    args.dtypes = args.dtypes or (["f32", "bf16"] if is_cpu else ["bf16", "fp8"])
    args.tokens = args.tokens or ([1, 16, 512, 4096] if is_cpu else [16384, 65536])
    return args


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cells = json.loads(args.json.read_text())["cells"] if args.json and args.json.exists() else []
    args.all_shapes |= {cell["shape"]: shape_of(cell["shape"]) for cell in cells}
    done = {tuple(cell[name] for name in KEY) for cell in cells}
    args.dense = 0.0 if args.device == "cpu" else dense_rate(args.device)
    ours = Moeworks(args.threads, args.device)
    where = f"{args.threads} threads" if args.device == "cpu" else f"{torch.cuda.get_device_name()}, dense {args.dense / 1e12:.0f} TFLOP/s"
    print(f"{where}, PyTorch {torch.__version__}; milliseconds, medians")
    shares = f"{'share':>8}{'its':>8}{'routing':>9}" if args.dense else ""
    print(f"{'shape':20}{'type':6}{'pass':9}{'T':>6}{'Moeworks':>11}{'PyTorch':>11}{'ratio':>8}{shares}  best way")
    for cell in cells:
        print(line_of(cell, args))
    for name, dtype in itertools.product(args.shapes, args.dtypes):
        keys = itertools.product([name], [dtype], args.tokens, args.passes)
        # The weights of a shape take gigabytes: those of one at a time, and of none that has no cell left.
        contenders = None
        for key in (key for key in keys if key not in done):
            contenders = contenders or list(ways(args.all_shapes[name], DTYPES[dtype], args.device))
            _, _, tokens, which = key
            times = measured(args, ours, contenders, (name, dtype), tokens, which == "both")
            shape = args.all_shapes[name]
            routing = our_times(ours, shape, dtype, tokens, which == "both", part="routing") if args.dense else None
            cells.append(cell_of(key, times, routing))
            print(line_of(cells[-1], args), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"geometric_mean": summary(cells)[0], "cells": cells}, indent=1))
    if args.dense:
        sort = ours.times((64, 64, 256, 8, "swiglu"), "bf16", 65536, part="sort")
        print(f"counting sort of 65,536 x 8 choices of 256 experts: {statistics.median(sort) * 1e6:.0f} microseconds")
    ours.close()
    print(summary(cells)[1])


if __name__ == "__main__":
    main()
