//! Values made by PyTorch: see `tests/fixtures/make.py`.

use std::collections::BTreeMap;

use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::attention::{AttentionInputs, AttentionSaved, AttentionShape, attention, attention_backward};
use moeworks_ops::e4m3::{round_matrices, round_rows};
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertWeights, WeightGradInputs, experts_backward, experts_forward, experts_weight_grad,
};
use moeworks_ops::head_loss::{head_loss, head_loss_backward};
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{RopeTable, Rotation, rope};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_close, doubles};

/// The arrays of one operation, by name.
struct Fixture {
    ctx: Context,
    arrays: BTreeMap<String, Array>,
}

struct Array {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Fixture {
    fn load(operation: &str) -> Self {
        let text = include_str!("../fixtures/ops.json");
        let all: serde_json::Value = serde_json::from_str(text).expect("the fixture is JSON");
        let arrays = all[operation].as_object().expect("the operation is in the fixture").iter();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            let list = value.as_array().expect("a list");
            list.iter().map(|x| x.as_f64().expect("a number")).collect()
        };
        let array = |value: &serde_json::Value| Array {
            shape: numbers(&value["shape"]).into_iter().map(|dim| dim as usize).collect(),
            values: numbers(&value["values"]),
        };
        let arrays = arrays.map(|(name, value)| (name.clone(), array(value))).collect();
        Self { ctx: Context::cpu(2), arrays }
    }

    fn values(&self, name: &str) -> &[f64] {
        &self.arrays[name].values
    }

    fn number(&self, name: &str) -> f64 {
        self.values(name)[0]
    }

    fn tensor(&self, name: &str) -> Tensor {
        let array = &self.arrays[name];
        let values: Vec<f32> = array.values.iter().map(|&x| x as f32).collect();
        Tensor::from_slice(self.ctx.pool(), &array.shape, &values)
    }

    /// The array with its leading dims merged.
    fn matrix(&self, name: &str) -> Tensor {
        let tensor = self.tensor(name);
        let shape = [tensor.rows(), tensor.cols()];
        tensor.reshaped(&shape)
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.values(name).iter().map(|&x| if x < 0.0 { u32::MAX } else { x as u32 }).collect()
    }

    #[track_caller]
    fn check(&self, name: &str, actual: &Tensor, tolerance: f64) {
        assert_close(name, &doubles(actual), self.values(name), tolerance);
    }
}

#[test]
fn rms_norm_is_that_of_pytorch() {
    let f = Fixture::load("rms_norm");
    let (x, weight) = (f.tensor("x"), f.tensor("weight"));
    let (y, inv_rms) = rms_norm(&f.ctx, &x, &weight, f.number("eps") as f32, DType::F32);
    f.check("y", &y, 1e-6);
    let mut dweight = f.ctx.zeros(weight.shape(), DType::F32);
    let dx = rms_norm_backward(&f.ctx, &f.tensor("dy"), &x, &weight, &inv_rms, Write::Replace, &mut dweight);
    f.check("dx", &dx, 2e-6);
    f.check("dweight", &dweight, 2e-6);
}

#[test]
fn rope_is_the_rotate_half_form_of_hugging_face() {
    let f = Fixture::load("rope");
    let positions = f.ids("positions");
    let mut x = f.matrix("x");
    let table = RopeTable::new(f.number("head_dim") as usize, f.number("theta"), 4096);
    rope(&f.ctx, &mut x, &table, &positions, Rotation::Forward);
    // PyTorch's angles are f32: at position 4000 they carry an error of 2e-4.
    f.check("y", &x, 5e-4);
    let mut dy = f.matrix("dy");
    rope(&f.ctx, &mut dy, &table, &positions, Rotation::Inverse);
    f.check("dx", &dy, 5e-4);
}

#[test]
fn rounding_to_eight_bit_floats_is_that_of_pytorch() {
    let f = Fixture::load("e4m3");
    assert_eq!(round_rows(&f.ctx, &f.tensor("x")).to_f32_vec(), f.tensor("y").f32s());
    assert_eq!(round_matrices(&f.ctx, &f.tensor("w"), 40).to_f32_vec(), f.tensor("rounded").f32s());
}

