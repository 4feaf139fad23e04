//! Communications that are started now and finished later.

use moeworks_comm::{CommError, RankOptions, Reduce, run_ranks};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use crate::collectives::{column, on_ranks, received_by, sent_by};

#[test]
fn many_are_in_flight_at_once_and_finish_in_any_order() {
    let counts: Vec<Vec<usize>> = vec![vec![3, 0, 70], vec![1, 5000, 2], vec![0, 9, 4]];
    let results = on_ranks(3, |comm| {
        let recv_counts = column(&counts, comm.rank());
        let start = || {
            let recv = vec![0_u32; recv_counts.iter().sum()];
            comm.start_all_to_all_v(sent_by(comm.rank(), &counts), &counts[comm.rank()], recv, &recv_counts)
        };
        let mut pending: Vec<_> = (0..20).map(|_| start()).collect::<Result<_, _>>()?;
        let sum = comm.start_all_reduce(vec![1.0_f32; 100_000], Reduce::Sum)?;
        if comm.rank() == 1 {
            pending.reverse();
        }
        let received: Vec<Vec<u32>> =
            pending.into_iter().map(|p| p.finish().map(|(_, r)| r)).collect::<Result<_, _>>()?;
        Ok((received, sum.finish()?))
    });
    for (rank, (received, sum)) in results.iter().enumerate() {
        assert!(received.iter().all(|r| *r == received_by(rank, &counts)));
        assert!(sum.iter().all(|&x| x == 3.0));
    }
}

#[test]
fn tensors_come_back_from_what_they_were_given_to() {
    let results = on_ranks(4, |comm| {
        let pool = MemoryPool::new();
        let send = Tensor::from_slice(&pool, &[4, 2], &[comm.rank() as f32; 8]);
        let recv = Tensor::empty(&pool, &[4, 2], DType::F32);
        let (send, recv) = comm.start_all_to_all_v(send, &[2; 4], recv, &[2; 4])?.finish()?;
        let share = Tensor::empty(&pool, &[2], DType::F32);
        let (_, share) = comm.start_reduce_scatter(send, &[2; 4], share, Reduce::Sum)?.finish()?;
        let gathered = Tensor::empty(&pool, &[8], DType::F32);
        let (_, gathered) = comm.start_all_gather_v(share, gathered, &[2; 4])?.finish()?;
        Ok((recv.f32s().to_vec(), gathered.f32s().to_vec()))
    });
    for (recv, gathered) in results {
        assert_eq!(recv, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
        assert_eq!(gathered, [6.0; 8]);
    }
}

#[test]
fn asking_moves_it_on_without_waiting() {
    on_ranks(2, |comm| {
        if comm.rank() == 1 {
            let mut early = [0_u8; 1];
            comm.receive(&mut early, 0, 0)?;
        }
        let mut pending = comm.start_broadcast(vec![comm.rank() as u32; 5], 0)?;
        if comm.rank() == 0 {
            assert!(!pending.is_finished()?, "rank 1 waits for a message");
            comm.send(&[0_u8], 1, 0)?;
        }
        while !pending.is_finished()? {
            std::thread::yield_now();
        }
        assert_eq!(pending.finish()?, [0; 5]);
        Ok(())
    });
}

#[test]
fn one_that_is_dropped_is_carried_out_all_the_same() {
    on_ranks(3, |comm| {
        drop(comm.start_all_reduce(vec![1.0_f32; 10_000], Reduce::Sum)?);
        let mut data = [comm.rank() as u32];
        comm.all_reduce(&mut data, Reduce::Sum)?;
        assert_eq!(data, [3]);
        Ok(())
    });
}

#[test]
fn memory_is_not_read_any_more_once_its_rank_has_failed() {
    // Rank 0 starts a broadcast, then fails before anybody has read its memory.
    let results = run_ranks(&RankOptions::new(3), |comm| {
        if comm.rank() == 0 {
            let _pending = comm.start_broadcast(vec![7_u32; 100_000], 0)?;
            panic!("out of luck");
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        comm.start_broadcast(vec![0_u32; 100_000], 0)?.finish().map(drop)
    });
    for result in results {
        assert_eq!(result, Err(CommError::Died { rank: 0, reason: "panicked: out of luck".into() }));
    }
}
