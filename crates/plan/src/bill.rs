//! Days, money and energy of a number of tokens.

/// The speed of a run, and what an hour of a rank costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The number of ranks.
    pub num_ranks: usize,
    /// Tokens per second of all ranks.
    pub tokens_per_s: f64,
    /// The price of a rank for an hour, if known.
    pub price_per_hour: Option<f64>,
    /// The power of a rank in watts, if known.
    pub watts: Option<f64>,
}

/// The bill of a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bill {
    /// The number of tokens.
    pub tokens: f64,
    /// Days.
    pub days: f64,
    /// Hours of all ranks together.
    pub rank_hours: f64,
    /// The price, in the currency of the price of an hour.
    pub price: Option<f64>,
    /// Energy in kilowatt-hours.
    pub kilowatt_hours: Option<f64>,
}

impl Rate {
    /// Returns the bill of `tokens` tokens.
    #[must_use]
    pub fn bill(&self, tokens: f64) -> Bill {
        let hours = tokens / self.tokens_per_s / 3600.0;
        let rank_hours = hours * self.num_ranks as f64;
        Bill {
            tokens,
            days: hours / 24.0,
            rank_hours,
            price: self.price_per_hour.map(|price| price * rank_hours),
            kilowatt_hours: self.watts.map(|watts| watts * rank_hours / 1e3),
        }
    }
}

impl Bill {
    /// Returns the years of one rank that the bill comes to, of 365 days each (core-years in GShard's table).
    #[must_use]
    pub fn rank_years(&self) -> f64 {
        self.rank_hours / 24.0 / 365.0
    }
}
