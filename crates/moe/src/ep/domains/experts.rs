//! A layer's experts on their way inside a domain: whole, or as differences of which the largest numbers travel.
//!
//! A rank's message holds, tensor after tensor, its experts one after another. All ranks give of a tensor the same
//! bytes for each expert, so that they know each other's lengths.

use std::sync::Arc;

use moeworks_comm::CommError;
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_tensor::{DType, Tensor, bf16};

use super::codec::Codec;
use super::messages::PendingGather;
use super::{Domain, DomainBase, DomainPass, LayerPlacement, LayerRanks};
use crate::MoeWeights;

/// The experts of a layer as the other ranks of the domain have them.
pub(super) struct Remembered {
    /// The experts that each member gave.
    given: Vec<Vec<usize>>,
    /// For each matrix of experts the numbers of all given experts, in the order of members.
    matrices: Vec<Vec<f32>>,
}

/// The form in which the experts of a pass travel.
enum Form {
    Whole {
        /// True if they are the base of the differences that follow.
        are_remembered: bool,
    },
    /// Differences from what is remembered.
    Changes,
    /// Differences from these mean experts, one for each matrix.
    FromMean(Vec<Vec<f32>>),
}

/// The bytes of an expert's part of one tensor.
#[derive(Clone, Copy)]
enum Piece {
    /// The numbers as they are.
    Whole { bytes: usize },
    /// The largest differences.
    Largest(Codec),
}

impl Piece {
    fn bytes(self) -> usize {
        match self {
            Self::Whole { bytes } => bytes,
            Self::Largest(codec) => codec.bytes(),
        }
    }
}

/// Returns the numbers of one expert in a tensor `[E, ..]`.
fn num_of_expert(tensor: &Tensor) -> usize {
    tensor.shape()[1..].iter().product()
}

/// Returns whether a tensor has a matrix for each expert. Biases always travel whole.
fn is_of_matrices(tensor: &Tensor) -> bool {
    tensor.shape().len() > 2
}

/// Lists the tensors of experts, the matrices first.
fn tensors(weights: &MoeWeights) -> Vec<&Tensor> {
    let biases = weights.biases.iter().flat_map(|(gate_up, down)| [gate_up, down]);
    [&weights.gate_up, &weights.down].into_iter().chain(biases).collect()
}

/// The part of a gathering that a rank sends.
pub(super) struct Sender<'a> {
    pub(super) ctx: &'a Context,
    pub(super) domain: &'a Domain,
    /// The experts that each member gives.
    pub(super) given: &'a [Vec<usize>],
    /// The experts of this rank, ascending.
    pub(super) own: &'a [usize],
    pub(super) layer: usize,
}

/// A gathering under way.
pub(super) struct UnderWay {
    pending: PendingGather,
    form: Form,
    pieces: Vec<Piece>,
    layer: usize,
}

impl Sender<'_> {
    /// Starts to gather the experts of the domain.
    pub(super) fn start(&self, weights: &MoeWeights, is_training: bool) -> Result<UnderWay, CommError> {
        let form = self.form(weights, is_training)?;
        let pieces = pieces(self.domain, &form, weights);
        let mut sent = Vec::new();
        for (index, (tensor, &piece)) in tensors(weights).into_iter().zip(&pieces).enumerate() {
            match piece {
                Piece::Whole { bytes } => self.append_whole(tensor, bytes, &mut sent),
                Piece::Largest(codec) => {
                    self.append_largest(index, tensor, Differences { form: &form, codec }, &mut sent);
                }
            }
        }
        let pending = self.domain.start_gather(sent, &sizes(self.given, &pieces))?;
        Ok(UnderWay { pending, form, pieces, layer: self.layer })
    }

    fn given_here(&self) -> &[usize] {
        &self.given[self.domain.place]
    }

    /// Returns the row of an expert among those of this rank.
    fn row(&self, expert: usize) -> usize {
        self.own.binary_search(&expert).expect("an expert that the rank holds")
    }

    fn form(&self, weights: &MoeWeights, is_training: bool) -> Result<Form, CommError> {
        let options = &self.domain.options;
        if options.keep >= 1.0 || !is_training {
            return Ok(Form::Whole { are_remembered: false });
        }
        if options.base == DomainBase::Mean {
            let matrices = tensors(weights).into_iter().filter(|tensor| is_of_matrices(tensor));
            return Ok(Form::FromMean(matrices.map(|tensor| self.mean(tensor)).collect::<Result<_, _>>()?));
        }
        let memory = self.domain.memory();
        let is_known = memory.experts.get(&self.layer).is_some_and(|remembered| remembered.given == self.given);
        Ok(if is_known { Form::Changes } else { Form::Whole { are_remembered: true } })
    }

    /// Computes the mean expert of the domain in one tensor.
    fn mean(&self, tensor: &Tensor) -> Result<Vec<f32>, CommError> {
        let (exact, size) = (cast(self.ctx, tensor, DType::F32), num_of_expert(tensor));
        let mut mean = vec![0.0_f32; size];
        for &expert in self.given_here() {
            let row = &exact.f32s()[self.row(expert) * size..(self.row(expert) + 1) * size];
            mean.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        self.domain.sum(&mut mean)?;
        let share = 1.0 / self.given.iter().map(Vec::len).sum::<usize>().max(1) as f32;
        mean.iter_mut().for_each(|sum| *sum *= share);
        Ok(mean)
    }

    fn append_whole(&self, tensor: &Tensor, bytes: usize, sent: &mut Vec<u8>) {
        for &expert in self.given_here() {
            let start = sent.len();
            sent.resize(start + bytes, 0);
            tensor.read_bytes(self.row(expert) * bytes, &mut sent[start..]);
        }
    }

    fn append_largest(&self, index: usize, tensor: &Tensor, differences: Differences<'_>, sent: &mut Vec<u8>) {
        let Differences { form, codec } = differences;
        let (exact, size) = (cast(self.ctx, tensor, DType::F32), num_of_expert(tensor));
        let memory = self.domain.memory();
        let first: usize = self.given[..self.domain.place].iter().map(Vec::len).sum();
        for (at, &expert) in self.given_here().iter().enumerate() {
            let base = match form {
                Form::FromMean(means) => &means[index][..],
                _ => &memory.experts[&self.layer].matrices[index][(first + at) * size..(first + at + 1) * size],
            };
            let row = &exact.f32s()[self.row(expert) * size..(self.row(expert) + 1) * size];
            let difference: Vec<f32> = row.iter().zip(base).map(|(x, base)| x - base).collect();
            let start = sent.len();
            sent.resize(start + codec.bytes(), 0);
            codec.encode(&difference, &mut sent[start..]);
        }
    }
}

