//! The kernels' sources: one table, so that no test can forget one.

use super::Target;

/// A file of kernels, compiled as one module, or as several with other definitions.
#[derive(Debug)]
pub struct Source {
    /// The module's name: the file's without its ending, unless there are several.
    pub name: &'static str,
    /// The file's name without its ending.
    pub file: &'static str,
    /// The kernels it defines.
    pub kernels: &'static [&'static str],
    /// The capabilities that it is for; none if it is for all.
    only: &'static [u32],
    /// What comes before the text besides [`COMMON`].
    header: &'static str,
    text: &'static str,
}

impl PartialEq for Source {
    /// Names are those of modules: nothing else need be compared, for each launch of a step that comes again.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// What every source begins with.
const COMMON: &str = include_str!("kernels/common.cuh");

/// The file of a source that names one, or has its own name.
macro_rules! file_of {
    ($name:literal) => {
        $name
    };
    ($name:literal $file:literal) => {
        $file
    };
}

/// Declares a source and its place in the table.
macro_rules! sources {
    ($($(#[$docs:meta])* $constant:ident = $name:literal $(in $file:literal with $definition:literal)?
        $(after $($header:literal)+)? $(only $capability:literal)?: [$($kernel:literal),* $(,)?];)*) => {
        $($(#[$docs])* pub(crate) static $constant: Source = Source {
            name: $name,
            file: file_of!($name $($file)?),
            kernels: &[$($kernel),*],
            only: &[$($capability)?],
            header: concat!($($definition, "\n",)? $($(include_str!(concat!("kernels/", $header)), "\n"),+)?),
            text: include_str!(concat!("kernels/", file_of!($name $($file)?), ".cu")),
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
    GROUPED = "grouped" after "grouped.cuh" "few_rows.cuh" "few.cuh": [
        "rows_nt", "rows_nn", "plain_rows_nt", "plain_rows_nn", "few_rows_nt", "few_both_nt", "few_each", "few_up_paired", "few_up_single", "up_paired", "up_single", "plain_up_paired", "plain_up_single",
        "pull_back_rows", "plain_pull_back_rows", "depths_tn", "plain_depths_tn", "add_row_biases", "add_bias_dots", "sum_group_rows",
        "combine_rows", "combine_rows_normed", "add_row_parts", "grads_of_choices",
    ];
    GROUPED_HOPPER = "grouped_hopper" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" "hopper_finish.cuh" only 90: [
        "hopper_rows_nt", "hopper_rows_nn", "hopper_up_paired", "hopper_up_single", "hopper_pull_back_rows", "hopper_depths_tn",
    ];
    GROUPED_FP8 = "grouped_fp8" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" "hopper_finish.cuh" only 90: [
        "fp8_rows_nt", "fp8_up_paired", "fp8_up_single", "fp8_pull_back_rows",
    ];
    E4M3 = "e4m3": ["e4m3_rows", "e4m3_matrices"];
    BLOCKS = "blocks" after "blocks.cuh": ["blocks_to_bf16", "gather_block_rows"];
    SOME_ROWS_BF16 = "some_rows_bf16" in "some_rows" with "#define OF_TYPE(name) name##_bf16\n#define TYPE_OF_WEIGHTS BF16"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_bf16", "some_each_bf16", "some_up_paired_bf16", "some_up_single_bf16", "some_combined_bf16"];
    SOME_ROWS_Q8 = "some_rows_q8" in "some_rows" with "#define OF_TYPE(name) name##_q8\n#define TYPE_OF_WEIGHTS Q8"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q8", "some_each_q8", "some_up_paired_q8", "some_up_single_q8", "some_combined_q8"];
    SOME_ROWS_Q4 = "some_rows_q4" in "some_rows" with "#define OF_TYPE(name) name##_q4\n#define TYPE_OF_WEIGHTS Q4"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q4", "some_each_q4", "some_up_paired_q4", "some_up_single_q4", "some_combined_q4"];
    SOME_ROWS_Q4K = "some_rows_q4k" in "some_rows" with "#define OF_TYPE(name) name##_q4k\n#define TYPE_OF_WEIGHTS Q4K"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q4k", "some_each_q4k", "some_up_paired_q4k", "some_up_single_q4k", "some_combined_q4k"];
    SOME_ROWS_Q5K = "some_rows_q5k" in "some_rows" with "#define OF_TYPE(name) name##_q5k\n#define TYPE_OF_WEIGHTS Q5K"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q5k", "some_each_q5k", "some_up_paired_q5k", "some_up_single_q5k", "some_combined_q5k"];
    SOME_ROWS_Q6K = "some_rows_q6k" in "some_rows" with "#define OF_TYPE(name) name##_q6k\n#define TYPE_OF_WEIGHTS Q6K"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q6k", "some_each_q6k", "some_up_paired_q6k", "some_up_single_q6k", "some_combined_q6k"];
    SOME_ROWS_MXFP4 = "some_rows_mxfp4" in "some_rows" with "#define OF_TYPE(name) name##_mxfp4\n#define TYPE_OF_WEIGHTS MXFP4"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_mxfp4", "some_each_mxfp4", "some_up_paired_mxfp4", "some_up_single_mxfp4", "some_combined_mxfp4"];
    SOME_ROWS_F8 = "some_rows_f8" in "some_rows" with "#define OF_TYPE(name) name##_f8\n#define TYPE_OF_WEIGHTS F8"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_f8", "some_each_f8", "some_up_paired_f8", "some_up_single_f8", "some_combined_f8"];
    SOME_ROWS_Q4_1 = "some_rows_q4_1" in "some_rows" with "#define OF_TYPE(name) name##_q4_1\n#define TYPE_OF_WEIGHTS Q4_1"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q4_1", "some_each_q4_1", "some_up_paired_q4_1", "some_up_single_q4_1", "some_combined_q4_1"];
    SOME_ROWS_Q5_0 = "some_rows_q5_0" in "some_rows" with "#define OF_TYPE(name) name##_q5_0\n#define TYPE_OF_WEIGHTS Q5_0"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q5_0", "some_each_q5_0", "some_up_paired_q5_0", "some_up_single_q5_0", "some_combined_q5_0"];
    SOME_ROWS_Q5_1 = "some_rows_q5_1" in "some_rows" with "#define OF_TYPE(name) name##_q5_1\n#define TYPE_OF_WEIGHTS Q5_1"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q5_1", "some_each_q5_1", "some_up_paired_q5_1", "some_up_single_q5_1", "some_combined_q5_1"];
    SOME_ROWS_Q2K = "some_rows_q2k" in "some_rows" with "#define OF_TYPE(name) name##_q2k\n#define TYPE_OF_WEIGHTS Q2K"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q2k", "some_each_q2k", "some_up_paired_q2k", "some_up_single_q2k", "some_combined_q2k"];
    SOME_ROWS_Q3K = "some_rows_q3k" in "some_rows" with "#define OF_TYPE(name) name##_q3k\n#define TYPE_OF_WEIGHTS Q3K"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_q3k", "some_each_q3k", "some_up_paired_q3k", "some_up_single_q3k", "some_combined_q3k"];
    SOME_ROWS_IQ4_NL = "some_rows_iq4_nl" in "some_rows" with "#define OF_TYPE(name) name##_iq4_nl\n#define TYPE_OF_WEIGHTS IQ4_NL"
        after "grouped.cuh" "few_rows.cuh" "blocks.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "some_rows.cuh":
        ["some_rows_nt_iq4_nl", "some_each_iq4_nl", "some_up_paired_iq4_nl", "some_up_single_iq4_nl", "some_combined_iq4_nl"];
    ROUTE_FEW = "route_few" after "grouped.cuh" "few_rows.cuh" "few.cuh" "norm_rows.cuh" "last_block.cuh" "softmax.cuh" "router.cuh": ["route_few"];
    ROUTER = "router" after "last_block.cuh" "softmax.cuh" "router.cuh": [
        "softmax_top_k", "sum_scores", "sum_choices", "add_choices", "softmax_top_k_backward", "count_choices", "scan_cells", "list_tiles", "place_choices", "sort_few_choices", "decide_for_few",
    ];
    ATTENTION_WIDE = "attention_wide" after "attention.cuh" "attention_tiles.cuh": ["attention_wide_320", "attention_wide_576", "attention_wide_join"];
    HEADS = "heads": ["heads_nt", "heads_nn"];
    ATTENTION = "attention" after "attention.cuh": [
        "attention_delta", "attention_sinks_back",
        "attention_64", "attention_backward_queries_64", "attention_backward_keys_64",
        "attention_128", "attention_backward_queries_128", "attention_backward_keys_128",
        "attention_256", "attention_backward_queries_256", "attention_backward_keys_256",
    ];
    ATTENTION_PLACED = "attention_placed" after "few.cuh" "rotation.cuh" "attention.cuh" "attention_tiles.cuh" "attention_forward.cuh": [
        "attention_placed_64", "attention_placed_128",
    ];
    ATTENTION_TENSOR = "attention_tensor" after "attention.cuh" "attention_tiles.cuh" "attention_forward.cuh": [
        "attention_tensor_64", "attention_few_64", "attention_tensor_queries_64", "attention_tensor_keys_64",
        "attention_tensor_128", "attention_few_128", "attention_tensor_queries_128", "attention_tensor_keys_128",
        "attention_tensor_192", "attention_few_192", "attention_tensor_queries_192", "attention_tensor_keys_192",
        "attention_tensor_256", "attention_few_256", "attention_tensor_queries_256", "attention_tensor_join",
    ];
    ELEMENTWISE = "elementwise": [
        "cast_elements", "cast_to_levels", "fill_elements", "copy_words", "copy_words_of_each", "add_elements", "scale_elements", "clip_elements", "clip_backward", "sigmoid_elements", "sigmoid_backward", "add_bias", "sum_columns", "add_parts", "sums_of_squares", "adamw_step", "gather_rows",
        "add_rows_of_ids", "rotate", "copy_columns", "add_columns",
    ];
    PLACE_HEADS = "place_heads" after "few.cuh" "rotation.cuh": ["place_heads_f32", "place_heads_bf16"];
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
        format!("{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}", self.header, self.file, waiting(self.text))
    }

    /// The whole text, for a C++ compiler, with a function for each kernel that the emulation calls.
    pub(super) fn emulated_text(&self) -> String {
        let entries: String = self.kernels.iter().map(|kernel| format!("EMULATED_KERNEL({kernel})\n")).collect();
        let machine = include_str!("emulator.h");
        format!("{machine}\n{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}\n{entries}", self.header, self.file, self.text)
    }
}
