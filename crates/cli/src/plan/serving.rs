//! `moeworks plan --serve`: replicas, batch and memory of keys and values, with prefill and decode apart or together.

use moeworks_plan::{PhaseCost, Precision, ServingJob, ServingPlan, serving_plan};
use serde_json::{Value, json};

use super::inputs::{Place, model, place, skew, work};
use super::layouts::{params, precision_name, time};
use crate::args::PlanArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::{bytes, thousands};
use crate::tables;

/// The most tokens of a prompt or an answer.
const MAX_LEN: usize = 1 << 24;

pub(super) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let options = &args.serving;
    for (option, len) in [("--input", options.input), ("--output", options.output)] {
        if !(1..=MAX_LEN).contains(&len) {
            return Err(Failure::input(format!("{option} {len}: must be from 1 to {MAX_LEN}")));
        }
    }
    if options.token_ms.is_some_and(|ms| !(ms > 0.0 && ms < 1e9)) {
        return Err(Failure::input("--token-ms: must be a number above 0 and below 1e9"));
    }
    check_answers(args)?;
    let work = work(args)?;
    let place = place(args, &work)?;
    let job = ServingJob {
        weight_bytes: if work.precision == Precision::Fp8 { 1.0 } else { work.precision.bytes() as f64 },
        cache_bytes: if work.precision == Precision::F32 { 4.0 } else { 2.0 },
        input_len: options.input,
        output_len: options.output,
        max_token_s: options.token_ms.map(|ms| 1e-3 * ms),
        skew: skew(args, &work.parts)?,
        parts: work.parts,
    };
    let plans = serving_plan(&job, &place.fabric);
    if args.json {
        let value = json!({
            "cluster": place.name,
            "ranks": place.fabric.num_ranks,
            "model": job.parts.name,
            "params": job.parts.params(),
            "precision": precision_name(work.precision),
            "input": job.input_len,
            "output": job.output_len,
            "plans": plans.iter().map(plan_json).collect::<Vec<_>>(),
            "sentences": sentences(&job, &place, &plans),
        });
        println!("{value:#}");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{} ranks: {}. {}: {} parameters in {}; prompts of {} tokens, answers of {}.",
        thousands(place.fabric.num_ranks as u64),
        place.name,
        job.parts.name,
        params(&job.parts),
        precision_name(work.precision),
        thousands(job.input_len as u64),
        thousands(job.output_len as u64),
    );
    println!();
    if !plans.is_empty() {
        tables::print(&HEADER, &plans.iter().map(row).collect::<Vec<_>>());
        println!();
    }
    sentences(&job, &place, &plans).iter().for_each(|line| println!("{line}"));
    Ok(ExitCode::SUCCESS)
}

/// Refuses a model that does not predict tokens.
fn check_answers(args: &PlanArgs) -> Result<(), Failure> {
    let Some(name) = &args.described.model else { return Ok(()) };
    if model(name)?.has_embedding {
        return Ok(());
    }
    Err(Failure::input(format!("--serve plans answers of language models, and {name} has no vocabulary")))
}

const HEADER: [&str; 10] = [
    "prefill and decode",
    "prefill",
    "decode",
    "sequences",
    "keys and values",
    "requests/s",
    "tokens/s",
    "first token",
    "next token",
    "idle ranks",
];

fn is_apart(plan: &ServingPlan) -> bool {
    plan.prefill_replicas > 0
}

fn replicas(count: usize, cost: &PhaseCost) -> String {
    format!("{count} x {} (tp {})", cost.ranks, cost.tp)
}

fn row(plan: &ServingPlan) -> Vec<String> {
    let decode = &plan.decode;
    vec![
        if is_apart(plan) { "apart" } else { "together" }.to_owned(),
        if is_apart(plan) { replicas(plan.prefill_replicas, &plan.prefill) } else { "the same".to_owned() },
        replicas(plan.decode_replicas, decode),
        thousands(decode.batch as u64),
        bytes(decode.cache_bytes as u64),
        format!("{:.2}", plan.requests_per_s),
        thousands(plan.tokens_per_s as u64),
        time(plan.first_token_s),
        time(plan.token_s),
        plan.idle_ranks.to_string(),
    ]
}

/// Returns what is said beside the table.
fn sentences(job: &ServingJob, place: &Place, plans: &[ServingPlan]) -> Vec<String> {
    let Some(best) = plans.first() else { return vec![nothing(job, place)] };
    let decode = &best.decode;
    let mut lines = vec![format!(
        "A replica for answers has {} ranks with {} of weights each and {} sequences, whose keys and values take {} of a rank; \
         a step takes {}, the longest part of it for {}.",
        decode.ranks,
        bytes(decode.weight_bytes as u64),
        thousands(decode.batch as u64),
        bytes(decode.cache_bytes as u64),
        time(decode.step_s),
        decode.longest,
    )];
    let prompts = match best.prefill.batch {
        1 => "A prompt at a time takes".to_owned(),
        many => format!("{} prompts at a time take", thousands(many as u64)),
    };
    lines.push(format!(
        "{prompts} {} on {} ranks, the longest part of it for {}.",
        time(best.prefill.step_s),
        best.prefill.ranks,
        best.prefill.longest
    ));
    if let Some(other) = plans.get(1) {
        let name = |plan: &ServingPlan| if is_apart(plan) { "apart" } else { "together" };
        lines.push(format!(
            "Prefill and decode {} serve {:.2} requests/s, {} {:.2}; the next token takes {} against {}.",
            name(best),
            best.requests_per_s,
            name(other),
            other.requests_per_s,
            time(best.token_s),
            time(other.token_s),
        ));
    }
    lines
}

fn nothing(job: &ServingJob, place: &Place) -> String {
    let limit = match job.max_token_s {
        Some(limit) => format!(" with at most {} between two tokens", time(limit)),
        None => String::new(),
    };
    format!(
        "Nothing fits{limit}: the weights take {} in all, {} ranks have {} each, a tenth of which is left for activations.",
        bytes((job.parts.params() * job.weight_bytes) as u64),
        thousands(place.fabric.num_ranks as u64),
        bytes(place.fabric.rates.memory_bytes as u64),
    )
}

fn phase_json(cost: &PhaseCost) -> Value {
    json!({
        "ranks": cost.ranks,
        "tp": cost.tp,
        "batch": cost.batch,
        "step_seconds": cost.step_s,
        "requests_per_s": cost.requests_per_s,
        "weight_bytes": cost.weight_bytes,
        "cache_bytes": cost.cache_bytes,
        "longest": cost.longest,
    })
}

fn plan_json(plan: &ServingPlan) -> Value {
    json!({
        "apart": is_apart(plan),
        "prefill": phase_json(&plan.prefill),
        "decode": phase_json(&plan.decode),
        "prefill_replicas": plan.prefill_replicas,
        "decode_replicas": plan.decode_replicas,
        "idle_ranks": plan.idle_ranks,
        "requests_per_s": plan.requests_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "first_token_seconds": plan.first_token_s,
        "token_seconds": plan.token_s,
    })
}
