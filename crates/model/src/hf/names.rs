//! From the name of one of our tensors to the tensors on disk that hold it.
//!
//! Ours are named as `DecoderWeights::tensors` does: experts stacked, gate and up joined. A tensor of ours is some pieces,
//! one behind the other; a piece is a tensor on disk, whole or seen through strides (transposed, interleaved, or a part).
//! The same description serves reading and writing.

use super::family::Family;

/// Where a tensor of ours is on disk.
pub(crate) struct Rule {
    /// Our name; a layer's without `model.layers.N.`. With `encoder.` before it the rule is for an encoder's layers and comes
    /// before the others there.
    pub(crate) ours: &'static str,
    /// Its form on disk.
    pub(crate) form: Form,
}

/// The form of a tensor on disk. Names of a layer's tensors are without the part that all names of the layer share.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    /// One tensor of the same elements.
    Whole(&'static str),
    /// One matrix, or stack of matrices, each transposed.
    Transposed(&'static str),
    /// As `Transposed`, and the columns of gate and up alternate (GPT-OSS).
    Interleaved(&'static str),
    /// As `Interleaved` without a transposition: a stack of vectors of gate and up.
    InterleavedVectors(&'static str),
    /// As `Transposed`, in blocks of 32 four-bit floats with a scale each: `NAME_blocks` and `NAME_scales`.
    Mxfp4 {
        /// The name before `_blocks`.
        name: &'static str,
        /// Whether gate and up alternate.
        is_interleaved: bool,
    },
    /// The rows, or elements, of several tensors, one behind the other: gate and up. Without a gate the last alone.
    Joined(&'static [&'static str]),
    /// As `Joined` for each expert, whose number stands for `{e}`.
    PerExpert(&'static [&'static str]),
    /// One of three equal parts of a transposed matrix's rows, or of a vector (GPT-2's queries, keys and values).
    Third {
        /// The name.
        name: &'static str,
        /// Which part.
        index: usize,
    },
}

/// How most families store what they store differently from us.
const USUAL: &[Rule] = &[
    Rule { ours: "mlp.gate_up_proj", form: Form::Joined(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]) },
    Rule { ours: "mlp.down_proj", form: Form::Whole("mlp.down_proj.weight") },
    Rule {
        ours: "mlp.experts.gate_up_proj",
        form: Form::PerExpert(&["mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"]),
    },
    Rule { ours: "mlp.experts.down_proj", form: Form::PerExpert(&["mlp.experts.{e}.down_proj.weight"]) },
    // As in memory: `save_original_format=False`.
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
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) name: String,
    /// The shape of the tensor on disk.
    pub(crate) shape: Vec<usize>,
    /// Which of its elements they are; none: all, in order.
    pub(crate) view: Option<View>,
    /// Whether the values are four-bit floats in blocks, under two names.
    pub(crate) is_mxfp4: bool,
}

impl Piece {
    /// The piece and its view, if it is in blocks of four-bit floats.
    pub(crate) fn as_mxfp4(&self) -> Option<(&Self, View)> {
        self.view.filter(|_| self.is_mxfp4).map(|view| (self, view))
    }
}

/// Elements of a tensor on disk: those of `matrices` matrices of `rows` rows of `cols` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) matrices: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The first element.
    pub(crate) start: usize,
    /// Elements from one matrix, row and column to the next.
    pub(crate) strides: [usize; 3],
    /// Whether row r of ours is row 2 r there if it is in the first half, and an odd one otherwise.
    pub(crate) is_interleaved: bool,
}

impl View {
    /// Which row of a matrix there is row `row` of ours.
    pub(crate) fn row_there(&self, row: usize) -> usize {
        let half = self.rows / 2;
        if self.is_interleaved { 2 * (row % half) + row / half } else { row }
    }

    /// Whether it is all of a stack, each matrix transposed.
    pub(crate) fn is_transposed(&self) -> bool {
        self.start == 0 && self.strides == [self.rows * self.cols, 1, self.rows]
    }

    /// Calls `f` with the positions of our elements, in order, and theirs.
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

/// Every form in which a family may store the tensor `name` of shape `shape`, the one that we write first.
pub(crate) fn forms(family: &Family, name: &str, shape: &[usize], is_gated: bool) -> Vec<Vec<Piece>> {
    let Name { layer, is_encoder, local } = Name::of(name);
    let prefixes: Vec<String> = match layer {
        Some(layer) if is_encoder => vec![format!("{}{layer}.", family.encoder_layers)],
        Some(layer) => family.layers.iter().map(|layers| format!("{layers}{layer}.")).collect(),
        None => vec![String::new()],
    };
    // A dense feed-forward is a stack of one with us.
    let shape = if DENSE.contains(&local) { &shape[1..] } else { shape };
    let rules = || family.rules.iter().chain(USUAL);
    let is_own = |rule: &&Rule| is_encoder && rule.ours.strip_prefix("encoder.") == Some(local);
    let has_own = rules().any(|rule| is_own(&rule));
    let mut forms = Vec::new();
    for prefix in &prefixes {
        let rules = rules().filter(|rule| if has_own { is_own(rule) } else { rule.ours == local });
        forms.extend(rules.map(|rule| pieces(rule.form, prefix, shape, is_gated)));
    }
    if forms.is_empty() {
        forms.extend(prefixes.iter().map(|prefix| vec![whole(name_on_disk(prefix, local), shape)]));
    }
    forms
}

fn name_on_disk(prefix: &str, local: &str) -> String {
    format!("{prefix}{local}")
}

/// The parts of one of our names.
struct Name<'a> {
    /// The number of the tensor's layer, if it is in one.
    layer: Option<&'a str>,
    /// Whether that is an encoder's.
    is_encoder: bool,
    /// The name in the layer.
    local: &'a str,
}

impl<'a> Name<'a> {
    fn of(name: &'a str) -> Self {
        let in_layer = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'));
        match (in_layer("model.layers."), in_layer("model.encoder.layers.")) {
            (Some((layer, local)), _) => Self { layer: Some(layer), is_encoder: false, local },
            (_, Some((layer, local))) => Self { layer: Some(layer), is_encoder: true, local },
            _ => Self { layer: None, is_encoder: false, local: name },
        }
    }
}

fn whole(name: String, shape: &[usize]) -> Piece {
    Piece { name, shape: shape.to_vec(), view: None, is_mxfp4: false }
}

fn pieces(form: Form, prefix: &str, shape: &[usize], is_gated: bool) -> Vec<Piece> {
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
    let seen = |name: &str, shape: Vec<usize>, view: View| Piece {
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
            // A vector of ours is a row there: its elements are rows of one column each.
            let [vectors, len] = [rows, cols];
            let view =
                View { matrices: vectors, rows: len, cols: 1, start: 0, strides: [len, 1, 1], is_interleaved: true };
            vec![seen(name, vec![vectors, len], view)]
        }
        Form::Mxfp4 { name, is_interleaved } => {
            // The values of a row of the transposed matrix, that is of one of ours, are in blocks of neighbours.
            let view = View { strides: [rows * cols, cols, 1], ..transposed(is_interleaved) };
            let shape = vec![matrices, rows, cols];
            vec![Piece { name: on_disk(name), shape, view: Some(view), is_mxfp4: true }]
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

/// The names of gate and up; of up alone without a gate.
fn joined(names: &'static [&'static str], is_gated: bool) -> &'static [&'static str] {
    if is_gated || names.len() < 2 { names } else { &names[1..] }
}
