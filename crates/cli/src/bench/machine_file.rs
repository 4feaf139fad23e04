//! `moeworks bench machine`: a file of this machine's rates, and steps predicted from it.

use std::path::Path;
use std::{fmt, fs};

use moeworks_bench::machine_file::{CHECKED, CheckedStep, Effort, check, measure, predict};
use moeworks_plan::Precision;
use moeworks_plan::machine::{Machine, PredictedStep};
use serde_json::{Value, json};

use crate::args::MachineFileArgs;
use crate::environment;
use crate::estimate::vocabulary;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::tables;
use crate::train::resolve_config;

/// The first line of a file that this program writes.
const MARK: &str = "# Measured by `moeworks bench machine`";
/// The lines below it.
const LEGEND: &str = "\
# cores of this process; memory_bytes_per_s: read by all cores together; link: between two ranks that are threads.
# probe_s: seconds of a fixed piece of work meanwhile, by which --check knows how fast the machine is later.
# overhead: fitted on small training steps. layer_s, step_s: seconds of a layer of a microbatch and of a step, whatever
# their sizes; passes: times that the values kept for backward go through memory; weight_s, choice_s, score_s: seconds
# of a core for a weight in a microbatch, for a choice and for a score of an expert; ranks_s: seconds of a step on several ranks; wait_s: seconds of waiting in a
# communication; link_share: time of bytes between ranks over that on the link.
# products: operations a second of [rows, width] x [width, width] by as many threads, forward and with both gradients;
# experts: of several experts with so many rows each, [rows, width] x [width, expert_width] and back; attention: of causal attention; output_layers: with the loss;
# updates: parameters a second of norm and optimizer. With one thread, all cores do the same at the same time.
";
/// The products by which a topology describes the speed of a rank.
const USUAL_SIZE: [f64; 2] = [512.0, 256.0];

pub(super) fn run(args: &MachineFileArgs) -> Result<ExitCode, Failure> {
    let is_configured =
        args.config.preset.is_some() || args.config.config.is_some() || !args.config.settings.is_empty();
    if is_configured && !args.predict {
        return Err(Failure::input("--preset, --config and --set say what --predict predicts: give --predict too"));
    }
    if !(1..=CHECKED.len()).contains(&args.most) {
        return Err(Failure::input(format!("--most {}: must be from 1 to {}", args.most, CHECKED.len())));
    }
    if args.check {
        return compare(args, &read(&args.out)?);
    }
    if args.predict {
        return predict_one(args, &read(&args.out)?);
    }
    write(args)
}

fn read(path: &Path) -> Result<Machine, Failure> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::input(format!("--out {shown}: {error}; `moeworks bench machine --out {shown}` writes it"))
    })?;
    Machine::parse(&text).map_err(|error| Failure::input(format!("--out {shown}: {error}")))
}

