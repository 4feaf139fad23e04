//! Speed of the operations other than matrix products: `cargo bench -p moeworks-ops --bench vector [-- NAME]`.
//!
//! Memory-bound operations print bytes read and written a second, and the share that this is of the rate of reading
//! memory; attention and the head print floating-point operations a second and the share of their type's peak.
//! Attention counts what the causal mask leaves.

use std::time::Instant;

use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::attention::{AttentionShape, attention, attention_backward};
use moeworks_ops::elementwise::{add_assign, cast, cast_into, fill_normal, scale_assign, sum_of_squares};
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::head_loss::{head_loss, head_loss_backward};
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{RopeTable, Rotation, rope};
use moeworks_ops::{Context, peak};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

struct Bench {
    ctx: Context,
    filter: Option<String>,
    peaks: peak::Peaks,
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--"));
    let ctx = Context::cpu_all_cores();
    let peaks = peak::measure(&ctx);
    let (read, flops) = (peaks.read_bytes_per_s / 1e9, peaks.f32_flops / 1e9);
    println!("{} threads, {:?}: reads {read:.1} GB/s, f32 {flops:.0} GFLOP/s", ctx.threads().count(), ctx.isa());
    let bench = Bench { ctx, filter, peaks };
    bench.elementwise();
    bench.rows();
    bench.attention();
    bench.head();
}

impl Bench {
    fn run(&self, name: &str, unit: Unit, mut operation: impl FnMut()) {
        if !self.wants(name) {
            return;
        }
        let start = Instant::now();
        let mut best = f64::INFINITY;
        let mut runs = 0;
        while runs < 3 || (start.elapsed().as_secs_f64() < 0.5 && runs < 200) {
            let start = Instant::now();
            operation();
            best = best.min(start.elapsed().as_secs_f64());
            runs += 1;
        }
        let (count, peak, label) = match unit {
            Unit::Bytes(count) => (count, self.peaks.read_bytes_per_s, "GB/s"),
            Unit::Flops(count, dtype) => (count, self.peaks.flops(dtype), "GFLOP/s"),
        };
        let rate = count / best;
        println!("{name:44} {:10.3} ms {:8.1} {label:8} {:5.0}%", best * 1e3, rate / 1e9, 100.0 * rate / peak);
    }

    fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    fn normal(&self, shape: &[usize], dtype: DType) -> Tensor {
        let random = Random::new(1, Purpose::Test, 0);
        let values: Vec<f32> = (0..8191).map(|i| random.normal(i)).collect();
        let repeated: Vec<f32> = values.into_iter().cycle().take(shape.iter().product()).collect();
        cast(&self.ctx, &Tensor::from_slice(self.ctx.pool(), shape, &repeated), dtype)
    }

    fn elementwise(&self) {
        let ctx = &self.ctx;
        let len = 32 << 20;
        let f = |count: usize| Unit::Bytes((count * len) as f64);
        let (mut y, x) = (self.normal(&[len], DType::F32), self.normal(&[len], DType::F32));
        let mut half = cast(ctx, &x, DType::BF16);
        self.run("add_assign f32", f(12), || add_assign(ctx, &mut y, &x));
        self.run("add_assign bf16", f(10), || add_assign(ctx, &mut y, &half));
        self.run("scale_assign f32", f(8), || scale_assign(ctx, &mut y, 0.5));
        self.run("cast f32 to bf16", f(6), || cast_into(ctx, &x, &mut half));
        self.run("cast bf16 to f32", f(6), || cast_into(ctx, &half, &mut y));
        self.run("sum_of_squares f32", f(4), || _ = sum_of_squares(ctx, &x));
        self.run("sum_of_squares bf16", f(2), || _ = sum_of_squares(ctx, &half));
        let mut small = ctx.zeros(&[1 << 20], DType::F32);
        let random = Random::new(1, Purpose::Test, 0);
        self.run("fill_normal, 1 Mi", Unit::Bytes(f64::from(4 << 20)), || fill_normal(ctx, &random, 0.02, &mut small));
        let (mut m, mut v) = (self.normal(&[len], DType::F32), self.normal(&[len], DType::F32));
        scale_assign(ctx, &mut v, 0.0);
        let step =
            AdamWStep { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };
        self.run("adamw f32", f(28), || {
            let tensors = AdamWTensors { param: &mut y, grad: &x, m: &mut m, v: &mut v, compute: None };
            adamw(ctx, &step, tensors);
        });
        self.run("adamw f32 and bf16 copy", f(30), || {
            let tensors = AdamWTensors { param: &mut y, grad: &x, m: &mut m, v: &mut v, compute: Some(&mut half) };
            adamw(ctx, &step, tensors);
        });
    }

