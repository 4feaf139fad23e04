//! A streaming checkpoint writer: weights arrive one after another, such as from other ranks, and only those that the
//! current tensor on disk is made of are in memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use moeworks_tensor::Tensor;

/// The weights of a model that arrive while they are written.
pub struct StreamedWeights<'a> {
    /// Name and shape of each weight, in the order of [`DecoderWeights::tensors`](crate::DecoderWeights::tensors).
    pub shapes: Vec<(String, Vec<usize>)>,
    /// The model's other state, such as router biases, which is in memory already:
    /// [`DecoderWeights::states`](crate::DecoderWeights::states).
    pub states: Vec<(String, &'a Tensor)>,
    /// Returns the next weight, in f32.
    pub next: &'a dyn Fn() -> io::Result<Tensor>,
}

/// The weights that have arrived and are still needed.
pub(super) struct StreamBuffer<'a> {
    weights: &'a StreamedWeights<'a>,
    received: RefCell<Received>,
}

#[derive(Default)]
struct Received {
    num_received: usize,
    tensors: BTreeMap<usize, Rc<Tensor>>,
    /// The number of parts of each weight that have yet to be written.
    num_parts: Vec<usize>,
}

impl<'a> StreamBuffer<'a> {
    pub(super) fn new(weights: &'a StreamedWeights<'a>) -> Self {
        Self { weights, received: RefCell::default() }
    }

    /// Sets the number of parts that each weight is written in.
    pub(super) fn expect(&self, num_parts: Vec<usize>) {
        self.received.borrow_mut().num_parts = num_parts;
    }

    pub(super) fn num_bytes(&self, index: usize) -> usize {
        size_of::<f32>() * self.weights.shapes[index].1.iter().product::<usize>()
    }

    /// Returns weight `index`, receiving weights until it is there, and counts one part as written. The last part
    /// frees it.
    fn next_part(&self, index: usize) -> io::Result<Rc<Tensor>> {
        let received = &mut *self.received.borrow_mut();
        while received.num_received <= index {
            let tensor = (self.weights.next)()?;
            let (name, shape) = &self.weights.shapes[received.num_received];
            if tensor.shape() != shape || tensor.num_bytes() != self.num_bytes(received.num_received) {
                return Err(io::Error::other(format!("{name} arrived as {tensor:?}, expected f32 of shape {shape:?}")));
            }
            received.tensors.insert(received.num_received, Rc::new(tensor));
            received.num_received += 1;
        }
        let used_up = || io::Error::other(format!("{} is written twice", self.weights.shapes[index].0));
        let tensor = received.tensors.get(&index).cloned().ok_or_else(used_up)?;
        received.num_parts[index] -= 1;
        if received.num_parts[index] == 0 {
            received.tensors.remove(&index);
        }
        Ok(tensor)
    }
}

/// The source of the bytes of one part of a weight.
pub(super) enum PartBytes<'a> {
    /// Bytes that are in memory.
    Lent(&'a [u8]),
    /// Bytes of a weight that has yet to arrive.
    Streamed {
        from: &'a StreamBuffer<'a>,
        /// The index of the weight.
        index: usize,
        /// The bytes of it.
        range: Range<usize>,
    },
}

impl<'a> PartBytes<'a> {
    pub(super) fn arrived(&self) -> io::Result<Arrived<'a>> {
        match self {
            Self::Lent(bytes) => Ok(Arrived::Lent(bytes)),
            Self::Streamed { from, index, range } => Ok(Arrived::Streamed(from.next_part(*index)?, range.clone())),
        }
    }
}

/// The bytes of a part, in memory.
pub(super) enum Arrived<'a> {
    Lent(&'a [u8]),
    Streamed(Rc<Tensor>, Range<usize>),
}

impl Arrived<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Lent(bytes) => bytes,
            Self::Streamed(tensor, range) => &tensor.bytes()[range.clone()],
        }
    }
}
