//! Random sequences, cancellations and limits over many turns.

use std::collections::HashMap;

use moeworks_serve::{Limits, NewSequence, Refused, Scheduler, SequenceId, Turn};

use crate::simulated::Simulated;

/// A small generator of random numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }
}

/// A server with random clients.
struct Clients {
    random: Random,
    scheduler: Scheduler,
    simulated: Simulated,
    /// Sequences that are served, and the turn in which each came.
    served: HashMap<SequenceId, u64>,
    longest_service: u64,
    num_finished: u64,
    num_refused: u64,
}

impl Clients {
    fn new(seed: u64, limits: Limits) -> Self {
        let scheduler = Scheduler::new(limits).unwrap();
        let simulated = Simulated::new(&scheduler);
        let (random, served) = (Random(seed), HashMap::new());
        Self { random, scheduler, simulated, served, longest_service: 0, num_finished: 0, num_refused: 0 }
    }

    /// A prompt that often begins as others do.
    fn prompt(&mut self, most: usize) -> Vec<u32> {
        let len = self.random.between(1, most);
        let shared = if self.random.below(3) == 0 { 0 } else { self.random.between(0, len) };
        let own = self.random.below(4) as u32;
        (0..len).map(|i| if i < shared { i as u32 % 7 } else { 100 + own + i as u32 % 3 }).collect()
    }

    fn come(&mut self, turn: u64) {
        let most = self.scheduler.limits().max_sequence_tokens();
        let salt = self.random.below(2) as u8;
        let new = NewSequence {
            prompt: self.prompt(most.min(40)),
            max_new_tokens: self.random.between(1, 12),
            priority: self.random.below(3) as i32,
            salt: vec![salt],
            uses_prefix_cache: self.random.below(8) > 0,
            ..NewSequence::default()
        };
        let fits = new.prompt.len() + new.max_new_tokens <= most + 1;
        match self.scheduler.add(new) {
            Ok(id) => {
                assert!(fits);
                self.simulated.add(id, salt);
                self.served.insert(id, turn);
            }
            Err(Refused::TooLong { .. }) => assert!(!fits),
            Err(Refused::QueueFull { max_waiting }) => {
                // Those that were preempted wait besides.
                assert!(self.scheduler.counts().waiting >= max_waiting);
                self.num_refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn go(&mut self, id: SequenceId, turn: u64) {
        assert!(self.scheduler.remove(id), "{id} was served");
        assert!(self.scheduler.tokens(id).is_none());
        self.simulated.remove(id);
        let came = self.served.remove(&id).expect("a client that came");
        self.longest_service = self.longest_service.max(turn - came);
    }

    /// One turn, in which clients come, go away in the middle of it, and get tokens.
    fn turn(&mut self, number: u64) -> Turn {
        for _ in 0..self.random.below(3) {
            self.come(number);
        }
        let turn = self.scheduler.next_turn();
        self.check(&turn);
        self.simulated.carry_out(&turn, &self.scheduler);
        if self.random.below(20) == 0
            && let Some(&id) = self.served.keys().min_by_key(|id| id.0 % 17)
        {
            self.go(id, number);
        }
        let draws = turn.parts.iter().filter(|part| part.draws).map(|part| part.sequence);
        let drawn: Vec<(SequenceId, u32)> = draws.map(|id| (id, self.random.below(5) as u32)).collect();
        self.scheduler.complete(&turn, &drawn);
        for (id, token) in drawn {
            // Without its client a full sequence would hold its blocks for ever.
            let is_done = token == 0 || self.scheduler.is_full(id) == Some(true);
            if is_done && self.served.contains_key(&id) {
                self.go(id, number);
                self.num_finished += 1;
            }
        }
        turn
    }

    fn check(&self, turn: &Turn) {
        let limits = self.scheduler.limits();
        assert!(turn.num_tokens() <= limits.turn_tokens, "{turn}");
        assert!(!turn.is_empty() || self.served.is_empty(), "nothing is done though sequences wait: {turn}");
        let counts = self.scheduler.counts();
        assert!(counts.running <= limits.max_running);
        assert_eq!(counts.running + counts.waiting, self.served.len(), "none is lost");
        for (i, part) in turn.parts.iter().enumerate() {
            assert!(turn.parts[..i].iter().all(|other| other.sequence != part.sequence), "twice in {turn}");
            assert!(!turn.preempted.contains(&part.sequence), "preempted and passed: {turn}");
        }
    }
}

fn run(seed: u64, num_turns: u64, limits: Limits) -> Clients {
    let mut clients = Clients::new(seed, limits);
    for number in 0..num_turns {
        clients.turn(number);
        if number % 16 == 0 || num_turns < 5000 {
            clients.scheduler.check().unwrap_or_else(|problem| panic!("turn {number}, seed {seed}: {problem}"));
        }
    }
    let left: Vec<SequenceId> = clients.served.keys().copied().collect();
    left.into_iter().for_each(|id| clients.go(id, num_turns));
    clients.scheduler.check().unwrap();
    assert_eq!(clients.scheduler.counts().free_blocks, limits.num_blocks, "no block is left behind");
    clients
}

/// Many kinds of limits, `num_turns` turns in all.
fn run_all(num_turns: u64) {
    let mut random = Random(7);
    let num_runs = 50;
    let [mut finished, mut refused, mut preempted, mut found] = [0; 4];
    for seed in 0..num_runs {
        let max_running = random.between(1, 12);
        let limits = Limits {
            num_blocks: random.between(3, 60),
            block_len: [1, 2, 4, 16][random.below(4)],
            turn_tokens: max_running + random.below(40),
            max_running,
            max_waiting: random.between(1, 30),
            turns_to_rise: random.between(1, 50) as u64,
            has_prefix_cache: random.below(4) > 0,
        };
        let clients = run(seed, num_turns / num_runs, limits);
        let counts = clients.scheduler.counts();
        finished += clients.num_finished;
        refused += clients.num_refused;
        preempted += counts.preemptions;
        found += counts.prefix_hits;
        // Everybody before it could take all turns of its own length.
        let bound = 60 * (limits.max_waiting + limits.max_running + 3) as u64 + 10 * limits.turns_to_rise;
        assert!(clients.longest_service < bound, "a sequence took {} turns of {bound}", clients.longest_service);
    }
    assert!([finished, refused, preempted, found].iter().all(|&count| count > num_turns / 1000), "all of it happens");
}

#[test]
fn a_million_random_turns_keep_every_promise() {
    run_all(1_000_000);
}
