//! Tests of the file of a machine and of predicted steps.

use super::*;
use crate::{Layout, Link, ModelShape, Precision};

fn product(rows: usize, width: usize, flops: f64) -> ProductRate {
    ProductRate { precision: Precision::F32, threads: 1, rows, width, flops, training_flops: None }
}

/// A machine of which only products are measured, as in files of earlier versions.
fn machine() -> Machine {
    Machine {
        name: "two cores".to_owned(),
        cores: 2,
        memory_bytes: 8e9,
        memory_bytes_per_s: 1e10,
        probe_s: None,
        link: Link { latency_s: 1e-6, bytes_per_s: 4e9 },
        overhead: Overhead { layer_s: 1e-4, passes: 2.0, ..Overhead::default() },
        products: vec![product(4, 64, 1e9), product(400, 64, 1e10), product(4, 256, 2e9), product(400, 256, 2e10)],
        experts: Vec::new(),
        attention: Vec::new(),
        output_layers: Vec::new(),
        updates: Vec::new(),
    }
}

/// A machine of which all parts are measured, with two threads.
fn measured() -> Machine {
    let (precision, threads) = (Precision::F32, 2);
    let expert = |rows, flops, training_flops| ExpertRate {
        precision,
        threads,
        rows,
        width: 64,
        expert_width: 64,
        flops,
        training_flops,
    };
    let attention = |seq_len, flops| AttentionRate {
        precision,
        threads,
        seq_len,
        head_dim: 64,
        flops,
        training_flops: flops / 2.0,
    };
    Machine {
        probe_s: Some(1e-3),
        overhead: Overhead {
            layer_s: 1e-4,
            passes: 2.0,
            step_s: 3e-3,
            weight_s: 1e-9,
            choice_s: 1e-7,
            score_s: 1e-8,
            ranks_s: 1e-3,
            wait_s: 1e-5,
            link_share: 2.0,
        },
        products: vec![ProductRate { threads, training_flops: Some(5e9), ..product(64, 64, 1e10) }],
        experts: vec![expert(16, 1e9, 2e9), expert(1024, 1e10, 2e10)],
        attention: vec![attention(64, 4e9), attention(1024, 8e9)],
        output_layers: vec![OutputLayerRate { precision, threads, width: 64, vocabulary: 256, training_flops: 3e9 }],
        updates: vec![UpdateRate { precision, threads, params_per_s: 1e8 }],
        ..machine()
    }
}

fn layer_sizes() -> LayerSizes {
    LayerSizes {
        attention_params: 4.0 * 128.0 * 128.0,
        score_elements: 256.0,
        head_dim: 64,
        window: None,
        expert_width: 256,
        dense_params: 0.0,
        dense_width: 0,
        shared_params: 0.0,
        shared_width: 0,
        vocabulary: 256,
    }
}

fn sizes() -> StepSizes {
    StepSizes {
        sequences: 8,
        seq_len: 64,
        microbatches: 4,
        precision: Precision::F32,
        checkpoint_layers: false,
        layers: layer_sizes(),
    }
}

fn shape() -> ModelShape {
    ModelShape { width: 128, num_layers: 2, num_moe_layers: 2, num_experts: 8, top_k: 2, ..ModelShape::example() }
}

fn near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-9
}

#[test]
fn rates_between_measured_sizes_are_interpolated_and_those_beyond_stay() {
    let rate = |size| machine().product_rate(Precision::F32, 1, size);
    assert!(near(rate([4.0, 64.0]), 1e9));
    assert!(near(rate([40.0, 64.0]), 10_f64.powf(9.5)));
    assert!(near(rate([400.0, 128.0]), 1e10 * 2_f64.sqrt()));
    assert!(near(rate([1.0, 16.0]), 1e9) && near(rate([1e6, 1e6]), 2e10));
    let unmeasured = machine().product_rate(Precision::Bf16, 8, [4.0, 64.0]);
    assert!(near(unmeasured, 1e9), "a precision that was not measured has the rates of the other");
}

