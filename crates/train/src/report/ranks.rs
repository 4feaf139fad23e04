//! The report's section on ranks: time and bytes over the steps, and the last step of each rank.

use std::fmt::Write as _;

use super::chart::{Chart, Line};
use super::numbers::{Unit, bytes, grouped, short};
use super::page::{BLUE, GREEN, ORANGE, Page, VIOLET};
use crate::metrics::RanksRecord;

/// The most ranks that get a row each.
const MAX_ROWS: usize = 64;

impl Page<'_> {
    /// Renders the section on ranks; empty for a run of one rank.
    pub(super) fn ranks(&self) -> String {
        let Some(ranks) = &self.data.last.ranks else { return String::new() };
        let mut html = String::from("<section><h2>Ranks</h2><div class=\"cards\">");
        for (index, chart) in self.rank_charts(ranks).into_iter().enumerate() {
            html += &chart.card(false, 40 + index);
        }
        html += &table(ranks, self.data.last.step);
        html + "</div></section>"
    }

    fn rank_charts(&self, ranks: &RanksRecord) -> [Chart; 3] {
        let line = |name: &str, scalar: &str, colour: &str| {
            let points = self.data.series(&format!("ranks/{scalar}"));
            Line::new(name, colour, points, ranks.scalar(scalar)).noisy()
        };
        let mut waiting = self.chart(
            "Waiting of ranks",
            vec![
                line("for the slowest", "waiting_ms", ORANGE),
                line("in communication", "standing_ms_mean", VIOLET),
                line("of that, tensor-parallel", "tensor_ms_mean", BLUE),
            ],
        );
        waiting.note = "Milliseconds of a step, in the mean over ranks.".to_owned();
        let mut imbalance = self.chart("Imbalance of ranks", vec![line("busiest over mean", "imbalance", BLUE)]);
        imbalance.note = "Time of forward and backward without communication; 1 is even.".to_owned();
        let mut sent = self.chart(
            "Bytes sent",
            vec![line("inside nodes", "node_mb", GREEN), line("between nodes", "cluster_mb", ORANGE)],
        );
        sent.note = "Of all ranks in a step, in millions.".to_owned();
        for chart in [&mut waiting, &mut sent] {
            (chart.from_zero, chart.cuts_peaks) = (true, true);
        }
        [waiting, imbalance, sent]
    }
}

fn table(ranks: &RanksRecord, step: u64) -> String {
    let mut html = format!(
        "<div class=\"card wide\"><h3>Rank by rank</h3><p>Step {}, in milliseconds.</p><div class=\"scroll\"><table><thead>\
         <tr><th>Rank</th><th>Forward and backward</th><th>Sum of gradients</th><th>Optimizer</th><th>In communication</th>\
         <th>Of it tensor-parallel</th><th>Sent inside its node</th><th>Sent to others</th></tr></thead><tbody>",
        grouped(step)
    );
    for (rank, record) in ranks.ranks.iter().enumerate().take(MAX_ROWS) {
        let _ = write!(html, "<tr><td>{rank}</td>");
        for time in [record.work_ms, record.gradients_ms, record.update_ms, record.standing_ms, record.tensor_ms] {
            let _ = write!(html, "<td>{}</td>", short(time, Unit::Plain));
        }
        let _ = write!(html, "<td>{}</td><td>{}</td></tr>", bytes(record.node_bytes), bytes(record.cluster_bytes));
    }
    html += "</tbody></table></div>";
    if ranks.ranks.len() > MAX_ROWS {
        let _ = write!(html, "<p>The first {MAX_ROWS} of {} ranks.</p>", ranks.ranks.len());
    }
    html + "</div>"
}
