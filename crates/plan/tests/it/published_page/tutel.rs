//! Tutel's layer and its models of images.

use moeworks_plan::cost::fabric::{ExpertRows, LinkCost};
use moeworks_plan::cost::pipeline::overlapped_seconds;
use moeworks_plan::{
    Algorithm, Cluster, Fabric, Members, Mesh, Model, ModelParts, Practice, Precision, TrainingJob, mesh_cost,
};

use super::{Cell, Kind, Table, solve};

/// A cluster of A100 with a time for each message.
fn fabric(message_s: f64, num_ranks: usize) -> Fabric {
    let mut cluster = Cluster::named("a100-ndm-v4").expect("a bundled cluster");
    for level in &mut cluster.levels[1..] {
        level.message_s = message_s;
    }
    Fabric::new(&cluster, num_ranks, Precision::Bf16)
}

/// Returns an all-to-all on the path of a layer: Tutel has the linear one and 2DH.
fn all_to_all(fabric: &Fabric, tokens: f64, row_bytes: f64, path: Algorithm) -> LinkCost {
    let n = fabric.num_ranks;
    let rows = ExpertRows { tokens, top_k: 2, num_experts: 2 * n, row_bytes, max_units: None };
    fabric.all_to_all(Members { num: n, stride: 1 }, path, &rows)
}

/// The layer of figure 23: 16,384 tokens of width 2,048, two experts of as much, top 2.
struct Layer {
    fabric: Fabric,
}

impl Layer {
    fn new(message_s: f64, num_ranks: usize) -> Self {
        Self { fabric: fabric(message_s, num_ranks) }
    }

    fn transfer(&self, path: Algorithm, chunks: f64) -> f64 {
        all_to_all(&self.fabric, 16_384.0 / chunks, 4096.0, path).total()
    }

    fn compute(&self) -> f64 {
        4.0 * 2048.0 * 2048.0 * 2.0 * 16_384.0 / self.fabric.rates.flops
    }

    fn whole(&self, path: Algorithm) -> f64 {
        2.0 * self.transfer(path, 1.0) + self.compute()
    }

    fn best_path(&self) -> Algorithm {
        let paths = [Algorithm::Linear, Algorithm::Hierarchical];
        paths.into_iter().min_by(|a, b| self.whole(*a).total_cmp(&self.whole(*b))).unwrap_or_default()
    }

    /// Returns the gain of the best number of chunks on the best path.
    fn pipelining(&self) -> f64 {
        let path = self.best_path();
        let chunked = |chunks: usize| {
            let r = chunks as f64;
            overlapped_seconds(chunks, self.transfer(path, r), self.compute() / r)
        };
        let best = [1, 2, 4, 8].into_iter().map(chunked).fold(f64::INFINITY, f64::min);
        self.whole(path) / best
    }
}

/// Returns the time of a message, from the gain of 2DH on 2,048 GPUs.
fn message_s() -> f64 {
    solve(0.0, 1e-4, 4.25, |message_s| {
        let layer = Layer::new(message_s, 2048);
        layer.whole(Algorithm::Linear) / layer.whole(Algorithm::Hierarchical)
    })
}

fn layer(message_s: f64) -> Table {
    let gain = |n| {
        let layer = Layer::new(message_s, n);
        layer.whole(Algorithm::Linear) / layer.whole(layer.best_path())
    };
    let pipelining = |n| Layer::new(message_s, n).pipelining();
    Table {
        title: "Tutel's layer",
        intro: format!(
            "Gains of a layer of 16,384 tokens on A100 NDm v4 (2206.03382, figure 23): 2DH over the linear all-to-all, and \
             chunks that overlap. One constant is fitted on the row of 2,048 GPUs: {:.0} us for each message between nodes.",
            1e6 * message_s,
        ),
        unit: "",
        cells: vec![
            Cell::new("2DH, 2,048 GPUs", 4.25, gain(2048), Kind::Fitted),
            Cell::new("chunks, 16 GPUs", 1.43, pipelining(16), Kind::Predicted),
            Cell::new("chunks, 2,048 GPUs", 1.04, pipelining(2048), Kind::Predicted),
        ],
        remark: "2DH gains with the number of GPUs and chunks lose, in both. The gains of Tutel's kernels (3.52 on 16 GPUs, \
                 1.04 on 2,048) are those over Fairseq's, which nobody plans."
            .to_owned(),
    }
}

