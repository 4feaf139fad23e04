//! Tests of the file of a machine and of predicted steps.

use super::*;
use crate::{Layout, Link, ModelShape, Precision};

fn machine() -> Machine {
    let product = |rows, width, flops| ProductRate { precision: Precision::F32, threads: 1, rows, width, flops };
    Machine {
        name: "two cores".to_owned(),
        cores: 2,
        memory_bytes: 8e9,
        memory_bytes_per_s: 1e10,
        link: Link { latency_s: 1e-6, bytes_per_s: 4e9 },
        overhead: Overhead { layer_s: 1e-4, passes: 2.0 },
        products: vec![product(4, 64, 1e9), product(400, 64, 1e10), product(4, 256, 2e9), product(400, 256, 2e10)],
    }
}

fn sizes() -> StepSizes {
    StepSizes { sequences: 8, seq_len: 64, microbatches: 4, precision: Precision::F32, checkpoint_layers: false }
}

#[test]
fn rates_between_measured_sizes_are_interpolated_and_those_beyond_stay() {
    let rate = |size| machine().product_rate(Precision::F32, 1, size);
    assert_eq!(rate([4.0, 64.0]), 1e9);
    assert!((rate([40.0, 64.0]) / 10_f64.powf(9.5) - 1.0).abs() < 1e-9);
    assert!((rate([400.0, 128.0]) / (1e10 * 2_f64.sqrt()) - 1.0).abs() < 1e-9);
    assert_eq!([rate([1.0, 16.0]), rate([1e6, 1e6])], [1e9, 2e10]);
    assert_eq!(machine().product_rate(Precision::Bf16, 8, [4.0, 64.0]), 1e9, "what was not measured is as the rest");
}

#[test]
fn rates_between_measured_numbers_of_threads_are_interpolated() {
    let product = |threads, flops| ProductRate { precision: Precision::F32, threads, rows: 64, width: 64, flops };
    let machine = Machine { products: vec![product(1, 1e9), product(16, 16e9)], cores: 16, ..machine() };
    let rate = machine.product_rate(Precision::F32, 4, [64.0, 64.0]);
    assert!((rate / 4e9 - 1.0).abs() < 1e-9, "four of sixteen threads: {rate}");
    let share = MachineShare::new(&machine, 4).product_rate(Precision::F32, [64.0, 64.0]);
    assert!((share / 4e9 - 1.0).abs() < 1e-9, "a rank of four: {share}");
}

#[test]
fn a_step_on_two_ranks_has_half_the_work_of_each_and_communication() {
    let shape =
        ModelShape { width: 128, num_layers: 2, num_moe_layers: 2, num_experts: 8, top_k: 2, ..ModelShape::example() };
    let step = |layout: Layout| predict_step(&machine(), &shape, sizes(), &layout);
    let (one, two) = (step(Layout::new(1, 1, 1)), step(Layout::new(2, 1, 1)));
    assert_eq!(one.communication, 0.0);
    assert!(two.communication > 0.0);
    assert!(
        (two.update / (2.0 * one.update) - 1.0).abs() < 1e-9,
        "each updates all weights with half of the memory's rate"
    );
    let again = StepSizes { checkpoint_layers: true, ..sizes() };
    let again = predict_step(&machine(), &shape, again, &Layout::new(1, 1, 1));
    assert!((again.products / one.products - 4.0 / 3.0).abs() < 1e-9);
    let piped = step(Layout::new(1, 1, 1).with_pipeline(2));
    assert!((piped.bubble / (piped.products + piped.passes + piped.layers) - 0.25).abs() < 1e-9, "{piped:?}");
}

#[test]
fn files_that_describe_no_machine_are_refused_in_one_line() {
    let text = machine().to_toml();
    let problem = |text: &str| Machine::parse(text).unwrap_err().to_string();
    assert!(problem(&text.replace("cores = 2", "cores = 0")).contains("cores = 0: must be a finite number above 0"));
    assert!(problem(&text.replace("cores = 2", "corse = 2")).starts_with("line 2: unknown field `corse`"));
    assert!(problem("cores").starts_with("line 1: "));
    let none = Machine { products: Vec::new(), ..machine() };
    assert!(problem(&none.to_toml()).contains("products"));
}
