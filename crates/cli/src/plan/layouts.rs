//! `moeworks plan` in all dimensions: the best layouts, the reasons for the first, and the bill of a number of
//! tokens.

use moeworks_plan::ModelParts;
use moeworks_plan::{Bill, MeshCost, Pins, Practice, Precision, Rate, Search, TrainingJob, Verdict, search, verdict};

use super::inputs::{Place, Work, pins, place, skew, tokens, work};
use super::layouts_json::as_json;
use crate::args::PlanArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::{bytes, thousands};
use crate::tables;

/// All that is printed, as text or JSON.
pub(super) struct Plan {
    pub(super) place: Place,
    pub(super) job: TrainingJob,
    pub(super) found: Search,
    pub(super) verdict: Option<Verdict>,
    /// The best layout that the trainer carries out, if the best one is planned only.
    pub(super) trainable: Option<MeshCost>,
    pub(super) bill: Option<Bill>,
    /// The number of layouts to print.
    pub(super) top: usize,
}

pub(super) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let tokens = args.bill.tokens.as_deref().map(tokens).transpose()?;
    let work = work(args)?;
    let place = place(args, &work)?;
    let pins = pins(args, &work, &place)?;
    let job = TrainingJob {
        skew: skew(args, &work.parts)?,
        expert_gradient_bytes: work.expert_gradient_bytes,
        seq_len: work.seq_len,
        global_batch: work.sequences(place.fabric.num_ranks),
        precision: work.precision,
        practice: Practice::moeworks(work.precision),
        stage_layers: None,
        parts: work.parts.clone(),
    };
    let found = search(&job, &place.fabric, &pins);
    if found.found.is_empty() {
        return Err(nothing(&job, &work, &place, &found));
    }
    let verdict = verdict(&job, &place.fabric, &pins, &found);
    let trainable = best_trainable(&job, &place, pins, &found);
    let bill = tokens.and_then(|tokens| bill(&place, &found.found[0], tokens));
    let plan = Plan { place, job, found, verdict, trainable, bill, top: args.described.top };
    if args.json {
        println!("{:#}", as_json(&plan));
    } else {
        print(&plan);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the failure if no way to cut the ranks is left.
fn nothing(job: &TrainingJob, work: &Work, place: &Place, found: &Search) -> Failure {
    let n = place.fabric.num_ranks;
    if found.lacks_sequences {
        return Failure::input(format!(
            "{} sequences a step are too few for {n} ranks: each data-parallel rank needs one; give --global-batch of at least \
             {n}, or a number of ranks with more divisors",
            job.global_batch
        ));
    }
    Failure::input(format!(
        "no layout of {n} ranks has the given sizes: their product must divide {n}, tp must divide {} (heads of the model) and \
         etp must divide tp",
        work.parts.max_tp
    ))
}

fn best_trainable(job: &TrainingJob, place: &Place, pins: Pins, found: &Search) -> Option<MeshCost> {
    let best = found.found[0];
    let has = |cost: &MeshCost| cost.mesh.trainable(job.parts.num_experts).is_some();
    if has(&best) {
        return None;
    }
    let pins = Pins { only_trainable: true, ..pins };
    search(job, &place.fabric, &pins).found.into_iter().find(|cost| has(cost) && cost.fits)
}

fn bill(place: &Place, best: &MeshCost, tokens: f64) -> Option<Bill> {
    let rate = Rate {
        num_ranks: place.fabric.num_ranks,
        tokens_per_s: best.tokens_per_s,
        price_per_hour: place.price_per_hour,
        watts: place.watts,
    };
    best.fits.then(|| rate.bill(tokens))
}

pub(super) fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16",
        Precision::Fp8 => "fp8",
    }
}

/// Formats seconds in the unit that suits them.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        at if at >= 1.0 => format!("{seconds:.2} s"),
        at if at >= 1e-3 => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

/// Formats a number of parameters.
pub(super) fn params(parts: &ModelParts) -> String {
    match parts.params() {
        many if many >= 1e9 => format!("{:.2} billion", many / 1e9),
        many => format!("{:.2} million", many / 1e6),
    }
}

const HEADER: [&str; 12] = [
    "layout",
    "schedule",
    "zero",
    "recompute",
    "memory",
    "step",
    "MFU",
    "compute",
    "all-to-all",
    "tp and cp",
    "bubble",
    "gradients",
];
/// The words of the table.
const LEGEND: &str = "\
tp, cp, dp, pp, ep, etp: ranks of tensor, context, data, pipeline, expert and expert-tensor parallelism. mb: sequences of a
microbatch. memory: of the fullest rank. MFU: of the peak of bf16 products. compute and what follows: parts of the step, of
communication what nothing hides.";

fn row(cost: &MeshCost) -> Vec<String> {
    let (mesh, at) = (&cost.mesh, &cost.time);
    let schedule = match (mesh.pp, mesh.virtual_stages) {
        (1, _) => format!("mb {}", mesh.microbatch),
        (_, 1) => format!("{} mb {}", mesh.schedule, mesh.microbatch),
        (_, stages) => format!("{} x{stages} mb {}", mesh.schedule, mesh.microbatch),
    };
    vec![
        layout(cost),
        schedule,
        mesh.zero.to_string(),
        mesh.recompute.name().to_owned(),
        bytes(cost.memory.total() as u64) + if cost.fits { "" } else { " (too much)" },
        time(at.total()),
        format!("{:.1}%", 100.0 * cost.mfu),
        time(at.products + at.attention + at.elementwise),
        time(at.experts),
        time(at.tensor + at.context),
        time(at.bubble + at.messages),
        time(at.gradients + at.optimizer),
    ]
}

