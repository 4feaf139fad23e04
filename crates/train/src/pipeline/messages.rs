//! Messages over the cuts between stages, from one stage group to another.
//!
//! A send is started and goes on by itself, so that no rank waits for one that is not there yet. Receives are started
//! early, too: a rank waits only for a message that it needs and that has not come.
//! Messages between two stage groups about the same stage come in the order in which the schedule sends them, which
//! the receiver knows: one that comes before its turn is laid aside.

use std::collections::HashMap;

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_model::ResidualStream;
use moeworks_moe::LayerStats;
use moeworks_ops::Context;
use moeworks_plan::Schedule;
use moeworks_plan::schedule::{Action, Chain, Kind};
use moeworks_tensor::{DType, Tensor};

use super::of_chain;

/// The first tag of these messages.
const FIRST_TAG: u32 = 16;
/// Numbers before each message.
const HEADER: usize = 4;

/// A residual stream or its gradient at a cut, and statistics of MoE layers: forward those before the cut, back
/// those of all.
pub(super) struct Parcel {
    pub(super) stream: ResidualStream,
    pub(super) stats: Vec<LayerStats>,
}

/// The cut that a parcel crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cut {
    /// True for a gradient, on its way back.
    pub(super) is_grad: bool,
    /// The stage that made it.
    pub(super) stage: u32,
    pub(super) microbatch: u32,
}

impl Cut {
    fn tag(self) -> u32 {
        FIRST_TAG + 2 * self.stage + u32::from(self.is_grad)
    }

    /// The stage that needs it.
    pub(super) fn destination(self) -> Option<u32> {
        if self.is_grad { self.stage.checked_sub(1) } else { Some(self.stage + 1) }
    }
}

/// The messages of one stage and direction from one pp index.
type Flow = (bool, u32, usize);

/// The flows to a stage group: for each the microbatches in the order in which they are sent.
pub(super) struct Flows {
    orders: HashMap<Flow, Vec<u32>>,
}

impl Flows {
    /// The flows to `pp_rank` of `schedule`.
    pub(super) fn new(schedule: &Schedule, pp_rank: usize) -> Self {
        let mut orders: HashMap<Flow, Vec<u32>> = HashMap::new();
        for (from, entries) in schedule.ranks.iter().enumerate().filter(|(from, _)| *from != pp_rank) {
            for (is_grad, chain) in [(false, Chain::Forward), (true, Chain::Backward)] {
                for action in of_chain(entries, chain).filter(|action| sends(schedule, *action)) {
                    let cut = Cut { is_grad, stage: action.stage, microbatch: action.microbatch };
                    let to = cut.destination().and_then(|stage| schedule.rank_of(stage, action.microbatch));
                    if to == Some(pp_rank as u32) {
                        orders.entry((is_grad, action.stage, from)).or_default().push(action.microbatch);
                    }
                }
            }
        }
        Self { orders }
    }
}

/// Returns whether the result of a stage leaves with `action`.
fn sends(schedule: &Schedule, action: Action) -> bool {
    match action.kind {
        Kind::SendOutput | Kind::SendGrad => true,
        _ => !schedule.has_messages() && Work::of(schedule, action).is_some_and(|work| work != Work::WeightGrad),
    }
}

/// A computation of a whole stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Forward,
    /// The gradient of the input, that of the weights for later.
    InputGrad,
    /// Both.
    Backward,
    WeightGrad,
}

impl Work {
    /// The computation that begins with `action`. Where the parts of MoE layers are actions of their own, all of a
    /// stage is computed with the first part of its forward, of its backward, and with the last of its weight
    /// gradients.
    pub(super) fn of(schedule: &Schedule, action: Action) -> Option<Self> {
        let last_layer = schedule.moe_layers_of(action.stage).saturating_sub(1);
        match action.kind {
            Kind::Forward => Some(Self::Forward),
            Kind::InputGrad => Some(Self::InputGrad),
            Kind::Backward => Some(Self::Backward),
            Kind::WeightGrad => Some(Self::WeightGrad),
            Kind::ForwardAttention if action.layer == 0 => Some(Self::Forward),
            Kind::BackwardCombine if action.layer == last_layer => Some(Self::InputGrad),
            Kind::WeightAttention if action.layer == 0 => Some(Self::WeightGrad),
            _ => None,
        }
    }
}

/// A part of a message on its way.
enum Sending {
    Numbers(Pending<Vec<f64>>),
    Tensor(Pending<Tensor>),
}

