//! Loading weights from a GGUF file: the mapping of tensor names, and the decoding of blocks.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor, bf16};

use super::GgufFile;
use super::blocks::GgmlType;
use super::config::{FREQUENCIES, FREQUENCIES_BY_LENGTH};
use super::error::GgufError;
use crate::config::ModelConfig;
use crate::hf::warn_of_keys;
use crate::weights::{DecoderWeights, ModelPart, TensorPart, WeightRole, WeightTable, as_range, chosen, part_shape};

/// The tensors of the file that hold one of ours.
enum Place {
    /// One tensor with the same elements.
    Whole(String),
    /// Gate and up, joined for each matrix of the stack.
    Joined([String; 2]),
    /// Biases of gate and up, joined for each expert.
    JoinedVectors([String; 2]),
    /// One matrix for each expert of the stack, or a gate and an up for each.
    PerExpert(Vec<String>),
    /// The up-projections of latent attention, stored apart: that of keys, transposed for each head, and that of
    /// values.
    Widening([String; 2]),
}

/// Our names in a layer, with those of the file.
const LAYER_NAMES: [(&str, &str); 29] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("input_layernorm.bias", "attn_norm.bias"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.q_a_proj.weight", "attn_q_a.weight"),
    ("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    ("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
    ("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    ("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.o_proj.bias", "attn_output.bias"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("post_attention_layernorm.bias", "ffn_norm.bias"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.bias", "ffn_gate_inp.bias"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.down_proj", "ffn_down.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp.weight"),
];

/// Our tensors that the file has as gate and up.
const JOINED: [(&str, [&str; 2]); 4] = [
    ("mlp.gate_up_proj", ["ffn_gate.weight", "ffn_up.weight"]),
    ("mlp.shared_experts.gate_up_proj", ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]),
    ("mlp.experts.gate_up_proj", ["ffn_gate_exps.weight", "ffn_up_exps.weight"]),
    ("mlp.experts.gate_up_proj_bias", ["ffn_gate_exps.bias", "ffn_up_exps.bias"]),
];

impl GgufFile {
    /// Loads the configuration and the weights. Matrices keep their type, float or blocks, and are borrowed from the
    /// mapped file wherever rows keep their order. Norm weights, biases and routers are f32.
    pub fn load_model(&self, ctx: &Context) -> Result<(ModelConfig, DecoderWeights), GgufError> {
        self.load_part(ctx, &ModelPart::Whole)
    }

    /// Loads a part of the model; see [`load_model`](Self::load_model). All tensors are checked, but only those of
    /// the part are read.
    pub fn load_part(&self, ctx: &Context, part: &ModelPart) -> Result<(ModelConfig, DecoderWeights), GgufError> {
        let (config, unknown) = self.read_config()?;
        warn_of_keys(self.path(), &unknown);
        let architecture = self.known_architecture()?;
        self.check_layers(&config)?;
        let (table, mut state_shapes) = (WeightTable::new(&config), Vec::new());
        // The structure and the shapes come first, then the tensors: nothing is allocated that the file does not
        // hold.
        let empty = || ctx.empty(&[0], DType::F32);
        let mut weights = DecoderWeights::build(
            &config,
            &table,
            |_| empty(),
            |state| {
                state_shapes.push(state.shape.clone());
                empty()
            },
        );
        let mut used: BTreeSet<String> =
            FREQUENCIES_BY_LENGTH.into_iter().chain([FREQUENCIES]).map(str::to_owned).collect();
        if config.tie_embeddings {
            used.insert("output.weight".to_owned());
        }
        for ((_, _, to), spec) in weights.entries_mut().into_iter().zip(table.specs()) {
            let heads = match spec.role {
                WeightRole::Q | WeightRole::QBias => config.num_heads,
                WeightRole::K | WeightRole::KBias => config.num_kv_heads,
                _ => 0,
            };
            let heads = if architecture.has_rotary_neighbours { heads } else { 0 };
            let is_product = spec.role.is_product();
            let (place, num_encoder_layers) = (self.place(&spec.name, &spec.shape), config.num_encoder_layers());
            let form = Read { shape: &spec.shape, heads, may_be_blocks: is_product };
            let tensor = match part.of_tensor(spec, num_encoder_layers) {
                TensorPart::Whole => self.read(ctx, &place, form, &mut used)?,
                TensorPart::Experts(experts) => self.read_experts(ctx, &place, form, &experts, &mut used)?,
                TensorPart::Nothing => {
                    self.check(ctx, &place, form, &mut used)?;
                    continue;
                }
            };
            *to = if is_product { tensor } else { elementwise::cast(ctx, &tensor, DType::F32) };
        }
        let states: Vec<String> = weights.states().into_iter().map(|(name, _)| name).collect();
        for ((name, to), shape) in states.iter().zip(weights.states_mut()).zip(state_shapes) {
            let form = Read { shape: &shape, heads: 0, may_be_blocks: false };
            if !part.has_all_else() {
                self.check(ctx, &self.place(name, &shape), form, &mut used)?;
                continue;
            }
            let tensor = self.read(ctx, &self.place(name, &shape), form, &mut used)?;
            *to = elementwise::cast(ctx, &tensor, DType::F32);
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

    /// Fails if the file has fewer tensors than the model has layers, before the list of the layers' names is
    /// allocated.
    fn check_layers(&self, config: &ModelConfig) -> Result<(), GgufError> {
        let (layers, tensors) = (config.num_layers, self.tensors().len());
        if layers <= tensors {
            return Ok(());
        }
        let key = format!("{}.block_count", self.architecture()?);
        Err(self.wrong_key(&key, format!("is {layers}: the file has {tensors} tensors in all")))
    }

    /// Finds our tensor `name` in the file.
    fn place(&self, name: &str, shape: &[usize]) -> Place {
        let Some((layer, local)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) else {
            return Place::Whole(match name {
                "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
                "model.norm.weight" => "output_norm.weight".to_owned(),
                "model.norm.bias" => "output_norm.bias".to_owned(),
                "lm_head.weight" => "output.weight".to_owned(),
                "lm_head.bias" => "output.bias".to_owned(),
                other => other.to_owned(),
            });
        };
        let there = |theirs: &str| format!("blk.{layer}.{theirs}");
        // Files of Mixtral's first months have one tensor per expert.
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
                "mlp.experts.gate_up_proj_bias" => Place::JoinedVectors([there(gate), there(up)]),
                _ => Place::Joined([there(gate), there(up)]),
            };
        }
        if local == "mlp.experts.down_proj" && self.tensors().contains_key(&there("ffn_down.0.weight")) {
            return one_by_one(&["ffn_down"]);
        }
        let has = |theirs: &str| self.tensors().contains_key(&there(theirs));
        if local == "self_attn.kv_b_proj.weight" && !has("attn_kv_b.weight") {
            return Place::Widening([there("attn_k_b.weight"), there("attn_v_b.weight")]);
        }
        if local == "post_attention_layernorm.weight" && has("post_attention_norm.weight") {
            return Place::Whole(there("post_attention_norm.weight"));
        }
        let theirs = LAYER_NAMES.iter().find(|(ours, _)| *ours == local).map_or(local, |(_, theirs)| theirs);
        Place::Whole(there(theirs))
    }

    /// Reads one of our tensors.
    fn read(
        &self,
        ctx: &Context,
        place: &Place,
        form: Read<'_>,
        used: &mut BTreeSet<String>,
    ) -> Result<Tensor, GgufError> {
        let shape = form.shape;
        if let Place::Widening(names) = place {
            return self.widening(ctx, names, shape, used);
        }
        let pieces = self.pieces(place, shape, used)?;
        let dtype = form.dtype(&pieces);
        Ok(self.read_pieces(ctx, &pieces, form, dtype))
    }

    /// Reads the given experts, ascending, of a stack; perhaps none.
    fn read_experts(
        &self,
        ctx: &Context,
        place: &Place,
        form: Read<'_>,
        experts: &[usize],
        used: &mut BTreeSet<String>,
    ) -> Result<Tensor, GgufError> {
        let num_experts = form.shape[0];
        let pieces = self.pieces(place, form.shape, used)?;
        let (dtype, shape) = (form.dtype(&pieces), part_shape(form.shape, experts));
        if experts.is_empty() {
            return Ok(ctx.empty(&shape, dtype));
        }
        let pieces = match (&*pieces, as_range(experts)) {
            ([whole], Some(range)) => vec![whole.slice(range, num_experts)],
            ([whole], None) => experts.iter().map(|&expert| whole.nth(expert, num_experts)).collect(),
            _ => chosen(&pieces, num_experts, experts),
        };
        Ok(self.read_pieces(ctx, &pieces, Read { shape: &shape, ..form }, dtype))
    }

    /// Checks that the file has one of our tensors, without reading it.
    fn check(
        &self,
        ctx: &Context,
        place: &Place,
        form: Read<'_>,
        used: &mut BTreeSet<String>,
    ) -> Result<(), GgufError> {
        match place {
            Place::Widening(names) => self.widening(ctx, names, form.shape, used).map(drop),
            place => self.pieces(place, form.shape, used).map(drop),
        }
    }

    /// Makes a tensor of consecutive slices.
    fn read_pieces(&self, ctx: &Context, pieces: &[Part<'_>], form: Read<'_>, dtype: DType) -> Tensor {
        let shape = form.shape;
        if form.heads == 0
            && let Some(tensor) = self.lent(ctx, pieces, shape, dtype)
        {
            return tensor;
        }
        let mut tensor = ctx.empty(shape, dtype);
        if pieces.iter().all(|part| part.is_stored_as(dtype)) {
            let mut to = tensor.bytes_mut();
            for part in pieces {
                let (here, rest) = to.split_at_mut(part.bytes.len());
                here.copy_from_slice(&form.in_halves(part.bytes, part.bytes.len() / shape[0].max(1)));
                to = rest;
            }
            return tensor;
        }
        // One slice at a time, so that no second copy of a stack is made.
        let mut values = vec![0.0; tensor.len() / pieces.len()];
        for (i, part) in pieces.iter().enumerate() {
            part.ty.decode(part.bytes, &mut values);
            let values = form.in_halves(&values, shape[1..].iter().product());
            let range = i * values.len()..(i + 1) * values.len();
            if dtype == DType::F32 {
                tensor.f32s_mut()[range].copy_from_slice(&values);
            } else {
                tensor.bf16s_mut()[range].iter_mut().zip(&*values).for_each(|(to, &x)| *to = bf16::from_f32(x));
            }
        }
        tensor
    }

    /// Builds the up-projection `[H (N + w), L]` of latent attention from that of keys `[H, L, N]` and that of values
    /// `[H, w, L]`.
    /// H heads, N width of a key without its rotated part, w width of a value, L latent width.
    fn widening(
        &self,
        ctx: &Context,
        names: &[String; 2],
        shape: &[usize],
        used: &mut BTreeSet<String>,
    ) -> Result<Tensor, GgufError> {
        let found = &self.tensor_info(&names[0])?.shape;
        let rank = shape[1];
        let (heads, plain) = match found[..] {
            [heads, _, plain] if heads > 0 && shape[0].is_multiple_of(heads) && shape[0] / heads >= plain => {
                (heads, plain)
            }
            _ => {
                let (path, found, expected) = (self.path().to_owned(), found.clone(), vec![0, rank, 0]);
                return Err(GgufError::WrongShape { path, tensor: names[0].clone(), found, expected });
            }
        };
        let wide = shape[0] / heads;
        let keys = self.part(&names[0], &[heads, rank, plain], used)?;
        let values = self.part(&names[1], &[heads, wide - plain, rank], used)?;
        let decoded = |part: &Part<'_>, len: usize| {
            let mut numbers = vec![0.0; len];
            part.ty.decode(part.bytes, &mut numbers);
            numbers
        };
        let (keys, values) = (decoded(&keys, heads * rank * plain), decoded(&values, heads * (wide - plain) * rank));
        let mut tensor = ctx.empty(shape, DType::F32);
        for (row, to) in tensor.f32s_mut().chunks_exact_mut(rank.max(1)).enumerate() {
            let (head, row) = (row / wide, row % wide);
            if row < plain {
                to.iter_mut().enumerate().for_each(|(l, to)| *to = keys[(head * rank + l) * plain + row]);
            } else {
                to.copy_from_slice(&values[(head * (wide - plain) + row - plain) * rank..][..rank]);
            }
        }
        Ok(tensor)
    }

    /// Returns the consecutive slices that make one of our tensors of this shape.
    fn pieces(&self, place: &Place, shape: &[usize], used: &mut BTreeSet<String>) -> Result<Vec<Part<'_>>, GgufError> {
        let len: usize = shape.iter().product();
        match place {
            Place::Whole(name) => Ok(vec![self.part(name, shape, used)?]),
            Place::Joined(names) => {
                let (matrices, rows) = if let [e, rows, _] = *shape { (e, rows) } else { (1, shape[0]) };
                let half = [matrices, rows / 2, *shape.last().unwrap_or(&1)];
                let [gate, up] = [self.part(&names[0], &half, used)?, self.part(&names[1], &half, used)?];
                Ok((0..matrices).flat_map(|e| [gate.nth(e, matrices), up.nth(e, matrices)]).collect())
            }
            Place::JoinedVectors(names) => {
                let half = [shape[0], shape[1] / 2];
                let [gate, up] = [self.part(&names[0], &half, used)?, self.part(&names[1], &half, used)?];
                Ok((0..half[0]).flat_map(|e| [gate.nth(e, half[0]), up.nth(e, half[0])]).collect())
            }
            Place::Widening(_) => Ok(Vec::new()),
            Place::PerExpert(names) => {
                let matrix = [len / shape[2] / names.len(), shape[2]];
                names.iter().map(|name| self.part(name, &matrix, used)).collect()
            }
        }
    }

    /// Returns the tensor `name`. Fails if it is missing or of another shape, where leading dims of 1 do not count.
    fn part(&self, name: &str, shape: &[usize], used: &mut BTreeSet<String>) -> Result<Part<'_>, GgufError> {
        let info = self.tensor_info(name)?;
        let essential = |shape: &[usize]| shape.iter().copied().skip_while(|&dim| dim == 1).collect::<Vec<_>>();
        if essential(&info.shape) != essential(shape) {
            let (path, found, expected) = (self.path().to_owned(), info.shape.clone(), shape.to_vec());
            return Err(GgufError::WrongShape { path, tensor: name.to_owned(), found, expected });
        }
        used.insert(name.to_owned());
        Ok(Part { ty: info.ty, file: info.file, start: info.range.start, bytes: self.bytes(info) })
    }

    /// Borrows the tensor from the file, whole or in slices, if all of it is of type `dtype`.
    fn lent(&self, ctx: &Context, parts: &[Part<'_>], shape: &[usize], dtype: DType) -> Option<Tensor> {
        let lent = |part: &Part<'_>, shape: &[usize]| {
            let lent = || Tensor::from_foreign(self.files[part.file].1.clone(), part.range(), shape, dtype);
            part.is_stored_as(dtype).then(lent).flatten()
        };
        if let [part] = parts {
            return lent(part, shape);
        }
        let (cols, rows) = (*shape.last()?, shape.iter().rev().skip(1).product::<usize>());
        let piece = [rows / parts.len().max(1), cols];
        let pieces: Option<Vec<Tensor>> = parts.iter().map(|part| lent(part, &piece)).collect();
        Tensor::of_pieces(ctx.pool(), pieces?, shape)
    }
}

