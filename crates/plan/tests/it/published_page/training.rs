//! Training at scale: parallel folding, the Megatron-Core report, DeepSeek-V3.

use moeworks_plan::Algorithm;
use moeworks_plan::cost::fabric::ExpertRows;
use std::sync::OnceLock;

use moeworks_plan::models::{Attention, Experts, LayerGroup};
use moeworks_plan::{
    Cluster, Fabric, Members, Mesh, MeshCost, Model, ModelParts, Practice, Precision, Rate, Recompute, ScheduleKind,
    TrainingJob, mesh_cost,
};

use super::{Cell, Kind, Table, solve};

/// The two constants of a cluster.
#[derive(Clone, Copy)]
pub(super) struct Constants {
    /// The share of the peak that large products reach.
    pub(super) efficiency: f64,
    /// The share of its bandwidth that memory reaches.
    pub(super) memory: f64,
}

impl Constants {
    fn fabric(self, cluster: &str, num_ranks: usize, precision: Precision) -> Fabric {
        let mut cluster = Cluster::named(cluster).expect("a bundled cluster");
        cluster.device.efficiency = self.efficiency;
        cluster.device.memory_efficiency = self.memory;
        Fabric::new(&cluster, num_ranks, precision)
    }

    /// Returns the constants at which two figures of a row are their targets; `of` rises with both.
    fn fit(targets: [f64; 2], of: impl Fn(Self) -> [f64; 2]) -> Self {
        let efficiency = |memory: f64| solve(0.05, 1.5, targets[0], |efficiency| of(Self { efficiency, memory })[0]);
        let memory = solve(0.1, 1.0, targets[1], |memory| of(Self { efficiency: efficiency(memory), memory })[1]);
        Self { efficiency: efficiency(memory), memory }
    }
}

fn named(name: &str) -> ModelParts {
    ModelParts::from(&Model::named(name).expect("a bundled model"))
}

/// A model whose layers are alike: width, layers, heads, heads of keys and values.
fn uniform(sizes: [usize; 4], experts: Experts, vocabulary: usize) -> ModelParts {
    let [width, num, heads, kv_heads] = sizes;
    let group = LayerGroup {
        num,
        width: None,
        token_share: 1.0,
        attention: Some(Attention::Heads { heads, kv_heads, head_dim: 128 }),
        window: None,
        has_cross_attention: false,
        dense_width: 0,
        experts: Some(experts),
        expert_every: 1,
        is_gated: true,
        has_biases: false,
    };
    ModelParts::from(&Model {
        name: String::new(),
        width,
        vocabulary,
        sequence: 4096,
        is_tied: false,
        has_embedding: true,
        is_causal: true,
        mtp_layers: 0,
        other_params: 0,
        groups: vec![group],
    })
}

/// The models of parallel folding.
fn folding_model(name: &str) -> ModelParts {
    match name {
        "Qwen2-57B-A14B" => {
            uniform([3584, 28, 28, 4], Experts { num: 64, top_k: 8, width: 2560, shared_width: 20_480 }, 151_936)
        }
        "Mixtral-8x22B-G8T8" => {
            uniform([6144, 56, 48, 8], Experts { num: 64, top_k: 8, width: 2048, shared_width: 0 }, 32_000)
        }
        "Llama3-8x70B" => {
            uniform([8192, 80, 64, 8], Experts { num: 8, top_k: 2, width: 28_672, shared_width: 0 }, 128_256)
        }
        _ => named("mixtral-8x22b"),
    }
}

/// A layout of parallel folding's tables.
#[derive(Clone, Copy)]
struct Printed {
    model: &'static str,
    gpus: usize,
    method: &'static str,
    /// TP, EP, PP.
    sizes: [usize; 3],
    mfu: f64,
}

const fn printed(model: &'static str, gpus: usize, method: &'static str, sizes: [usize; 3], mfu: f64) -> Printed {
    Printed { model, gpus, method, sizes, mfu }
}

const MIXTRAL: &str = "Mixtral-8x22B";
const QWEN2: &str = "Qwen2-57B-A14B";
const FINE: &str = "Mixtral-8x22B-G8T8";
const LLAMA: &str = "Llama3-8x70B";

