//! `moeworks bench overlap`: prints the share of a layer's communication that is hidden behind its computation, by
//! the number of chunks.

use moeworks_bench::BenchError;
use moeworks_bench::overlap::{self, CHUNKS, Overlap, TOKENS};
use moeworks_bench::pass::Pass;
use moeworks_bench::ranks::on_ranks;
use moeworks_bench::travel::{self, Compared, Travel};
use moeworks_comm::mpi::is_launched;
use moeworks_plan::Link;
use serde_json::json;

use super::comm::check_ranks;
use crate::args::OverlapArgs;
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::tables;

/// The share of a pass below which communication is too short to measure how much of it is hidden.
const LITTLE: f64 = 0.02;

pub(super) fn run(args: &OverlapArgs) -> Result<ExitCode, Failure> {
    let link = args.link.as_deref().map(parse_link).transpose()?;
    check_ranks(args.ranks)?;
    let machine = environment::machine();
    let measured = on_ranks(args.ranks, |comm| overlap::measure(comm, link, &machine))?;
    let travel = (!is_launched()).then(travel::measure).transpose().map_err(BenchError::from)?;
    if let Some(measured) = measured {
        print(&measured, travel, args.json);
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses a link written as `LATENCY_US,MB_PER_S`.
pub(super) fn parse_link(text: &str) -> Result<Link, Failure> {
    let wrong = || Failure::input(format!("--link {text}: must be LATENCY_US,MB_PER_S, such as 1000,125"));
    let (latency, rate) = text.split_once(',').ok_or_else(wrong)?;
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0).ok_or_else(wrong);
    let (latency_us, rate) = (number(latency)?, number(rate)?);
    if rate == 0.0 || latency_us > 1e7 {
        return Err(wrong());
    }
    Ok(Link { latency_s: latency_us * 1e-6, bytes_per_s: rate * 1e6 })
}

fn print(measured: &Overlap, travel: Option<Travel>, is_json: bool) {
    let Overlap { num_ranks, passes, gradient_sums } = measured;
    let (after, overlapped) = (gradient_sums.after, gradient_sums.overlapped);
    let hidden_of_sums = overlapped.hidden(&after);
    if is_json {
        let row = |(chunks, pass): (usize, &Pass)| {
            let mut row = pass.json();
            (row["chunks"], row["hidden"]) = (json!(chunks), json!(pass.hidden(&passes[0])));
            row
        };
        let gradients = json!({ "behind": after.json(), "under": overlapped.json(), "hidden": hidden_of_sums });
        let rows: Vec<_> = CHUNKS.into_iter().zip(passes).map(row).collect();
        println!(
            "{:#}",
            json!({ "ranks": num_ranks, "rows": rows, "gradients": gradients, "travel": travel.map(|travel| {
            json!({ "hops": travel.hops.json(), "shared": travel.shared.json() })
        }) })
        );
        return;
    }
    println!("{num_ranks} ranks, {TOKENS} tokens each: forward, backward and the weights' gradients of a layer");
    let cells = |(chunks, pass): (usize, &Pass)| {
        let hidden = format!("{:.0}%", 100.0 * pass.hidden(&passes[0]));
        let [seconds, communication, waiting] = [pass.seconds, pass.communication_s, pass.waiting_s].map(milliseconds);
        vec![chunks.to_string(), seconds, communication, hidden, waiting]
    };
    let header = ["chunks", "ms", "ms in communication", "of it hidden", "ms waiting for a slower rank"];
    tables::print(&header, &CHUNKS.into_iter().zip(passes).map(cells).collect::<Vec<_>>());
    said_of_little(&passes[0]).iter().for_each(|said| println!("{said}"));
    println!(
        "\nsums of the gradients of dense matrices: behind backward {} ms, {} of them in communication; under it {} and {}: \
         {:.0}% hidden",
        milliseconds(after.seconds),
        milliseconds(after.communication_s),
        milliseconds(overlapped.seconds),
        milliseconds(overlapped.communication_s),
        100.0 * hidden_of_sums,
    );
    said_of_little(&after).iter().for_each(|said| println!("{said}"));
    travel.iter().for_each(print_travel);
}

/// Prints passes whose computations are waits, on emulated links.
fn print_travel(Travel { hops, shared }: &Travel) {
    println!("\nforward and backward of a layer on emulated links, medians in turns:");
    let cells = |what: &str, compared: &Compared| {
        let [after, under] = [compared.after_s, compared.under_s].map(milliseconds);
        vec![what.to_owned(), after, under, format!("{:.2}", compared.ratio())]
    };
    let rows = [
        cells("the hop inside a node and the hop between nodes, 4 ranks on 2 nodes", hops),
        cells("a shared expert and the dispatch, 2 ranks", shared),
    ];
    tables::print(&["", "ms after each other", "ms under each other", "ratio"], &rows);
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", 1e3 * seconds)
}

/// Returns a remark if a pass communicates so little that the hidden share is meaningless.
fn said_of_little(whole: &Pass) -> Option<String> {
    let share = whole.communication_s / whole.seconds;
    (share < LITTLE).then(|| {
        format!(
            "(There is next to nothing to hide: communication takes {:.1}% of the time here. --link tries the pace of a network.)",
            100.0 * share
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_there_is_next_to_nothing_to_hide_is_said_in_words() {
        let of = |communication_s: f64| said_of_little(&Pass { seconds: 2.0, communication_s, waiting_s: 0.5 });
        assert!(of(0.0).is_some_and(|said| said.contains("communication takes 0.0% of the time")));
        assert!(of(0.03).is_some_and(|said| said.contains("communication takes 1.5% of the time")));
        assert_eq!(of(0.05), None);
    }
}
