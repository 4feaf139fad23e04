//! The model, the cluster and the load of experts that `moeworks plan` is asked about.

use std::fs;
use std::path::Path;

use moeworks_infer::store::METRICS_JSONL;
use moeworks_model::WeightTable;
use moeworks_model::model_cost::Parameters;
use moeworks_plan::{Cluster, Fabric, Model, ModelParts, Pins, Precision, Recompute, ScheduleKind, Skew};
use moeworks_train::config::RunConfig;
use moeworks_train::metrics::read_loads;

use super::{config_to_lay_out, model_shape, read_topology, this_machine, topology_file};
use crate::args::PlanArgs;
use crate::failure::Failure;

/// Tokens of a step of a described model, if no number of sequences is given.
const STEP_TOKENS: usize = 4 << 20;
/// The most tokens of a sequence, and sequences of a step.
const MAX_SIZE: usize = 1 << 24;
/// Steps of a run whose loads are read.
const LOAD_STEPS: usize = 100;

/// The model and the step to plan for.
pub(super) struct Work {
    pub(super) parts: ModelParts,
    pub(super) seq_len: usize,
    /// Sequences of a step, if they are given or configured.
    pub(super) global_batch: Option<usize>,
    pub(super) precision: Precision,
    pub(super) expert_gradient_bytes: usize,
    /// The configuration, unless the model is a described one.
    config: Option<RunConfig>,
}

/// The cluster to plan for.
pub(super) struct Place {
    pub(super) name: String,
    /// The device of a rank, if the cluster says it.
    pub(super) device: Option<String>,
    pub(super) fabric: Fabric,
    pub(super) price_per_hour: Option<f64>,
    pub(super) watts: Option<f64>,
}

impl Work {
    /// Returns the sequences of a step on `num_ranks` ranks.
    pub(super) fn sequences(&self, num_ranks: usize) -> usize {
        self.global_batch.unwrap_or_else(|| STEP_TOKENS.div_ceil(self.seq_len).max(num_ranks))
    }
}

/// Reads the model: a described one, or that of a configuration.
pub(super) fn work(args: &PlanArgs) -> Result<Work, Failure> {
    let described = &args.described;
    for (option, value) in [("--seq-len", described.seq_len), ("--global-batch", described.global_batch)] {
        if value.is_some_and(|value| !(1..=MAX_SIZE).contains(&value)) {
            return Err(Failure::input(format!("{option}: must be from 1 to {MAX_SIZE}")));
        }
    }
    let precision = described.precision.as_deref().map(precision).transpose()?;
    let mut work = match &described.model {
        Some(name) => of_model(&model(name)?),
        None => of_config(config_to_lay_out(args)?)?,
    };
    work.seq_len = described.seq_len.unwrap_or(work.seq_len);
    work.global_batch = described.global_batch.or(work.global_batch);
    work.precision = precision.unwrap_or(work.precision);
    Ok(work)
}

fn of_model(model: &Model) -> Work {
    Work {
        parts: ModelParts::from(model),
        seq_len: model.sequence,
        global_batch: None,
        precision: Precision::Bf16,
        expert_gradient_bytes: 4,
        config: None,
    }
}

fn of_config(config: RunConfig) -> Result<Work, Failure> {
    Ok(Work {
        parts: parts(&config, &config.weight_table()?, model_shape(&config)?.max_tp),
        seq_len: config.train.seq_len,
        global_batch: Some(config.train.batch_size * config.train.grad_accumulation),
        precision: config.train.precision,
        expert_gradient_bytes: config.train.expert_gradients.bytes(),
        config: Some(config),
    })
}