#[test]
fn attention_is_scaled_dot_product_attention_with_grouped_heads() {
    for case in ["attention", "attention_cached"] {
        let f = Fixture::load(case);
        let sizes = f.ids("sizes");
        let [batch, seq_len, kv_len, num_heads, num_kv_heads, head_dim] = sizes[..] else { panic!("six sizes") };
        let shape = AttentionShape {
            value_dim: head_dim as usize,
            window: None,
            batch: batch as usize,
            seq_len: seq_len as usize,
            kv_len: kv_len as usize,
            kv_capacity: kv_len as usize,
            num_heads: num_heads as usize,
            num_kv_heads: num_kv_heads as usize,
            head_dim: head_dim as usize,
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let (q, k, v) = (f.matrix("q"), f.matrix("k"), f.matrix("v"));
        let (o, lse) = attention(&f.ctx, &q, &k, &v, &shape);
        f.check("o", &o, 2e-6);
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, sinks: None };
        let saved = AttentionSaved { o: &o, lse: &lse };
        let (dq, dk, dv) = attention_backward(&f.ctx, &f.matrix("d_o"), inputs, saved, &shape);
        f.check("dq", &dq, 5e-6);
        f.check("dk", &dk, 5e-6);
        f.check("dv", &dv, 5e-6);
    }
}

#[test]
fn the_head_is_a_linear_layer_and_cross_entropy() {
    let f = Fixture::load("head_loss");
    let (x, w, targets) = (f.matrix("x"), f.tensor("w"), f.ids("targets"));
    let loss = head_loss(&f.ctx, &x, &w, &targets);
    assert_close("loss", &[loss.loss_sum / loss.num_targets as f64], f.values("mean_loss"), 1e-6);
    let mut dw = f.ctx.zeros(w.shape(), DType::F32);
    let scale = 1.0 / loss.num_targets as f32;
    let (_, dx) = head_loss_backward(&f.ctx, &x, &w, &targets, scale, Write::Replace, &mut dw);
    f.check("dx", &dx, 1e-6);
    f.check("dw", &dw, 1e-6);
}

#[test]
fn embedding_is_that_of_pytorch() {
    let f = Fixture::load("embedding");
    let (ids, table) = (f.ids("ids"), f.tensor("table"));
    // Decimal digits in the fixture, hence not quite the bits.
    f.check("y", &embedding(&f.ctx, &ids, &table, DType::F32), 1e-8);
    let mut dtable = f.ctx.zeros(table.shape(), DType::F32);
    embedding_backward(&f.ctx, &ids, &f.tensor("dy"), &mut dtable);
    f.check("dtable", &dtable, 1e-6);
}

#[test]
fn adamw_is_that_of_pytorch_over_several_steps() {
    let f = Fixture::load("adamw");
    let mut param = f.tensor("param");
    let (mut m, mut v) = (f.ctx.zeros(param.shape(), DType::F32), f.ctx.zeros(param.shape(), DType::F32));
    let settings = f.values("settings");
    for step in 1..=f.number("num_steps") as u64 {
        let step = AdamWStep {
            lr: settings[0],
            beta1: settings[1],
            beta2: settings[2],
            eps: settings[3],
            weight_decay: settings[4],
            step,
            grad_scale: 1.0,
        };
        let grad = f.tensor(&format!("grad_{}", step.step));
        adamw(&f.ctx, &step, AdamWTensors { param: &mut param, grad: &grad, m: &mut m, v: &mut v, compute: None });
        f.check(&format!("param_{}", step.step), &param, 1e-6);
    }
    f.check("m", &m, 1e-6);
    f.check("v", &v, 1e-6);
}

#[test]
fn an_expert_is_two_linear_layers_and_the_activation_of_pytorch() {
    let activations = [Activation::SwiGlu, Activation::Gelu, Activation::Relu];
    for (name, activation) in ["experts_swiglu", "experts_gelu", "experts_relu"].into_iter().zip(activations) {
        let f = Fixture::load(name);
        let (x, dy, gate_up, down) = (f.tensor("x"), f.tensor("dy"), f.tensor("gate_up"), f.tensor("down"));
        let tokens: Vec<u32> = (0..x.rows() as u32).collect();
        let (offsets, ones) = ([0, x.rows() as u32], vec![1.0; x.rows()]);
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let rows = ExpertRows::new(&offsets, &tokens, &ones, &tokens, 1);
        let (y, saved) = experts_forward(&f.ctx, &x, weights, rows);
        // The normal distribution is computed to within 3e-7, times pre-activations of up to ten.
        f.check("y", &y, 1e-5);
        let back = experts_backward(&f.ctx, &dy, weights, rows, &saved);
        f.check("dx", &back.dx, 1e-5);
        let (mut d_gate_up, mut d_down) =
            (f.ctx.zeros(gate_up.shape(), DType::F32), f.ctx.zeros(down.shape(), DType::F32));
        let grads = ExpertGrads { gate_up: &mut d_gate_up, down: &mut d_down };
        let inputs = WeightGradInputs { x: &x, dy: &dy, saved: &saved, dh: &back.dh, weighed: back.weighed.as_ref() };
        experts_weight_grad(&f.ctx, inputs, activation, rows, Write::Replace, grads);
        f.check("d_gate_up", &d_gate_up, 1e-5);
        f.check("d_down", &d_down, 1e-5);
    }
}
