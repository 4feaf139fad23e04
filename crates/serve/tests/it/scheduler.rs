//! Turns by hand.

use moeworks_serve::{BlockCopy, Limits, LimitsError, NewSequence, Refused, Scheduler, SequenceId, Turn};

fn limits() -> Limits {
    Limits { num_blocks: 8, block_len: 4, turn_tokens: 10, max_running: 3, ..Limits::default() }
}

fn new(prompt: std::ops::Range<u32>, max_new_tokens: usize) -> NewSequence {
    NewSequence { prompt: prompt.collect(), max_new_tokens, uses_prefix_cache: true, ..NewSequence::default() }
}

/// Makes a turn whose drawing sequences all draw `token`.
fn turn(scheduler: &mut Scheduler, token: u32) -> Turn {
    let turn = scheduler.next_turn();
    let drawn: Vec<_> = turn.parts.iter().filter(|part| part.draws).map(|part| (part.sequence, token)).collect();
    scheduler.complete(&turn, &drawn);
    scheduler.check().unwrap();
    turn
}

#[test]
fn prompts_go_in_pieces_beside_sequences_that_draw() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    scheduler.add(new(0..3, 5)).unwrap();
    scheduler.add(new(100..112, 2)).unwrap();
    let shown: Vec<String> = (0..3).map(|_| turn(&mut scheduler, 7).to_string()).collect();
    assert_eq!(
        shown,
        ["turn 1: #0 0..3 draws, #1 0..7", "turn 2: #0 3 draws, #1 7..12 draws", "turn 3: #0 4 draws, #1 12 draws"]
    );
}

#[test]
fn a_prompt_that_was_computed_before_is_not_computed_again() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    let first = scheduler.add(new(0..9, 1)).unwrap();
    let blocks = turn(&mut scheduler, 7).parts[0].blocks.clone();
    scheduler.remove(first);
    scheduler.add(new(0..10, 1)).unwrap();
    let part = turn(&mut scheduler, 7).parts.remove(0);
    assert_eq!((part.start, part.tokens), (8, vec![8, 9]), "two blocks of four are known");
    assert_eq!(part.blocks[..2], blocks[..2]);
    assert_eq!(scheduler.counts().prefix_hits, 8);
}

#[test]
fn a_whole_known_prompt_is_copied_where_its_last_token_is_written_again() {
    let mut scheduler = Scheduler::new(limits()).unwrap();
    scheduler.add(new(0..8, 5)).unwrap();
    let blocks = turn(&mut scheduler, 7).parts[0].blocks.clone();
    scheduler.add(new(0..8, 5)).unwrap();
    let second = turn(&mut scheduler, 7);
    let part = &second.parts[1];
    assert_eq!((part.start, part.blocks[0]), (7, blocks[0]));
    assert_eq!(second.copies, [BlockCopy { from: blocks[1], to: part.blocks[1] }]);
    assert_ne!(part.blocks[1], blocks[1], "the first sequence keeps its block");
}

#[test]
fn salts_and_adapters_share_no_blocks() {
    for other in [
        NewSequence { salt: b"theirs".to_vec(), ..new(0..9, 1) },
        NewSequence { adapter: Some(1), ..new(0..9, 1) },
        NewSequence { uses_prefix_cache: false, ..new(0..9, 1) },
    ] {
        let mut scheduler = Scheduler::new(limits()).unwrap();
        scheduler.add(new(0..9, 1)).unwrap();
        turn(&mut scheduler, 7);
        scheduler.remove(SequenceId(0));
        scheduler.add(other).unwrap();
        assert_eq!(turn(&mut scheduler, 7).parts[0].start, 0);
    }
}

#[test]
fn the_last_sequence_gives_its_blocks_to_those_before_it_and_finds_them_again() {
    let limits = Limits { num_blocks: 4, max_running: 2, ..limits() };
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.add(new(0..4, 9)).unwrap();
    scheduler.add(new(50..53, 9)).unwrap();
    let mut preempted = Vec::new();
    for _ in 0..7 {
        preempted.extend(turn(&mut scheduler, 7).preempted);
    }
    assert_eq!(preempted, [SequenceId(1)]);
    scheduler.remove(SequenceId(0));
    let part = turn(&mut scheduler, 7).parts.remove(0);
    assert_eq!(part.sequence, SequenceId(1));
    assert!(part.draws && part.start > 0, "the first full block is still known");
}

#[test]
fn a_lower_priority_number_is_served_first_and_waiting_raises() {
    let limits = Limits { max_running: 1, turns_to_rise: 5, ..limits() };
    let mut scheduler = Scheduler::new(limits).unwrap();
    let low = scheduler.add(NewSequence { priority: 1, ..new(0..2, 1) }).unwrap();
    let high = scheduler.add(new(0..2, 1)).unwrap();
    assert_eq!(turn(&mut scheduler, 7).parts[0].sequence, high);
    scheduler.remove(high);
    for number in 0.. {
        scheduler.add(new(0..2, 1)).unwrap();
        let served = turn(&mut scheduler, 7).parts[0].sequence;
        scheduler.remove(served);
        if served == low {
            assert!((3..=6).contains(&number), "after five turns of waiting, not {number}");
            break;
        }
        assert!(number < 10, "it waits for ever");
    }
}

#[test]
fn what_cannot_be_served_is_refused() {
    let mut scheduler = Scheduler::new(Limits { max_waiting: 1, ..limits() }).unwrap();
    assert_eq!(scheduler.add(new(0..0, 1)), Err(Refused::EmptyPrompt));
    assert_eq!(scheduler.add(new(0..1, 0)), Err(Refused::NoNewTokens));
    let long = scheduler.add(new(0..30, 4)).unwrap_err();
    assert_eq!(long, Refused::TooLong { prompt_len: 30, max_new_tokens: 4, most: 33 });
    assert_eq!(
        scheduler.add(new(0..3, usize::MAX)).unwrap_err(),
        Refused::TooLong { prompt_len: 3, max_new_tokens: usize::MAX, most: 33 }
    );
    scheduler.add(new(0..30, 3)).unwrap();
    assert_eq!(scheduler.add(new(0..1, 1)), Err(Refused::QueueFull { max_waiting: 1 }));
    assert!(!scheduler.remove(SequenceId(9)));
}

#[test]
fn limits_that_leave_nothing_are_refused() {
    let zero = Scheduler::new(Limits { block_len: 0, ..limits() }).unwrap_err();
    assert_eq!(zero.to_string(), "block_len = 0: must be at least 1");
    let few = Scheduler::new(Limits { turn_tokens: 2, ..limits() }).unwrap_err();
    assert_eq!(few, LimitsError::FewTokens { turn_tokens: 2, max_running: 3 });
}