/// Parallel folding, table 3, a method after the other.
const TABLE_3: [Printed; 18] = [
    printed(MIXTRAL, 128, "Folding", [2, 8, 8], 49.3),
    printed(FINE, 128, "Folding", [4, 8, 8], 28.8),
    printed(QWEN2, 64, "Folding", [2, 4, 4], 39.0),
    printed(LLAMA, 256, "Folding", [8, 8, 16], 41.6),
    printed(MIXTRAL, 128, "MCore", [2, 4, 8], 46.3),
    printed(FINE, 128, "MCore", [2, 8, 8], 17.1),
    printed(QWEN2, 64, "MCore", [2, 4, 4], 35.3),
    printed(LLAMA, 256, "MCore", [8, 4, 8], 38.8),
    printed(MIXTRAL, 128, "TP+EP+DP", [4, 8, 1], 36.6),
    printed(FINE, 128, "TP+EP+DP", [8, 8, 1], 8.7),
    printed(QWEN2, 64, "TP+EP+DP", [4, 4, 1], 23.1),
    printed(MIXTRAL, 128, "FSDP+EP", [2, 8, 1], 23.4),
    printed(FINE, 128, "FSDP+EP", [4, 8, 1], 9.0),
    printed(QWEN2, 64, "FSDP+EP", [1, 8, 1], 25.4),
    printed(LLAMA, 256, "FSDP+EP", [8, 8, 1], 19.6),
    printed(MIXTRAL, 128, "FSDP", [1, 1, 1], 4.3),
    printed(FINE, 128, "FSDP", [1, 1, 1], 2.2),
    printed(QWEN2, 64, "FSDP", [1, 1, 1], 9.9),
];

impl Printed {
    fn cost(&self, constants: Constants, global_batch: usize) -> MeshCost {
        let [tp, ep, pp] = self.sizes;
        let parts = folding_model(self.model);
        let is_folded = self.method == "Folding";
        let dp = self.gpus / tp / pp;
        // One layer a stage where the microbatches allow it: the papers do not print the stages.
        let can_interleave = pp > 1 && (global_batch / dp).is_multiple_of(pp);
        let virtual_stages = if can_interleave { parts.num_layers / pp } else { 1 };
        let mesh = Mesh {
            pp,
            etp: if is_folded { 1 } else { tp },
            is_folded,
            virtual_stages,
            schedule: if virtual_stages > 1 { ScheduleKind::Interleaved } else { ScheduleKind::OneFOneB },
            zero: if self.method.starts_with("FSDP") { 3 } else { 1 },
            ..Mesh::new(tp, dp, ep)
        };
        let job = TrainingJob {
            practice: Practice::MEGATRON,
            ..TrainingJob::new(parts, 4096, global_batch, Precision::Bf16)
        };
        mesh_cost(&job, &constants.fabric("h100", self.gpus, Precision::Bf16), &mesh)
    }

    fn cell(&self, constants: Constants, kind: Kind) -> Cell {
        let [tp, ep, pp] = self.sizes;
        let what = format!("{}, {}, {} GPUs, TP{tp} EP{ep} PP{pp}", self.method, self.model, self.gpus);
        Cell::new(what, self.mfu, 100.0 * self.cost(constants, 256).mfu, kind)
    }
}

/// The constants of H100 nodes, from two cells of folding's row.
pub(super) fn h100() -> Constants {
    static FITTED: OnceLock<Constants> = OnceLock::new();
    *FITTED.get_or_init(|| {
        Constants::fit([49.3, 28.8], |constants| {
            [0, 1].map(|place: usize| 100.0 * TABLE_3[place].cost(constants, 256).mfu)
        })
    })
}

fn table_3(constants: Constants) -> Table {
    let kind = |place: usize, printed: &Printed| match place {
        0 | 1 => Kind::Fitted,
        _ if printed.method.starts_with("FSDP") => Kind::Order,
        _ => Kind::Predicted,
    };
    let fsdp = TABLE_3[15];
    let cells = TABLE_3.iter().enumerate().map(|(place, printed)| printed.cell(constants, kind(place, printed)));
    Table {
        title: "Parallel folding, table 3",
        intro: format!(
            "MFU in percent on H100 in bf16, sequences of 4,096, 256 a step (2504.14960). Two constants of the cluster are \
             fitted on the first two cells of folding's row: products reach {:.0}% of the peak, and memory {:.0}% of its \
             bandwidth. Stages of a rank are not printed: as many as it has layers. Attention has the speed of FlashAttention-3 (2407.08608). Weights gathered by FSDP are compared in \
             order only: what holds it back ({:.1}% where links would allow {:.0}%) is not in the paper.",
            100.0 * constants.efficiency,
            100.0 * constants.memory,
            fsdp.mfu,
            100.0 * fsdp.cost(constants, 256).mfu,
        ),
        unit: "",
        cells: cells.collect(),
        remark: "Folding > MCore > TP+EP+DP > FSDP in each model but Llama3, whose folded layout has twice the pipeline ranks, \
                 and the fine-grained model is below the coarse one everywhere, as published; tests hold both."
            .to_owned(),
    }
}