#[test]
fn rates_between_measured_numbers_of_threads_are_interpolated() {
    let product = |threads, flops| ProductRate { threads, ..product(64, 64, flops) };
    let machine = Machine { products: vec![product(1, 1e9), product(16, 16e9)], cores: 16, ..machine() };
    let rate = machine.product_rate(Precision::F32, 4, [64.0, 64.0]);
    assert!(near(rate, 4e9), "four of sixteen threads: {rate}");
    let share = MachineShare::new(&machine, 4).product_rate(Precision::F32, [64.0, 64.0]);
    assert!(near(share, 4e9), "a rank of four: {share}");
}

#[test]
fn parts_that_were_not_measured_have_the_rates_of_products() {
    let share = MachineShare::new(&machine(), 2);
    let size = [400.0, 256.0];
    assert_eq!(share.experts(Precision::F32, [400.0, 1024.0, 64.0]), share.products(Precision::F32, size));
    assert_eq!(share.attention(Precision::F32, size), None);
    assert_eq!(share.output_layer(Precision::F32, size), None);
    assert!(near(share.update_seconds(Precision::F32, 1e6), 28e6 / 5e9), "at half of the memory's rate");
}

#[test]
fn forward_and_backward_take_the_time_of_their_measured_rates() {
    let rates = MachineShare::new(&measured(), 1).products(Precision::F32, [64.0, 64.0]);
    assert!(near(rates.forward_seconds(1e9), 0.1) && near(rates.training_seconds(1e9), 0.6));
    assert!(near(rates.backward_seconds(1e9), 0.5));
    let fast = PassRates { forward: 1.0, training: 100.0 };
    assert_eq!(fast.backward_seconds(1.0), 0.0, "a backward pass takes no negative time");
}

#[test]
fn the_parts_of_a_step_add_up_and_come_from_their_own_rates() {
    let step = predict_step(&measured(), &shape(), sizes(), &Layout::new(1, 1, 1));
    let sum: f64 = step.parts().iter().map(|(_, seconds)| seconds).sum();
    assert!(near(step.total(), sum) && step.bubble == 0.0 && step.communication == 0.0);
    assert_eq!(step.step, 3e-3);
    assert!(near(step.update, shape().params() as f64 / 1e8));
    // Four microbatches of 512 tokens.
    assert!(near(step.output_layer, 4.0 * 6.0 * 512.0 * 128.0 * 256.0 / 3e9));
    assert!(near(step.attention, 4.0 * 2.0 * 3.0 * 512.0 * 64.0 * 256.0 / 2e9));
    let slower =
        Machine { attention: vec![AttentionRate { training_flops: 1e9, ..measured().attention[0] }], ..measured() };
    let slower = predict_step(&slower, &shape(), sizes(), &Layout::new(1, 1, 1));
    assert!(near(slower.attention, 2.0 * step.attention));
    assert_eq!(PredictedStep { attention: step.attention, ..slower }, step, "nothing else has changed");
}

#[test]
fn twice_the_layers_take_twice_the_time_of_layers_and_the_same_outside_them() {
    let step = |num: usize| {
        let shape = ModelShape {
            num_layers: num,
            num_moe_layers: num,
            activation_bytes: num as f64 * 4000.0,
            dense_params: num as u64 * 100_000,
            outside_params: 0,
            ..shape()
        };
        predict_step(&measured(), &shape, sizes(), &Layout::new(1, 1, 1))
    };
    let (two, four) = (step(2), step(4));
    let ratios = [
        four.products / two.products,
        four.attention / two.attention,
        four.experts / two.experts,
        four.layers / two.layers,
    ];
    assert!(ratios.iter().all(|ratio| near(*ratio, 2.0)), "{ratios:?}");
    assert_eq!((four.output_layer, four.step), (two.output_layer, two.step));
}

