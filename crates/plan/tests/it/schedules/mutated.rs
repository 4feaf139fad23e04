//! Right schedules with random changes: the checker agrees with a second one, which is slow and simple.

use std::collections::HashSet;

use moeworks_plan::schedule::{Action, Entry, Kind};
use moeworks_plan::{Schedule, ScheduleKind, Times};
use proptest::prelude::*;

use super::generate;

/// Returns whether a schedule of whole stages without messages can be carried out, by doing so with sets of finished
/// actions.
fn can_be_carried_out(schedule: &Schedule) -> bool {
    let (num_stages, num_microbatches) = (schedule.num_stages() as u32, schedule.num_microbatches() as u32);
    let all: Vec<(usize, Action)> = schedule
        .ranks
        .iter()
        .enumerate()
        .flat_map(|(rank, entries)| {
            entries.iter().flat_map(move |entry| entry.actions().map(move |action| (rank, action)))
        })
        .collect();
    let is_placed =
        |&(rank, action): &(usize, Action)| schedule.rank_of(action.stage, action.microbatch) == Some(rank as u32);
    let count = |kind, stage, microbatch| {
        all.iter().filter(|(_, action)| *action == Action::new(kind, stage, microbatch)).count()
    };
    let is_complete = (0..num_stages).all(|stage| {
        (0..num_microbatches).all(|microbatch| {
            let [f, b, w, bw] = [Kind::Forward, Kind::InputGrad, Kind::WeightGrad, Kind::Backward]
                .map(|kind| count(kind, stage, microbatch));
            f == 1 && ((b, w, bw) == (1, 1, 0) || (b, w, bw) == (0, 0, 1))
        })
    });
    all.iter().all(is_placed) && is_complete && runs_through(schedule)
}

fn runs_through(schedule: &Schedule) -> bool {
    let last = schedule.num_stages() as u32 - 1;
    let mut done: HashSet<(u32, u32, bool)> = HashSet::new(); // stage, microbatch, and whether it is the gradient
    let mut next = vec![0; schedule.num_ranks()];
    let can_start = |action: Action, done: &HashSet<_>| {
        let Action { stage, microbatch, .. } = action;
        match action.kind {
            Kind::Forward => stage == 0 || done.contains(&(stage - 1, microbatch, false)),
            Kind::WeightGrad => done.contains(&(stage, microbatch, true)),
            _ => {
                let has_input = stage == last || done.contains(&(stage + 1, microbatch, true));
                has_input && done.contains(&(stage, microbatch, false))
            }
        }
    };
    loop {
        let mut has_moved = false;
        for (entries, next) in schedule.ranks.iter().zip(&mut next) {
            while let Some(entry) = entries.get(*next) {
                if !entry.actions().all(|action| can_start(action, &done)) {
                    break;
                }
                for action in entry.actions().filter(|action| action.kind != Kind::WeightGrad) {
                    done.insert((action.stage, action.microbatch, action.kind != Kind::Forward));
                }
                *next += 1;
                has_moved = true;
            }
        }
        if !has_moved {
            return next.iter().zip(&schedule.ranks).all(|(&next, entries)| next == entries.len());
        }
    }
}

/// A change to a schedule, by numbers that are taken modulo what there is.
#[derive(Clone, Debug)]
enum Change {
    Delete { rank: usize, position: usize },
    Repeat { rank: usize, position: usize, at: usize },
    Swap { rank: usize, position: usize, with: usize },
    Move { rank: usize, position: usize, to: usize, at: usize },
    Rename { rank: usize, position: usize, stage: u32, microbatch: u32 },
    Join { rank: usize, position: usize },
}

fn change() -> impl Strategy<Value = Change> {
    let at = || 0..1000_usize;
    prop_oneof![
        (at(), at()).prop_map(|(rank, position)| Change::Delete { rank, position }),
        (at(), at(), at()).prop_map(|(rank, position, at)| Change::Repeat { rank, position, at }),
        (at(), at(), at()).prop_map(|(rank, position, with)| Change::Swap { rank, position, with }),
        (at(), at()).prop_map(|(rank, position)| Change::Swap { rank, position, with: position + 1 }),
        (at(), at(), at(), at()).prop_map(|(rank, position, to, at)| Change::Move { rank, position, to, at }),
        (at(), at(), 0..9_u32, 0..9_u32).prop_map(|(rank, position, stage, microbatch)| Change::Rename {
            rank,
            position,
            stage,
            microbatch
        }),
        (at(), at()).prop_map(|(rank, position)| Change::Join { rank, position }),
    ]
}

fn apply(change: &Change, schedule: &mut Schedule) {
    let num_ranks = schedule.num_ranks();
    let (Change::Delete { rank, position }
    | Change::Repeat { rank, position, .. }
    | Change::Swap { rank, position, .. }
    | Change::Move { rank, position, .. }
    | Change::Rename { rank, position, .. }
    | Change::Join { rank, position }) = *change;
    let rank = rank % num_ranks;
    let entries = &mut schedule.ranks[rank];
    let (len, position) = (entries.len(), position % entries.len());
    match *change {
        Change::Delete { .. } => drop(entries.remove(position)),
        Change::Repeat { at, .. } => entries.insert(at % len, entries[position]),
        Change::Swap { with, .. } => entries.swap(position, with % len),
        Change::Move { to, at, .. } => {
            let entry = entries.remove(position);
            let entries = &mut schedule.ranks[to % num_ranks];
            entries.insert(at % (entries.len() + 1), entry);
        }
        Change::Rename { stage, microbatch, .. } => {
            if let Entry::One(action) = &mut entries[position] {
                (action.stage, action.microbatch) = (stage, microbatch);
            }
        }
        Change::Join { .. } => {
            if let (Entry::One(forward), Some(&Entry::One(backward))) = (entries[position], entries.get(position + 1))
                && forward.kind == Kind::Forward
                && matches!(backward.kind, Kind::InputGrad | Kind::Backward)
            {
                entries[position] = Entry::Pair(forward, backward);
                entries.remove(position + 1);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// One to three changes to a schedule of any kind: caught, unless what comes out is right.
    #[test]
    fn changes_are_caught_where_they_do_harm(
        kind in 0..12_usize,
        half in 1..3_usize,
        changes in prop::collection::vec(change(), 1..4),
    ) {
        let unit = Times::uniform(1.0, 1.0, 1.0);
        let mut schedule = generate(ScheduleKind::ALL[kind], 2 * half, 4 * half, &unit);
        prop_assert!(can_be_carried_out(&schedule));
        changes.iter().for_each(|change| apply(change, &mut schedule));
        let checked = schedule.check();
        prop_assert_eq!(checked.is_ok(), can_be_carried_out(&schedule), "{:?}: {:?}\n{}", changes, checked.err(), schedule);
    }
}
