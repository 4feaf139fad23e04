//! The full effective configuration as TOML with a comment for each setting: it can be saved and used as it is.

use moeworks_moe::RouterKind;
use toml::Table;

use super::RunConfig;

/// Letters of a line of a comment that is put together.
const COMMENT_WIDTH: usize = 110;

/// The comments of settings, by their dotted names, besides those of routing schemes.
const COMMENTS: &[(&str, &str)] = &[
    ("model", "The model's shape and rules."),
    ("model.vocab_size", "Tokens that the model knows; 0: as many as the tokenizer has."),
    ("model.width", "Width of the residual stream (D)."),
    ("model.num_layers", "Layers (L)."),
    ("model.num_heads", "Query heads (H)."),
    ("model.num_kv_heads", "Key and value heads; divides num_heads."),
    ("model.head_dim", "Width of a head, even."),
    ("model.qk_norm", "Norm of queries and keys: none, head (Qwen3) or whole (OLMoE)."),
    ("model.num_experts", "Experts of an MoE layer (E); 0: a dense model."),
    ("model.top_k", "Experts that a token goes to (K), 1 to num_experts."),
    ("model.expert_width", "Hidden width of an expert (F)."),
    ("model.shared_width", "Hidden width of all shared experts together; 0: none."),
    ("model.moe_every", "Every how many layers the feed-forward is an MoE."),
    ("model.dense_width", "Hidden width of the dense feed-forward of the other layers."),
    ("model.activation", "Of experts and dense feed-forwards: swiglu, gelu or relu."),
    (
        "model.softmax_before_topk",
        "Softmax over all experts before the choice (true), or over the chosen ones (false).",
    ),
    ("model.normalize_weights", "Whether a token's router weights are divided by their sum."),
    (
        "model.capacity_factor",
        "Above 0: an expert takes ceil(factor K T / E) tokens, later ones are dropped; 0: none is ever dropped;\n\
         below 0: none is dropped up to |factor| times the even share.",
    ),
    (
        "model.jitter",
        "In training, router inputs are multiplied by a number in [1 - jitter, 1 + jitter]: a number or a ramp.",
    ),
    ("model.tie_embeddings", "Whether the output projection is the embedding."),
    ("model.rope_theta", "Base of the rotary embedding."),
    ("model.norm_eps", "Epsilon of the RMS norms."),
    ("model.max_seq_len", "The longest sequence that the model is made for."),
    ("model.init_std", "Standard deviation of the initial weights."),
    ("model.router", "How tokens and experts find each other."),
    ("model.router.scores", "What makes scores of logits: softmax or sigmoid."),
    (
        "model.router.expert_bias",
        "Whether each expert has a bias that counts in the choice only, moved by load and not by gradient.",
    ),
    (
        "model.router.bias_update_rate",
        "What the bias of an expert below (above) the mean load rises (falls) by after a step: a number or a ramp, such as\n\
         \"step 0.001 to 0 over 0.965\" (DeepSeek-V3).",
    ),
    ("model.router.num_groups", "Groups of consecutive experts; divides num_experts."),
    ("model.router.top_groups", "Groups that the experts of a token may be in."),
    ("model.router.group_score", "What groups are chosen by: max, or top_two: the sum of the two highest scores."),
    ("model.router.routed_scale", "Multiplies the weights of a token's experts."),
    ("model.router.noise_std", "Deviation of normal noise on the logits in training, a number or a ramp; 0: none."),
    (
        "model.router.input_dropout",
        "Share of elements of the router's input that training leaves out, a number or a ramp.",
    ),
    ("model.router.temperature", "Logits are divided by this: a number or a ramp, whose end holds outside training."),
    ("model.router.random_share", "Share of the run over which choices are random."),
    ("model.router.random_fade", "Share of the run, after that, over which random choices become rare."),
    ("model.router.zero_experts", "Experts that give nothing."),
    ("model.router.copy_experts", "Experts that give the token itself."),
    ("model.router.constant_experts", "Experts that give a mixture of the token and a learned vector."),
    ("model.router.null_experts", "Experts that give nothing and do not count in a token's weights."),
    (
        "model.router.gate_residual",
        "Whether the logits of the MoE layer before, times a learned matrix, are added (MoE++).",
    ),
    ("model.router.free_ratio", "What an expert without computation counts in the balance loss (tau of MoE++)."),
    (
        "model.router.modality_boundaries",
        "Token ids at which modalities begin after the first, such as \"1000, 2000\".",
    ),
    ("model.router.modality_experts", "Experts reserved for each modality, such as \"4, 2\"; the others are shared."),
    (
        "model.router.sparsemixer_jitter",
        "Above 0: sparsemixer (PhiMoE): in training two experts are drawn from those within twice this of the highest score.",
    ),
    (
        "model.router.overflow",
        "Where an expert has no room: drop later tokens, priority (drop those of lower score), reroute to the next expert.",
    ),
    ("model.router.local_group", "Tokens that share a capacity; 0: all of a microbatch."),
    ("data", "Where text comes from and how it becomes tokens."),
    (
        "data.paths",
        "Text files, folders, globs, .jsonl, .json, .csv, .parquet, also .gz and .zst; - is standard input; []: the text of this\n\
         checkout. A weight behind each, such as \"books=0.3\", says in what proportion training draws from them.",
    ),
    ("data.format", "auto: by names and first bytes; or text, json (rows), csv or parquet for all files."),
    ("data.tokenizer", "bytes, bpe (trained on the data) or the path of a tokenizer.json."),
    ("data.bpe_vocab_size", "Tokens of a tokenizer trained on the data."),
    ("data.validation_fraction", "Share of the tokens held out for validation, 0 to 0.5."),
    ("data.validation_seed", "Which tokens those are; training's own seed has no part in it."),
    ("data.hash_embeddings", "Run or model whose embeddings model.router.hash = \"clustered\" clusters."),
    (
        "data.text_field",
        "Field of JSON rows and column of CSV and Parquet files that holds the text; a.b is field b within a.",
    ),
    ("data.cache_dir", "Folder of tokenised data; \"\": moeworks in the user's cache folder."),
    ("train", "How the model is trained."),
    ("train.steps", "Optimizer steps in total."),
    ("train.seq_len", "Tokens of a sequence (S); with an encoder those of a text before some are left out."),
    ("train.batch_size", "Sequences of a microbatch."),
    ("train.grad_accumulation", "Microbatches of a step."),
    ("train.lr", "Highest learning rate."),
    ("train.min_lr_ratio", "Last learning rate as a share of the highest."),
    ("train.schedule", "After the warm-up: cosine, wsd (constant, then linear decay) or constant."),
    ("train.warmup_steps", "Steps of the linear warm-up."),
    ("train.decay_fraction", "Share of the steps that wsd decays over."),
    ("train.weight_decay", "Decoupled weight decay of matrices."),
    ("train.beta1", "AdamW's memory of the gradient."),
    ("train.beta2", "AdamW's memory of the gradient's square."),
    ("train.eps", "AdamW's epsilon."),
    ("train.clip_norm", "Largest global norm of the gradient; 0: no clipping."),
    (
        "train.precision",
        "f32; bf16: matrix products in bf16 with f32 masters; or fp8: the same, experts in eight-bit floats.",
    ),
    (
        "train.expert_gradients",
        "f32; or bf16, on one rank: gradients of experts in half the memory, rounded once a microbatch.",
    ),
    ("train.checkpoint_layers", "Whether layers keep only their input for backward and compute the rest again."),
    (
        "train.balance",
        "Balance loss over experts: none, layer (each by itself), pooled (over all layers) or gshard (by first choices).",
    ),
    (
        "train.balance_coef",
        "Weight of the balance loss: a number, or a ramp such as \"linear 0.01 to 0.001 over 0.5\".",
    ),
    (
        "train.device_coef",
        "Weight of the balance loss over the router's groups of experts, as balance_coef; none without groups.",
    ),
    ("train.communication_coef", "Weight of the balance loss over the tokens that each group gets, as device_coef."),
    ("train.sequence_coef", "Weight of the sequence-wise balance loss, as balance_coef."),
    ("train.importance_coef", "Weight of the squared variation of the experts' summed weights, as balance_coef."),
    ("train.load_coef", "Weight of the squared variation of the experts' load under noise, as balance_coef."),
    ("train.local_entropy_coef", "Weight of the mean entropy of a token's choice, as balance_coef."),
    ("train.global_entropy_coef", "Weight of what the entropy of the mean choice lacks, as balance_coef."),
    (
        "train.min_entropy",
        "The entropy that the mean choice is to have, in nats; 0: the logarithm of the number of experts.",
    ),
    ("train.z_coef", "Weight of the router's z-loss."),
    ("train.eval_every", "Steps between evaluations; 0: only at the end."),
    ("train.eval_batches", "Microbatches of an evaluation; 0: all held-out data."),
    ("train.sample_every", "Steps between samples of generated text; 0: none."),
    ("train.sample_tokens", "Tokens of a sample."),
    ("train.sample_prompt", "What a sample goes on from."),
    ("train.checkpoint_every", "Steps between checkpoints; 0: only at the end."),
    ("train.keep_last", "How many of the newest checkpoints are kept, besides the best."),
    ("train.max_bad_steps", "Steps in a row with a non-finite loss or gradient that end the run."),
    ("train.seed", "Of initial weights, order of data, routing noise and samples."),
    ("train.threads", "Threads that compute; 0: one on each core."),
    ("train.device", "What computes: cpu, cuda (an NVIDIA GPU), cuda:N, or auto: a GPU if there is one."),
    (
        "train.offload_optimizer",
        "With a GPU: moments and f32 weights stay in the host's memory, and weights are updated there.",
    ),
    (
        "train.freeze",
        "Weights that training leaves as they are, by patterns of names such as \"model.embed_tokens.*\" or \"*.mlp.experts.*\": no gradient,\n\
         no optimizer state, no weight decay. `moeworks inspect MODEL --sharding` lists names.",
    ),
    ("parallel", "How the model lies on ranks. Each trains on its share of the sequences of a microbatch."),
    ("parallel.dp", "Groups of ranks, each with all experts."),
    ("parallel.ep", "Ranks of a group, which hold the experts between them; each of them is tp ranks."),
    ("parallel.tp", "Ranks that hold what is no expert between them and pass the same sequences."),
    ("parallel.apart", "Whether neighbouring ranks are in different groups."),
    (
        "parallel.placement",
        "Which ranks of a group hold which experts: sharded (each on one), everywhere, or the path of a file with a line\n\
         for each expert, under \"placement experts=E ranks=R\", for all layers or under \"layer N:\" for each.",
    ),
    (
        "parallel.all_to_all",
        "By which hops tokens go: linear, hierarchical (in the node first), two_hop (once to each node), or auto, by cost.",
    ),
    ("parallel.wire", "In which form tokens go: f32, bf16, f16 or int8 (dispatch alone; the rest as bf16)."),
    (
        "parallel.moving",
        "tokens (to their experts), weights (of all experts to the tokens), or auto: for each layer and step the experts whose\n\
         weights cost less to move than their tokens.",
    ),
    (
        "parallel.chunks",
        "Chunks that a layer's tokens go in, one under way while another is computed; 0: as measured, which makes the rounding\n\
         of a run depend on the machine.",
    ),
    (
        "parallel.topology",
        "What moeworks bench comm measured, for choices by cost; without the file they go by a described cluster.",
    ),
    ("parallel.pin", "Whether ranks and their threads keep to cores of their own, near their memory."),
    (
        "parallel.zero",
        "What ranks that hold the same weights share out (the stages of ZeRO): 0 nothing, 1 their optimizer state, 2 gradients, too:\n\
         less memory for the same traffic; 3 the weights themselves, each layer put together for forward and again for backward.",
    ),
    (
        "parallel.ordered_sums",
        "Whether sums over ranks are taken in the order of ranks, the bits of ranks that are threads, also where the MPI library takes\n\
         them sooner; all ranks have the same bits either way.",
    ),
    ("parallel.timeout_s", "Seconds after which a rank that others wait for in a step is taken for hung."),
    (
        "parallel.sharding",
        "Weights whose cut over the ranks of tp differs from the usual one: \"PATTERN=replicated\" or \"PATTERN=tensor\" (cut as usual), later\n\
         rules win, such as \"model.layers.0.self_attn.*=replicated\". The embedding, the output projection and the attention and dense\n\
         feed-forward of each layer are cut or replicated as a whole. `moeworks inspect MODEL --sharding --tp N` shows the cuts.",
    ),
    ("run", "Where the results go."),
    ("run.out", "Folder of all runs."),
    ("run.name", "Folder of this run within it; \"\": made from the date and the time."),
];