pub(super) fn layout(cost: &MeshCost) -> String {
    let mesh = &cost.mesh;
    format!("tp {} cp {} dp {} pp {} ep {} etp {}", mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.ep, mesh.etp)
}

fn print(plan: &Plan) {
    let Plan { place, job, found, .. } = plan;
    let num_fit = found.found.iter().filter(|cost| cost.fits).count();
    println!(
        "{} ranks{}: {}. {}: {} parameters, {:.2} GFLOP a token; {} sequences of {} tokens a step in {}.",
        thousands(place.fabric.num_ranks as u64),
        place.device.as_ref().map_or_else(String::new, |device| format!(" ({device} each)")),
        place.name,
        job.parts.name,
        params(&job.parts),
        job.parts.training_flops(job.seq_len) / 1e9,
        thousands(job.global_batch as u64),
        thousands(job.seq_len as u64),
        precision_name(job.precision),
    );
    println!(
        "{} layouts were costed: {} ways to cut the ranks, of which {} fit in {} each.",
        thousands(found.num_costed as u64),
        thousands(found.found.len() as u64),
        thousands(num_fit as u64),
        bytes(place.fabric.rates.memory_bytes as u64),
    );
    println!();
    tables::print(&HEADER, &found.found.iter().take(plan.top).map(row).collect::<Vec<_>>());
    if found.found.len() > plan.top {
        println!("  and {} more", thousands((found.found.len() - plan.top) as u64));
    }
    println!("{LEGEND}");
    println!();
    sentences(plan).iter().for_each(|line| println!("{line}"));
}

/// Returns all that is said beside the table.
pub(super) fn sentences(plan: &Plan) -> Vec<String> {
    let best = &plan.found.found[0];
    let mut lines = vec![match &plan.verdict {
        Some(_) => format!(
            "Proposed: {}. {} tokens/s, {} a rank.",
            best.mesh,
            thousands(best.tokens_per_s as u64),
            thousands((best.tokens_per_s / best.mesh.num_ranks() as f64) as u64),
        ),
        None => does_not_fit(plan),
    }];
    if let Some(verdict) = &plan.verdict {
        lines.extend(verdict.sentences.iter().cloned());
        lines.push(hottest(best));
        lines.push(training(plan, best));
    }
    lines.extend(plan.bill.as_ref().map(|bill| bill_line(bill, plan.place.price_per_hour)));
    lines
}

fn does_not_fit(plan: &Plan) -> String {
    let (best, room) = (&plan.found.found[0], plan.place.fabric.rates.memory_bytes);
    let state = best.memory.state() * best.mesh.num_ranks() as f64;
    let floor = (state / room).ceil().max(best.mesh.num_ranks() as f64 + 1.0);
    format!(
        "No layout fits: a rank has {}, and the leanest ({}) needs {}. It would take at least {} such ranks, or fewer tokens \
         a sequence.",
        bytes(room as u64),
        best.mesh,
        bytes(best.memory.total() as u64),
        thousands(floor as u64),
    )
}

fn hottest(best: &MeshCost) -> String {
    let memory = &best.memory;
    format!(
        "The hottest rank holds {} weights, {} gradients, {} optimizer state, {} activations and {} received rows; its \
         experts have {:.2} times the mean load.",
        bytes(memory.weights as u64),
        bytes(memory.gradients as u64),
        bytes(memory.optimizer as u64),
        bytes(memory.activations as u64),
        bytes(memory.received as u64),
        best.hot.time,
    )
}

/// Returns how to train the proposal, or what the trainer lacks for it.
fn training(plan: &Plan, best: &MeshCost) -> String {
    let parts = &plan.job.parts;
    let options = |cost: &MeshCost| cost.mesh.options(parts.num_experts, parts.num_layers, cost.microbatches);
    if let Some(options) = options(best) {
        return format!("Train with: moeworks train {options}");
    }
    let lacks = best.mesh.planned_only(parts.num_experts).join(" and ");
    match plan.trainable.as_ref().and_then(|cost| Some((cost, options(cost)?))) {
        Some((cost, options)) => format!(
            "Planned only: moeworks train has no {lacks}. The best that it carries out takes {}: moeworks train {options}",
            time(cost.time.total()),
        ),
        None => format!("Planned only: moeworks train has no {lacks}, and nothing fits without."),
    }
}

fn bill_line(bill: &Bill, price_per_hour: Option<f64>) -> String {
    let mut line = format!("{} tokens take {}: {} rank hours", count(bill.tokens), days(bill.days), {
        let hours = bill.rank_hours;
        if hours < 100.0 { format!("{hours:.2}") } else { thousands(hours.round() as u64) }
    });
    if let (Some(price), Some(each)) = (bill.price, price_per_hour) {
        line += &format!(", which cost {} at {each} each", thousands(price.round() as u64));
    }
    if let Some(energy) = bill.kilowatt_hours {
        line += &format!(", {} kWh", thousands(energy.round() as u64));
    }
    line + "."
}

/// Formats a number of days; less than one as hours or minutes.
fn days(days: f64) -> String {
    match 24.0 * days {
        hours if hours < 1.0 => format!("{:.1} minutes", 60.0 * hours),
        hours if hours < 24.0 => format!("{hours:.2} hours"),
        _ => format!("{days:.2} days"),
    }
}

/// Formats a number of tokens.
fn count(tokens: f64) -> String {
    match tokens {
        many if many >= 1e12 => format!("{} trillion", many / 1e12),
        many if many >= 1e9 => format!("{} billion", many / 1e9),
        many if many >= 1e6 => format!("{} million", many / 1e6),
        few => thousands(few as u64),
    }
}
