//! A step of a model on a cluster: its arguments, and its figures as a table and as JSON.

use std::{fs, io};

use moeworks_plan::schedule::{Checked, Peaks};
use moeworks_plan::{
    Algorithm, Cluster, Exchange, Layout, Model, Precision, Schedule, ScheduleKind, StepCosts, StepReport, StepRequest,
    Wire,
};
use serde_json::{Value, json};

use super::print::{SHOWN, number, percent};
use super::{Unit, generate, read_schedule, trace, write_files};
use crate::args::{PathChoice, PrecisionChoice, SimulateArgs, StepArgs, WireChoice};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::{bytes, thousands};
use crate::tables;

/// Numbers that share a scale on the wire.
const BLOCK: usize = 128;

pub(super) fn run(args: &SimulateArgs, model: &str, cluster: &str) -> Result<ExitCode, Failure> {
    let mut model = read("--model", model, Model::named, Model::parse)?.value;
    let cluster = read("--cluster", cluster, Cluster::named, Cluster::parse)?;
    if let Some(sequence) = args.step.sequence {
        model = Model { sequence, ..model };
        model.check().map_err(|error| Failure::input(format!("--{error}")))?;
    }
    let given = given_schedule(args)?;
    let pp = given.as_ref().map_or_else(|| args.pp.unwrap_or(0), Schedule::num_ranks);
    let layout = Layout::new(args.step.dp, args.step.ep, args.step.tp).with_pipeline(pp);
    let ranks = [layout.ep, layout.tp, layout.pp].into_iter().try_fold(layout.dp, usize::checked_mul);
    // A bundled cluster is a kind of cluster, of as many ranks as are needed; ranks share the cores of a measured
    // machine.
    let can_resize = cluster.is_named || cluster.value.machine.is_some();
    let resized = ranks.filter(|&ranks| can_resize && ranks <= MAX_RANKS).map(|ranks| cluster.value.resized(ranks));
    let cluster = resized.unwrap_or(cluster.value);
    let loads = expert_loads(args.step.skew, &model)?;
    let request = request(&args.step, Sources { model: &model, cluster: &cluster, loads: &loads }, layout);
    let num_stages = match &given {
        Some(schedule) => schedule.num_stages(),
        None => num_stages(args, pp)?,
    };
    let costs = request.costs(num_stages)?;
    let schedule = match given {
        Some(schedule) => schedule,
        None => generate(args.schedule.parse::<ScheduleKind>()?, args, costs.times())?,
    };
    let schedule = costs.written_out(&schedule)?;
    let checked = schedule.check()?;
    let report = costs.simulate(&checked)?;
    let beside = trace::Step { sums: &report.simulation.sums, state_bytes: &report.state_bytes };
    write_files(args, &report.simulation.timeline, &schedule, Unit { name: "s", micros: 1e6 }, beside)?;
    let shown = Shown { request: &request, costs: &costs, checked: &checked, schedule: &schedule, report: &report };
    if args.json {
        println!("{:#}", shown.json());
    } else {
        shown.print();
    }
    Ok(ExitCode::SUCCESS)
}

/// The largest number of ranks of a bundled cluster.
const MAX_RANKS: usize = 1 << 20;

/// A description, and whether it is a bundled one.
struct Source<T> {
    value: T,
    is_named: bool,
}