/// The way to read one of our tensors.
#[derive(Clone, Copy)]
struct Read<'a> {
    shape: &'a [usize],
    /// The number of heads whose rows are stored as rotating pairs and have to become halves; 0 keeps the rows'
    /// order.
    heads: usize,
    /// True if the tensor may stay in blocks.
    may_be_blocks: bool,
}

impl Read<'_> {
    /// Returns the common type of the slices, or else a float type that holds all of them.
    fn dtype(self, pieces: &[Part<'_>]) -> DType {
        let first = pieces.first().map_or(DType::F32, |part| part.ty.own());
        let is_same = pieces.iter().all(|part| part.ty.own() == first);
        match first {
            dtype if is_same && (self.may_be_blocks || !dtype.is_quantized()) => dtype,
            _ if pieces.iter().any(|part| matches!(part.ty.own(), DType::F32 | DType::F16)) => DType::F32,
            _ => DType::BF16,
        }
    }

    /// Undoes the reordering of llama.cpp's converter: of a head's h rows, `2 i` and `2 i + 1` become `i` and `i + h
    /// / 2`. A row is `row_len` values, of any type.
    fn in_halves<'b, T: Copy>(&self, values: &'b [T], row_len: usize) -> Cow<'b, [T]> {
        if self.heads == 0 {
            return Cow::Borrowed(values);
        }
        let head_dim = self.shape[0] / self.heads;
        let rows: Vec<&[T]> = values.chunks_exact(row_len.max(1)).collect();
        let source = |row: usize| {
            let (head, row) = (row / head_dim, row % head_dim);
            head * head_dim + 2 * (row % (head_dim / 2)) + row / (head_dim / 2)
        };
        (0..rows.len()).flat_map(|row| rows[source(row)].iter().copied()).collect::<Vec<_>>().into()
    }
}

/// A range of elements of a file.
#[derive(Clone, Copy)]
struct Part<'a> {
    ty: GgmlType,
    /// The index of the file.
    file: usize,
    /// The offset of the bytes in the file.
    start: usize,
    bytes: &'a [u8],
}

impl Part<'_> {
    /// Returns the range of the bytes in the file.
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes.len()
    }

    /// Returns true if its bytes are those of a tensor of `dtype` on this machine.
    fn is_stored_as(&self, dtype: DType) -> bool {
        self.ty.own() == dtype && (cfg!(target_endian = "little") || dtype.is_quantized())
    }

    /// Returns one of `count` equal parts.
    fn nth(self, index: usize, count: usize) -> Self {
        self.slice(index..index + 1, count)
    }

    /// Returns consecutive ones of `count` equal parts.
    fn slice(self, range: Range<usize>, count: usize) -> Self {
        let len = self.bytes.len() / count;
        Self { start: self.start + range.start * len, bytes: &self.bytes[range.start * len..range.end * len], ..self }
    }
}
