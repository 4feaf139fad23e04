//! Aims that were set without a source, beside what the planner finds.

use moeworks_plan::{Estimate, ModelShape, Precision, Tokens, Topology, Workload, weak_scaling};

use super::{Cell, Kind, Table};

fn communication(estimate: &Estimate) -> f64 {
    let time = &estimate.time;
    100.0 * (time.all_to_all + time.all_reduce + time.tensor_parallel) / time.total()
}

pub(super) fn tables() -> Vec<Table> {
    let workload =
        Workload { tokens: Tokens::OfEachRank(8192), precision: Precision::Bf16, zero: 1, expert_gradient_bytes: 4 };
    let rows = weak_scaling(&ModelShape::example(), &workload, &Topology::example_cluster(1), 2048);
    let at = |num_ranks: usize| rows.iter().find(|row| row.num_ranks == num_ranks).expect("a power of two");
    let (first, middle, last) = (at(8), at(512), at(2048));
    let step = |estimate: &Estimate| estimate.time.total();
    let grows = |before: f64, after: f64| 100.0 * (after / before - 1.0);
    let cell = |what, aim, ours| Cell::new(what, aim, ours, Kind::Order);
    let scaling = 100.0 * step(&first.compressed) / step(&middle.compressed);
    let between = 100.0 * step(&at(64).compressed) / step(&middle.compressed);
    vec![Table {
        title: "Aims without a source",
        intro: "Figures that circulate without a paper behind them, beside those of `moeworks plan --scaling` for its built-in \
                model (64 experts, 6 a token, 8,192 tokens a rank) and cluster (A100, 25 GB/s a rank between nodes)."
            .to_owned(),
        unit: "",
        cells: vec![
            cell("scaling from 8 to 512 ranks, %, all measures on", 92.0, scaling),
            cell("scaling from 64 to 512 ranks, %, all measures on", 92.0, between),
            cell("communication at 2,048 ranks, %, straight all-to-all", 62.0, communication(&last.linear)),
            cell("communication at 2,048 ranks, %, all measures on", 23.0, communication(&last.compressed)),
        ],
        remark: format!(
            "The aims say neither where scaling begins nor what they count. Ours is the speed of a rank over that in the \
             smaller cluster: from one node, in which no token leaves it, it is {} the aim, from eight nodes, of which \
             each has one of the 64 experts a rank, {}. Communication is the part of a step that nothing hides. The shares of communication are {} theirs. With the straight all-to-all a step grows by \
             {:.0}% from 8 to 64 ranks and by {:.0}% from 64 to 512, with all measures on by {:.0}% and {:.0}%.",
            if scaling >= 92.0 { "above" } else { "below" },
            if between >= 92.0 { "above" } else { "below" },
            if communication(&last.compressed) <= 23.0 { "below" } else { "above" },
            grows(step(&first.linear), step(&at(64).linear)),
            grows(step(&at(64).linear), step(&middle.linear)),
            grows(step(&first.compressed), step(&at(64).compressed)),
            grows(step(&at(64).compressed), step(&middle.compressed)),
        ),
    }]
}
