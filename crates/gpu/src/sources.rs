//! The table of the kernels' sources: there is only one, so that no test can forget a source.

use crate::Target;

/// A file of kernels, compiled as one module, or as several with other definitions.
#[derive(Debug)]
pub struct Source {
    /// The module's name: the file's without its ending, unless there are several.
    pub name: &'static str,
    /// The file's name without its ending.
    pub file: &'static str,
    /// The kernels that it defines.
    pub kernels: &'static [&'static str],
    /// The capabilities that it is for; empty for all.
    only: &'static [u32],
    /// The text between [`COMMON`] and the source's own.
    header: &'static str,
    text: &'static str,
}

impl PartialEq for Source {
    /// Compares names, which are unique among modules, because each launch of a replayed step compares its source.
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// The beginning of every source.
const COMMON: &str = include_str!("kernels/common.cuh");

/// The file of a source: the one that it names, or that of its own name.
macro_rules! file_of {
    ($name:literal) => {
        $name
    };
    ($name:literal $file:literal) => {
        $file
    };
}

/// Declares sources and the table of them.
macro_rules! sources {
    ($($constant:ident = $name:literal $(in $file:literal with $definition:literal)?
        $(after $($header:literal)+)? $(only $capability:literal)?: [$($kernel:literal),* $(,)?];)*) => {
        $(#[doc = concat!("The kernels of `", file_of!($name $($file)?), ".cu` in the module `", $name, "`.")]
        pub static $constant: Source = Source {
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
    RMS_NORM = "rms_norm" after "vec.cuh": [
        "rms_norm_f32_f32", "rms_norm_f32_bf16", "rms_norm_bf16_f32", "rms_norm_bf16_bf16",
        "rms_norm_backward_f32_f32", "rms_norm_backward_f32_bf16", "rms_norm_backward_bf16_f32", "rms_norm_backward_bf16_bf16",
    ];
    LAYER_NORM = "layer_norm" after "vec.cuh": [
        "layer_norm_f32_f32", "layer_norm_f32_bf16", "layer_norm_bf16_f32", "layer_norm_bf16_bf16",
        "layer_norm_backward_f32_f32", "layer_norm_backward_f32_bf16", "layer_norm_backward_bf16_f32", "layer_norm_backward_bf16_bf16",
    ];
    GROUPED = "grouped" after "grouped.cuh" "vec_gemm.cuh" "vec.cuh": [
        "rows_nt", "rows_nn", "plain_rows_nt", "plain_rows_nn", "vec_rows_nt", "vec_both_nt", "vec_batched", "vec_up_paired", "vec_up_single", "up_paired", "up_single", "plain_up_paired", "plain_up_single",
        "pull_back_rows", "plain_pull_back_rows", "wgrad_tn", "plain_wgrad_tn", "add_row_biases", "add_bias_dots", "sum_group_rows",
        "combine_rows", "combine_rows_normed", "add_row_parts", "grads_of_choices",
    ];
    GROUPED_HOPPER = "grouped_hopper" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" "hopper_finish.cuh" only 90: [
        "hopper_rows_nt", "hopper_rows_nn", "hopper_up_paired", "hopper_up_single", "hopper_pull_back_rows", "hopper_wgrad_tn",
    ];
    GROUPED_FP8 = "grouped_fp8" after "grouped.cuh" "hopper.cuh" "hopper_tiles.cuh" "hopper_finish.cuh" only 90: [
        "fp8_rows_nt", "fp8_up_paired", "fp8_up_single", "fp8_pull_back_rows",
    ];
    E4M3 = "e4m3": ["e4m3_rows", "e4m3_matrices"];
    BLOCKS = "blocks" after "blocks.cuh": ["blocks_to_bf16", "gather_block_rows"];
    SMALL_M_GEMM_BF16 = "small_m_gemm_bf16" in "small_m_gemm" with "#define OF_TYPE(name) name##_bf16\n#define TYPE_OF_WEIGHTS BF16"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_bf16", "small_m_batched_bf16", "small_m_up_paired_bf16", "small_m_up_single_bf16", "small_m_combined_bf16"];
    SMALL_M_GEMM_Q8 = "small_m_gemm_q8" in "small_m_gemm" with "#define OF_TYPE(name) name##_q8\n#define TYPE_OF_WEIGHTS Q8"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q8", "small_m_batched_q8", "small_m_up_paired_q8", "small_m_up_single_q8", "small_m_combined_q8"];
    SMALL_M_GEMM_Q4 = "small_m_gemm_q4" in "small_m_gemm" with "#define OF_TYPE(name) name##_q4\n#define TYPE_OF_WEIGHTS Q4"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q4", "small_m_batched_q4", "small_m_up_paired_q4", "small_m_up_single_q4", "small_m_combined_q4"];
    SMALL_M_GEMM_Q4K = "small_m_gemm_q4k" in "small_m_gemm" with "#define OF_TYPE(name) name##_q4k\n#define TYPE_OF_WEIGHTS Q4K"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q4k", "small_m_batched_q4k", "small_m_up_paired_q4k", "small_m_up_single_q4k", "small_m_combined_q4k"];
    SMALL_M_GEMM_Q5K = "small_m_gemm_q5k" in "small_m_gemm" with "#define OF_TYPE(name) name##_q5k\n#define TYPE_OF_WEIGHTS Q5K"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q5k", "small_m_batched_q5k", "small_m_up_paired_q5k", "small_m_up_single_q5k", "small_m_combined_q5k"];
    SMALL_M_GEMM_Q6K = "small_m_gemm_q6k" in "small_m_gemm" with "#define OF_TYPE(name) name##_q6k\n#define TYPE_OF_WEIGHTS Q6K"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q6k", "small_m_batched_q6k", "small_m_up_paired_q6k", "small_m_up_single_q6k", "small_m_combined_q6k"];
    SMALL_M_GEMM_MXFP4 = "small_m_gemm_mxfp4" in "small_m_gemm" with "#define OF_TYPE(name) name##_mxfp4\n#define TYPE_OF_WEIGHTS MXFP4"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_mxfp4", "small_m_batched_mxfp4", "small_m_up_paired_mxfp4", "small_m_up_single_mxfp4", "small_m_combined_mxfp4"];
    SMALL_M_GEMM_F8 = "small_m_gemm_f8" in "small_m_gemm" with "#define OF_TYPE(name) name##_f8\n#define TYPE_OF_WEIGHTS F8"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_f8", "small_m_batched_f8", "small_m_up_paired_f8", "small_m_up_single_f8", "small_m_combined_f8"];
    SMALL_M_GEMM_Q4_1 = "small_m_gemm_q4_1" in "small_m_gemm" with "#define OF_TYPE(name) name##_q4_1\n#define TYPE_OF_WEIGHTS Q4_1"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q4_1", "small_m_batched_q4_1", "small_m_up_paired_q4_1", "small_m_up_single_q4_1", "small_m_combined_q4_1"];
    SMALL_M_GEMM_Q5_0 = "small_m_gemm_q5_0" in "small_m_gemm" with "#define OF_TYPE(name) name##_q5_0\n#define TYPE_OF_WEIGHTS Q5_0"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q5_0", "small_m_batched_q5_0", "small_m_up_paired_q5_0", "small_m_up_single_q5_0", "small_m_combined_q5_0"];
    SMALL_M_GEMM_Q5_1 = "small_m_gemm_q5_1" in "small_m_gemm" with "#define OF_TYPE(name) name##_q5_1\n#define TYPE_OF_WEIGHTS Q5_1"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q5_1", "small_m_batched_q5_1", "small_m_up_paired_q5_1", "small_m_up_single_q5_1", "small_m_combined_q5_1"];
    SMALL_M_GEMM_Q2K = "small_m_gemm_q2k" in "small_m_gemm" with "#define OF_TYPE(name) name##_q2k\n#define TYPE_OF_WEIGHTS Q2K"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q2k", "small_m_batched_q2k", "small_m_up_paired_q2k", "small_m_up_single_q2k", "small_m_combined_q2k"];
    SMALL_M_GEMM_Q3K = "small_m_gemm_q3k" in "small_m_gemm" with "#define OF_TYPE(name) name##_q3k\n#define TYPE_OF_WEIGHTS Q3K"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_q3k", "small_m_batched_q3k", "small_m_up_paired_q3k", "small_m_up_single_q3k", "small_m_combined_q3k"];
    SMALL_M_GEMM_IQ4_NL = "small_m_gemm_iq4_nl" in "small_m_gemm" with "#define OF_TYPE(name) name##_iq4_nl\n#define TYPE_OF_WEIGHTS IQ4_NL"
        after "grouped.cuh" "vec_gemm.cuh" "blocks.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "small_m_gemm.cuh":
        ["small_m_rows_nt_iq4_nl", "small_m_batched_iq4_nl", "small_m_up_paired_iq4_nl", "small_m_up_single_iq4_nl", "small_m_combined_iq4_nl"];
    ROUTE_FEW = "route_few" after "grouped.cuh" "vec_gemm.cuh" "vec.cuh" "norm_rows.cuh" "last_block.cuh" "softmax.cuh" "router.cuh": ["route_few"];
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
    ATTENTION_PLACED = "attention_placed" after "vec.cuh" "rotation.cuh" "attention.cuh" "attention_tiles.cuh" "attention_forward.cuh": [
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
    QKV_NORM_ROPE_APPEND = "qkv_norm_rope_append" after "vec.cuh" "rotation.cuh": ["qkv_norm_rope_append_f32", "qkv_norm_rope_append_bf16"];
    PEAK = "peak": ["multiply_adds", "matrix_products", "read_memory", "copy_memory"];
    PEAK_HOPPER = "peak_hopper" after "hopper.cuh" only 90: ["hopper_matrix_products", "hopper_byte_products"];
    NOISE = "noise": ["times_factors"];
    SCORES = "scores" after "softmax.cuh": ["score_top_k", "score_top_k_backward"];
    SAMPLING = "sampling": ["draw_tokens"];
    LOGITS = "logits": ["cut_numbers"];
    HEAD_LOSS = "head_loss": ["cross_entropy"];
}

/// The call that each kernel begins with, unless its text has one after the first loads.
const WAIT: &str = "after_earlier";

/// The text with a wait at the beginning of every kernel: a graph lets a kernel's blocks start while the kernel
/// before is still at work.
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
    /// Returns whether the source can be compiled for `target`: instructions of some capabilities are in no PTX for
    /// newer ones.
    #[must_use]
    pub fn is_for(&self, target: Target) -> bool {
        let is_exact = target == Target::real(target.capability);
        self.only.is_empty() || is_exact && self.only.contains(&target.capability)
    }

    /// Returns the whole text for a CUDA compiler.
    #[must_use]
    pub fn cuda_text(&self) -> String {
        format!("{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}", self.header, self.file, waiting(self.text))
    }

    /// Returns the whole text for a C++ compiler, with a function for each kernel that the emulation calls.
    pub(crate) fn emulated_text(&self) -> String {
        let entries: String = self.kernels.iter().map(|kernel| format!("EMULATED_KERNEL({kernel})\n")).collect();
        let machine = include_str!("emulator.h");
        format!("{machine}\n{COMMON}\n{}\n#line 1 \"{}.cu\"\n{}\n{entries}", self.header, self.file, self.text)
    }
}
