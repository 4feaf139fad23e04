//! The families of `transformers` that a decoder can be, one row each: what distinguishes them and what they call things.
//!
//! Names on disk as of transformers 5.23: `save_pretrained` writes one tensor an expert, while in memory (and on disk with
//! `save_original_format=False`) experts are stacked as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`.

use crate::config::{ActivationKind, ModelConfig, QkNorm};

/// What distinguishes a family.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The class in `architectures`.
    pub(crate) architecture: &'static str,
    /// Whether it has MoE layers.
    pub(crate) is_moe: bool,
    /// Its norm of queries and keys.
    pub(crate) qk_norm: QkNorm,
    /// The key of F.
    pub(crate) expert_width_key: &'static str,
    /// Whether `decoder_sparse_step` leaves some layers dense; otherwise all are MoE layers.
    pub(crate) has_sparse_step: bool,
    /// Whether router weights are always normalised; otherwise `norm_topk_prob` says.
    pub(crate) always_normalizes: bool,
    /// The router's name inside a layer.
    pub(crate) router: &'static str,
    /// The experts' name inside a layer.
    pub(crate) experts: &'static str,
    /// Gate, up and down of one expert.
    pub(crate) expert_matrices: [&'static str; 3],
    /// `rms_norm_eps` where the file has none.
    pub(crate) default_eps: f32,
    /// `rope_theta` where the file has none.
    pub(crate) default_theta: f64,
    /// `head_dim` where the file has none; none for hidden_size / num_attention_heads.
    pub(crate) default_head_dim: Option<usize>,
}

const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    is_moe: true,
    qk_norm: QkNorm::Head,
    expert_width_key: "moe_intermediate_size",
    has_sparse_step: true,
    always_normalizes: false,
    router: "mlp.gate.weight",
    experts: "mlp.experts",
    expert_matrices: PROJECTIONS,
    default_eps: 1e-6,
    default_theta: 10_000.0,
    default_head_dim: None,
};

/// Gate, up and down as most families call them.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Every family that is read and written, the first that fits first.
pub(crate) const FAMILIES: [Family; 5] = [
    QWEN3_MOE,
    Family {
        model_type: "olmoe",
        architecture: "OlmoeForCausalLM",
        qk_norm: QkNorm::Whole,
        expert_width_key: "intermediate_size",
        has_sparse_step: false,
        default_eps: 1e-5,
        ..QWEN3_MOE
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        qk_norm: QkNorm::None,
        expert_width_key: "intermediate_size",
        has_sparse_step: false,
        always_normalizes: true,
        router: "block_sparse_moe.gate.weight",
        experts: "block_sparse_moe.experts",
        expert_matrices: ["w1", "w3", "w2"],
        default_eps: 1e-5,
        default_theta: 1e6,
        ..QWEN3_MOE
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        is_moe: false,
        default_head_dim: Some(128),
        ..QWEN3_MOE
    },
    Family { model_type: "llama", architecture: "LlamaForCausalLM", is_moe: false, qk_norm: QkNorm::None, ..QWEN3_MOE },
];

/// Ours, for what the others cannot express.
pub(crate) const OURS: Family = Family { model_type: "moeworks", architecture: "MoeworksForCausalLM", ..QWEN3_MOE };

/// The names of all families, for messages.
pub(crate) fn supported() -> String {
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).chain([OURS.model_type]).collect();
    names.join(", ")
}

impl Family {
    /// The family that computes what a model of `config` does.
    pub(crate) fn of(config: &ModelConfig) -> &'static Self {
        FAMILIES.iter().find(|family| family.fits(config)).unwrap_or(&OURS)
    }

    /// The family of this name.
    pub(crate) fn named(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().chain([&OURS]).find(|family| family.model_type == model_type)
    }

    fn fits(&self, config: &ModelConfig) -> bool {
        let normalizes = config.normalize_weights || !config.softmax_before_topk;
        // OLMoE's query norm is as wide as the model.
        let has_norm_width = self.qk_norm != QkNorm::Whole || config.num_heads * config.head_dim == config.width;
        let all_moe = (0..config.num_layers).all(|i| config.is_moe_layer(i));
        config.activation == ActivationKind::Swiglu
            && config.qk_norm == self.qk_norm
            && has_norm_width
            && (config.num_experts > 0) == self.is_moe
            && (!self.is_moe
                || (config.shared_width == 0
                    && config.router.is_plain_at_inference()
                    && (self.has_sparse_step || all_moe)
                    && (normalizes || !self.always_normalizes)))
    }

    /// Whether `transformers` loads it.
    pub(crate) fn is_known_to_transformers(&self) -> bool {
        self.model_type != OURS.model_type
    }
}

/// The names of a layer's tensors on disk.
pub(crate) struct LayerNames {
    prefix: String,
    family: &'static Family,
}

/// Which matrix of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matrix {
    Gate,
    Up,
    Down,
}

impl LayerNames {
    pub(crate) fn new(family: &'static Family, layer: usize) -> Self {
        Self { prefix: format!("model.layers.{layer}."), family }
    }

    /// A tensor that every family calls the same.
    pub(crate) fn common(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(crate) fn router(&self) -> String {
        self.common(self.family.router)
    }

    pub(crate) fn expert(&self, expert: usize, matrix: Matrix) -> String {
        let name = self.family.expert_matrices[matrix as usize];
        format!("{}{}.{expert}.{name}.weight", self.prefix, self.family.experts)
    }

    pub(crate) fn dense(&self, matrix: Matrix) -> String {
        format!("{}mlp.{}.weight", self.prefix, PROJECTIONS[matrix as usize])
    }

    pub(crate) fn shared(&self, matrix: Matrix) -> String {
        format!("{}mlp.shared_experts.{}.weight", self.prefix, PROJECTIONS[matrix as usize])
    }
}
