//! Weights from a GGUF file: our names to its names, blocks to numbers.

use std::collections::BTreeSet;

use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{Bytes, DType, Tensor, bf16};

use super::blocks::GgmlType;
use super::config::FREQUENCIES;
use super::error::GgufError;
use super::{GgufFile, GgufTensor};
use crate::config::ModelConfig;
use crate::shapes::weights_with;
use crate::weights::{DecoderWeights, Role};

/// Where one of our tensors is: some tensors of the file.
enum Place {
    /// One tensor of the same elements.
    Whole(String),
    /// Gate and up, joined for each matrix of the stack.
    Joined([String; 2]),
    /// A matrix for each expert of the stack, or a gate and an up for each.
    PerExpert(Vec<String>),
}

/// Our names inside a layer and theirs.
const LAYER_NAMES: [(&str, &str); 17] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.o_proj.bias", "attn_output.bias"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.down_proj", "ffn_down.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp.weight"),
];

/// Tensors of ours that are a gate and an up there.
const JOINED: [(&str, [&str; 2]); 3] = [
    ("mlp.gate_up_proj", ["ffn_gate.weight", "ffn_up.weight"]),
    ("mlp.shared_experts.gate_up_proj", ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]),
    ("mlp.experts.gate_up_proj", ["ffn_gate_exps.weight", "ffn_up_exps.weight"]),
];

impl GgufFile {
    /// The configuration and the weights. Matrices of f32 and bf16 are lent from the mapped file where they need no
    /// joining or reordering; f16 becomes f32 and blocks become bf16. Norm weights, biases and routers are f32.
    pub fn load_model(&self, ctx: &Context) -> Result<(ModelConfig, DecoderWeights), GgufError> {
        let config = self.config()?;
        let architecture = self.known_architecture()?;
        let mut shapes = Vec::new();
        // First the structure and the shapes, then the tensors: nothing is allocated that the file does not hold.
        let placeholder = |shape: &[usize]| {
            shapes.push(shape.to_vec());
            ctx.empty(&[0], DType::F32)
        };
        // None of the architectures has a router that keeps anything besides weights.
        let mut weights = weights_with(&config, placeholder, |shape| ctx.zeros(shape, DType::F32));
        let mut used = BTreeSet::from([FREQUENCIES.to_owned()]);
        if config.tie_embeddings {
            used.insert("output.weight".to_owned());
        }
        for ((name, role, to), shape) in weights.places().into_iter().zip(shapes) {
            let heads = match name.rsplit_once("self_attn.").map_or("", |(_, local)| local) {
                "q_proj.weight" | "q_proj.bias" => config.num_heads,
                "k_proj.weight" | "k_proj.bias" => config.num_kv_heads,
                _ => 0,
            };
            let heads = if architecture.has_rotary_neighbours { heads } else { 0 };
            let tensor = self.read(ctx, &self.place(&name, &shape), &shape, heads, &mut used)?;
            *to = if role == Role::Exact { elementwise::cast(ctx, &tensor, DType::F32) } else { tensor };
        }
        match self.tensors().keys().find(|name| !used.contains(*name)) {
            None => Ok((config, weights)),
            Some(name) => Err(GgufError::UnexpectedTensor {
                path: self.path().to_owned(),
                tensor: name.clone(),
                architecture: self.architecture()?.to_owned(),
            }),
        }
    }

    /// Where our tensor `name` is.
    fn place(&self, name: &str, shape: &[usize]) -> Place {
        let Some((layer, local)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
            return Place::Whole(match name {
                "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
                "model.norm.weight" => "output_norm.weight".to_owned(),
                "lm_head.weight" => "output.weight".to_owned(),
                other => other.to_owned(),
            });
        };
        let there = |theirs: &str| format!("blk.{layer}.{theirs}");
        // Files of Mixtral's first months have a tensor for each expert.
        let one_by_one = |names: &[&str]| {
            let name = |e: usize| names.iter().map(move |name| format!("blk.{layer}.{name}.{e}.weight"));
            Place::PerExpert((0..shape[0]).flat_map(name).collect())
        };
        if let Some((_, [gate, up])) = JOINED.iter().find(|(ours, _)| *ours == local) {
            let fused = there("ffn_gate_up_exps.weight");
            return match local {
                "mlp.experts.gate_up_proj" if self.tensors().contains_key(&fused) => Place::Whole(fused),
                "mlp.experts.gate_up_proj" if self.tensors().contains_key(&there("ffn_gate.0.weight")) => {
                    one_by_one(&["ffn_gate", "ffn_up"])
                }
                _ => Place::Joined([there(gate), there(up)]),
            };
        }
        if local == "mlp.experts.down_proj" && self.tensors().contains_key(&there("ffn_down.0.weight")) {
            return one_by_one(&["ffn_down"]);
        }
        let theirs = LAYER_NAMES.iter().find(|(ours, _)| *ours == local).map_or(local, |(_, theirs)| theirs);
        Place::Whole(there(theirs))
    }