/// The form of differences and their encoding.
#[derive(Clone, Copy)]
struct Differences<'a> {
    form: &'a Form,
    codec: Codec,
}

/// Returns the form of each tensor's part of an expert.
fn pieces(domain: &Domain, form: &Form, weights: &MoeWeights) -> Vec<Piece> {
    let piece = |tensor: &Tensor| {
        let num = num_of_expert(tensor);
        if matches!(form, Form::Whole { .. }) || !is_of_matrices(tensor) {
            return Piece::Whole { bytes: num * tensor.dtype().size() };
        }
        Piece::Largest(Codec::new(num, domain.options.keep, domain.options.base.values()))
    };
    tensors(weights).into_iter().map(piece).collect()
}

/// Returns the bytes that each member gives.
fn sizes(given: &[Vec<usize>], pieces: &[Piece]) -> Vec<usize> {
    let of_expert: usize = pieces.iter().map(|piece| piece.bytes()).sum();
    given.iter().map(|given| given.len() * of_expert).collect()
}

/// The experts of a domain on their way to a pass.
pub(in crate::ep) struct ArrivingExperts {
    pub(super) domain: Arc<Domain>,
    /// The placement of the pass.
    pub(super) placed: LayerPlacement,
    /// The experts that each member gives.
    pub(super) given: Vec<Vec<usize>>,
    /// None if communication failed.
    pub(super) under_way: Option<UnderWay>,
}

impl ArrivingExperts {
    /// Waits for the experts. `weights` are those of this rank, by the placement in force.
    pub(super) fn finish(self, ctx: &Context, own: &LayerRanks, weights: &MoeWeights) -> DomainPass {
        let Self { domain, placed, given, under_way } = self;
        let receiver = Receiver { ctx, domain: &domain, given: &given, held: &placed.held, own: own.held() };
        let finish = || match under_way {
            Some(under_way) => receiver.finish(under_way, own, weights).map(Some),
            None => Ok(None),
        };
        let whole = own.time("domain: gather", || own.attempt(None, finish));
        let nothing = |tensor: &Tensor| ctx.zeros(&receiver.shape(tensor), tensor.dtype());
        let whole = whole.unwrap_or_else(|| tensors(weights).into_iter().map(nothing).collect());
        let mut whole = whole.into_iter();
        let mut next = || whole.next().expect("as many tensors as were sent");
        let weights = MoeWeights {
            gate_up: next(),
            down: next(),
            biases: weights.biases.as_ref().map(|_| (next(), next())),
            ..weights.clone()
        };
        let ranks = LayerRanks { placed, ..own.clone() };
        DomainPass { ranks, weights, own: own.clone(), given, domain }
    }
}

/// The part of a gathering that a rank receives.
struct Receiver<'a> {
    ctx: &'a Context,
    domain: &'a Domain,
    given: &'a [Vec<usize>],
    /// The experts of the domain, ascending.
    held: &'a [usize],
    /// The experts of this rank by the placement in force, ascending.
    own: &'a [usize],
}