fn table_4(constants: Constants) -> Table {
    let rows = [
        ("Folding", MIXTRAL, 128, [2, 8, 8], [52.2, 50.7, 48.9, 44.9]),
        ("MCore", MIXTRAL, 128, [2, 4, 8], [49.4, 48.0, 45.5, 42.3]),
        ("TP+EP+DP", MIXTRAL, 128, [4, 8, 1], [40.4, 39.1, 36.0, 36.2]),
        ("Folding", QWEN2, 64, [2, 4, 4], [39.9, 39.7, 38.1, 36.6]),
        ("MCore", QWEN2, 64, [2, 4, 4], [36.2, 36.0, 34.8, 32.5]),
        ("Folding", FINE, 128, [4, 8, 8], [30.0, 29.3, 26.7, 25.5]),
    ];
    let mut cells = Vec::new();
    for (method, model, least, sizes, figures) in rows {
        for (place, mfu) in figures.into_iter().enumerate() {
            let printed = Printed { model, gpus: least << place, method, sizes, mfu };
            let what = format!("{method}, {model}, {} GPUs", printed.gpus);
            cells.push(Cell::new(what, mfu, 100.0 * printed.cost(constants, 1024).mfu, Kind::Predicted));
        }
    }
    Table {
        title: "Parallel folding, table 4",
        intro: "MFU in percent as the number of GPUs grows, 1,024 sequences a step, with the constants of table 3. The paper \
                takes the best layout at each size and does not print it; ours is that of table 3."
            .to_owned(),
        unit: "",
        cells,
        remark: "The planner's MFU falls with the number of GPUs as measured.".to_owned(),
    }
}

/// A run of the Megatron-Core report.
struct Reported {
    model: &'static str,
    cluster: &'static str,
    precision: Precision,
    mesh: Mesh,
    global_batch: usize,
    /// The multiprocessors that an all-to-all holds, of those of the device.
    exchange_units: f64,
    tflops: f64,
}

/// DeepEP's multiprocessors by default, of an H100's 132; NVIDIA's HybridEP's, of a GB200's 148.
const DEEP_EP: f64 = 20.0 / 132.0;
const HYBRID_EP: f64 = 16.0 / 148.0;

fn reported_cost(run: &Reported, constants: Constants) -> MeshCost {
    let is_deepseek = run.model == "deepseek-v3";
    let parts = ModelParts { max_units: is_deepseek.then_some(4), ..named(run.model) };
    // DeepSeek dispatches in FP8; Megatron-Core in bf16: its dispatch takes as long as its combine.
    let dispatch_bytes = (run.cluster == "h800").then_some(1.0);
    let exchange_units = run.exchange_units;
    let practice = Practice { dispatch_bytes, paths: &Algorithm::ALL, exchange_units, ..Practice::MEGATRON };
    // "Et|(tt|)*30mL": a layer, 30 times two, the further prediction and the heads.
    let is_printed = is_deepseek && run.cluster == "h100";
    let stage_layers =
        is_printed.then(|| (0..32).map(|stage| [1, 2, 0][usize::from(stage > 0) + usize::from(stage > 30)]).collect());
    let job = TrainingJob { practice, stage_layers, ..TrainingJob::new(parts, 4096, run.global_batch, run.precision) };
    mesh_cost(&job, &constants.fabric(run.cluster, run.mesh.num_ranks(), run.precision), &run.mesh)
}

/// Makes a mesh of TP, PP, EP and stages of a rank.
fn mesh(gpus: usize, [tp, pp, ep, virtual_stages]: [usize; 4], schedule: ScheduleKind, recompute: Recompute) -> Mesh {
    Mesh { pp, virtual_stages, schedule, recompute, ..Mesh::new(tp, gpus / tp / pp, ep) }
}

