use super::*;

#[test]
fn a_freed_block_is_used_again() {
    let pool = MemoryPool::new();
    for _ in 0..10 {
        let _small = pool.take(1000);
        let _large = pool.take(3 << 20);
    }
    assert_eq!(pool.stats().system_allocations, 2);
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn trimming_gives_back_what_is_not_in_use() {
    let pool = MemoryPool::new();
    let kept = pool.take(4096);
    drop(pool.take(1 << 21));
    pool.trim();
    assert_eq!(pool.stats().held_bytes, size_class(4096));
    drop(kept);
}

#[test]
fn a_size_class_holds_its_size_and_wastes_at_most_an_eighth() {
    for bytes in (1..100_000).step_by(37) {
        let class = size_class(bytes);
        assert!(class >= bytes && class.is_multiple_of(64), "{bytes} -> {class}");
        assert!(bytes < 1024 || class <= bytes + bytes / 8, "{bytes} -> {class}");
    }
}