impl Sending {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        match self {
            Self::Numbers(pending) => pending.is_finished(),
            Self::Tensor(pending) => pending.is_finished(),
        }
    }

    fn finish(self) -> Result<(), CommError> {
        match self {
            Self::Numbers(pending) => pending.finish().map(drop),
            Self::Tensor(pending) => pending.finish().map(drop),
        }
    }
}

/// The messages of a rank with the ranks at its place in other stage groups.
pub(super) struct Line<'a> {
    ctx: &'a Context,
    comm: &'a dyn Communicator,
    sending: Vec<Sending>,
}

impl<'a> Line<'a> {
    pub(super) fn new(ctx: &'a Context, comm: &'a dyn Communicator) -> Self {
        Self { ctx, comm, sending: Vec::new() }
    }

    /// Starts to send a parcel to pp index `to`.
    pub(super) fn send(&mut self, cut: Cut, parcel: Parcel, to: usize) -> Result<(), CommError> {
        let Parcel { stream: ResidualStream { x, router_logits }, stats } = parcel;
        let numbers: Vec<f64> = stats.iter().flat_map(LayerStats::to_numbers).collect();
        let logits_width = router_logits.as_ref().map_or(0, Tensor::cols);
        let header = [x.rows(), x.cols(), logits_width, numbers.len()].map(|number| number as f64);
        let tag = cut.tag();
        let mut started = vec![Sending::Numbers(self.comm.start_send(header.to_vec(), to, tag)?)];
        if !numbers.is_empty() {
            started.push(Sending::Numbers(self.comm.start_send(numbers, to, tag)?));
        }
        for tensor in [Some(x), router_logits].into_iter().flatten() {
            started.push(Sending::Tensor(self.comm.start_send(tensor, to, tag)?));
        }
        self.sending.extend(started);
        Ok(())
    }

    /// Waits for the next parcel about a cut from pp index `from`.
    pub(super) fn receive(&self, cut: Cut, from: usize) -> Result<Parcel, CommError> {
        let header = self.start_header(cut, from)?.finish()?;
        self.start_body(header, cut, from)?.finish()
    }

    /// Starts to receive the header of the next parcel about a cut.
    fn start_header(&self, cut: Cut, from: usize) -> Result<Pending<Vec<f64>>, CommError> {
        self.comm.start_receive(vec![0.0_f64; HEADER], from, cut.tag())
    }

    /// Starts to receive what the `header` of a parcel announces.
    fn start_body(&self, header: Vec<f64>, cut: Cut, from: usize) -> Result<Body, CommError> {
        let [rows, cols, logits_width, num_numbers] = [0, 1, 2, 3].map(|place| header[place] as usize);
        let (comm, tag) = (self.comm, cut.tag());
        let numbers = (num_numbers > 0).then(|| comm.start_receive(vec![0.0_f64; num_numbers], from, tag));
        let numbers = numbers.transpose()?;
        let tensor = |width: usize| comm.start_receive(self.ctx.empty(&[rows, width], DType::F32), from, tag);
        let x = tensor(cols)?;
        let router_logits = (logits_width > 0).then(|| tensor(logits_width)).transpose()?;
        Ok(Body { numbers, x, router_logits })
    }

    /// Gives memory back of messages that have arrived.
    pub(super) fn forget_arrived(&mut self) -> Result<(), CommError> {
        let mut error = None;
        self.sending.retain_mut(|sending| match sending.is_finished() {
            Ok(is_finished) => !is_finished,
            Err(failed) => {
                error = error.take().or(Some(failed));
                true
            }
        });
        error.map_or(Ok(()), Err)
    }

    /// Waits until all messages have arrived.
    pub(super) fn finish(self) -> Result<(), CommError> {
        self.sending.into_iter().try_for_each(Sending::finish)
    }
}

/// A parcel on its way to this rank: first its header, then what that announces.
enum Incoming {
    Header(Pending<Vec<f64>>),
    Body(Body),
}

/// The parts of a parcel behind its header.
struct Body {
    numbers: Option<Pending<Vec<f64>>>,
    x: Pending<Tensor>,
    router_logits: Option<Pending<Tensor>>,
}

impl Body {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        let numbers = self.numbers.as_mut().map_or(Ok(true), Pending::is_finished)?;
        let logits = self.router_logits.as_mut().map_or(Ok(true), Pending::is_finished)?;
        Ok(self.x.is_finished()? && numbers && logits)
    }

    fn finish(self) -> Result<Parcel, CommError> {
        let numbers = self.numbers.map_or(Ok(Vec::new()), Pending::finish)?;
        let x = self.x.finish()?;
        let router_logits = self.router_logits.map(Pending::finish).transpose()?;
        Ok(Parcel { stream: ResidualStream { x, router_logits }, stats: stats_from_numbers(numbers) })
    }
}