    fn rows(&self) {
        let ctx = &self.ctx;
        for (tokens, width, norm) in [(16384, 1024, 1024), (16384, 1024, 64), (4096, 256, 256), (4096, 256, 64)] {
            for (label, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
                let (x, weight) = (self.normal(&[tokens, width], dtype), self.normal(&[norm], DType::F32));
                let dy = self.normal(&[tokens, width], DType::F32);
                let mut dweight = ctx.zeros(&[norm], DType::F32);
                let (elements, size) = (tokens * width, dtype.size());
                let (_, inv_rms) = rms_norm(ctx, &x, &weight, 1e-6, dtype);
                let name = |what: &str| format!("{what} {label} {tokens}x{width}, rows of {norm}");
                self.run(&name("rms_norm"), Unit::Bytes((2 * size * elements) as f64), || {
                    _ = rms_norm(ctx, &x, &weight, 1e-6, dtype);
                });
                self.run(&name("rms_norm_backward"), Unit::Bytes(((8 + size) * elements) as f64), || {
                    _ = rms_norm_backward(ctx, &dy, &x, &weight, &inv_rms, Write::Add, &mut dweight);
                });
            }
        }
        for (tokens, width) in [(16384, 1024), (4096, 256)] {
            let (mut x, mut half) =
                (self.normal(&[tokens, width], DType::F32), self.normal(&[tokens, width], DType::BF16));
            let table = RopeTable::new(64, 10_000.0, 2048);
            let positions: Vec<u32> = (0..tokens as u32).map(|i| i % 2048).collect();
            let elements = tokens * width;
            self.run(&format!("rope f32 {tokens}x{width}"), Unit::Bytes((8 * elements) as f64), || {
                rope(ctx, &mut x, &table, &positions, Rotation::Forward);
            });
            self.run(&format!("rope bf16 {tokens}x{width}"), Unit::Bytes((4 * elements) as f64), || {
                rope(ctx, &mut half, &table, &positions, Rotation::Forward);
            });
            for vocabulary in [256_u64, 32_000] {
                let random = Random::new(2, Purpose::Test, 0);
                let ids: Vec<u32> = (0..tokens as u64).map(|i| random.below(i, vocabulary) as u32).collect();
                let mut rows = self.normal(&[vocabulary as usize, width], DType::F32);
                let name = |what: &str| format!("{what} f32 {tokens}x{width} of {vocabulary}");
                self.run(&name("embedding"), Unit::Bytes((8 * elements) as f64), || {
                    _ = embedding(ctx, &ids, &rows, DType::F32);
                });
                self.run(&name("embedding_backward"), Unit::Bytes((12 * elements) as f64), || {
                    embedding_backward(ctx, &ids, &x, &mut rows);
                });
            }
        }
    }

    fn attention(&self) {
        let cases = [
            ("train 16x256 4/4x64", 16, (256, 256), (4, 4), 64),
            ("train 16x256 4/2x64", 16, (256, 256), (4, 2), 64),
            ("train 1x4096 8/2x128", 1, (4096, 4096), (8, 2), 128),
            ("train 4x1024 16/16x64", 4, (1024, 1024), (16, 16), 64),
            ("decode 1x8192 16/4x128", 1, (1, 8192), (16, 4), 128),
            ("decode 8x4096 8/8x64", 8, (1, 4096), (8, 8), 64),
        ];
        for (name, batch, (seq_len, kv_len), (num_heads, num_kv_heads), head_dim) in cases {
            for (label, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
                let (forward, backward) =
                    (format!("attention {name} {label}"), format!("attention_backward {name} {label}"));
                if !self.wants(&forward) && !self.wants(&backward) {
                    continue;
                }
                let ctx = &self.ctx;
                let scale = 1.0 / (head_dim as f32).sqrt();
                let kv_capacity = kv_len;
                let shape = AttentionShape {
                    batch,
                    seq_len,
                    kv_len,
                    kv_capacity,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    value_dim: head_dim,
                    window: None,
                    scale,
                };
                let q = self.normal(&[batch * seq_len, num_heads * head_dim], dtype);
                let k = self.normal(&[batch * kv_len, num_kv_heads * head_dim], dtype);
                let v = self.normal(&[batch * kv_len, num_kv_heads * head_dim], dtype);
                if seq_len == 1 {
                    let bytes = (2 * k.num_bytes()) as f64;
                    self.run(&forward, Unit::Bytes(bytes), || {
                        _ = attention(ctx, &q, &k, &v, &shape);
                    });
                    continue;
                }
                let d_o = self.normal(&[batch * seq_len, num_heads * head_dim], DType::F32);
                let pairs = batch * num_heads * seq_len * (2 * kv_len - seq_len + 1) / 2;
                let flops = (4 * pairs * head_dim) as f64;
                let (o, lse) = attention(ctx, &q, &k, &v, &shape);
                self.run(&forward, Unit::Flops(flops, dtype), || {
                    _ = attention(ctx, &q, &k, &v, &shape);
                });
                self.run(&backward, Unit::Flops(2.5 * flops, dtype), || {
                    _ = attention_backward(ctx, &d_o, (&q, &k, &v), (&o, &lse), &shape);
                });
            }
        }
    }

    fn head(&self) {
        let ctx = &self.ctx;
        for (tokens, width, vocabulary) in [(4096, 256, 256), (1024, 512, 32_000)] {
            for (label, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
                let (x, w) = (self.normal(&[tokens, width], dtype), self.normal(&[vocabulary, width], dtype));
                let mut dw = ctx.zeros(&[vocabulary, width], DType::F32);
                let targets: Vec<u32> = (0..tokens as u32).map(|i| i % vocabulary as u32).collect();
                let flops = (2 * tokens * width * vocabulary) as f64;
                let name = |what: &str| format!("{what} {label} {tokens}x{width}, {vocabulary} classes");
                self.run(&name("head_loss"), Unit::Flops(flops, dtype), || _ = head_loss(ctx, &x, &w, &targets));
                self.run(&name("head_loss_backward"), Unit::Flops(3.0 * flops, dtype), || {
                    _ = head_loss_backward(ctx, &x, &w, &targets, 1e-3, Write::Replace, &mut dw);
                });
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Unit {
    Bytes(f64),
    Flops(f64, DType),
}
