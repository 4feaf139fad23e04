//! The checker's errors for wrong schedules, word for word.

use moeworks_plan::Schedule;

/// Returns the checker's error for two ranks with two stages and two microbatches.
fn said(rank_0: &str, rank_1: &str) -> String {
    let text = format!("schedule s\nmicrobatches 0..2: stages on ranks 0 1\nrank 0: {rank_0}\nrank 1: {rank_1}\n");
    let schedule: Schedule = text.parse().expect("a schedule that can be read");
    schedule.check().map_or_else(|error| error.to_string(), |_| "right".to_owned())
}

const RANK_0: &str = "0F0, 0F1, 0BW0, 0BW1";
const RANK_1: &str = "1F0, 1B0, 1F1, 1W0, 1BW1";

#[test]
fn right_schedules_pass() {
    assert_eq!(said(RANK_0, RANK_1), "right");
    assert_eq!(said("0F0, 0F1, 0B0, 0B1, 0W1, 0W0", "1F0, 1F1&1BW0, 1BW1"), "right");
    let (sends, receives) =
        ("0F0, 0SF0, 0F1, 0SF1, 0RB0, 0BW0, 0RB1, 0BW1", "1RF0, 1RF1, 1F0, 1BW0, 1SB0, 1F1, 1BW1, 1SB1");
    assert_eq!(said(sends, receives), "right");
}

#[test]
fn actions_that_are_not_there_or_there_twice_are_named() {
    assert_eq!(said("0F0, 0F1, 0BW0", RANK_1), "rank 0: 0B1 is missing: it must be there once");
    assert_eq!(said("0F0, 0F1, 0B0, 0BW1", RANK_1), "rank 0: 0W0 is missing: it must be there once");
    assert_eq!(
        said("0F0, 0F1, 0F0, 0BW0, 0BW1", RANK_1),
        "rank 0, position 2: 0F0: is there a second time: it must be there once"
    );
    let (again, said_of_it) =
        ("0F0, 0F1, 0BW0, 0W0, 0BW1", "rank 0, position 3: 0W0: is there a second time: it must be there once");
    assert_eq!(said(again, RANK_1), said_of_it);
    assert_eq!(said("", RANK_1), "rank 0: 0F0 is missing: it must be there once");
}

#[test]
fn actions_out_of_range_and_on_the_wrong_rank_are_named() {
    let said_of_it = "rank 0, position 0: 0F2: microbatch 2 is out of range: the schedule has 2, counted from 0";
    assert_eq!(said("0F2, 0F1, 0BW0, 0BW1", RANK_1), said_of_it);
    let said_of_it = "rank 0, position 0: 2F0: stage 2 is out of range: the schedule has 2, counted from 0";
    assert_eq!(said("2F0, 0F1, 0BW0, 0BW1", RANK_1), said_of_it);
    let said_of_it = "rank 0, position 1: 1F0: must be on rank 1, which holds stage 1 for microbatch 0";
    assert_eq!(said("0F0, 1F0, 0F1, 0BW0, 0BW1", RANK_1), said_of_it);
    let said_of_it =
        "rank 0, position 0: 0FA0.0: is a part of a MoE layer, but stage 0 has no MoE layers: use F, B, W or BW";
    assert_eq!(said("0FA0.0, 0F1, 0BW0, 0BW1", RANK_1), said_of_it);
}

#[test]
fn actions_before_what_they_need_are_named() {
    let said_of_it = "rank 0, position 0: 0BW0: needs 0F0 of the same rank, which must come before it";
    assert_eq!(said("0BW0, 0F0, 0F1, 0BW1", RANK_1), said_of_it);
    let said_of_it = "rank 1, position 1: 1W0: needs 1B0 of the same rank, which must come before it";
    assert_eq!(said(RANK_0, "1F0, 1W0, 1B0, 1F1, 1BW1"), said_of_it);
    let said_of_it = "rank 1, position 1: 1BW1: needs 1F1 of the same rank, which must come before it";
    assert_eq!(said(RANK_0, "1F0, 1F1&1BW1, 1BW0"), said_of_it);
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let said_of_it =
        "rank 0, position 1: 0BW0: waits forever for 1B0 of rank 1, which itself stands at position 0 (1F1)";
    assert_eq!(said("0F0, 0BW0, 0F1, 0BW1", "1F1, 1F0, 1BW0, 1BW1"), said_of_it);
}

#[test]
fn messages_must_match_in_order() {
    let rank_0 = "0F0, 0SF0, 0F1, 0SF1, 0RB0, 0BW0, 0RB1, 0BW1";
    let said_of_it = "rank 1, position 0: 1RF1: the message that arrives here is for 1RF0, \
                      because messages come in the order in which they are sent";
    assert_eq!(said(rank_0, "1RF1, 1RF0, 1F0, 1BW0, 1SB0, 1F1, 1BW1, 1SB1"), said_of_it);
    let said_of_it = "rank 1, position 0: 1F0: needs 1RF0 of the same rank, which must come before it";
    assert_eq!(said(rank_0, "1F0, 1BW0, 1SB0, 1F1, 1BW1, 1SB1"), said_of_it);
    assert_eq!(
        said(rank_0, "1RF0, 1RF1, 1F0, 1BW0, 1F1, 1BW1, 1SB1"),
        "rank 1: 1SB0 is missing: it must be there once"
    );
    let said_of_it =
        "rank 1, position 0: 1RB0: is a message that nobody needs: no other rank has the stage at its other end";
    assert_eq!(said(rank_0, "1RB0, 1RF0, 1RF1, 1F0, 1BW0, 1SB0, 1F1, 1BW1, 1SB1"), said_of_it);
    let said_of_it = "rank 0, position 0: 0SF0: needs 0F0 of the same rank, which must come before it";
    assert_eq!(
        said("0SF0, 0F0, 0F1, 0SF1, 0RB0, 0BW0, 0RB1, 0BW1", "1RF0, 1RF1, 1F0, 1BW0, 1SB0, 1F1, 1BW1, 1SB1"),
        said_of_it
    );
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let check = |change: fn(&mut Schedule)| {
        let mut schedule: Schedule =
            "schedule s\nmicrobatches 0..1: stages on ranks 0\nrank 0: 0F0, 0BW0".parse().unwrap();
        change(&mut schedule);
        schedule.check().map_or_else(|error| error.to_string(), |_| "right".to_owned())
    };
    assert_eq!(check(|_| ()), "right");
    let said_of_it = "the name is \"a\\nb\": must be one line without # and spaces around it";
    assert_eq!(check(|of| of.name = "a\nb".to_owned()), said_of_it);
    assert_eq!(check(|of| of.ranks.clear()), "0 ranks and 1 stages: there must be at least 1 of each");
    assert_eq!(check(|of| of.moe_layers = vec![1, 1]), "MoE layers of 2 stages: the schedule has 1 stages");
    let said_of_it = "copy 0 has 1 stages and 0 microbatches: must have 1 stages and at least 1 microbatch";
    assert_eq!(check(|of| of.copies[0].num_microbatches = 0), said_of_it);
}
