//! The division of a model's weights among the ranks of a layout, as a table or as JSON.

use moeworks_infer::open::Source;
use moeworks_model::{Cut, HeldPart, ModelConfig, Sharding, WeightSpec, WeightTable};
use moeworks_plan::Layout;
use moeworks_train::config::{ConfigLayers, PlacementChoice, RunConfig};
use moeworks_train::placements;
use serde_json::{Value, json};

use crate::args::ShardingArgs;
use crate::failure::Failure;
use crate::progress::{bytes, thousands};
use crate::tables;

/// The bytes of an f32 weight.
const WEIGHT_BYTES: u64 = 4;
/// The largest number of different parts shown for a tensor.
const MAX_PARTS: usize = 4;

/// Tensors that share a row of the table.
struct Row<'a> {
    cells: Vec<String>,
    specs: Vec<&'a WeightSpec>,
}

impl Row<'_> {
    /// Returns the cells with the number of layers of the row, or with `is_named` with the indices of these layers.
    fn with_layers(&self, is_named: bool) -> Vec<String> {
        let numbers: Vec<usize> = self.specs.iter().filter_map(|spec| spec.place.layer()).collect();
        let layers = if is_named && !numbers.is_empty() {
            let numbers: Vec<String> = numbers.iter().map(|number| format!("#{number}")).collect();
            numbers.join(" ")
        } else {
            self.specs.len().to_string()
        };
        let mut cells = self.cells.clone();
        cells.insert(1, layers);
        cells
    }
}

/// A model's table of weights and their parts on ranks.
pub(crate) struct View {
    table: WeightTable,
    sharding: Sharding,
}

impl View {
    /// Creates the view of the model `config` in `source` for the options `args`. Settings that are not given come
    /// from the run, if `source` is in one.
    pub(crate) fn new(source: &Source, config: &ModelConfig, args: &ShardingArgs) -> Result<Self, Failure> {
        let mut run = run_config(source)?.unwrap_or_default();
        run.model = config.clone();
        let parallel = &mut run.parallel;
        if let Some(placement) = &args.placement {
            parallel.placement = placement.clone().into();
        } else if args.ep.or(args.tp).is_some() && matches!(parallel.placement, PlacementChoice::File(_)) {
            // The run's placement file is for its own number of ranks.
            parallel.placement = PlacementChoice::Sharded;
        }
        parallel.dp = args.dp.unwrap_or(parallel.dp);
        parallel.ep = args.ep.unwrap_or(parallel.ep);
        parallel.tp = args.tp.unwrap_or(parallel.tp);
        parallel.sharding.extend(args.shard.iter().cloned());
        run.train.freeze.extend(args.freeze.iter().cloned());
        run.train.seq_len = run.train.seq_len.min(config.max_seq_len);
        run.validate()?;
        let table = run.weight_table()?;
        // Each stage group of a pipeline holds its layers as this one does.
        let layout = run.parallel.layout().of_stage_group();
        if config.variant.encoder.is_some() && layout.num_ranks() > 1 {
            return Err(Failure::input("a model with an encoder is trained on one rank alone: --dp 1 --ep 1 --tp 1"));
        }
        let sharding = Sharding::new(config, &table, layout, placements(&run)?)
            .map_err(moeworks_train::config::ConfigError::from)?;
        Ok(Self { table, sharding })
    }

    /// Returns the bytes of the f32 weights on each rank.
    fn rank_bytes(&self) -> Vec<u64> {
        let of_rank = |rank| {
            let elements = self.table.specs().iter().map(|spec| self.sharding.num_elements(spec, rank) as u64);
            elements.sum::<u64>() * WEIGHT_BYTES
        };
        (0..self.sharding.layout().num_ranks()).map(of_rank).collect()
    }

    /// Prints a row for each tensor. Tensors whose names differ only in the layer's index share a row. If they differ
    /// in more than the name, as with a placement for each layer, a row lists its layers.
    pub(crate) fn print(&self) {
        let layout = self.sharding.layout();
        let Layout { dp, ep, tp, .. } = layout;
        println!("weights on {} ranks: dp {dp} x ep {ep} x tp {tp}", layout.num_ranks());
        println!();
        let mut rows: Vec<Row<'_>> = Vec::new();
        for spec in self.table.specs() {
            let cells = self.row(spec);
            match rows.iter_mut().find(|row| row.cells == cells) {
                Some(row) => row.specs.push(spec),
                None => rows.push(Row { cells, specs: vec![spec] }),
            }
        }
        let num_rows = |name: &str| rows.iter().filter(|row| row.cells[0] == name).count();
        let rows: Vec<Vec<String>> = rows.iter().map(|row| row.with_layers(num_rows(&row.cells[0]) > 1)).collect();
        tables::print(&["weight", "layers", "shape", "cut", "parts", "f32 a rank", "trained"], &rows);
        println!();
        self.print_totals();
    }