    /// Reads a tensor of ours of this shape. With `heads`, rows of that many heads come as pairs that rotate together, and
    /// leave as halves.
    fn read(
        &self,
        ctx: &Context,
        place: &Place,
        shape: &[usize],
        heads: usize,
        used: &mut BTreeSet<String>,
    ) -> Result<Tensor, GgufError> {
        let len: usize = shape.iter().product();
        let pieces = match place {
            Place::Whole(name) => vec![self.part(name, shape, used)?],
            Place::Joined(names) => {
                let (matrices, rows) = if let [e, rows, _] = *shape { (e, rows) } else { (1, shape[0]) };
                let half = [matrices, rows / 2, *shape.last().unwrap_or(&1)];
                let [gate, up] = [self.part(&names[0], &half, used)?, self.part(&names[1], &half, used)?];
                (0..matrices).flat_map(|e| [gate.nth(e, matrices), up.nth(e, matrices)]).collect()
            }
            Place::PerExpert(names) => {
                let matrix = [len / shape[2] / names.len(), shape[2]];
                names.iter().map(|name| self.part(name, &matrix, used)).collect::<Result<_, _>>()?
            }
        };
        if let [part] = pieces[..]
            && heads == 0
            && let Some(tensor) = self.lent(&part, shape)
        {
            return Ok(tensor);
        }
        let is_f32 = pieces.iter().any(|part| matches!(part.ty, GgmlType::F32 | GgmlType::F16));
        let mut tensor = ctx.empty(shape, if is_f32 { DType::F32 } else { DType::BF16 });
        // One piece at a time, so that no second copy of a stack is made.
        let mut values = vec![0.0; len / pieces.len()];
        for (i, part) in pieces.iter().enumerate() {
            part.ty.decode(part.bytes, &mut values);
            if heads > 0 {
                values = pairs_to_halves(&values, heads, shape);
            }
            let range = i * values.len()..(i + 1) * values.len();
            if is_f32 {
                tensor.f32s_mut()[range].copy_from_slice(&values);
            } else {
                tensor.bf16s_mut()[range].iter_mut().zip(&values).for_each(|(to, &x)| *to = bf16::from_f32(x));
            }
        }
        Ok(tensor)
    }

    /// The tensor `name`, which must be there and have a shape; dims of one element at the front do not count.
    fn part(&self, name: &str, shape: &[usize], used: &mut BTreeSet<String>) -> Result<Part<'_>, GgufError> {
        let info = self.tensor_info(name)?;
        let essential = |shape: &[usize]| shape.iter().copied().skip_while(|&dim| dim == 1).collect::<Vec<_>>();
        if essential(&info.shape) != essential(shape) {
            let (path, found, expected) = (self.path().to_owned(), info.shape.clone(), shape.to_vec());
            return Err(GgufError::WrongShape { path, tensor: name.to_owned(), found, expected });
        }
        used.insert(name.to_owned());
        Ok(Part { info, ty: info.ty, bytes: self.bytes(info) })
    }

    /// The tensor as the file has it, if it is of a type that we compute with.
    fn lent(&self, part: &Part<'_>, shape: &[usize]) -> Option<Tensor> {
        let dtype = match part.ty {
            GgmlType::F32 => DType::F32,
            GgmlType::Bf16 => DType::BF16,
            _ => return None,
        };
        let owner: Bytes = self.map.clone();
        let is_little = cfg!(target_endian = "little");
        is_little.then(|| Tensor::from_foreign(owner, part.info.range.clone(), shape, dtype)).flatten()
    }
}

/// Some elements of the file.
#[derive(Clone, Copy)]
struct Part<'a> {
    info: &'a GgufTensor,
    ty: GgmlType,
    bytes: &'a [u8],
}

impl Part<'_> {
    /// One of `count` equal parts.
    fn nth(self, index: usize, count: usize) -> Self {
        let len = self.bytes.len() / count;
        Self { bytes: &self.bytes[index * len..(index + 1) * len], ..self }
    }
}

/// Undoes the reordering of llama.cpp's converter: of a head's rows the pairs `2 i` and `2 i + 1` become the rows `i` and
/// `i + h / 2`.
fn pairs_to_halves(values: &[f32], heads: usize, shape: &[usize]) -> Vec<f32> {
    let row_len: usize = shape[1..].iter().product();
    let head_dim = shape[0] / heads;
    let rows: Vec<&[f32]> = values.chunks_exact(row_len.max(1)).collect();
    let source = |row: usize| {
        let (head, row) = (row / head_dim, row % head_dim);
        head * head_dim + 2 * (row % (head_dim / 2)) + row / (head_dim / 2)
    };
    (0..rows.len()).flat_map(|row| rows[source(row)].iter().copied()).collect()
}
