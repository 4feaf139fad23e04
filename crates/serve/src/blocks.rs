//! Blocks of keys and values: who uses them, which are free, and which still hold a known prefix (PagedAttention,
//! Kwon et al., 2309.06180, section 4).

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use crate::hash::BlockHash;

/// The number of a block, from 0.
pub type BlockId = u32;

/// The blocks that keys and values may lie in. A free block keeps its content, and can be found by its hash, until it
/// is taken for something else: the block that has been free for longest first, blocks without a hash before all
/// others.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, BlockId>,
    free: BTreeMap<FreeKey, BlockId>,
    num_releases: u64,
}

#[derive(Clone, Debug, Default)]
struct Block {
    /// Sequences that hold it.
    num_users: u32,
    hash: Option<BlockHash>,
    /// Its place among the free blocks; none while it is used.
    free_key: Option<FreeKey>,
}

/// The order in which free blocks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FreeKey {
    has_hash: bool,
    released_at: u64,
}

impl BlockPool {
    /// Makes `num_blocks` free blocks.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX);
        let mut pool = Self { blocks: Vec::new(), by_hash: HashMap::new(), free: BTreeMap::new(), num_releases: 0 };
        pool.blocks.resize(num_blocks as usize, Block::default());
        (0..num_blocks).for_each(|id| pool.add_free(id));
        pool
    }

    /// All blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that no sequence holds.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that can be found by their hash.
    #[must_use]
    pub fn num_hashed(&self) -> usize {
        self.by_hash.len()
    }

    /// Sequences that hold block `id`.
    #[must_use]
    pub fn num_users(&self, id: BlockId) -> u32 {
        self.blocks[id as usize].num_users
    }

    /// Takes a free block for one user; its content may be overwritten. None if all are used.
    pub fn take(&mut self) -> Option<BlockId> {
        let (_, id) = self.free.pop_first()?;
        let block = &mut self.blocks[id as usize];
        block.free_key = None;
        block.num_users = 1;
        if let Some(hash) = block.hash.take() {
            self.by_hash.remove(&hash);
        }
        Some(id)
    }

    /// Finds the block whose content has this hash.
    #[must_use]
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    /// Adds a user to block `id`, which is free or used.
    pub fn share(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        block.num_users += 1;
        if let Some(key) = block.free_key.take() {
            self.free.remove(&key);
        }
    }

    /// Takes a user from block `id`. Without users it is free, and keeps its content for now.
    pub fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        assert!(block.num_users > 0, "block {id} is released by nobody");
        block.num_users -= 1;
        if block.num_users == 0 {
            self.add_free(id);
        }
    }

    /// Names the content of block `id`, which is used and will not be written again. Where another block has this
    /// content, that one stays the one that is found.
    pub fn publish(&mut self, id: BlockId, hash: BlockHash) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.num_users > 0 && block.hash.is_none_or(|old| old == hash), "block {id} is published twice");
        if let Entry::Vacant(entry) = self.by_hash.entry(hash) {
            block.hash = Some(hash);
            entry.insert(id);
        }
    }

    fn add_free(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        let key = FreeKey { has_hash: block.hash.is_some(), released_at: self.num_releases };
        self.num_releases += 1;
        block.free_key = Some(key);
        self.free.insert(key, id);
    }

    /// Checks what must always hold: a block is free exactly if nobody uses it, and hashes name blocks one to one.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<(), String> {
        for (id, block) in self.blocks.iter().enumerate() {
            let is_listed = block.free_key.is_some_and(|key| self.free.get(&key) == Some(&(id as BlockId)));
            if is_listed != (block.num_users == 0) {
                return Err(format!("block {id} has {} users and is_free is {is_listed}", block.num_users));
            }
            if block.hash.is_some_and(|hash| self.by_hash.get(&hash) != Some(&(id as BlockId))) {
                return Err(format!("block {id} is not found by its hash"));
            }
        }
        let num_hashed = self.blocks.iter().filter(|block| block.hash.is_some()).count();
        let num_free = self.blocks.iter().filter(|block| block.num_users == 0).count();
        match (num_hashed == self.by_hash.len(), num_free == self.free.len()) {
            (true, true) => Ok(()),
            _ => Err(format!(
                "{num_hashed} hashes for {} names, {num_free} free of {}",
                self.by_hash.len(),
                self.free.len()
            )),
        }
    }
}