    fn print_totals(&self) {
        let bytes_of_ranks = self.rank_bytes();
        let (least, most) = (bytes_of_ranks.iter().min(), bytes_of_ranks.iter().max());
        let (least, most) = (least.copied().unwrap_or_default(), most.copied().unwrap_or_default());
        let of_rank = if least == most { bytes(most) } else { format!("{} to {}", bytes(least), bytes(most)) };
        println!("f32 weights a rank    {of_rank}");
        let total: u64 = self.table.specs().iter().map(|spec| spec.num_elements() as u64).sum();
        println!(
            "parameters            {} in all, {} trained",
            thousands(total),
            thousands(self.table.num_trainable())
        );
    }

    fn row(&self, spec: &WeightSpec) -> Vec<String> {
        let parts = self.sharding.parts(spec);
        let largest = (0..self.sharding.layout().num_ranks()).map(|rank| self.sharding.num_elements(spec, rank)).max();
        vec![
            spec.general_name(),
            format!("{:?}", spec.shape),
            spec.shard.to_string(),
            describe(&parts),
            bytes(largest.unwrap_or_default() as u64 * WEIGHT_BYTES),
            if spec.is_trainable { "yes" } else { "frozen" }.to_owned(),
        ]
    }

    /// Returns the table as JSON, with the ranks that hold each part.
    pub(crate) fn json(&self) -> Value {
        let Layout { dp, ep, tp, .. } = *self.sharding.layout();
        let weights: Vec<Value> = self.table.specs().iter().map(|spec| self.weight_json(spec)).collect();
        json!({
            "layout": { "dp": dp, "ep": ep, "tp": tp },
            "weights": weights,
            "rank_bytes": self.rank_bytes(),
            "trainable_parameters": self.table.num_trainable(),
        })
    }

    fn weight_json(&self, spec: &WeightSpec) -> Value {
        let part = |part: HeldPart| {
            let shape = self.sharding.part_shape(spec, part.ranks[0]);
            let elements = shape.iter().product::<usize>() as u64;
            let ranges =
                part.cut.map(|cut| cut.pieces.iter().map(|piece| [piece.start, piece.end]).collect::<Vec<_>>());
            json!({ "ranks": part.ranks, "ranges": ranges, "shape": shape, "bytes": elements * WEIGHT_BYTES })
        };
        let parts: Vec<Value> = self.sharding.parts(spec).into_iter().map(part).collect();
        json!({
            "name": spec.name,
            "shape": spec.shape,
            "cut": spec.shard.to_string(),
            "dim": spec.shard.dim(),
            "trainable": spec.is_trainable,
            "decayed": spec.is_decayed,
            "parts": parts,
        })
    }
}

/// Returns the settings of the run that contains `source`, if there is one.
fn run_config(source: &Source) -> Result<Option<RunConfig>, Failure> {
    let file = source.run().and_then(|run| run.run_dir.as_ref()).map(|dir| dir.join("config.toml"));
    let Some(file) = file.filter(|file| file.is_file()) else { return Ok(None) };
    Ok(Some(ConfigLayers { file: Some(file), ..ConfigLayers::default() }.resolve()?))
}

/// Returns the table of the weights of the model `config`. Weights that the model's run does not train are frozen, if
/// its settings can be read.
pub(crate) fn weight_table(source: &Source, config: &ModelConfig) -> WeightTable {
    let run = run_config(source).ok().flatten();
    let of_run = run.and_then(|run| RunConfig { model: config.clone(), ..run }.weight_table().ok());
    of_run.unwrap_or_else(|| WeightTable::new(config))
}

/// Formats the ranges of the parts, as in `0..4 | 4..8`.
fn describe(parts: &[HeldPart]) -> String {
    let ranges = |cut: &Option<Cut>| match cut {
        None => "whole".to_owned(),
        Some(cut) => {
            cut.pieces.iter().map(|piece| format!("{}..{}", piece.start, piece.end)).collect::<Vec<_>>().join("+")
        }
    };
    let mut shown: Vec<String> = parts.iter().take(MAX_PARTS).map(|part| ranges(&part.cut)).collect();
    if parts.len() > MAX_PARTS {
        shown.push(format!("... {} in all", parts.len()));
    }
    shown.join(" | ")
}