/// Returns the parts of a configured model.
fn parts(config: &RunConfig, table: &WeightTable, max_tp: usize) -> ModelParts {
    let model = &config.model;
    let moe_layers = model.moe_layers().len();
    let layers = model.num_layers;
    let parameters = Parameters::from_table(model, table);
    let sum = |group: &str| {
        let parts = parameters.parts.iter().filter(|part| part.name == group);
        parts.map(|part| part.total as f64).sum::<f64>()
    };
    let each = |group: &str, num: usize| sum(group) / num.max(1) as f64;
    let cached = (model.num_kv_heads * (model.head_dim + model.value_dim())) as f64;
    let latent = model.variant.latent.map(|latent| (latent.kv_rank + latent.rotary_dim) as f64);
    // The narrow vectors of latent attention, and the parameters that widen them.
    let latent_sizes = model.variant.latent.map_or([0.0, 0.0], |latent| {
        let keys = model.num_heads * (latent.plain_dim + model.value_dim());
        let wide = latent.query_rank * model.num_heads * model.head_dim + latent.kv_rank * keys;
        [wide as f64, (latent.query_rank + latent.kv_rank + latent.rotary_dim) as f64]
    });
    let matrix = (model.vocab_size * model.width) as f64;
    ModelParts {
        name: "the configured model".to_owned(),
        width: model.width,
        num_layers: layers,
        num_moe_layers: moe_layers,
        num_experts: if moe_layers > 0 { model.num_experts } else { 0 },
        top_k: if moe_layers > 0 { model.top_k } else { 0 },
        max_units: None,
        expert_width: model.expert_width,
        expert_params: each("experts", moe_layers * model.num_experts),
        shared_params: each("shared experts", moe_layers),
        router_params: each("routers", moe_layers),
        dense_params: each("dense feed-forward", layers - moe_layers.min(layers)),
        attention_params: each("attention", layers),
        up_projection_params: latent_sizes[0],
        latent_elements: latent_sizes[1],
        norm_params: each("norms", layers),
        query_elements: (model.num_heads * model.head_dim) as f64,
        value_elements: (model.num_heads * model.value_dim()) as f64,
        key_value_elements: cached,
        cache_elements: latent.unwrap_or(cached),
        activation_inputs: model.moe().activation.num_inputs(),
        vocabulary: model.vocab_size,
        is_tied: model.tie_embeddings,
        max_tp,
        num_mtp_layers: 0,
        other_params: (sum("embedding") - matrix).max(0.0),
        token_share: 1.0,
        window: None,
        is_causal: true,
    }
}

/// Returns a bundled model, or one of a file.
pub(super) fn model(name: &str) -> Result<Model, Failure> {
    let is_bundled = Model::NAMES.iter().any(|(bundled, _)| *bundled == name);
    if is_bundled || !Path::new(name).exists() {
        return Model::named(name).map_err(|error| Failure::input(format!("--model: {error}")));
    }
    let text = read("--model", name)?;
    Model::parse(&text).map_err(|error| Failure::input(format!("--model {name}: {error}")))
}

fn cluster(name: &str) -> Result<Cluster, Failure> {
    let is_bundled = Cluster::NAMES.iter().any(|(bundled, _)| *bundled == name);
    if is_bundled || !Path::new(name).exists() {
        return Cluster::named(name).map_err(|error| Failure::input(format!("--cluster: {error}")));
    }
    let text = read("--cluster", name)?;
    Cluster::parse(&text).map_err(|error| Failure::input(format!("--cluster {name}: {error}")))
}

fn read(option: &str, file: &str) -> Result<String, Failure> {
    fs::read_to_string(file).map_err(|error| Failure::input(format!("{option} {file}: {error}")))
}

/// Returns the cluster: a described one, a topology, or this machine.
pub(super) fn place(args: &PlanArgs, work: &Work) -> Result<Place, Failure> {
    let (cluster, name) = match (&args.described.cluster, topology_file(args), args.ranks) {
        (Some(name), ..) => (cluster(name)?, name.clone()),
        (None, Some(file), _) => (Cluster::from(&read_topology(&file)?), file.display().to_string()),
        (None, None, Some(ranks)) if work.config.is_some() => {
            let config = work.config.as_ref().ok_or_else(no_cluster)?;
            (Cluster::from(&this_machine(config, ranks)?), "this machine, shared by its ranks".to_owned())
        }
        (None, None, _) => return Err(no_cluster()),
    };
    let num_ranks = args.ranks.unwrap_or_else(|| cluster.num_ranks());
    let (price, watts) = (args.bill.price, args.bill.watts);
    for (option, value) in [("--price", price), ("--watts", watts)] {
        if value.is_some_and(|value| !(0.0..1e9).contains(&value)) {
            return Err(Failure::input(format!("{option}: must be a number from 0 to 1e9")));
        }
    }
    Ok(Place {
        name,
        device: Some(cluster.resized(num_ranks).device.name).filter(|name| name != "rank" && name != "device"),
        fabric: Fabric::new(&cluster, num_ranks, work.precision),
        price_per_hour: price.or(cluster.device.price_per_hour),
        watts: watts.or(cluster.device.watts),
    })
}

fn no_cluster() -> Failure {
    let names = Cluster::NAMES.map(|(name, _)| name).join(", ");
    Failure::input(format!("plan needs --cluster NAME|FILE or --topology FILE; bundled clusters: {names}"))
}

/// Reads a number format.
fn precision(word: &str) -> Result<Precision, Failure> {
    match word {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        "fp8" => Ok(Precision::Fp8),
        _ => Err(Failure::input(format!("--precision {word}: must be f32, bf16 or fp8"))),
    }
}