/// The comments of all settings, by their dotted names. A test holds that none is missing and none is left over.
pub(super) fn comments() -> Vec<(String, String)> {
    let all = COMMENTS.iter().map(|(name, comment)| ((*name).to_owned(), (*comment).to_owned()));
    let schemes = RouterKind::ALL.iter().flat_map(|kind| kind.doc().settings);
    let of_schemes = schemes.map(|setting| (format!("model.router.{}", setting.name), setting.comment.to_owned()));
    all.chain([("model.router.kind".to_owned(), kind_comment())]).chain(of_schemes).collect()
}

/// The comment of the setting that names the scheme, with all names in lines of a width that can be read.
fn kind_comment() -> String {
    let names: Vec<&str> = RouterKind::ALL.iter().map(|kind| kind.name()).collect();
    let mut comment = "The scheme:".to_owned();
    let mut width = comment.len();
    for (i, name) in names.iter().enumerate() {
        let word = match names.len() - i {
            1 => format!("or {name}."),
            2 => (*name).to_owned(),
            _ => format!("{name},"),
        };
        let is_full = width + word.len() > COMMENT_WIDTH;
        width = if is_full { word.len() } else { width + 1 + word.len() };
        comment.push(if is_full { '\n' } else { ' ' });
        comment.push_str(&word);
    }
    comment + "\nChoosing one also sets what it was published with, unless that is given too."
}

