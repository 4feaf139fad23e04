use std::sync::atomic::AtomicU32;

use super::*;

#[test]
fn every_task_runs_once_on_any_number_of_threads() {
    for num_threads in [1, 2, 3, 5] {
        let threads = Threads::new(num_threads);
        for num_tasks in [0, 1, 2, 7, 100] {
            let counts: Vec<AtomicU32> = (0..num_tasks).map(|_| AtomicU32::new(0)).collect();
            threads.run(num_tasks, |index| {
                counts[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn many_short_jobs_with_pauses_end() {
    let threads = Threads::new(3);
    let total = AtomicUsize::new(0);
    for round in 0..20_000 {
        threads.run(3, |_| {
            total.fetch_add(1, Ordering::Relaxed);
        });
        if round % 4000 == 0 {
            thread::sleep(Duration::from_millis(2)); // long enough for the workers to park
        }
    }
    assert_eq!(total.load(Ordering::Relaxed), 60_000);
}

#[test]
fn a_nested_call_runs_inline() {
    let threads = Threads::new(2);
    let total = AtomicUsize::new(0);
    threads.run(4, |_| {
        threads.run(5, |_| {
            total.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(total.load(Ordering::Relaxed), 20);
}

#[test]
fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives_on() {
    let threads = Threads::new(2);
    let result = panic::catch_unwind(AssertUnwindSafe(|| threads.run(8, |index| assert_ne!(index, 5, "task five"))));
    assert!(result.is_err());
    let total = AtomicUsize::new(0);
    threads.run(8, |_| {
        total.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(total.load(Ordering::Relaxed), 8);
}

#[test]
fn pieces_cover_the_data() {
    let threads = Threads::new(2);
    let mut data = vec![0_u32; 1003];
    threads.run_pieces(&mut data, 100, |index, piece| piece.fill(index as u32));
    assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i / 100));
}
