//! The measurement of the parts of a step.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use moeworks_ops::{Context, MachineOptions};
use moeworks_plan::machine::Machine;

use super::Effort;
use super::parts::{Part, PartSeconds, Pass, Work};
use super::probe::Probe;
use crate::timing::median;

/// Measures all parts, adds their rates to `machine`, and sets its probe. The machine's speed may change
/// meanwhile: each part has the time that it would take at the usual speed.
pub(super) fn measure_parts(machine: &mut Machine, options: &MachineOptions, effort: Effort) {
    let (cores, rounds) = (machine.cores, effort.rounds());
    let parts = Part::all(cores, effort);
    let mut timed: Vec<Vec<TimedPart>> = parts.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (part, timed) in parts.iter().zip(&mut timed) {
            timed.push(time_part(part, cores, options, effort.part_seconds() / rounds as f64));
        }
    }
    let probe_s = median(timed.iter().flatten().map(|timed| timed.probe_s).collect());
    for (part, timed) in parts.iter().zip(timed) {
        let at_speed = |seconds: fn(&PartSeconds) -> f64| {
            median(timed.iter().map(|timed| seconds(&timed.seconds) * probe_s / timed.probe_s).collect())
        };
        let seconds = PartSeconds { forward: at_speed(|of| of.forward), training: at_speed(|of| of.training) };
        part.write(seconds, machine);
    }
    machine.probe_s = Some(probe_s);
}

/// A measured part.
struct TimedPart {
    seconds: PartSeconds,
    /// The seconds of a probe at the same time, by the same threads.
    probe_s: f64,
}

/// Measures a part by its threads, while as many others as there are cores for do the same.
fn time_part(part: &Part, cores: usize, options: &MachineOptions, seconds: f64) -> TimedPart {
    let groups = (cores / part.threads).max(1);
    let (start, is_over) = (Barrier::new(groups), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 1..groups {
            scope.spawn(|| {
                let ctx = Context::cpu(part.threads).on_machine(options);
                let mut work = part.prepare(&ctx);
                start.wait();
                while !is_over.load(Ordering::Relaxed) {
                    work(Pass::Forward);
                    work(Pass::Training);
                }
            });
        }
        let ctx = Context::cpu(part.threads).on_machine(options);
        let mut work = part.prepare(&ctx);
        let probe = Probe::new(&ctx);
        start.wait();
        let timed = time(&mut work, &probe, seconds);
        is_over.store(true, Ordering::Relaxed);
        timed
    })
}

fn time(work: &mut Work<'_>, probe: &Probe, seconds: f64) -> TimedPart {
    let (mut forward, mut training, mut probes) = (Vec::new(), Vec::new(), vec![probe.seconds()]);
    work(Pass::Training);
    let begun = Instant::now();
    while training.is_empty() || begun.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        work(Pass::Forward);
        let middle = Instant::now();
        work(Pass::Training);
        forward.push((middle - start).as_secs_f64().max(1e-9));
        training.push(middle.elapsed().as_secs_f64().max(1e-9));
        // A third of the time at most.
        if begun.elapsed().as_secs_f64() > 3.0 * probes.iter().sum::<f64>() {
            probes.push(probe.seconds());
            work(Pass::Training);
        }
    }
    let seconds = PartSeconds { forward: median(forward), training: median(training) };
    TimedPart { seconds, probe_s: median(probes) }
}
