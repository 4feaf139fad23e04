//! `moeworks bench machine`: a file of this machine's rates, and steps predicted from it.

use std::fs;
use std::path::Path;

use moeworks_bench::machine_file::{CHECKED, CheckedStep, check, measure, predict};
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
# overhead: fitted on two small training steps; layer_s seconds of a layer of a microbatch, whatever its size;
# passes: times that the values kept for backward go through memory.
# products: operations a second of [rows, width] x [width, width], by as many threads, medians.
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
    let machine = measure(&environment::machine(), &mut |what| notice!("measuring {what}"))?;
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
    println!(
        "overhead  {:.1} µs a layer, {:.2} passes over kept values",
        machine.overhead.layer_s * 1e6,
        machine.overhead.passes
    );
    let row = |product: &moeworks_plan::machine::ProductRate| {
        let precision = if product.precision == Precision::F32 { "f32" } else { "bf16" };
        let sizes = [product.threads, product.rows, product.width].map(|size| size.to_string());
        [vec![precision.to_owned()], sizes.to_vec(), vec![format!("{:.1}", product.flops / 1e9)]].concat()
    };
    tables::print(
        &["product", "threads", "rows", "width", "GFLOP/s"],
        &machine.products.iter().map(row).collect::<Vec<_>>(),
    );
    println!("written: {}", args.out.display());
    Ok(ExitCode::SUCCESS)
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
    for (name, seconds) in named(&step) {
        println!("  {name:14} {:10.2} ms", seconds * 1e3);
    }
    Ok(ExitCode::SUCCESS)
}

fn named(step: &PredictedStep) -> [(&'static str, f64); 6] {
    let PredictedStep { products, passes, layers, update, communication, bubble } = *step;
    [
        ("products", products),
        ("passes", passes),
        ("layers", layers),
        ("update", update),
        ("communication", communication),
        ("bubble", bubble),
    ]
}

/// Returns the parts of a step as JSON, in seconds.
fn parts(step: &PredictedStep) -> Value {
    let mut value = json!({ "seconds": step.total() });
    for (name, seconds) in named(step) {
        value[name] = json!(seconds);
    }
    value
}

fn compare(args: &MachineFileArgs, machine: &Machine) -> Result<ExitCode, Failure> {
    let options = environment::machine();
    let steps =
        check(machine, &options, args.most, &mut |step| notice!("{}: {:.1} ms", step.name, step.measured_s * 1e3))?;
    let mut errors: Vec<f64> = steps.iter().map(|step| step.error().abs()).collect();
    errors.sort_by(f64::total_cmp);
    let (middle, most) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    if args.json {
        let row = |step: &CheckedStep| {
            let (measured, error) = (step.measured_s, step.error());
            json!({ "name": step.name, "predicted": parts(&step.predicted), "measured_s": measured, "error": error })
        };
        let rows: Vec<Value> = steps.iter().map(row).collect();
        println!("{:#}", json!({ "steps": rows, "median_error": middle, "largest_error": most }));
        return Ok(ExitCode::SUCCESS);
    }
    let row = |step: &CheckedStep| {
        let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
        vec![
            step.name.to_owned(),
            ms(step.predicted.total()),
            ms(step.measured_s),
            format!("{:+.1}%", 100.0 * step.error()),
        ]
    };
    tables::print(
        &["configuration", "predicted, ms", "measured, ms", "error"],
        &steps.iter().map(row).collect::<Vec<_>>(),
    );
    println!("error: {:.1}% in the median, {:.1}% at most", 100.0 * middle, 100.0 * most);
    Ok(ExitCode::SUCCESS)
}
