//! Comparison of calls in debug builds: ranks exchange what they call beside the call itself, and name a rank that
//! differs.

use std::ffi::c_int;

use super::api::Handle;
use super::group::{Group, hash};
use crate::CommError;
use crate::error::{RankCall, disagreement, piece_disagreement};
use crate::operation::{Call, Operation};

/// The encoding of a call: its four words, and a hash of counts that must agree on all ranks.
type Words = [u64; 5];

/// A comparison in flight.
pub(crate) struct Check {
    pub(crate) requests: Vec<Handle>,
    own: Box<Words>,
    all: Vec<Words>,
    sent: Vec<u64>,
    announced: Vec<u64>,
    recv_counts: Vec<usize>,
}

impl Check {
    /// Starts the comparison. Messages between two ranks are not compared: a wrong size shows on arrival.
    pub(crate) fn start(group: &Group, operation: &Operation<'_>) -> Result<Option<Self>, CommError> {
        let call = operation.call;
        if !group.process.is_checked || matches!(call, Call::Send { .. } | Call::Receive { .. }) {
            return Ok(None);
        }
        let counts = match call {
            Call::AllGatherV => hash(operation.recv_counts),
            Call::ReduceScatter { .. } => hash(operation.send_counts),
            _ => 0,
        };
        let [a, b, c, d] = call.to_words();
        let size = group.size();
        let sent = match call {
            Call::AllToAllV => operation.send_counts.iter().map(|&count| count as u64).collect(),
            _ => vec![0; size],
        };
        let mut check = Self {
            requests: Vec::new(),
            own: Box::new([a, b, c, d, counts]),
            all: vec![[0; 5]; size],
            sent,
            announced: vec![0; size],
            recv_counts: operation.recv_counts.to_vec(),
        };
        check.post(group, call)?;
        Ok(Some(check))
    }

    fn post(&mut self, group: &Group, call: Call) -> Result<(), CommError> {
        let functions = group.functions();
        let byte = group.byte();
        let words = size_of::<Words>() as c_int;
        let (mut gather, mut exchange) = (0, 0);
        // SAFETY: all memory is on the heap and belongs to `self`, which is kept until the requests are done
        // (`Started`).
        unsafe {
            let (own, all) = (self.own.as_ptr().cast(), self.all.as_mut_ptr().cast());
            group.check(
                &call,
                (functions.iallgather)(own, words, byte, all, words, byte, group.internal_comm, &raw mut gather),
            )?;
            let (sent, announced) = (self.sent.as_ptr().cast(), self.announced.as_mut_ptr().cast());
            group.check(
                &call,
                (functions.ialltoall)(sent, 8, byte, announced, 8, byte, group.internal_comm, &raw mut exchange),
            )?;
        }
        self.requests = vec![gather, exchange];
        Ok(())
    }

    /// Compares the calls once all ranks have answered.
    pub(crate) fn verdict(&self, group: &Group) -> Result<(), CommError> {
        if self.all.iter().any(|words| *words != *self.own) {
            let calls = self.all.iter().zip(&group.members);
            let calls = calls.map(|(words, &rank)| RankCall { rank, text: describe(words) });
            return Err(group.fail(disagreement(&calls.collect::<Vec<_>>())));
        }
        if self.own[0] != Call::AllToAllV.to_words()[0] {
            return Ok(());
        }
        let mut pairs = self.announced.iter().zip(&self.recv_counts).enumerate();
        match pairs.find(|(_, (sent, expected))| **sent != **expected as u64) {
            None => Ok(()),
            Some((from, (&sent, &expected))) => {
                let (from, to) = (group.members[from], group.members[group.rank]);
                Err(group.fail(piece_disagreement(from, sent, to, expected as u64)))
            }
        }
    }
}

fn describe(&[a, b, c, d, counts]: &Words) -> String {
    match Call::from_words([a, b, c, d]) {
        None => "an unknown operation".to_owned(),
        Some(call @ (Call::AllGatherV | Call::ReduceScatter { .. })) => {
            format!("{call} with counts whose checksum is {counts:x}")
        }
        Some(call) => call.to_string(),
    }
}