fn write(args: &MachineFileArgs) -> Result<ExitCode, Failure> {
    let target = |option, path| Target { option, path, mark: MARK, is_forced: args.force };
    target("--out", &*args.out).check()?;
    if let Some(path) = &args.topology {
        target("--topology", path).check()?;
    }
    let effort = if args.quick { Effort::Quick } else { Effort::Whole };
    let machine = measure(&environment::machine(), effort, &mut |what| notice!("measuring {what}"))?;
    write_whole(&args.out, &format!("{MARK}: {}.\n{LEGEND}{}", machine.name, machine.to_toml()))?;
    if let Some(path) = &args.topology {
        let topology = machine.topology(machine.cores, Precision::F32, USUAL_SIZE);
        write_whole(path, &format!("{MARK}: {}.\n{}", machine.name, topology.to_toml()))?;
    }
    if args.json {
        println!("{:#}", serde_json::to_value(&machine)?);
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}, {} cores", machine.name, machine.cores);
    println!("memory    {:.1} GB/s read by all cores", machine.memory_bytes_per_s / 1e9);
    println!(
        "link      {:.1} µs, {:.2} GB/s between threads",
        machine.link.latency_s * 1e6,
        machine.link.bytes_per_s / 1e9
    );
    let overhead = machine.overhead;
    println!(
        "overhead  {:.1} µs a layer, {:.2} passes over kept values, {:.1} µs a step",
        overhead.layer_s * 1e6,
        overhead.passes,
        overhead.step_s * 1e6
    );
    println!(
        "          {:.2} ns a weight, {:.1} ns a choice, {:.2} ns a score",
        overhead.weight_s * 1e9,
        overhead.choice_s * 1e9,
        overhead.score_s * 1e9
    );
    println!(
        "ranks     {:.1} µs a step, {:.1} µs of waiting a communication, bytes at {:.2} times their time on the link",
        overhead.ranks_s * 1e6,
        overhead.wait_s * 1e6,
        overhead.link_share
    );
    tables::print(
        &["part", "precision", "threads", "sizes", "forward, GFLOP/s", "with backward"],
        &rates(&machine).iter().map(|rate| rate.to_vec()).collect::<Vec<_>>(),
    );
    println!("written: {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// Returns the rows of the table of rates.
fn rates(machine: &Machine) -> Vec<[String; 6]> {
    let row = |part: &str, precision: Precision, threads: usize, sizes: String, rates: [Option<f64>; 2]| {
        let precision = if precision == Precision::F32 { "f32" } else { "bf16" };
        let [forward, training] = rates.map(|rate| rate.map_or_else(String::new, |rate| format!("{:.1}", rate / 1e9)));
        [part.to_owned(), precision.to_owned(), threads.to_string(), sizes, forward, training]
    };
    let products = machine.products.iter().map(|rate| {
        let sizes = format!("{} rows x {}", rate.rows, rate.width);
        row("products", rate.precision, rate.threads, sizes, [Some(rate.flops), rate.training_flops])
    });
    let experts = machine.experts.iter().map(|rate| {
        let sizes = format!("{} rows x {} x {}", rate.rows, rate.width, rate.expert_width);
        row("experts", rate.precision, rate.threads, sizes, [Some(rate.flops), Some(rate.training_flops)])
    });
    let attention = machine.attention.iter().map(|rate| {
        let sizes = format!("{} tokens x {}", rate.seq_len, rate.head_dim);
        row("attention", rate.precision, rate.threads, sizes, [Some(rate.flops), Some(rate.training_flops)])
    });
    let output_layers = machine.output_layers.iter().map(|rate| {
        let sizes = format!("{} x {} ids", rate.width, rate.vocabulary);
        row("output layer", rate.precision, rate.threads, sizes, [None, Some(rate.training_flops)])
    });
    products.chain(experts).chain(attention).chain(output_layers).collect()
}

fn predict_one(args: &MachineFileArgs, machine: &Machine) -> Result<ExitCode, Failure> {
    let mut config = resolve_config(&args.config, Vec::new())?;
    config.model.vocab_size = vocabulary(&config);
    let step = predict(machine, &config)?;
    if args.json {
        println!("{:#}", parts(&step));
        return Ok(ExitCode::SUCCESS);
    }
    let tokens = config.train.step_tokens() as f64;
    println!("a step takes about {:.1} ms on this machine: {:.0} tokens/s", step.total() * 1e3, tokens / step.total());
    for (name, seconds) in step.parts() {
        println!("  {:14} {:10.2} ms", name.replace('_', " "), seconds * 1e3);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the parts of a step as JSON, in seconds.
fn parts(step: &PredictedStep) -> Value {
    let mut value = json!({ "seconds": step.total() });
    for (name, seconds) in step.parts() {
        value[name] = json!(seconds);
    }
    value
}

fn compare(args: &MachineFileArgs, machine: &Machine) -> Result<ExitCode, Failure> {
    let options = environment::machine();
    notice!("steps of {} configurations, some times each", args.most);
    let steps = check(machine, &options, args.most)?;
    let [at_speed, by_clock] =
        [CheckedStep::error_at_speed, CheckedStep::error].map(|error| Errors::new(steps.iter().map(error)));
    if args.json {
        let row = |step: &CheckedStep| {
            json!({
                "name": step.name, "predicted": parts(&step.predicted), "measured_s": step.measured_s,
                "speed": step.speed, "error": step.error_at_speed(), "error_by_clock": step.error(),
            })
        };
        let rows: Vec<Value> = steps.iter().map(row).collect();
        println!(
            "{:#}",
            json!({
                "steps": rows, "median_error": at_speed.middle, "largest_error": at_speed.most,
                "median_error_by_clock": by_clock.middle, "largest_error_by_clock": by_clock.most,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    let row = |step: &CheckedStep| {
        let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
        vec![
            step.name.to_owned(),
            ms(step.predicted.total()),
            ms(step.measured_s),
            format!("{:.2}", step.speed),
            ms(step.measured_s * step.speed),
            format!("{:+.1}%", 100.0 * step.error_at_speed()),
        ]
    };
    tables::print(
        &["configuration", "predicted, ms", "measured, ms", "speed", "at speed 1, ms", "error"],
        &steps.iter().map(row).collect::<Vec<_>>(),
    );
    println!("error: {at_speed}; by the clock, whatever the machine's speed: {by_clock}");
    Ok(ExitCode::SUCCESS)
}

/// The size of errors.
struct Errors {
    middle: f64,
    most: f64,
}

impl Errors {
    fn new(errors: impl Iterator<Item = f64>) -> Self {
        let mut errors: Vec<f64> = errors.map(f64::abs).collect();
        errors.sort_by(f64::total_cmp);
        Self { middle: errors[errors.len() / 2], most: errors[errors.len() - 1] }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}% in the median, {:.1}% at most", 100.0 * self.middle, 100.0 * self.most)
    }
}