fn overhead(message_s: f64) -> Table {
    let transfer = |n: usize| {
        let layer = Layer::new(message_s, n);
        layer.transfer(layer.best_path(), 1.0)
    };
    let published = [(16, 371.8, 189.1, 1.51), (64, 375.1, 323.8, 1.86), (256, 386.3, 491.3, 1.76)];
    // The paper does not say how many layers and tokens: the first row gives the scale.
    let scale = 189.1 / transfer(16);
    let mut cells = Vec::new();
    for (gpus, compute, exchange, bound) in published {
        let ours = scale * transfer(gpus);
        let kind = if gpus == 16 { Kind::Fitted } else { Kind::Predicted };
        cells.push(Cell::new(format!("{gpus} GPUs: all-to-all, ms"), exchange, ours, kind));
        let ours = (compute + ours) / f64::max(compute, ours);
        let kind = if gpus == 16 { Kind::Fitted } else { Kind::Predicted };
        cells.push(Cell::new(format!("{gpus} GPUs: most that overlap can gain"), bound, ours, kind));
    }
    Table {
        title: "Tutel's overhead, table 2",
        intro: "Milliseconds of all-to-alls, and the gain if they were hidden: the sum of both parts over the longer one. The \
                row of 16 GPUs gives the number of bytes, which is not printed; the rest follows from links."
            .to_owned(),
        unit: "",
        cells,
        remark: "On 256 GPUs the all-to-all was slower than the links of its nodes say.".to_owned(),
    }
}

/// Images a second and GPU, table 7: GPUs, dense, Tutel in training, Tutel in inference.
const IMAGES: [(usize, f64, f64, f64); 5] = [
    (8, 291.0, 274.0, 1053.0),
    (16, 290.0, 253.0, 943.0),
    (32, 288.0, 249.0, 892.0),
    (64, 285.0, 234.0, 835.0),
    (128, 256.0, 226.0, 792.0),
];

/// Returns the seconds that all-to-alls of SwinV2-B-MoE take for an image, forward.
fn image_s(message_s: f64, gpus: usize) -> f64 {
    const BATCH: f64 = 128.0;
    let fabric = fabric(message_s, gpus);
    // Nine layers of width 512 with 144 tokens an image, one of width 1,024 with 36; capacity factor 1.25, f16.
    let layers = [(9.0, 144.0, 512.0), (1.0, 36.0, 1024.0)];
    let seconds = layers.map(|(num, tokens, width)| {
        let rows = BATCH * tokens * 1.25 / 2.0;
        let path = |path| all_to_all(&fabric, rows, 2.0 * width, path).total();
        2.0 * num * path(Algorithm::Linear).min(path(Algorithm::Hierarchical))
    });
    seconds.iter().sum::<f64>() / BATCH
}

fn images(message_s: f64) -> Table {
    let [train, infer] = [1.0 / 274.0 - 2.0 * image_s(message_s, 8), 1.0 / 1053.0 - image_s(message_s, 8)];
    let mut cells = Vec::new();
    for (gpus, _, trained, inferred) in IMAGES {
        let exchange = image_s(message_s, gpus);
        let kind = if gpus == 8 { Kind::Fitted } else { Kind::Predicted };
        let ours = 1.0 / (train + 2.0 * exchange);
        cells.push(Cell::new(format!("{gpus} GPUs: training"), trained, ours, kind));
        let ours = 1.0 / (infer + exchange);
        cells.push(Cell::new(format!("{gpus} GPUs: inference"), inferred, ours, kind));
    }
    Table {
        title: "Tutel end to end, table 7",
        intro: "Images a second and GPU of SwinV2-B with 8 to 128 experts, one a GPU. The row of 8 GPUs gives the seconds of \
                everything but the all-to-all (one constant for training, one for inference); those of the all-to-all follow \
                from bytes, links and the messages of the table before. Assumed: 128 images a GPU."
            .to_owned(),
        unit: "",
        cells,
        remark: "The dense model slows down as well from 64 to 128 GPUs (285 to 256 images a second), which is no matter of \
                 experts."
            .to_owned(),
    }
}

/// The gain of 2DH in a step of the 1.1T model on 512 A100.
fn meta() -> Table {
    let parts = ModelParts::from(&Model::named("meta-1.1t").expect("a bundled model"));
    let message_s = message_s();
    let fabric = fabric(message_s, 512);
    let job =
        TrainingJob { practice: Practice::MEGATRON, ..TrainingJob::new(parts.clone(), 2048, 1024, Precision::Bf16) };
    let cost = mesh_cost(&job, &fabric, &Mesh::new(1, 512, 512));
    let rest = cost.time.total() - cost.time.experts;
    let moves = |path| {
        let rows = ExpertRows {
            tokens: 2048.0,
            top_k: parts.top_k,
            num_experts: 512,
            row_bytes: 2.0 * parts.width as f64,
            max_units: None,
        };
        let one = fabric.all_to_all(Members { num: 512, stride: 1 }, path, &rows).total();
        4.0 * cost.microbatches as f64 * parts.num_moe_layers as f64 * one
    };
    let gain = (rest + moves(Algorithm::Linear)) / (rest + moves(Algorithm::Hierarchical));
    Table {
        title: "The 1.1T model on 512 A100",
        intro: "Microsoft's post on Tutel: 40% more tokens a second than Fairseq on the 1.1T model of Meta's benchmark. Ours \
                is the gain of 2DH over the linear all-to-all alone, with one sequence of 2,048 tokens a GPU and microbatch; \
                batch and kernels are not published."
            .to_owned(),
        unit: "",
        cells: vec![Cell::new("gain", 1.40, gain, Kind::Order)],
        remark: "More tokens in a microbatch make the gain smaller.".to_owned(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let message_s = message_s();
    vec![layer(message_s), overhead(message_s), images(message_s), meta()]
}
