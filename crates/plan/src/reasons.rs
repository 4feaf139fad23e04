//! The reasons for a layout: what binds it, by costing it again on a cluster with more of each resource, and what
//! each other choice would have cost.

use crate::cost::fabric::Fabric;
use crate::cost::training::{MeshCost, TrainingJob, mesh_cost_with};
use crate::search::{Pins, Search, search};
use crate::{Mesh, Recompute};

/// The gain of twice as much of a resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Gain {
    /// The resource, such as `compute` or `links of the node`.
    pub resource: String,
    /// Seconds of a step with twice as much; for the bubble, without it.
    pub seconds: f64,
    /// The share of the step that it saves.
    pub saved: f64,
}

/// The best layout with another choice in one dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The dimension, such as `tp`.
    pub dimension: &'static str,
    /// The choice of the winner.
    pub chosen: usize,
    /// The other choice.
    pub value: usize,
    /// The layout, which may not fit.
    pub cost: MeshCost,
    /// The part of the step that grows most, and by how many seconds; none if the layout does not fit.
    pub grows: Option<(&'static str, f64)>,
}

/// The reasons for the first layout of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The resource that saves the most time if there is twice as much.
    pub binds: String,
    /// The gains of all resources, largest first.
    pub gains: Vec<Gain>,
    /// The best other choice in each dimension that has one.
    pub alternatives: Vec<Alternative>,
    /// All of it in sentences.
    pub sentences: Vec<String>,
}

/// The seconds in a unit that suits them.
fn seconds(seconds: f64) -> String {
    match seconds.abs() {
        at if at >= 1.0 => format!("{seconds:.2} s"),
        at if at >= 1e-3 => format!("{:.1} ms", 1e3 * seconds),
        _ => format!("{:.1} us", 1e6 * seconds),
    }
}

fn gigabytes(bytes: f64) -> String {
    if bytes >= 1e9 { format!("{:.1} GB", bytes / 1e9) } else { format!("{:.1} MB", bytes / 1e6) }
}

/// Returns the reasons for the first layout of `found`; none if nothing was found or nothing fits.
#[must_use]
pub fn verdict(job: &TrainingJob, fabric: &Fabric, pins: &Pins, found: &Search) -> Option<Verdict> {
    let best = found.found.first().filter(|best| best.fits)?;
    let gains = gains(job, fabric, pins, best);
    let alternatives = alternatives(best, &found.found);
    let binds = gains.first().map_or_else(|| "nothing".to_owned(), |gain| gain.resource.clone());
    let mut sentences = vec![spent(best), binding(best, &gains)];
    sentences.extend(memory_sentence(fabric, best, &gains));
    sentences.extend(alternatives.iter().map(|other| other.sentence(best, fabric)));
    Some(Verdict { binds, gains, alternatives, sentences })
}

/// Costs the winner with twice as much of each resource, and the best layout with twice the memory.
fn gains(job: &TrainingJob, fabric: &Fabric, pins: &Pins, best: &MeshCost) -> Vec<Gain> {
    let total = best.time.total();
    let again = |fabric: &Fabric| mesh_cost_with(job, fabric, &best.mesh, best.hot).time.total();
    let mut gains = Vec::new();
    let mut add = |resource: String, seconds: f64| {
        gains.push(Gain { resource, seconds, saved: (1.0 - seconds / total).max(0.0) });
    };
    let mut other = fabric.clone();
    other.rates.flops *= 2.0;
    other.rates.fp8_flops *= 2.0;
    other.rates.attention_flops *= 2.0;
    other.machine.iter_mut().for_each(|machine| machine.speed_up(2.0, 1.0));
    add("compute".to_owned(), again(&other));
    let mut other = fabric.clone();
    other.rates.memory_bytes_per_s *= 2.0;
    other.rates.pass_bytes_per_s *= 2.0;
    other.machine.iter_mut().for_each(|machine| machine.speed_up(1.0, 2.0));
    add("memory bandwidth".to_owned(), again(&other));
    for level in 0..fabric.levels.len() {
        let mut other = fabric.clone();
        let links = &mut other.levels[level];
        links.bytes_per_s *= 2.0;
        links.latency_s /= 2.0;
        links.message_s /= 2.0;
        add(format!("links of the {}", links.name), again(&other));
    }
    if best.mesh.pp > 1 {
        add("pipeline bubble".to_owned(), total - best.time.bubble);
    }
    let mut other = fabric.clone();
    other.rates.memory_bytes *= 2.0;
    let roomy = search(job, &other, pins).found.first().map_or(total, |cost| cost.time.total());
    add("memory".to_owned(), roomy.min(total));
    gains.sort_by(|a, b| b.saved.total_cmp(&a.saved));
    gains
}

