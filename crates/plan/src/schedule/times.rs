//! Times and sizes that a timeline is made with.

/// Seconds (or any other unit) and sizes of one stage and microbatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTimes {
    /// F: computation of the forward.
    pub forward: f64,
    /// B: computation of the input's gradient.
    pub input_grad: f64,
    /// W: computation of the weights' gradients.
    pub weight_grad: f64,
    /// The dispatches of all MoE layers of the stage, one way.
    pub dispatch: f64,
    /// The combines of all MoE layers of the stage, one way.
    pub combine: f64,
    /// The part of F, B and W that experts take; the rest is attention and the like. Only expanded schedules use it.
    pub expert_share: f64,
    /// M_B: the size of the activations that F leaves for B.
    pub activation: f64,
    /// M_W: the size of their part that is kept between B and W.
    pub weight_grad_input: f64,
}

impl StageTimes {
    /// Makes times without all-to-alls, with activations of size 1 and nothing of them gone before W.
    #[must_use]
    pub fn new(forward: f64, input_grad: f64, weight_grad: f64) -> Self {
        Self {
            forward,
            input_grad,
            weight_grad,
            dispatch: 0.0,
            combine: 0.0,
            expert_share: 0.5,
            activation: 1.0,
            weight_grad_input: 1.0,
        }
    }

    /// Returns the computation of F, B and W.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.forward + self.input_grad + self.weight_grad
    }

    fn values(&self) -> [(&'static str, f64); 8] {
        [
            ("forward", self.forward),
            ("input_grad", self.input_grad),
            ("weight_grad", self.weight_grad),
            ("dispatch", self.dispatch),
            ("combine", self.combine),
            ("expert_share", self.expert_share),
            ("activation", self.activation),
            ("weight_grad_input", self.weight_grad_input),
        ]
    }
}

/// The time that an overlapped pair takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PairTime {
    /// The sum of the two actions' times, including their all-to-alls.
    #[default]
    Sum,
    /// The measured share of that sum.
    Share(f64),
    /// A measured time, whatever the stages.
    Fixed(f64),
}

/// Times and sizes of all stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// The times of each stage, or one for all of them.
    pub stages: Vec<StageTimes>,
    /// T_c: the time between the end of a stage and the arrival of its output, or of a gradient, on the next rank.
    pub message: f64,
    /// The time of an overlapped pair.
    pub pair: PairTime,
}

/// Times that do not fit a schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TimesError {
    /// Times of the wrong number of stages.
    #[error("times of {given} stages: the schedule has {num_stages}; give times for each, or one for all of them")]
    Stages {
        /// The number of stages with times.
        given: usize,
        /// Stages of the schedule.
        num_stages: usize,
    },
    /// A value that is no time.
    #[error("{name} = {value}: must be a number from 0 to 1e15{}", if *name == "expert_share" { " and at most 1" } else { "" })]
    Value {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl Times {
    /// Makes times that are the same for all stages, without communication.
    #[must_use]
    pub fn uniform(forward: f64, input_grad: f64, weight_grad: f64) -> Self {
        Self { stages: vec![StageTimes::new(forward, input_grad, weight_grad)], message: 0.0, pair: PairTime::Sum }
    }

    /// Returns these times with messages that take `message`.
    #[must_use]
    pub fn with_message(self, message: f64) -> Self {
        Self { message, ..self }
    }

    /// Returns the times of a stage.
    #[must_use]
    pub fn stage(&self, stage: u32) -> &StageTimes {
        const NONE: &StageTimes = &StageTimes {
            forward: 0.0,
            input_grad: 0.0,
            weight_grad: 0.0,
            dispatch: 0.0,
            combine: 0.0,
            expert_share: 0.0,
            activation: 0.0,
            weight_grad_input: 0.0,
        };
        self.stages.get(stage as usize).or(self.stages.last()).unwrap_or(NONE)
    }

    /// Fails unless there are times for `num_stages` stages, or one for all, and each is finite and not negative.
    pub fn check(&self, num_stages: usize) -> Result<(), TimesError> {
        if self.stages.len() != 1 && self.stages.len() != num_stages {
            return Err(TimesError::Stages { given: self.stages.len(), num_stages });
        }
        let pair = match self.pair {
            PairTime::Sum => 0.0,
            PairTime::Share(value) | PairTime::Fixed(value) => value,
        };
        let values = self.stages.iter().flat_map(StageTimes::values);
        let mut values = values.chain([("message", self.message), ("pair", pair)]);
        let is_wrong = |&(name, value): &(&str, f64)| {
            let most = if name == "expert_share" { 1.0 } else { 1e15 };
            !(0.0..=most).contains(&value)
        };
        match values.find(is_wrong) {
            Some((name, value)) => Err(TimesError::Value { name, value }),
            None => Ok(()),
        }
    }
}
