//! The options of `generate` and `chat`.

use std::path::PathBuf;

use clap::Args;
use moeworks_infer::generation::{SamplingSettings, TokenLimit};

use super::ComputeArgs;

/// The options that say how tokens are drawn. What is not given comes from the model's `generation_config.json`, or from the keys
/// `general.sampling.*` of a GGUF file.
#[derive(Clone, Debug, Args)]
#[command(
    next_help_heading = "Sampling (first these options, then what the model's files recommend, then the defaults)"
)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token; higher is more varied (default: 0.8)
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Only the K likeliest tokens; 0 for all (default: 0)
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Only the likeliest tokens that together have this probability (default: 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Only tokens at least this share as likely as the likeliest (default: 0)
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Above 1, tokens of the prompt and the answer become less likely to come again (default: 1)
    #[arg(long, visible_alias = "repeat-penalty", value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has (default: 0)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtracted from the logit of a token for each time that the answer has it (default: 0)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Penalties count the last N tokens; -1 for all (default: -1)
    #[arg(long, visible_alias = "repeat-last-n", value_name = "N", allow_negative_numbers = true)]
    pub(crate) penalty_last_n: Option<i64>,
    /// Seed of the random numbers; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Do not use the settings that the model's files recommend
    #[arg(long)]
    pub(crate) no_model_sampling: bool,
}

impl SamplingArgs {
    /// The settings that are given.
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
                         moeworks generate MODEL --prompt-file question.txt --max-tokens 500 --stop \"###\"")]
pub(crate) struct GenerateArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// The text to continue; - for standard input
    #[arg(long, short = 'p', value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    /// A file with the text to continue
    #[arg(long, short = 'f', value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Tokens to generate at most; -1 for as many as fit (default: the model's max_new_tokens, or 200)
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<TokenLimit>,
    /// End before this text, which is not printed; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// Read special tokens that the prompt spells, such as <|im_start|>, as these tokens and not as text
    #[arg(long)]
    pub(crate) special: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks chat MODEL\n  moeworks chat MODEL --system \"You are brief.\"\n  \
                         printf 'Hello\\nAnd now?\\n' | moeworks chat MODEL",
    after_help = "In a chat, /help lists the commands (/clear, /undo, /regen, /system TEXT, /exit). Ctrl-C stops an answer."
)]
pub(crate) struct ChatArgs {
    /// A run, a checkpoint, a model folder or a GGUF file
    pub(crate) model: PathBuf,
    /// Tell the model this before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// A chat template in Jinja in place of the model's own
    #[arg(long, value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// Tokens of an answer at most; -1 for as many as fit (default: as many as leave room for another turn)
    #[arg(long, short = 'n', value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<TokenLimit>,
    /// End an answer before this text, which is not printed; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// Neither read nor write the history of typed lines ($XDG_STATE_HOME/moeworks/history)
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}