impl Receiver<'_> {
    /// Returns the shape of a tensor with the experts of the domain.
    fn shape(&self, tensor: &Tensor) -> Vec<usize> {
        [&[self.held.len()], &tensor.shape()[1..]].concat()
    }

    fn finish(&self, under_way: UnderWay, own: &LayerRanks, weights: &MoeWeights) -> Result<Vec<Tensor>, CommError> {
        let UnderWay { pending, form, pieces, layer } = under_way;
        let sizes = sizes(self.given, &pieces);
        let received = self.domain.finish_gather(pending, &sizes, &own.inner.traffic)?;
        let mut members = received.as_slice();
        let mut of_tensors = vec![Vec::new(); pieces.len()];
        for given in self.given {
            for (piece, of_tensor) in pieces.iter().zip(&mut of_tensors) {
                let (bytes, rest) = members.split_at(given.len() * piece.bytes());
                of_tensor.extend(bytes.chunks_exact(piece.bytes().max(1)));
                members = rest;
            }
        }
        let tensors = tensors(weights).into_iter().enumerate();
        match &form {
            Form::Whole { are_remembered } => {
                let whole = tensors.map(|(index, tensor)| self.whole(tensor, &of_tensors[index]));
                let whole = whole.collect::<Vec<_>>();
                if *are_remembered {
                    self.remember(layer, &whole);
                }
                Ok(whole)
            }
            form => Ok(tensors
                .map(|(index, tensor)| match pieces[index] {
                    Piece::Whole { .. } => self.whole(tensor, &of_tensors[index]),
                    Piece::Largest(codec) => {
                        let approximate = self.approximate(form, codec, [layer, index], &of_tensors[index]);
                        self.with_own(tensor, &approximate)
                    }
                })
                .collect()),
        }
    }

    /// Makes a tensor of experts that came as they are, in the order of members.
    fn whole(&self, tensor: &Tensor, experts: &[&[u8]]) -> Tensor {
        let mut whole = self.ctx.empty(&self.shape(tensor), tensor.dtype());
        for (row, expert) in experts.iter().zip(self.given.iter().flatten()) {
            if let Ok(place) = self.held.binary_search(expert) {
                whole.bytes_mut()[place * row.len()..(place + 1) * row.len()].copy_from_slice(row);
            }
        }
        whole
    }

    /// Remembers the matrices of the domain's experts.
    fn remember(&self, layer: usize, whole: &[Tensor]) {
        let numbers = |tensor: &Tensor| {
            let size = num_of_expert(tensor);
            let mut numbers = Vec::with_capacity(tensor.len());
            for expert in self.given.iter().flatten() {
                let place = self.held.binary_search(expert).expect("an expert of the domain");
                let row = place * size..(place + 1) * size;
                match tensor.dtype() {
                    DType::F32 => numbers.extend_from_slice(&tensor.f32s()[row]),
                    _ => numbers.extend(cast(self.ctx, tensor, DType::F32).f32s()[row].iter()),
                }
            }
            numbers
        };
        let matrices = whole.iter().filter(|tensor| is_of_matrices(tensor)).map(numbers).collect();
        self.domain.memory().experts.insert(layer, Remembered { given: self.given.to_vec(), matrices });
    }

    /// Adds what came to its base. Returns all given experts, in the order of members.
    fn approximate(&self, form: &Form, codec: Codec, [layer, index]: [usize; 2], experts: &[&[u8]]) -> Vec<f32> {
        if let Form::FromMean(means) = form {
            let approximate = |message: &&[u8]| {
                let mut numbers = means[index].clone();
                codec.add(message, &mut numbers);
                numbers
            };
            return experts.iter().flat_map(approximate).collect();
        }
        let mut memory = self.domain.memory();
        let Some(remembered) = memory.experts.get_mut(&layer) else { return Vec::new() };
        let numbers = &mut remembered.matrices[index];
        let size = numbers.len() / experts.len().max(1);
        for (numbers, message) in numbers.chunks_exact_mut(size.max(1)).zip(experts) {
            codec.add(message, numbers);
        }
        numbers.clone()
    }

    /// Makes a tensor of approximate experts `numbers`, in the order of members, with this rank's own from `tensor`.
    fn with_own(&self, tensor: &Tensor, numbers: &[f32]) -> Tensor {
        let mut whole = self.ctx.empty(&self.shape(tensor), tensor.dtype());
        let size = num_of_expert(tensor);
        for (at, expert) in self.given.iter().flatten().enumerate() {
            let Ok(place) = self.held.binary_search(expert) else { continue };
            let bytes = place * size * tensor.dtype().size()..(place + 1) * size * tensor.dtype().size();
            if let Ok(own) = self.own.binary_search(expert) {
                tensor.read_bytes(own * bytes.len(), &mut whole.bytes_mut()[bytes]);
                continue;
            }
            let row = &numbers[at * size..(at + 1) * size];
            let range = place * size..(place + 1) * size;
            match tensor.dtype() {
                DType::F32 => whole.f32s_mut()[range].copy_from_slice(row),
                _ => whole.bf16s_mut()[range].iter_mut().zip(row).for_each(|(to, &x)| *to = bf16::from_f32(x)),
            }
        }
        whole
    }
}