/// The runs of table 11. Layouts are those of the scripts that NVIDIA publishes for these figures
/// (github.com/yanring/Megatron-MoE-ModelZoo, best_practice).
fn reported() -> Vec<Reported> {
    use Precision::{Bf16, Fp8};
    use ScheduleKind::{Interleaved, InterleavedOverlap, OneFOneB};
    let run = |model, cluster, precision, mesh, tflops| Reported {
        model,
        cluster,
        precision,
        mesh,
        global_batch: 8192,
        exchange_units: if cluster == "gb200" { HYBRID_EP } else { DEEP_EP },
        tflops,
    };
    let deepseek = mesh(256, [1, 4, 64, 4], Interleaved, Recompute::None);
    let small = Mesh { microbatch: 3, ..mesh(256, [1, 4, 64, 6], InterleavedOverlap, Recompute::Selective) };
    let plain = mesh(256, [1, 8, 8, 1], OneFOneB, Recompute::None);
    let paired = mesh(256, [2, 8, 32, 4], InterleavedOverlap, Recompute::Selective);
    let large = mesh(1024, [2, 8, 64, 4], InterleavedOverlap, Recompute::Selective);
    vec![
        run("deepseek-v3", "gb200", Fp8, deepseek, 1048.0),
        run("deepseek-v3", "gb200", Bf16, deepseek, 857.0),
        Reported { global_batch: 3072, ..run("qwen3-235b", "gb200", Fp8, small, 919.0) },
        run("qwen3-235b", "gb200", Bf16, plain, 750.0),
        Reported { global_batch: 2048, ..run("qwen3-235b", "h100", Bf16, paired, 320.0) },
        run("deepseek-v3", "h100", Fp8, large, 368.0),
    ]
}

fn tflops(run: &Reported, constants: Constants) -> f64 {
    reported_cost(run, constants).flops_per_rank / 1e12
}

/// The constants of GB200: memory as on H100, and products from the first run.
fn gb200(h100: Constants) -> Constants {
    let first = &reported()[0];
    let of = |efficiency| tflops(first, Constants { efficiency, ..h100 });
    Constants { efficiency: solve(0.05, 1.0, first.tflops, of), ..h100 }
}

fn megatron(h100: Constants) -> Table {
    let (runs, gb200) = (reported(), gb200(h100));
    let cell = |(place, run): (usize, &Reported)| {
        let constants = if run.cluster == "gb200" { gb200 } else { h100 };
        let format = if run.precision == Precision::Fp8 { "FP8" } else { "bf16" };
        let what = format!("{}, {} {}, {format}", run.model, run.mesh.num_ranks(), run.cluster);
        let kind = if place == 0 { Kind::Fitted } else { Kind::Predicted };
        Cell::new(what, run.tflops, tflops(run, constants), kind)
    };
    let slow = reported_cost(&runs[5], h100).time;
    let share = |part: f64| 100.0 * part / slow.total();
    Table {
        title: "The Megatron-Core report, table 11",
        intro: format!(
            "TFLOP/s of a GPU (2603.07685). One constant of GB200 is fitted on its first cell (products reach {:.0}% of the peak); \
             memory reaches {:.0}% of its bandwidth, as on H100, whose constants are those of parallel folding. Layouts, batches and \
             recomputation are those of the scripts that NVIDIA publishes for these figures (Megatron-MoE-ModelZoo, best_practice): \
             DeepSeek-V3 on H100 with TP2 PP8 EP64, four stages a rank as `Et|(tt|)*30mL` says, and pairs that hide the all-to-all \
             by DeepEP, which holds 20 of 132 multiprocessors.",
            100.0 * gb200.efficiency,
            100.0 * gb200.memory,
        ),
        unit: "",
        cells: runs.iter().enumerate().map(cell).collect(),
        remark: format!(
            "In FP8 on H100 operations alone would take a third of the step. Products with their operands take {:.0}% (quantising \
             reads and writes each operand, and gradients of weights are added in f32), passes over memory {:.0}%, attention at \
             the speed of FlashAttention-3 {:.0}%, and what the hidden all-to-all takes from products {:.0}%. The last pipeline \
             rank, with the further prediction and two output projections in bf16, is the slowest one.",
            share(slow.products),
            share(slow.elementwise),
            share(slow.attention),
            share(slow.experts),
        ),
    }
}

