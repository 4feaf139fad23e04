//! The kernels' sources: one table, so that no test can forget one.

use super::Target;

/// A file of kernels, compiled as one module.
#[derive(Debug)]
pub struct Source {
    /// The file's name without its ending.
    pub name: &'static str,
    /// The kernels it defines.
    pub kernels: &'static [&'static str],
    /// The capabilities that it is for; none if it is for all.
    only: &'static [u32],
    /// What comes before the text besides [`COMMON`].
    header: &'static str,
    text: &'static str,
}

impl PartialEq for Source {
    /// Names are those of files: nothing else need be compared, for each launch of a step that comes again.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// What every source begins with.
const COMMON: &str = include_str!("kernels/common.cuh");

/// Declares a source and its place in the table.
macro_rules! sources {
    ($($(#[$docs:meta])* $constant:ident = $name:literal $(after $($header:literal)+)? $(only $capability:literal)?:
        [$($kernel:literal),* $(,)?];)*) => {
        $($(#[$docs])* pub(crate) static $constant: Source = Source {
            name: $name,
            kernels: &[$($kernel),*],
            only: &[$($capability)?],
            header: concat!("" $($(, include_str!(concat!("kernels/", $header)), "\n")+)?),
            text: include_str!(concat!("kernels/", $name, ".cu")),
        };)*
        /// Every source.
        pub static SOURCES: &[&Source] = &[$(&$constant),*];
    };
}

sources! {
    RMS_NORM = "rms_norm" after "few.cuh": [
        "rms_norm_f32_f32", "rms_norm_f32_bf16", "rms_norm_bf16_f32", "rms_norm_bf16_bf16",
        "rms_norm_backward_f32_f32", "rms_norm_backward_f32_bf16", "rms_norm_backward_bf16_f32", "rms_norm_backward_bf16_bf16",
    ];
    LAYER_NORM = "layer_norm" after "few.cuh": [
        "layer_norm_f32_f32", "layer_norm_f32_bf16", "layer_norm_bf16_f32", "layer_norm_bf16_bf16",
        "layer_norm_backward_f32_f32", "layer_norm_backward_f32_bf16", "layer_norm_backward_bf16_f32", "layer_norm_backward_bf16_bf16",
    ];
    GROUPED = "grouped" after "grouped.cuh" "few_rows.cuh": [
        "rows_nt", "rows_nn", "plain_rows_nt", "plain_rows_nn", "few_rows_nt", "few_both_nt", "few_each", "few_up_paired", "few_up_single", "up_paired", "up_single", "plain_up_paired", "plain_up_single",
        "pull_back_rows", "plain_pull_back_rows", "depths_tn", "plain_depths_tn", "add_row_biases", "add_bias_dots", "sum_group_rows",
        "combine_rows", "add_row_parts", "grads_of_choices",
    ];
    SOME_ROWS = "some_rows" after "grouped.cuh" "few_rows.cuh" "some_rows.cuh": ["some_each"];
    GROUPED_HOPPER = "grouped_hopper" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" only 90: [
        "hopper_rows_nt", "hopper_rows_nn", "hopper_up_paired", "hopper_up_single", "hopper_pull_back_rows", "hopper_depths_tn",
    ];
    GROUPED_FP8 = "grouped_fp8" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" only 90: [
        "fp8_rows_nt", "fp8_up_paired", "fp8_up_single", "fp8_pull_back_rows",
    ];
    E4M3 = "e4m3": ["e4m3_rows", "e4m3_matrices"];
    BLOCKS = "blocks" after "grouped.cuh" "few_rows.cuh" "some_rows.cuh": [
        "blocks_to_bf16", "gather_block_rows",
        "few_rows_nt_q8", "few_both_nt_q8", "few_each_q8", "some_each_q8", "few_up_paired_q8", "few_up_single_q8",
        "few_rows_nt_q4", "few_both_nt_q4", "few_each_q4", "some_each_q4", "few_up_paired_q4", "few_up_single_q4",
        "few_rows_nt_q4k", "few_both_nt_q4k", "few_each_q4k", "some_each_q4k", "few_up_paired_q4k", "few_up_single_q4k",
        "few_rows_nt_q5k", "few_both_nt_q5k", "few_each_q5k", "some_each_q5k", "few_up_paired_q5k", "few_up_single_q5k",
        "few_rows_nt_q6k", "few_both_nt_q6k", "few_each_q6k", "some_each_q6k", "few_up_paired_q6k", "few_up_single_q6k",
        "few_rows_nt_mxfp4", "few_both_nt_mxfp4", "few_each_mxfp4", "some_each_mxfp4", "few_up_paired_mxfp4", "few_up_single_mxfp4",
        "few_rows_nt_f8", "few_both_nt_f8", "few_each_f8", "some_each_f8", "few_up_paired_f8", "few_up_single_f8",
    ];
    ROUTER = "router" after "softmax.cuh": [
        "softmax_top_k", "sum_scores", "sum_choices", "add_choices", "softmax_top_k_backward", "count_choices", "scan_cells", "first_rows", "list_tiles", "place_choices", "sort_few_choices", "decide_for_few",
    ];
    ATTENTION = "attention" after "attention.cuh": [
        "attention_delta", "attention_sinks_back",
        "attention_64", "attention_backward_queries_64", "attention_backward_keys_64",
        "attention_128", "attention_backward_queries_128", "attention_backward_keys_128",
        "attention_256", "attention_backward_queries_256", "attention_backward_keys_256",
    ];
    ATTENTION_TENSOR = "attention_tensor" after "attention.cuh": [
        "attention_tensor_64", "attention_tensor_queries_64", "attention_tensor_keys_64",
        "attention_tensor_128", "attention_tensor_queries_128", "attention_tensor_keys_128",
        "attention_tensor_192", "attention_tensor_queries_192", "attention_tensor_keys_192",
        "attention_tensor_256", "attention_tensor_queries_256", "attention_tensor_join",
    ];
    ELEMENTWISE = "elementwise": [
        "cast_elements", "fill_elements", "copy_words", "copy_words_of_each", "add_elements", "scale_elements", "clip_elements", "clip_backward", "sigmoid_elements", "sigmoid_backward", "add_bias", "sum_columns", "add_parts", "sums_of_squares", "adamw_step", "gather_rows",
        "add_rows_of_ids", "rotate", "copy_columns", "add_columns",
    ];
    PLACE_HEADS = "place_heads" after "few.cuh": ["place_heads_f32", "place_heads_bf16"];
    PEAK = "peak": ["multiply_adds", "matrix_products", "read_memory", "copy_memory"];
    PEAK_HOPPER = "peak_hopper" after "hopper.cuh" only 90: ["hopper_matrix_products", "hopper_byte_products"];
    NOISE = "noise": ["times_factors"];
    SCORES = "scores" after "softmax.cuh": ["score_top_k", "score_top_k_backward"];
    SAMPLING = "sampling": ["draw_tokens"];
    LOGITS = "logits": ["cut_numbers"];
    HEAD_LOSS = "head_loss": ["cross_entropy"];
}

