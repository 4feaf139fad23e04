//! The mapping from the name of one of our tensors to the tensors on disk that hold it.
//!
//! Our names are those of `DecoderWeights::tensors`: experts stacked, gate and up joined. A tensor of ours is one or
//! more consecutive slices. A slice is a tensor on disk, whole or seen through strides (transposed, interleaved, or a
//! part of it). Reading and writing use the same description.

use super::family::Family;

/// The form of one of our tensors on disk.
pub(crate) struct Rule {
    /// Our name; in a layer, without `model.layers.N.`. A rule whose name begins with `encoder.` is for an encoder's
    /// layers, and takes precedence there.
    pub(crate) ours: &'static str,
    /// The form on disk.
    pub(crate) form: Form,
}

/// The form of a tensor on disk. In a layer, names are without the layer's prefix.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    /// One tensor of the same elements.
    Whole(&'static str),
    /// One matrix, or stack of matrices, each transposed.
    Transposed(&'static str),
    /// A transposed stack in which the columns of gate and up alternate (GPT-OSS).
    Interleaved(&'static str),
    /// A stack of vectors in which the elements of gate and up alternate.
    InterleavedVectors(&'static str),
    /// A transposed stack in MXFP4: `NAME_blocks` and `NAME_scales`.
    Mxfp4 {
        /// The name without `_blocks`.
        name: &'static str,
        /// True if gate and up alternate.
        is_interleaved: bool,
    },
    /// Several tensors whose rows, or elements, are concatenated: gate and up. Without a gate, the last one alone.
    Joined(&'static [&'static str]),
    /// Tensors joined for each expert, with the expert's number in place of `{e}`.
    PerExpert(&'static [&'static str]),
    /// One of three equal parts of the rows of a transposed matrix, or of a vector (GPT-2's queries, keys and
    /// values).
    Third {
        /// The name.
        name: &'static str,
        /// The part: 0, 1 or 2.
        index: usize,
    },
}

/// The form of tensors in most families, where it differs from ours.
const USUAL: &[Rule] = &[
    Rule { ours: "mlp.gate_up_proj", form: Form::Joined(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]) },
    Rule { ours: "mlp.down_proj", form: Form::Whole("mlp.down_proj.weight") },
    Rule {
        ours: "mlp.experts.gate_up_proj",
        form: Form::PerExpert(&["mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"]),
    },
    Rule { ours: "mlp.experts.down_proj", form: Form::PerExpert(&["mlp.experts.{e}.down_proj.weight"]) },
    // Experts stacked, as `transformers` writes them with `save_original_format=False`.
    Rule { ours: "mlp.experts.gate_up_proj", form: Form::Whole("mlp.experts.gate_up_proj") },
    Rule { ours: "mlp.experts.down_proj", form: Form::Whole("mlp.experts.down_proj") },
    Rule {
        ours: "mlp.shared_experts.gate_up_proj",
        form: Form::Joined(&["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"]),
    },
    Rule { ours: "mlp.shared_experts.down_proj", form: Form::Whole("mlp.shared_experts.down_proj.weight") },
];

/// Our names of a dense feed-forward's tensors.
const DENSE: [&str; 4] = ["mlp.gate_up_proj", "mlp.down_proj", "mlp.gate_up_proj_bias", "mlp.down_proj_bias"];

/// A part of one of our tensors and the tensor on disk that holds it.
#[derive(Clone, Debug)]
pub(crate) struct TensorSlice {
    pub(crate) name: String,
    /// The shape of the tensor on disk.
    pub(crate) shape: Vec<usize>,
    /// The elements that belong to the part; none if all do, in order.
    pub(crate) view: Option<View>,
    /// True if the values are MXFP4, in two tensors.
    pub(crate) is_mxfp4: bool,
}

impl TensorSlice {
    /// Returns the slice and its view, if it is in MXFP4.
    pub(crate) fn as_mxfp4(&self) -> Option<(&Self, View)> {
        self.view.filter(|_| self.is_mxfp4).map(|view| (self, view))
    }
}

/// A strided view of a tensor on disk: `matrices` matrices of `rows` rows of `cols` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The first element.
    pub(crate) start: usize,
    /// Elements from one matrix, row and column to the next.
    pub(crate) strides: [usize; 3],
    /// True if gate and up rows alternate on disk: our row r of the first half is row 2 r, and row `rows / 2` + r is
    /// row 2 r + 1.
    pub(crate) is_interleaved: bool,
}

impl View {
    /// Returns the row on disk that is row `row` of ours.
    pub(crate) fn row_there(&self, row: usize) -> usize {
        let half = self.rows / 2;
        if self.is_interleaved { 2 * (row % half) + row / half } else { row }
    }

    /// Returns true if the view covers a whole stack, each matrix transposed.
    pub(crate) fn is_transposed(&self) -> bool {
        self.start == 0 && self.strides == [self.rows * self.cols, 1, self.rows]
    }

    /// Calls `f` with the index of each of our elements, in order, and its index on disk.
    pub(crate) fn for_each(&self, mut f: impl FnMut(usize, usize)) {
        let mut ours = 0;
        for matrix in 0..self.matrices {
            for row in 0..self.rows {
                let start = self.start + matrix * self.strides[0] + self.row_there(row) * self.strides[1];
                for col in 0..self.cols {
                    f(ours, start + col * self.strides[2]);
                    ours += 1;
                }
            }
        }
    }
}

