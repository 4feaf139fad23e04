//! Figures that follow from printed ones by arithmetic.

use moeworks_plan::cost::collectives::Rows;
use moeworks_plan::{Model, ModelParts, Peer, Rate, Wire, domain_transfers, peer};

use super::{Cell, Kind, Table};

pub(super) fn tables() -> Vec<Table> {
    vec![operations(), gshard(), deepseek_bill(), deepep(), transfers()]
}

fn named(name: &str) -> ModelParts {
    ModelParts::from(&Model::named(name).expect("a bundled model"))
}

fn operations() -> Table {
    let deepseek = named("deepseek-v3");
    let without = ModelParts { num_mtp_layers: 0, ..deepseek.clone() };
    let qwen = named("qwen3-235b");
    let cell = |what, published, ours: f64| Cell::new(what, published, ours / 1e9, Kind::Exact);
    Table {
        title: "Operations of a token",
        intro: "GFLOP of a training step for a token, from the models' sizes (6 for each parameter in products, \
                `3 L s H (d_qk + d_v)` for causal attention). Published: TFLOP/s over tokens/s in the Megatron-Core report \
                (2603.07685), and parameters in billions."
            .to_owned(),
        unit: "",
        cells: vec![
            cell("DeepSeek-V3 with a prediction layer, sequences of 4,096", 260.62, deepseek.training_flops(4096)),
            cell("the same without the prediction layer", 250.45, without.training_flops(4096)),
            cell("Qwen3-235B, sequences of 4,096", 148.33, qwen.training_flops(4096)),
            cell("Qwen3-235B, sequences of 131,072", 739.1, qwen.training_flops(131_072)),
            cell("DeepSeek-V3, parameters in billions", 671.03, deepseek.params()),
            cell("Mixtral 8x22B, parameters in billions", 140.62, named("mixtral-8x22b").params()),
            cell("GShard 600B, parameters in billions", 600.0, named("gshard-600b").params()).within(0.04),
        ],
        remark: "GShard's paper prints rounded sizes.".to_owned(),
    }
}

/// Rows of GShard's table 3: cores, steps a second, tokens of a batch, core-years, days.
const GSHARD: [(&str, usize, f64, f64, f64, f64); 6] = [
    ("600B, 2,048 cores", 2048, 0.72, 4e6, 22.4, 4.0),
    ("200B, 2,048 cores", 2048, 2.15, 4e6, 7.5, 1.4),
    ("150B, 512 cores", 512, 1.05, 1e6, 15.5, 11.0),
    ("50B, 512 cores", 512, 3.28, 1e6, 4.9, 3.5),
    ("37B, 128 cores", 128, 0.67, 1e6, 6.1, 17.3),
    ("12.5B, 128 cores", 128, 2.16, 1e6, 1.9, 5.4),
];

fn gshard() -> Table {
    let mut cells = Vec::new();
    for (what, num_ranks, steps_per_s, batch, years, days) in GSHARD {
        let rate = Rate { num_ranks, tokens_per_s: steps_per_s * batch, price_per_hour: None, watts: None };
        let bill = rate.bill(1e12);
        // Days are printed with one decimal.
        let digits = f64::max(0.02, 0.06 / days);
        cells.push(Cell::new(format!("{what}: days"), days, bill.days, Kind::Exact).within(digits));
        cells.push(Cell::new(format!("{what}: core-years"), years, bill.rank_years(), Kind::Exact));
    }
    Table {
        title: "GShard's days",
        intro: "Days and core-years of a trillion tokens, from the steps a second and the batch that GShard's table 3 \
                (2006.16668) prints."
            .to_owned(),
        unit: "",
        cells,
        remark: "1.4 days are 1.346, printed with one digit.".to_owned(),
    }
}

