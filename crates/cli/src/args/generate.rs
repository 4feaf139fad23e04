//! Command-line options of `generate` and `chat`.

use std::path::PathBuf;

use clap::Args;
use moeworks_infer::generation::{SamplingSettings, TokenLimit};

use super::{ComputeArgs, KvTypeChoice, RankArgs, RecordArgs};

/// Options for sampling. Missing ones come from the model's `generation_config.json`, or from the keys
/// `general.sampling.*` of a GGUF file.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling (these options override the model's files, which override the defaults)")]
pub(crate) struct SamplingArgs {
    /// Temperature: 0 always takes the likeliest token, higher values vary more (default: 0.8)
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Sample from the K likeliest tokens; 0 for all (default: 0)
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Sample from the likeliest tokens whose probabilities sum to P (default: 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from tokens that are at least P times as likely as the likeliest (default: 0)
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Penalty for repeating tokens of the prompt and the answer; above 1 makes them less likely (default: 1)
    #[arg(long, visible_alias = "repeat-penalty", value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Number subtracted from the logits of tokens that the answer contains (default: 0)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Number subtracted from a token's logit for each time that the answer contains it (default: 0)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Apply penalties to the last N tokens; -1 for all (default: -1)
    #[arg(long, visible_alias = "repeat-last-n", value_name = "N", allow_negative_numbers = true)]
    pub(crate) penalty_last_n: Option<i64>,
    /// Seed of the random numbers; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Ignore the sampling settings in the model's files
    #[arg(long)]
    pub(crate) no_model_sampling: bool,
}

impl SamplingArgs {
    /// Returns the settings given on the command line.
    pub(crate) fn settings(&self) -> SamplingSettings {
        SamplingSettings {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_last: self.penalty_last_n,
            seed: self.seed,
            ignores_model: self.no_model_sampling,
        }
    }
}

#[derive(Debug, Args)]
#[command(before_help = "Usual use:\n  moeworks generate MODEL --prompt \"Once upon a time\"\n  \
                         moeworks generate MODEL --prompt-file question.txt --max-tokens 500 --stop \"###\"\n  \
                         moeworks generate MODEL --prompt \"Name and age: \" --json-schema '{\"type\": \"object\", ...}'\n  \
                         moeworks generate MODEL --data prompts.jsonl --out answers.jsonl")]
pub(crate) struct GenerateArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Text to continue; - reads standard input
    #[arg(long, short = 'p', value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    /// File with the text to continue
    #[arg(long, short = 'f', value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Largest number of tokens to generate; -1 for as many as fit (default: the model's max_new_tokens, or 200)
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<TokenLimit>,
    /// Stop before this text, which is not printed (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// Read special tokens in the prompt, such as <|im_start|>, as tokens and not as text
    #[arg(long)]
    pub(crate) special: bool,
    #[command(flatten)]
    pub(crate) form: FormArgs,
    #[command(flatten)]
    pub(crate) batch: BatchArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}

/// The form that answers are held to: one of these.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Form of the answer")]
#[group(multiple = false)]
pub(crate) struct FormArgs {
    /// Answer with JSON of this schema: a file, or the schema itself, such as '{"type": "integer"}'
    #[arg(long, value_name = "FILE|JSON")]
    pub(crate) json_schema: Option<String>,
    /// Answer with an object of JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Answer with a text that this regular expression matches as a whole, such as '[0-9]{1,3}( C| F)'
    #[arg(long, value_name = "R", allow_hyphen_values = true)]
    pub(crate) regex: Option<String>,
    /// Answer with a text of the rule `root` of the grammar in this file, in llama.cpp's notation (GBNF)
    #[arg(long, visible_alias = "grammar-file", value_name = "FILE")]
    pub(crate) grammar: Option<PathBuf>,
    /// Answer with one of these texts, as in `--choices yes,no`
    #[arg(long, value_name = "A,B", value_delimiter = ',', allow_hyphen_values = true)]
    pub(crate) choices: Vec<String>,
}

/// The options of many prompts at once.
#[derive(Debug, Args)]
#[command(next_help_heading = "Many prompts")]
pub(crate) struct BatchArgs {
    /// A file of prompts, a JSON object a line: prompt or messages, and perhaps id, max_tokens, seed, sampling
    /// settings and a form (json_schema, regex, grammar or guided_choice)
    #[arg(long, value_name = "FILE", requires = "out", conflicts_with_all = ["prompt", "prompt_file"])]
    pub(crate) data: Option<PathBuf>,
    /// The file of answers, a JSON object a line in the order of the prompts; it is there when it is complete
    #[arg(long, value_name = "FILE", requires = "data")]
    pub(crate) out: Option<PathBuf>,
    /// Replace a file of answers that is there
    #[arg(long, requires = "data")]
    pub(crate) force: bool,
    /// A chat template in Jinja in place of the model's own, for prompts that are messages
    #[arg(long, value_name = "FILE", requires = "data")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Answers that are computed at a time
    #[arg(long, value_name = "N", default_value_t = 64, requires = "data")]
    pub(crate) max_running: usize,
    /// GB of memory for keys and values (default: as much as --max-running answers need, up to a quarter of the
    /// memory)
    #[arg(long, value_name = "GB", requires = "data")]
    pub(crate) kv_memory: Option<f64>,
    /// Number type of keys and values: q8 takes half the memory of bf16 (default: that of activations)
    #[arg(long, visible_alias = "kv-cache-dtype", value_name = "TYPE", value_enum, requires = "data")]
    pub(crate) kv_type: Option<KvTypeChoice>,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks chat MODEL\n  moeworks chat MODEL --system \"You are brief.\"\n  \
                         printf 'Hello\\nAnd now?\\n' | moeworks chat MODEL",
    after_help = "In a chat, /help lists the commands (/clear, /undo, /regen, /system TEXT, /exit). Ctrl-C stops an answer."
)]
pub(crate) struct ChatArgs {
    /// Model: a run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// System prompt: instructions for the model before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// Largest number of tokens of an answer; -1 for as many as fit (default: as many as leave room for another turn)
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<TokenLimit>,
    /// Stop an answer before this text, which is not printed (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// Do not read or write the history of typed lines ($XDG_STATE_HOME/moeworks/history)
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) form: FormArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
}