/// `config` as TOML, each setting under its comment. Reading it back gives the same value.
///
/// # Panics
/// If a seed is above `i64::MAX`, which no TOML can say and [`RunConfig::validate`] refuses.
#[must_use]
pub fn print_config(config: &RunConfig) -> String {
    let comments = comments();
    let mut text = String::new();
    let mut section = String::new();
    for line in plain(config).lines() {
        let name = match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(header) => {
                section = header.into();
                section.clone()
            }
            None => format!("{section}.{}", line.split(" = ").next().unwrap_or_default()),
        };
        if let Some((_, comment)) = comments.iter().find(|(known, _)| *known == name) {
            for comment_line in comment.lines() {
                text.push_str("# ");
                text.push_str(comment_line.trim_start());
                text.push('\n');
            }
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// The configuration as a table. Through text, because text has the shortest form of an f32: as f64 a value of 0.02 would
/// show as 0.019999999552965164.
pub(super) fn to_table(config: &RunConfig) -> Table {
    plain(config).parse().expect("what is written as TOML is TOML")
}

/// The dotted names of all sections and settings of `table`.
pub(super) fn names(table: &Table) -> Vec<String> {
    let mut names = Vec::new();
    for (name, value) in table {
        names.push(name.clone());
        names.extend(value.as_table().into_iter().flat_map(self::names).map(|inner| format!("{name}.{inner}")));
    }
    names
}

/// One line for each setting: strings are written on one line with escapes, whatever they hold.
fn plain(config: &RunConfig) -> String {
    toml::to_string(config).expect("every setting has a form in TOML")
}