fn deepseek_bill() -> Table {
    let hours_per_trillion = 180e3;
    let tokens_per_s = 1e12 / (hours_per_trillion * 3600.0) * 2048.0;
    let rate = Rate { num_ranks: 2048, tokens_per_s, price_per_hour: Some(2.0), watts: Some(700.0) };
    let (one, all) = (rate.bill(1e12), rate.bill(14.8e12));
    let cell = |what, published, ours| Cell::new(what, published, ours, Kind::Exact);
    let flops = named("deepseek-v3").training_flops(4096) * tokens_per_s / 2048.0;
    Table {
        title: "DeepSeek-V3's bill",
        intro: "From 180,000 hours of H800 for a trillion tokens on 2,048 of them, at 2 dollars an hour (2412.19437, \
                table 1)."
            .to_owned(),
        unit: "",
        cells: vec![
            cell("days of a trillion tokens", 3.66, one.days),
            cell("thousand hours of 14.8 trillion tokens", 2664.0, all.rank_hours / 1e3),
            cell("million dollars of 14.8 trillion tokens", 5.328, all.price.unwrap_or(0.0) / 1e6),
            cell("tokens a second and GPU", 1543.0, tokens_per_s / 2048.0),
            cell("TFLOP/s of a GPU", 402.0, flops / 1e12),
        ],
        remark:
            "`moeworks plan --tokens` prints these for a layout; the last two rows are derived, not printed, in the \
                 paper."
                .to_owned(),
    }
}

/// GPUs, microseconds and GB/s of DeepEP's table of low-latency kernels: dispatch, then combine.
const DEEPEP: [(usize, [f64; 2], [f64; 2]); 6] = [
    (8, [77.0, 98.0], [114.0, 127.0]),
    (16, [118.0, 63.0], [195.0, 74.0]),
    (32, [155.0, 48.0], [273.0, 53.0]),
    (64, [173.0, 43.0], [314.0, 46.0]),
    (128, [192.0, 39.0], [369.0, 39.0]),
    (256, [194.0, 39.0], [360.0, 40.0]),
];

fn deepep() -> Table {
    let mut cells = Vec::new();
    for (gpus, dispatch, combine) in DEEPEP {
        for (name, wire, [us, gb_per_s]) in
            [("dispatch in FP8", Wire::Byte { block: 128 }, dispatch), ("combine in bf16", Wire::Bf16, combine)]
        {
            let rows = Rows { tokens: 128, top_k: 8, num_experts: 256, row_bytes: wire.row_bytes(7168) };
            let ours = rows.bytes() / (us * 1e-6) / 1e9;
            // One printed figure, 39 GB/s, is 39.8 rounded down.
            cells.push(Cell::new(format!("{gpus} GPUs, {name}"), gb_per_s, ours, Kind::Exact).within(0.0205));
        }
    }
    Table {
        title: "DeepEP's bytes",
        intro: "GB/s of DeepEP's low-latency kernels: the bytes that 128 tokens of width 7,168 send to eight experts each, \
                over the microseconds printed beside them."
            .to_owned(),
        unit: "",
        cells,
        remark: "Published figures are whole numbers; a unit in the last place is up to 2.6%.".to_owned(),
    }
}

fn transfers() -> Table {
    let mut cells = Vec::new();
    for workers in [8_usize, 16, 32] {
        for domain in (0..6).map(|power| 1 << power).take_while(|&size| size <= workers) {
            let (tokens, experts) = domain_transfers(workers, domain);
            let count = |kind: Peer| {
                let pairs = (0..workers * workers).map(|pair| (pair / workers, pair % workers));
                pairs.filter(|&(a, b)| peer(a, b, 0, &[workers], &[domain]) == kind).count()
            };
            for (what, formula, counted) in
                [("all-to-all", tokens, count(Peer::Exchange)), ("all-gather", experts, count(Peer::Gather))]
            {
                let what = format!("{workers} workers in domains of {domain}: {what}");
                cells.push(Cell::new(what, formula as f64, counted as f64, Kind::Exact));
            }
        }
    }
    Table {
        title: "HybridEP's frequencies",
        intro:
            "Messages of an exchange, HybridEP's table 7 (2510.19470): `G (G/S - 1)` of the all-to-all and `G (S - 1)` \
                of the all-gather, beside those counted worker by worker in the plan that is carried out."
                .to_owned(),
        unit: "",
        cells,
        remark: "All 30 printed values follow from the formula.".to_owned(),
    }
}