/// Reads a number of tokens, such as `14.8T`.
pub(super) fn tokens(text: &str) -> Result<f64, Failure> {
    let units = [('K', 1e3), ('M', 1e6), ('B', 1e9), ('G', 1e9), ('T', 1e12)];
    let last = text.chars().last().map(|last| last.to_ascii_uppercase());
    let unit = units.into_iter().find(|(name, _)| Some(*name) == last);
    let (digits, scale) = match unit {
        Some((_, scale)) => (&text[..text.len() - 1], scale),
        None => (text, 1.0),
    };
    let tokens = digits.trim().parse::<f64>().ok().map(|number| number * scale);
    tokens.filter(|tokens| (1.0..=1e18).contains(tokens)).ok_or_else(|| {
        Failure::input(format!("--tokens {text}: must be a number from 1 to 1e18, such as 300B, 14.8T or 1e12"))
    })
}

/// Returns the load of the experts.
pub(super) fn skew(args: &PlanArgs, parts: &ModelParts) -> Result<Skew, Failure> {
    let load = &args.load;
    let check = |option: &str, value: f64, most: f64| {
        let is_right = (0.0..=most).contains(&value);
        if is_right { Ok(value) } else { Err(Failure::input(format!("{option} {value}: must be from 0 to {most}"))) }
    };
    match (load.skew, load.zipf, &load.loads) {
        (Some(variation), ..) => Ok(Skew::Variation(check("--skew", variation, 100.0)?)),
        (_, Some(exponent), _) => Ok(Skew::Zipf(check("--zipf", exponent, 10.0)?)),
        (.., Some(run)) => recorded(run, parts),
        _ => Ok(Skew::Even),
    }
}

fn recorded(run: &Path, parts: &ModelParts) -> Result<Skew, Failure> {
    let file = run.join(METRICS_JSONL);
    let window = read_loads(&file, LOAD_STEPS).map_err(|error| Failure::input(format!("--loads: {error}")))?;
    let layers: Vec<Vec<f64>> =
        window.layers.iter().map(|layer| layer.tokens_per_expert.iter().map(|&count| count as f64).collect()).collect();
    let Some(first) = layers.first() else {
        return Err(Failure::input(format!("--loads {}: has no record of an MoE layer", file.display())));
    };
    if first.len() != parts.num_experts {
        let message = format!(
            "--loads {}: has loads of {} experts; the model has {}",
            file.display(),
            first.len(),
            parts.num_experts
        );
        return Err(Failure::input(message));
    }
    Ok(Skew::Recorded(layers))
}

/// Returns the sizes that are given, which must be possible for the model on these ranks.
pub(super) fn pins(args: &PlanArgs, work: &Work, place: &Place) -> Result<Pins, Failure> {
    let given = &args.pins;
    let (n, parts) = (place.fabric.num_ranks, &work.parts);
    let limits = [
        ("--tp", given.tp, parts.max_tp.min(place.fabric.node_size()), "heads of the model, and ranks of a node"),
        ("--cp", given.cp, work.seq_len, "tokens of a sequence"),
        ("--pp", given.pp, parts.num_layers, "layers of the model"),
        ("--ep", given.ep, parts.num_experts.max(1), "experts of the model"),
        ("--etp", given.etp, parts.max_tp.min(place.fabric.node_size()), "heads of the model, and ranks of a node"),
    ];
    for (option, size, most, of) in limits {
        let Some(size) = size else { continue };
        if size == 0 || !n.is_multiple_of(size) {
            return Err(Failure::input(format!("{option} {size}: must divide the {n} ranks")));
        }
        if size > most {
            return Err(Failure::input(format!("{option} {size}: must be at most {most}, the {of}")));
        }
    }
    let sequences = work.sequences(n);
    if let Some(size) = given.microbatch.filter(|size| !(1..=sequences).contains(size)) {
        let most = format!("from 1 to {sequences}, the sequences of a step");
        return Err(Failure::input(format!("--microbatch {size}: must be {most}")));
    }
    let schedule = given.schedule.as_deref().map(str::parse::<ScheduleKind>).transpose();
    let schedule = schedule.map_err(|error| Failure::input(format!("--schedule: {error}")))?;
    if let Some(kind) = schedule.filter(|&kind| !Pins::can_plan(kind)) {
        let known = ScheduleKind::ALL.into_iter().filter(|&kind| Pins::can_plan(kind));
        let known: Vec<&str> = known.map(ScheduleKind::name).collect();
        let message =
            format!("--schedule {kind}: its bubble has no closed form; those that are planned: {}", known.join(", "));
        return Err(Failure::input(message));
    }
    let recompute = match given.recompute.as_deref() {
        None => None,
        Some("none") => Some(Recompute::None),
        Some("selective") => Some(Recompute::Selective),
        Some("full") => Some(Recompute::Full),
        Some(other) => {
            return Err(Failure::input(format!("--recompute {other}: must be none, selective or full")));
        }
    };
    Ok(Pins {
        tp: given.tp,
        cp: given.cp,
        pp: given.pp,
        ep: given.ep,
        etp: given.etp,
        microbatch: given.microbatch,
        zero: given.zero,
        schedule,
        recompute,
        only_trainable: given.trainable,
    })
}
