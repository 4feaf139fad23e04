//! HybridEP between data centres.

use moeworks_plan::cost::fabric::{ExpertRows, FabricLevel};
use moeworks_plan::{Algorithm, Fabric, Members, Migration, Rates, token_share};

use super::{Cell, Kind, Table};

/// Megabytes of tokens of a GPU.
const DATA: [f64; 6] = [6.0, 12.0, 24.0, 48.0, 96.0, 192.0];

/// Seconds of an iteration in table 5: the cluster, its data centres of 8 GPUs, Tutel, HybridEP.
const TABLE_5: [(&str, usize, [f64; 6], [f64; 6]); 2] = [
    ("M", 2, [2.52, 4.26, 5.82, 7.62, 12.65, 20.35], [2.48, 2.63, 2.74, 2.82, 3.01, 3.78]),
    ("L", 4, [3.74, 7.30, 10.69, 13.54, 18.59, 28.46], [3.49, 3.53, 3.54, 3.85, 4.24, 5.20]),
];

/// The seconds of an iteration but for its exchanges, and the number of exchanges.
#[derive(Clone, Copy)]
struct Constants {
    rest_s: f64,
    exchanges: f64,
}

/// Data centres of eight GPUs on PCIe, joined by a link of 10 Gbit/s each.
fn fabric(sites: usize) -> Fabric {
    let level = |name: &str, num_ranks, bytes_per_s| FabricLevel {
        name: name.to_owned(),
        num_ranks,
        latency_s: 0.0,
        message_s: 0.0,
        bytes_per_s,
    };
    let rates = Rates {
        flops: 1e14,
        fp8_flops: 1e14,
        attention_flops: 1e14,
        peak_flops: 1e14,
        memory_bytes: 80e9,
        memory_bytes_per_s: 2e12,
        pass_bytes_per_s: 2e12,
    };
    let levels = vec![level("site", 8, 16e9), level("sites", 8 * sites, 1.25e9 / 8.0)];
    Fabric { num_ranks: 8 * sites, rates, levels, machine: None }
}

/// Returns the seconds of an all-to-all of `megabytes` of each GPU among all.
fn exchange(sites: usize, megabytes: f64) -> f64 {
    let fabric = fabric(sites);
    let rows = ExpertRows { tokens: 1.0, top_k: 1, num_experts: 32, row_bytes: 1e6 * megabytes, max_units: None };
    fabric.all_to_all(Members { num: fabric.num_ranks, stride: 1 }, Algorithm::Linear, &rows).total()
}

/// Returns the seconds of an exchange of HybridEP, whose experts of `expert_mb` each move between sites if that is
/// less than the tokens: half of a gather, since one serves a dispatch and a combine.
fn hybrid(sites: usize, megabytes: f64, expert_mb: f64) -> f64 {
    let fabric = fabric(sites);
    let migration = Migration {
        workers: fabric.num_ranks,
        data_bytes: 1e6 * megabytes,
        expert_bytes: 1e6 * expert_mb,
        bytes_per_s: fabric.levels[1].bytes_per_s,
        hidden_s: 0.0,
    };
    let all = exchange(sites, megabytes);
    if token_share(&migration) > 0.0 {
        return all;
    }
    let rows = ExpertRows { tokens: 1.0, top_k: 1, num_experts: 32, row_bytes: 1e6 * megabytes, max_units: None };
    let inside = fabric.all_to_all(Members { num: 8, stride: 1 }, Algorithm::Linear, &rows).total();
    let fetched = 1e6 * expert_mb * (fabric.num_ranks - 8) as f64 / fabric.levels[1].bytes_per_s;
    all.min(inside + 0.5 * fetched)
}

fn constants() -> Constants {
    let (_, sites, tutel, _) = TABLE_5[0];
    let exchanges = (tutel[5] - tutel[0]) / (exchange(sites, DATA[5]) - exchange(sites, DATA[0]));
    Constants { rest_s: tutel[0] - exchanges * exchange(sites, DATA[0]), exchanges }
}

fn table_5(of: Constants) -> Table {
    let mut cells = Vec::new();
    for (name, sites, tutel, hybrid_s) in TABLE_5 {
        for (place, data) in DATA.into_iter().enumerate() {
            let ours = of.rest_s + of.exchanges * exchange(sites, data);
            let kind = if name == "M" && (place == 0 || place == 5) { Kind::Fitted } else { Kind::Order };
            cells.push(Cell::new(format!("{name}, {data} MB: Tutel, s"), tutel[place], ours, kind));
            let other = of.rest_s + of.exchanges * hybrid(sites, data, 0.36);
            cells.push(Cell::new(format!("{name}, {data} MB: HybridEP, s"), hybrid_s[place], other, Kind::Order));
        }
    }
    Table {
        title: "HybridEP, table 5",
        intro: format!(
            "Seconds of an iteration on 2 (M) and 4 (L) data centres of 8 GPUs with 10 Gbit/s each (2510.19470), by megabytes \
             of tokens of a GPU, with experts of 0.36 MB. The paper does not say which of its models this is; two constants are \
             fitted on Tutel's row of M: {:.2} s beside the exchanges, and {:.0} exchanges.",
            of.rest_s, of.exchanges,
        ),
        unit: "",
        cells,
        remark: "Measured times do not grow in proportion to the data, so only order and direction count: tokens that stay \
                 take ever longer to send, experts that move do not, and the gain grows with the data, and from 24 MB on with \
                 the number of data centres. Tests hold these."
            .to_owned(),
    }
}

fn table_6(of: Constants) -> Table {
    let rows = [
        ("M, 24 MB of tokens, 8 MB of experts", 2, 24.0, 8.0, 3.41, 2.54),
        ("L, 24 MB, 8 MB", 4, 24.0, 8.0, 6.12, 3.48),
        ("M, 48 MB, 2 MB", 2, 48.0, 2.0, 6.21, 2.81),
        ("L, 48 MB, 2 MB", 4, 48.0, 2.0, 10.89, 3.86),
    ];
    let mut cells = Vec::new();
    for (what, sites, data, expert, partition, migration) in rows {
        let seconds = |expert: f64| of.rest_s + of.exchanges * hybrid(sites, data, expert);
        cells.push(Cell::new(format!("{what}: partition, s"), partition, seconds(expert), Kind::Order));
        let what = format!("{what}: with compressed experts, s");
        cells.push(Cell::new(what, migration, seconds(expert / 50.0), Kind::Order));
    }
    Table {
        title: "HybridEP, table 6",
        intro: "Seconds of an iteration where the better of tokens and experts moves, and with experts compressed 50 times; \
                the constants are those of table 5. Rows of one data centre are left out: no link between sites."
            .to_owned(),
        unit: "",
        cells,
        remark: "Compression is faster in every row, and gains more on more data centres.".to_owned(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let of = constants();
    vec![table_5(of), table_6(of)]
}

#[test]
fn gains_of_hybrid_ep_grow_with_data_and_sites() {
    let of = constants();
    let gain = |sites, data| {
        let seconds = |exchange: f64| of.rest_s + of.exchanges * exchange;
        seconds(exchange(sites, data)) / seconds(hybrid(sites, data, 0.36))
    };
    for sites in [2, 4] {
        assert!(DATA.windows(2).all(|pair| gain(sites, pair[1]) > gain(sites, pair[0])), "{sites}");
    }
    assert!(DATA[2..].iter().all(|&data| gain(4, data) >= gain(2, data)), "from 24 MB on");
}
