//! Weights that are written while they come, one after another, such as from other ranks: in memory are those that a tensor on disk is
//! made of, not the model.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use moeworks_tensor::Tensor;

/// The weights of a model that are not there yet.
pub struct ComingWeights<'a> {
    /// Name and shape of each, in the order of [`DecoderWeights::tensors`](crate::DecoderWeights::tensors).
    pub shapes: Vec<(String, Vec<usize>)>,
    /// What the model keeps beside its weights, which is there:
    /// [`DecoderWeights::states`](crate::DecoderWeights::states).
    pub states: Vec<(String, &'a Tensor)>,
    /// Gives the next of them, in f32.
    pub next: &'a dyn Fn() -> io::Result<Tensor>,
}

/// Those that have come and are still needed.
pub(super) struct Arrivals<'a> {
    weights: &'a ComingWeights<'a>,
    there: RefCell<There>,
}

#[derive(Default)]
struct There {
    num_come: usize,
    tensors: BTreeMap<usize, Rc<Tensor>>,
    /// Of each how many of its parts have yet to be written.
    num_parts: Vec<usize>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(weights: &'a ComingWeights<'a>) -> Self {
        Self { weights, there: RefCell::default() }
    }

    /// Says into how many parts each is divided.
    pub(super) fn expect(&self, num_parts: Vec<usize>) {
        self.there.borrow_mut().num_parts = num_parts;
    }

    pub(super) fn num_bytes(&self, index: usize) -> usize {
        size_of::<f32>() * self.weights.shapes[index].1.iter().product::<usize>()
    }

    /// The tensor of which one more part is written, which goes with its last. Those before it come first.
    fn take_part(&self, index: usize) -> io::Result<Rc<Tensor>> {
        let there = &mut *self.there.borrow_mut();
        while there.num_come <= index {
            let tensor = (self.weights.next)()?;
            let (name, shape) = &self.weights.shapes[there.num_come];
            if tensor.shape() != shape || tensor.num_bytes() != self.num_bytes(there.num_come) {
                return Err(io::Error::other(format!(
                    "{name} came as {tensor:?}, but f32 of shape {shape:?} is needed"
                )));
            }
            there.tensors.insert(there.num_come, Rc::new(tensor));
            there.num_come += 1;
        }
        let used_up = || io::Error::other(format!("{} is written twice", self.weights.shapes[index].0));
        let tensor = there.tensors.get(&index).cloned().ok_or_else(used_up)?;
        there.num_parts[index] -= 1;
        if there.num_parts[index] == 0 {
            there.tensors.remove(&index);
        }
        Ok(tensor)
    }
}

/// Where the bytes of a part of one of ours are.
pub(super) enum PartBytes<'a> {
    /// At hand.
    Lent(&'a [u8]),
    /// In a tensor that is yet to come.
    Coming {
        from: &'a Arrivals<'a>,
        /// Which one.
        index: usize,
        /// Of its bytes.
        range: Range<usize>,
    },
}

impl<'a> PartBytes<'a> {
    pub(super) fn arrived(&self) -> io::Result<Arrived<'a>> {
        match self {
            Self::Lent(bytes) => Ok(Arrived::Lent(bytes)),
            Self::Coming { from, index, range } => Ok(Arrived::Come(from.take_part(*index)?, range.clone())),
        }
    }
}

/// The bytes of a part, in memory.
pub(super) enum Arrived<'a> {
    Lent(&'a [u8]),
    Come(Rc<Tensor>, Range<usize>),
}

impl Arrived<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Lent(bytes) => bytes,
            Self::Come(tensor, range) => &tensor.bytes()[range.clone()],
        }
    }
}
