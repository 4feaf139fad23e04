//! Ranks that die, leave or hang: the others stop soon with an error that names them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, run_ranks, try_run_ranks};

fn work_for_ever(comm: &dyn Communicator) -> Result<(), CommError> {
    let mut data = vec![1.0_f32; 50_000];
    loop {
        comm.all_reduce(&mut data, Reduce::Max)?;
        comm.barrier()?;
    }
}

#[test]
fn a_rank_that_panics_in_the_middle_stops_all_within_seconds() {
    for culprit in 0..4 {
        let start = Instant::now();
        let results = run_ranks(&RankOptions::new(4), |comm| {
            if comm.rank() == culprit {
                for _ in 0..10 {
                    comm.all_reduce(&mut vec![1.0_f32; 50_000], Reduce::Max)?;
                    comm.barrier()?;
                }
                panic!("disk on fire");
            }
            work_for_ever(comm)
        });
        assert!(start.elapsed() < Duration::from_secs(5));
        for result in results {
            let text = result.unwrap_err().to_string();
            assert_eq!(text, format!("rank {culprit} died: panicked: disk on fire"));
        }
    }
}

#[test]
fn the_error_that_was_first_is_the_runs() {
    let result = try_run_ranks::<(), _>(&RankOptions::new(3), |comm| {
        if comm.rank() == 2 {
            thread::sleep(Duration::from_millis(20));
            return Err(Box::new(CommError::Start("no such file".into())));
        }
        work_for_ever(comm).map_err(Box::new)
    });
    assert_eq!(*result.unwrap_err(), CommError::Start("no such file".into()));
}

#[test]
fn a_rank_that_ends_while_it_is_needed_is_named() {
    let results = run_ranks(&RankOptions::new(3), |comm| if comm.rank() == 1 { Ok(()) } else { work_for_ever(comm) });
    assert_eq!(results[1], Ok(()));
    assert!(matches!(results[0], Err(CommError::Left { rank: 1, .. })), "{:?}", results[0]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn a_rank_that_hangs_is_named_by_the_watchdog() {
    let (has_started, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let options = RankOptions::new(3).with_timeout(Duration::from_millis(300));
    let seen = Arc::new(Mutex::new(None));
    let seen_there = Arc::clone(&seen);
    let options = options.on_stuck(Duration::from_millis(200), move |error| {
        *seen_there.lock().unwrap() = Some(error.to_string());
    });
    let results = run_ranks(&options, |comm| {
        // It has started its part, before there was anything to add up, so that its memory is there, and then does
        // not go on.
        while comm.rank() != 2 && !has_started.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        let pending = comm.start_all_reduce(vec![1.0_f32; 50_000], Reduce::Sum)?;
        if comm.rank() == 2 {
            has_started.store(true, Ordering::SeqCst);
            while !is_over.load(Ordering::SeqCst) {
                is_over.store(seen.lock().unwrap().is_some(), Ordering::SeqCst);
                thread::sleep(Duration::from_millis(5));
            }
        }
        pending.finish().map(drop)
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(&error, CommError::Hung { ranks, .. } if *ranks == [2]), "{error}");
        assert!(error.to_string().starts_with("rank 2 hung: nothing from it for 0.3 s"), "{error}");
    }
    assert!(seen.lock().unwrap().as_ref().is_some_and(|text| text.starts_with("rank 2 hung")));
}

#[test]
fn a_rank_with_another_configuration_is_refused() {
    let results = run_ranks(&RankOptions::new(4), |comm| {
        let mut fingerprint = [7; 32];
        fingerprint[31] += u8::from(comm.rank() == 3);
        comm.check_same("configuration", &fingerprint)
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert_eq!(text, "rank 3 has another configuration than rank 0: start all ranks with the same one");
    }
}

#[test]
fn a_rank_can_give_up_for_all() {
    let results = run_ranks(&RankOptions::new(2), |comm| match comm.rank() {
        0 => Err::<(), _>(comm.abort("the loss is not finite")),
        _ => work_for_ever(comm),
    });
    assert!(
        results
            .iter()
            .all(|result| { *result == Err(CommError::Died { rank: 0, reason: "the loss is not finite".into() }) })
    );
}