fn stats_from_numbers(numbers: Vec<f64>) -> Vec<LayerStats> {
    let mut numbers = numbers.into_iter().peekable();
    let mut stats = Vec::new();
    while numbers.peek().is_some() {
        stats.push(LayerStats::from_numbers(&mut numbers));
    }
    stats
}

/// A flow to this rank while a step goes on.
struct InFlow<'a> {
    /// The cut of its parcels; that of the first one's microbatch.
    cut: Cut,
    from: usize,
    /// The microbatches in the order in which they are sent.
    order: &'a [u32],
    num_received: usize,
    /// The next parcel, which is received from the start of the step on, or from the end of the one before.
    incoming: Option<Incoming>,
}

impl InFlow<'_> {
    /// Goes on with the next parcel, to its end if it `waits`. Returns it when it has come, and starts to receive the
    /// one behind it.
    fn advance(&mut self, line: &Line<'_>, waits: bool) -> Result<Option<(Cut, Parcel)>, CommError> {
        loop {
            match self.incoming.take() {
                None if self.num_received == self.order.len() => return Ok(None),
                None => self.incoming = Some(Incoming::Header(line.start_header(self.cut, self.from)?)),
                Some(Incoming::Header(mut header)) => {
                    if !waits && !header.is_finished()? {
                        self.incoming = Some(Incoming::Header(header));
                        return Ok(None);
                    }
                    let body = line.start_body(header.finish()?, self.cut, self.from)?;
                    self.incoming = Some(Incoming::Body(body));
                }
                Some(Incoming::Body(mut body)) => {
                    if !waits && !body.is_finished()? {
                        self.incoming = Some(Incoming::Body(body));
                        return Ok(None);
                    }
                    let cut = Cut { microbatch: self.order[self.num_received], ..self.cut };
                    let parcel = body.finish()?;
                    self.num_received += 1;
                    if self.num_received < self.order.len() {
                        self.incoming = Some(Incoming::Header(line.start_header(self.cut, self.from)?));
                    }
                    return Ok(Some((cut, parcel)));
                }
            }
        }
    }
}

/// The parcels that come to a rank in a step. Each flow's next one is received before it is needed, so that it
/// travels while the rank computes.
pub(super) struct Inbox<'a> {
    flows: Vec<InFlow<'a>>,
    /// The parcels that are there and were not taken.
    parcels: HashMap<Cut, Parcel>,
}

impl<'a> Inbox<'a> {
    pub(super) fn new(flows: &'a Flows) -> Self {
        let flow = |(&(is_grad, stage, from), order): (&Flow, &'a Vec<u32>)| {
            let cut = Cut { is_grad, stage, microbatch: order[0] };
            InFlow { cut, from, order, num_received: 0, incoming: None }
        };
        Self { flows: flows.orders.iter().map(flow).collect(), parcels: HashMap::new() }
    }

    /// Starts to receive what comes next, and takes what has come, without waiting.
    pub(super) fn progress(&mut self, line: &Line<'_>) -> Result<(), CommError> {
        for flow in &mut self.flows {
            while let Some((cut, parcel)) = flow.advance(line, false)? {
                self.parcels.insert(cut, parcel);
            }
        }
        Ok(())
    }

    /// Lays a parcel down that another stage of this rank made.
    pub(super) fn put(&mut self, cut: Cut, parcel: Parcel) {
        self.parcels.insert(cut, parcel);
    }

    /// Waits until the parcel about `cut` has come from pp index `from`.
    pub(super) fn receive(&mut self, line: &Line<'_>, cut: Cut, from: usize) -> Result<(), CommError> {
        let is_its =
            |flow: &&mut InFlow<'_>| (flow.cut.is_grad, flow.cut.stage, flow.from) == (cut.is_grad, cut.stage, from);
        let Some(flow) = self.flows.iter_mut().find(is_its) else { return Ok(()) };
        while !self.parcels.contains_key(&cut) {
            let Some((cut, parcel)) = flow.advance(line, true)? else { return Ok(()) };
            self.parcels.insert(cut, parcel);
        }
        Ok(())
    }

    /// Takes the parcel about `cut`, which is there.
    pub(super) fn take(&mut self, cut: Cut) -> Parcel {
        self.parcels.remove(&cut).expect("a checked schedule needs what was made or sent before")
    }

    pub(super) fn has(&self, cut: Cut) -> bool {
        self.parcels.contains_key(&cut)
    }
}