/// Returns what a name stands for, or what a file says.
fn read<T, E: std::fmt::Display>(
    option: &str,
    name: &str,
    named: impl Fn(&str) -> Result<T, E>,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Source<T>, Failure> {
    let unknown = match named(name) {
        Ok(value) => return Ok(Source { value, is_named: true }),
        Err(unknown) => unknown,
    };
    match fs::read_to_string(name) {
        Ok(text) => {
            let value = parse(&text).map_err(|error| Failure::input(format!("{name}: {error}")))?;
            Ok(Source { value, is_named: false })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Failure::input(format!("{option}: {unknown}"))),
        Err(error) => Err(Failure::input(format!("{option}: cannot read {name}: {error}"))),
    }
}

/// Returns the schedule of a file; none if the schedule is given by name.
fn given_schedule(args: &SimulateArgs) -> Result<Option<Schedule>, Failure> {
    if args.schedule.parse::<ScheduleKind>().is_ok() { Ok(None) } else { read_schedule(args).map(Some) }
}

/// Returns the number of stages of a schedule by name.
fn num_stages(args: &SimulateArgs, pp: usize) -> Result<usize, Failure> {
    let kind: ScheduleKind = args.schedule.parse()?;
    if args.pp.is_none() {
        return Err(Failure::input(format!("schedule {kind} needs --pp, such as --pp 4")));
    }
    Ok(kind.virtual_stages(args.r#virtual)?.saturating_mul(pp).max(1))
}

/// Returns the rows of each expert of which the first gets `skew` times the average.
fn expert_loads(skew: f64, model: &Model) -> Result<Vec<f64>, Failure> {
    let experts = model.shape(Precision::Bf16).num_experts.max(1);
    if !(1.0..=experts as f64).contains(&skew) {
        let right = format!("must be from 1 to {experts}, the number of experts of {}", model.name);
        return Err(Failure::input(format!("--skew {skew}: {right}")));
    }
    let rest = (experts as f64 - skew) / (experts - 1).max(1) as f64;
    Ok((0..experts).map(|expert| if expert == 0 { skew } else { rest }).collect())
}

#[derive(Clone, Copy)]
struct Sources<'a> {
    model: &'a Model,
    cluster: &'a Cluster,
    loads: &'a [f64],
}

fn request<'a>(args: &StepArgs, of: Sources<'a>, layout: Layout) -> StepRequest<'a> {
    let precision = match args.precision {
        PrecisionChoice::F32 => Precision::F32,
        PrecisionChoice::Bf16 => Precision::Bf16,
        PrecisionChoice::Fp8 => Precision::Fp8,
    };
    let algorithm = match args.path {
        PathChoice::Linear => Algorithm::Linear,
        PathChoice::Hierarchical => Algorithm::Hierarchical,
        PathChoice::TwoHop => Algorithm::TwoHop,
    };
    let wire = match args.wire {
        Some(WireChoice::F32) => Wire::F32,
        Some(WireChoice::Bf16) => Wire::Bf16,
        Some(WireChoice::F16) => Wire::F16,
        Some(WireChoice::Int8 | WireChoice::Fp8) => Wire::Byte { block: BLOCK },
        None if precision == Precision::F32 => Wire::F32,
        None if precision == Precision::Fp8 => Wire::Byte { block: BLOCK },
        None => Wire::Bf16,
    };
    StepRequest {
        exchange: Exchange { algorithm, chunks: args.chunks, ..Exchange::plain(wire) },
        precision,
        zero: args.zero,
        checkpoint_layers: args.checkpoint_layers,
        expert_loads: (args.skew > 1.0).then_some(of.loads),
        domain: args.domain,
        context: args.cp,
        expert_compression: args.expert_compression,
        ..StepRequest::new(
            of.model,
            of.cluster,
            layout,
            args.tokens.unwrap_or_else(|| share_of_sequence(of.model, args)),
        )
    }
}

/// Returns the tokens of a rank whose tensor-parallel and context-parallel groups have a sequence each.
fn share_of_sequence(model: &Model, args: &StepArgs) -> usize {
    model.sequence.div_ceil(args.cp.max(1).saturating_mul(args.tp.max(1)))
}

/// A simulated step, to be shown.
struct Shown<'a> {
    request: &'a StepRequest<'a>,
    costs: &'a StepCosts<'a>,
    checked: &'a Checked<'a>,
    schedule: &'a Schedule,
    report: &'a StepReport<'a>,
}