/// Lists every form in which a family may store the tensor `name` of shape `shape`; the first is the one to write.
pub(crate) fn forms(family: &Family, name: &str, shape: &[usize], is_gated: bool) -> Vec<Vec<TensorSlice>> {
    let Name { layer, is_encoder, local } = Name::parse(name);
    let prefixes: Vec<String> = match layer {
        Some(layer) if is_encoder => vec![format!("{}{layer}.", family.encoder_layers)],
        Some(layer) => family.layers.iter().map(|layers| format!("{layers}{layer}.")).collect(),
        None => vec![String::new()],
    };
    // A dense feed-forward is a stack of one matrix in memory, and a plain matrix on disk.
    let shape = if DENSE.contains(&local) { &shape[1..] } else { shape };
    let rules = || family.rules.iter().chain(USUAL);
    let is_own = |rule: &&Rule| is_encoder && rule.ours.strip_prefix("encoder.") == Some(local);
    let has_own = rules().any(|rule| is_own(&rule));
    let mut forms = Vec::new();
    for prefix in &prefixes {
        let rules = rules().filter(|rule| if has_own { is_own(rule) } else { rule.ours == local });
        forms.extend(rules.map(|rule| slices(rule.form, prefix, shape, is_gated)));
    }
    if forms.is_empty() {
        forms.extend(prefixes.iter().map(|prefix| vec![whole(name_on_disk(prefix, local), shape)]));
    }
    forms
}

fn name_on_disk(prefix: &str, local: &str) -> String {
    format!("{prefix}{local}")
}

/// The parsed name of one of our tensors.
struct Name<'a> {
    /// The number of the tensor's layer, if it is in one.
    layer: Option<&'a str>,
    /// True if the layer is an encoder's.
    is_encoder: bool,
    /// The name within the layer.
    local: &'a str,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Self {
        let in_layer = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'));
        match (in_layer("model.layers."), in_layer("model.encoder.layers.")) {
            (Some((layer, local)), _) => Self { layer: Some(layer), is_encoder: false, local },
            (_, Some((layer, local))) => Self { layer: Some(layer), is_encoder: true, local },
            _ => Self { layer: None, is_encoder: false, local: name },
        }
    }
}

fn whole(name: String, shape: &[usize]) -> TensorSlice {
    TensorSlice { name, shape: shape.to_vec(), view: None, is_mxfp4: false }
}

fn slices(form: Form, prefix: &str, shape: &[usize], is_gated: bool) -> Vec<TensorSlice> {
    let on_disk = |local: &str| name_on_disk(prefix, local);
    let (matrices, rows, cols) = match *shape {
        [e, rows, cols] => (e, rows, cols),
        [rows, cols] => (1, rows, cols),
        _ => (1, shape.iter().product(), 1),
    };
    let transposed =
        |is_interleaved| View { matrices, rows, cols, start: 0, strides: [rows * cols, 1, rows], is_interleaved };
    let is_stack = shape.len() == 3;
    let stack = |shape: [usize; 2]| if is_stack { vec![matrices, shape[0], shape[1]] } else { shape.to_vec() };
    let seen = |name: &str, shape: Vec<usize>, view: View| TensorSlice {
        name: on_disk(name),
        shape,
        view: Some(view),
        is_mxfp4: false,
    };
    match form {
        Form::Whole(name) => vec![whole(on_disk(name), shape)],
        Form::Transposed(name) => vec![seen(name, stack([cols, rows]), transposed(false))],
        Form::Interleaved(name) => vec![seen(name, stack([cols, rows]), transposed(true))],
        Form::InterleavedVectors(name) => {
            // Each vector is a row on disk; its elements are seen as rows of one column each.
            let [vectors, len] = [rows, cols];
            let view =
                View { matrices: vectors, rows: len, cols: 1, start: 0, strides: [len, 1, 1], is_interleaved: true };
            vec![seen(name, vec![vectors, len], view)]
        }
        Form::Mxfp4 { name, is_interleaved } => {
            // Blocks hold neighbours of a row of ours, which is a row of the transposed matrix.
            let view = View { strides: [rows * cols, cols, 1], ..transposed(is_interleaved) };
            let shape = vec![matrices, rows, cols];
            vec![TensorSlice { name: on_disk(name), shape, view: Some(view), is_mxfp4: true }]
        }
        Form::Joined(names) => {
            let names = joined(names, is_gated);
            let part = [rows / names.len(), cols];
            // The parts of a vector are vectors.
            let part = &part[..shape.len().min(2)];
            names.iter().map(|name| whole(on_disk(name), part)).collect()
        }
        Form::PerExpert(names) => {
            let names = joined(names, is_gated);
            let one = |e: usize, name: &str| {
                whole(on_disk(&name.replace("{e}", &e.to_string())), &[rows / names.len(), cols])
            };
            (0..matrices).flat_map(|e| names.iter().map(move |name| (e, name))).map(|(e, name)| one(e, name)).collect()
        }
        Form::Third { name, index } => {
            let (shape, view) = if cols == 1 {
                (vec![3 * rows], View { strides: [0, 1, 1], start: index * rows, ..transposed(false) })
            } else {
                let strides = [0, 1, 3 * rows];
                (vec![cols, 3 * rows], View { strides, start: index * rows, ..transposed(false) })
            };
            vec![seen(name, shape, view)]
        }
    }
}

/// Returns the names of gate and up; without a gate, of up alone.
fn joined(names: &'static [&'static str], is_gated: bool) -> &'static [&'static str] {
    if is_gated || names.len() < 2 { names } else { &names[1..] }
}