/// What each kernel begins with, unless it does so itself, having asked for something.
const WAIT: &str = "after_earlier";

/// The text where every kernel waits for those before it: a graph lets a kernel's blocks come while the kernel before is still at work.
fn waiting(text: &str) -> String {
    let (mut waiting, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(body) = rest.find("KERNEL").and_then(|kernel| Some(kernel + rest[kernel..].find('{')? + 1)) {
        let (before, after) = rest.split_at(body);
        waiting.push_str(before);
        let end = after.find("\n}").unwrap_or(after.len());
        let own = after.find("KERNEL").map_or(end, |next| next.min(end));
        if !after[..own].contains(WAIT) {
            waiting.push_str(" after_earlier();");
        }
        rest = after;
    }
    waiting + rest
}

impl Source {
    /// Whether it can be compiled for `target`: instructions that only some capabilities have are in no PTX for newer ones.
    #[must_use]
    pub fn is_for(&self, target: Target) -> bool {
        let is_exact = target == Target::real(target.capability);
        self.only.is_empty() || is_exact && self.only.contains(&target.capability)
    }

    /// The whole text, for a CUDA compiler.
    #[must_use]
    pub fn cuda_text(&self) -> String {
        format!("{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}", self.header, self.name, waiting(self.text))
    }

    /// The whole text, for a C++ compiler, with a function for each kernel that the emulation calls.
    pub(super) fn emulated_text(&self) -> String {
        let entries: String = self.kernels.iter().map(|kernel| format!("EMULATED_KERNEL({kernel})\n")).collect();
        let machine = include_str!("emulator.h");
        format!("{machine}\n{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}\n{entries}", self.header, self.name, self.text)
    }
}
