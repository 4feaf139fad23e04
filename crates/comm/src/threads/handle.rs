//! Operations that were started and are finished later. All that a rank has under way go on whenever it waits for one, so
//! that ranks may finish them in different orders.

use std::sync::{Arc, Mutex};

use super::started::Started;
use super::world::{UnderWay, World, locked};
use crate::CommError;
use crate::started::RawPending;

/// A started operation, which is also in its rank's list of those under way.
pub(crate) struct Handle {
    started: Arc<Mutex<Started>>,
    world: Arc<World>,
    rank: usize,
}

impl UnderWay for Mutex<Started> {
    fn can_advance(&self) -> bool {
        // Whoever holds it makes it go on.
        self.try_lock().is_ok_and(|started| started.can_advance())
    }

    fn advance(&self) {
        if let Ok(mut started) = self.try_lock() {
            // An error is the whole run's: it comes out where this is finished.
            let _ = started.advance();
        }
    }
}

impl Handle {
    pub(crate) fn new(mut started: Started) -> Self {
        let (world, rank) = (Arc::clone(&started.group.world), started.world_rank());
        // What is there already need not be waited for. An error comes out at the end, as above.
        let _ = started.advance();
        let started = Arc::new(Mutex::new(started));
        world.add_under_way(rank, Arc::clone(&started) as Arc<dyn UnderWay>);
        Self { started, world, rank }
    }

    fn forget(&self) {
        self.world.remove_under_way(self.rank, &(Arc::clone(&self.started) as Arc<dyn UnderWay>));
    }
}

impl RawPending for Handle {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        self.world.advance_under_way(self.rank);
        match self.world.failure() {
            Some(error) => Err(error),
            None => Ok(locked(&self.started).advance()?.is_none()),
        }
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.forget();
        locked(&self.started).finish()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.forget();
        // Another thread of this rank may still hold it, to make it go on: the memory must not be needed after this.
        locked(&self.started).close();
    }
}