fn spent(best: &MeshCost) -> String {
    let total = best.time.total();
    let mut parts = best.time.parts();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shown = parts.iter().filter(|(_, part)| *part >= 0.01 * total).take(4);
    let shown: Vec<String> =
        shown.map(|(name, part)| format!("{name} {} ({:.0}%)", seconds(*part), 100.0 * part / total)).collect();
    format!("A step takes {}: {}.", seconds(total), shown.join(", "))
}

fn binding(best: &MeshCost, gains: &[Gain]) -> String {
    let total = seconds(best.time.total());
    let Some(first) = gains.first().filter(|gain| gain.saved >= 0.005) else {
        return format!("Nothing binds alone: no resource twice as large saves half a percent of {total}.");
    };
    let how = match first.resource.as_str() {
        "pipeline bubble" => "without it".to_owned(),
        "memory" => "with twice as much, and the best layout for that,".to_owned(),
        _ => "twice as fast".to_owned(),
    };
    let others = gains[1..].iter().filter(|gain| gain.saved >= 0.005).take(3);
    let others: Vec<String> = others.map(|gain| format!("{} {:.0}%", gain.resource, 100.0 * gain.saved)).collect();
    let others = if others.is_empty() { String::new() } else { format!("; {}", others.join(", ")) };
    format!(
        "What binds is {}: {how} a step would take {}, {:.0}% less{others}.",
        first.resource,
        seconds(first.seconds),
        100.0 * first.saved,
    )
}

fn memory_sentence(fabric: &Fabric, best: &MeshCost, gains: &[Gain]) -> Option<String> {
    let memory = gains.iter().find(|gain| gain.resource == "memory")?;
    let used = best.memory.total();
    let share = 100.0 * used / fabric.rates.memory_bytes;
    let effect = if memory.saved >= 0.005 {
        format!("twice the memory would allow a layout of {}", seconds(memory.seconds))
    } else {
        "more memory would change nothing".to_owned()
    };
    Some(format!(
        "The hottest rank needs {} of {} ({share:.0}%); {effect}.",
        gigabytes(used),
        gigabytes(fabric.rates.memory_bytes)
    ))
}

/// The dimensions in which choices are compared, and their values.
fn dimensions(mesh: &Mesh) -> [(&'static str, usize); 6] {
    [("tp", mesh.tp), ("cp", mesh.cp), ("dp", mesh.dp), ("pp", mesh.pp), ("ep", mesh.ep), ("etp", mesh.etp)]
}

fn alternatives(best: &MeshCost, found: &[MeshCost]) -> Vec<Alternative> {
    let chosen = dimensions(&best.mesh);
    let other = |place: usize| {
        let (dimension, value) = chosen[place];
        // Of layouts that do not fit, the one that comes next is the leanest.
        let cost = *found.iter().find(|cost| dimensions(&cost.mesh)[place].1 != value)?;
        let grows = || {
            let parts = best.time.parts().into_iter().zip(cost.time.parts());
            let grown = parts.map(|((name, of_best), (_, of_other))| (name, of_other - of_best));
            grown.max_by(|a, b| a.1.total_cmp(&b.1))
        };
        let grows = if cost.fits { grows() } else { None };
        Some(Alternative { dimension, chosen: value, value: dimensions(&cost.mesh)[place].1, cost, grows })
    };
    (0..chosen.len()).filter(|&place| chosen[place].0 != "dp").filter_map(other).collect()
}

impl Alternative {
    fn sentence(&self, best: &MeshCost, fabric: &Fabric) -> String {
        let Self { dimension, chosen, value, cost, grows } = self;
        if !cost.fits {
            return format!(
                "{dimension} {chosen}: nothing with another {dimension} fits; the leanest, {dimension} {value}, needs {} of {}.",
                gigabytes(cost.memory.total()),
                gigabytes(fabric.rates.memory_bytes),
            );
        }
        let more = cost.time.total() - best.time.total();
        if more < 5e-4 * best.time.total() {
            return format!("{dimension} {chosen}: the best with another {dimension} ({value}) takes as long.");
        }
        let why = match grows {
            Some((name, by)) if *by > 0.0 => format!(", of which {name} {}", seconds(*by)),
            _ => String::new(),
        };
        let form = match cost.mesh.recompute {
            Recompute::None => String::new(),
            recompute if recompute == best.mesh.recompute => String::new(),
            recompute => format!(", with {} recomputation", recompute.name()),
        };
        format!(
            "{dimension} {chosen}: the best with another {dimension} ({value}{form}) takes {} more ({:.1}%){why}.",
            seconds(more),
            100.0 * more / best.time.total(),
        )
    }
}