#[test]
fn recomputation_adds_a_forward_pass_of_the_layers() {
    let step = |checkpoint_layers| {
        let sizes = StepSizes { checkpoint_layers, ..sizes() };
        predict_step(&measured(), &shape(), sizes, &Layout::new(1, 1, 1))
    };
    let (once, again) = (step(false), step(true));
    // A forward pass at 4 GFLOP/s beside three at 2 GFLOP/s.
    assert!(near(again.attention / once.attention, 7.0 / 6.0), "{again:?}");
    assert!(near(again.layers / once.layers, 4.0 / 3.0));
    assert_eq!(again.output_layer, once.output_layer);
}

#[test]
fn a_step_on_two_ranks_has_half_the_work_of_each_and_communication() {
    let step = |layout: Layout| predict_step(&machine(), &shape(), sizes(), &layout);
    let (one, two) = (step(Layout::new(1, 1, 1)), step(Layout::new(2, 1, 1)));
    assert_eq!(one.communication, 0.0);
    assert!(two.communication > 0.0);
    assert!(near(two.update, 2.0 * one.update), "each updates all weights with half of the memory's rate");
}

#[test]
fn the_stages_of_a_pipeline_fill_and_drain_and_wait_for_the_one_with_the_output_layer() {
    let without_head = StepSizes { layers: LayerSizes { vocabulary: 0, ..layer_sizes() }, ..sizes() };
    let step = |sizes| predict_step(&machine(), &shape(), sizes, &Layout::new(1, 1, 1).with_pipeline(2));
    let equal = step(without_head);
    let work = equal.total() - equal.bubble - equal.update - equal.step;
    assert!(near(equal.bubble / work, 0.25), "one of four microbatches: {equal:?}");
    let unequal = step(sizes());
    // The last stage takes half of the layers and all of the output layer, for each of the microbatches.
    assert!(unequal.bubble > equal.bubble + 0.9 * unequal.output_layer, "{unequal:?}");
}

#[test]
fn a_written_file_is_read_back_the_same() {
    for machine in [machine(), measured()] {
        assert_eq!(Machine::parse(&machine.to_toml()), Ok(machine));
    }
}

#[test]
fn a_file_of_an_earlier_version_is_read() {
    let text = "name = \"a machine\"\ncores = 2\nmemory_bytes = 8e9\nmemory_bytes_per_s = 1e10\n\
        [link]\nlatency_s = 1e-6\nbytes_per_s = 4e9\n[overhead]\nlayer_s = 1e-4\npasses = 3.0\n\
        [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 64\nwidth = 64\nflops = 1e10\n";
    let machine = Machine::parse(text).unwrap();
    assert_eq!((machine.overhead.link_share, machine.overhead.wait_s, machine.probe_s), (1.0, 0.0, None));
    assert!(predict_step(&machine, &shape(), sizes(), &Layout::new(1, 2, 1)).total() > 0.0);
}

#[test]
fn files_that_describe_no_machine_are_refused_in_one_line() {
    let text = measured().to_toml();
    let problem = |text: &str| Machine::parse(text).unwrap_err().to_string();
    assert!(problem(&text.replace("cores = 2", "cores = 0")).contains("cores = 0: must be a finite number above 0"));
    assert!(problem(&text.replace("cores = 2", "corse = 2")).starts_with("line 2: unknown field `corse`"));
    assert!(problem("cores").starts_with("line 1: "));
    let none = Machine { products: Vec::new(), ..machine() };
    assert!(problem(&none.to_toml()).contains("products"));
    let slow = text.replace("params_per_s = 100000000.0", "params_per_s = -1.0");
    assert_eq!(problem(&slow), "updates.params_per_s = -1: must be a finite number above 0");
    let early = text.replace("wait_s = 0.00001", "wait_s = nan");
    assert_eq!(problem(&early), "overhead.wait_s = NaN: must be a finite number of at least 0");
    let rows = text.replace("rows = 16", "rows = 0");
    assert_eq!(problem(&rows), "experts.rows = 0: must be a finite number above 0");
}