impl Shown<'_> {
    fn most_memory(&self) -> f64 {
        self.report.peak_memory.iter().copied().fold(0.0, f64::max)
    }

    fn fits(&self) -> bool {
        self.most_memory() <= self.request.cluster.device.memory_bytes
    }

    /// Returns the busiest link of a level: the share of the step that it is full, and the most of it in use at a
    /// time.
    fn busiest(&self, level: usize) -> [f64; 2] {
        let links = self.report.simulation.links.iter().filter(|link| link.level == level);
        links.fold([0.0, 0.0], |[busy, most], link| [busy.max(link.busy_s / self.report.step_s), most.max(link.most)])
    }

    fn print(&self) {
        let Self { request, schedule, report, .. } = *self;
        let device = &request.cluster.device;
        println!(
            "{} on {}: {} ranks, {}{}; {}: {} stages, {} microbatches of {} tokens a rank",
            request.model.name,
            request.cluster.name,
            thousands(report.num_ranks as u64),
            request.layout,
            if request.context > 1 { format!(" (cp {}: planned only)", request.context) } else { String::new() },
            schedule.name,
            schedule.num_stages(),
            schedule.num_microbatches(),
            thousands(request.tokens as u64),
        );
        self.print_figures();
        let fits = if self.fits() { "fits" } else { "does not fit" };
        println!(
            "  peak memory {} a rank, {fits} in {}",
            bytes(self.most_memory() as u64),
            bytes(device.memory_bytes as u64)
        );
        self.print_levels();
        self.print_ranks();
    }

    fn print_figures(&self) {
        let report = self.report;
        let timeline = &report.simulation.timeline;
        println!(
            "  step {} s: {} s of the schedule, {} s of sums of gradients and update",
            number(report.step_s),
            number(timeline.makespan),
            number(report.step_s - timeline.makespan)
        );
        let hidden = report.hidden.map_or_else(
            || "no communication".to_owned(),
            |hidden| format!("communication hidden {}", percent(hidden)),
        );
        println!("  bubble {}, {hidden} (bubble: idle, or waiting for communication)", percent(timeline.bubble()));
        println!(
            "  tokens/s {}, {} a rank; {} of the devices' peak of {}",
            thousands(report.tokens_per_s.round() as u64),
            number(report.tokens_per_s / report.num_ranks as f64),
            percent(report.mfu),
            if self.request.precision == Precision::F32 { "f32" } else { "bf16" },
        );
    }

    fn print_levels(&self) {
        println!("Links: bytes of all ranks in a step, and the busiest link's use, over the step and at most:");
        let levels = self.report.simulation.levels.iter().zip(&self.request.cluster.levels).enumerate();
        let row = |(index, (of, level)): (usize, (&moeworks_plan::network::LevelBytes, &moeworks_plan::Level))| {
            let [busy, most] = self.busiest(index);
            vec![level.name.clone(), bytes(of.sent as u64), percent(busy), percent(most)]
        };
        tables::print(&["level", "bytes", "busy", "most"], &levels.map(row).collect::<Vec<_>>());
    }

    fn print_ranks(&self) {
        println!(
            "Ranks of the pipeline; each stands for the {} of its stage group:",
            self.request.layout.stage_group_size()
        );
        let row = |rank: usize| {
            let Peaks { held, .. } = self.checked.peaks()[rank];
            vec![
                rank.to_string(),
                number(self.report.simulation.timeline.busy[rank]),
                held.to_string(),
                bytes(self.report.state_bytes[rank] as u64),
                bytes(self.report.peak_memory[rank] as u64),
            ]
        };
        let ranks = self.schedule.num_ranks();
        let rows: Vec<_> = (0..ranks.min(SHOWN)).map(row).collect();
        tables::print(&["rank", "busy s", "microbatches held", "state", "peak memory"], &rows);
        if ranks > SHOWN {
            println!("  and {} more", ranks - SHOWN);
        }
    }

    fn json(&self) -> Value {
        let Self { request, schedule, report, .. } = *self;
        let timeline = &report.simulation.timeline;
        let Layout { dp, ep, tp, pp, .. } = request.layout;
        json!({
            "model": request.model.name,
            "cluster": request.cluster.name,
            "schedule": schedule.name,
            "layout": { "dp": dp, "ep": ep, "tp": tp, "pp": pp, "cp": request.context, "chunks": request.exchange.chunks },
            "num_ranks": report.num_ranks,
            "num_stages": schedule.num_stages(),
            "num_microbatches": schedule.num_microbatches(),
            "tokens": report.tokens,
            "makespan": timeline.makespan,
            "step_s": report.step_s,
            "bubble": timeline.bubble(),
            "longest_span": timeline.longest_span,
            "span_bubble": timeline.span_bubble(),
            "communication": timeline.communication,
            "communication_hidden": report.hidden,
            "tokens_per_s": report.tokens_per_s,
            "tokens_per_s_per_rank": report.tokens_per_s / report.num_ranks as f64,
            "mfu": report.mfu,
            "peak_memory_bytes": self.most_memory(),
            "device_memory_bytes": request.cluster.device.memory_bytes,
            "fits": self.fits(),
            "num_events": report.simulation.num_events,
            "levels": self.levels_json(),
            "ranks": (0..schedule.num_ranks()).map(|rank| self.rank_json(rank)).collect::<Vec<_>>(),
        })
    }

    fn levels_json(&self) -> Vec<Value> {
        let levels = self.report.simulation.levels.iter().zip(&self.request.cluster.levels).enumerate();
        let of = levels.map(|(index, (of, level))| {
            let [busy, most] = self.busiest(index);
            json!({
                "name": level.name,
                "sent_bytes": of.sent,
                "received_bytes": of.received,
                "busiest_link": { "busy": busy, "most": most },
            })
        });
        of.collect()
    }

    fn rank_json(&self, rank: usize) -> Value {
        let Peaks { activations, weight_grads, held } = self.checked.peaks()[rank];
        let times = self.costs.times();
        let stages = self.schedule.stages_of(rank).into_iter().map(|(_, stage)| {
            let of = times.stage(stage);
            json!({ "stage": stage, "forward_s": of.forward, "input_grad_s": of.input_grad, "weight_grad_s": of.weight_grad })
        });
        json!({
            "busy": self.report.simulation.timeline.busy[rank],
            "peak_activations": activations,
            "peak_weight_grads": weight_grads,
            "peak_held": held,
            "state_bytes": self.report.state_bytes[rank],
            "peak_memory_bytes": self.report.peak_memory[rank],
            "stages": stages.collect::<Vec<_>>(),
        })
    }
}