fn deepseek(h100: Constants) -> Table {
    let mesh = mesh(2048, [1, 16, 64, 1], ScheduleKind::DualPipe, Recompute::Selective);
    let run = Reported {
        model: "deepseek-v3",
        cluster: "h800",
        precision: Precision::Fp8,
        mesh,
        global_batch: 15_360,
        exchange_units: DEEP_EP,
        tflops: 402.0,
    };
    let cost = reported_cost(&run, h100);
    let tokens_per_s = cost.tokens_per_s;
    let rate = Rate { num_ranks: 2048, tokens_per_s, price_per_hour: Some(2.0), watts: Some(700.0) };
    let bill = rate.bill(1e12);
    let cell = |what, published, ours| Cell::new(what, published, ours, Kind::Predicted);
    Table {
        title: "DeepSeek-V3 on 2,048 H800",
        intro: "The layout of its report (PP16 by DualPipe, EP64 over eight nodes with each token on at most four, ZeRO 1, no \
                TP, norms and up-projections computed again, dispatch in FP8, 20 of 132 multiprocessors for the all-to-all), \
                15,360 sequences a step, with the constants of H100 nodes: nothing was fitted to H800."
            .to_owned(),
        unit: "",
        cells: vec![
            cell("days of a trillion tokens", 3.66, bill.days),
            cell("tokens a second and GPU", 1543.0, tokens_per_s / 2048.0),
            cell("TFLOP/s of a GPU", 402.0, cost.flops_per_rank / 1e12),
        ],
        remark: format!(
            "The days are those of a whole run, pauses included. The all-to-all costs {:.0}% of the step, all of it by the \
             multiprocessors that it holds: none of it is left uncovered, as the paper says of DualPipe.",
            100.0 * cost.time.experts / cost.time.total(),
        ),
    }
}

/// The all-to-all of 64 H100, by links and bytes alone.
fn all_to_all() -> Table {
    let fabric = Fabric::new(&Cluster::named("h100").expect("a bundled cluster"), 64, Precision::Bf16);
    let rows = ExpertRows { tokens: 4096.0, top_k: 8, num_experts: 256, row_bytes: 2.0 * 7168.0, max_units: Some(4) };
    let us = |path| 1e6 * fabric.all_to_all(Members { num: 64, stride: 1 }, path, &rows).total();
    let (linear, two_hop) = (us(Algorithm::Linear), us(Algorithm::TwoHop));
    let cell = |what, published, ours| Cell::new(what, published, ours, Kind::Predicted);
    Table {
        title: "The all-to-all of 64 H100",
        intro: "Microseconds, Megatron-Core report: straight to each rank, and once to each node (NVIDIA's HybridEP library). \
                Assumed: 4,096 tokens of DeepSeek-V3 in bf16, each on at most four nodes. Nothing is fitted."
            .to_owned(),
        unit: "",
        cells: vec![
            cell("dispatch, straight", 9164.0, linear),
            cell("combine, straight", 8727.0, linear),
            cell("dispatch, once to each node", 4626.0, two_hop),
            cell("combine, once to each node", 4398.0, two_hop),
            cell("dispatch, ratio of the two", 9164.0 / 4626.0, linear / two_hop),
        ],
        remark: "Half of the bytes cross between nodes if each token goes to a node once.".to_owned(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let h100 = h100();
    vec![table_3(h100), table_4(h100), megatron(h100), deepseek(h100), all_to_all()]
}

#[test]
fn bundled_clusters_have_the_fitted_constants() {
    let h100 = h100();
    for (name, constants) in [("h100", h100), ("h800", h100), ("gb200", gb200(h100))] {
        let device = Cluster::named(name).expect("a bundled cluster").device;
        let ours = [device.efficiency, device.memory_efficiency];
        let fitted = [constants.efficiency, constants.memory];
        let is_near = ours.iter().zip(fitted).all(|(ours, fitted)| (ours - fitted).abs() < 0.006);
        assert!(is_near, "{name}: {ours:?} in the file, {fitted:?} fitted");
    }
}

/// The order of methods in each model of table 3, and of the two kinds of Mixtral in each method.
#[test]
fn methods_and_models_come_in_the_published_order() {
    let constants = h100();
    let mfu = |method: &str, model: &str| {
        let found = TABLE_3.iter().find(|printed| printed.method == method && printed.model == model);
        found.map(|printed| printed.cost(constants, 256).mfu)
    };
    for model in [MIXTRAL, FINE, QWEN2] {
        let methods = ["Folding", "MCore", "TP+EP+DP", "FSDP"].map(|method| mfu(method, model));
        let known: Vec<f64> = methods.into_iter().flatten().collect();
        let known = if model == FINE { &known[..3] } else { &known[..] };
        assert!(known.windows(2).all(|pair| pair[0] > pair[1]), "{model}: {known:?}");
    }
    for method in ["Folding", "MCore", "TP+EP+DP", "FSDP+EP", "FSDP"] {
        assert!(mfu(method, FINE) < mfu(method, MIXTRAL), "{method}");
    }
}
