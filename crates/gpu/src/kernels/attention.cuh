// What the kernels of attention share: where rows and keys lie, and which keys a row sees.

struct Sizes {
    u32 seq_len, kv_len, kv_capacity, heads, kv_heads, head_dim, value_dim, window;  // window 0: none
    f32 scale;
    // Query heads that share a key head, and what stands for dividing by that: a division takes as long as twenty
    // other instructions.
    u32 of_key_head, inverse;
    DEVICE_MEMBER u32 group() const { return of_key_head; }
    DEVICE_MEMBER u32 rows() const { return seq_len * group(); }
    // The query of row r of a key head, and which of the heads that share it. 2^32 / group rounded up gives one too
    // many at most.
    DEVICE_MEMBER u32 query(u32 r) const {
        if (!inverse) return r;
        u32 query = (u32)((u64)r * inverse >> 32);
        return query * group() > r ? query - 1 : query;
    }
    DEVICE_MEMBER u32 head(u32 r) const { return r - query(r) * group(); }
    // Row r of key head g: its query's place in [batch seq_len, H], for this block's batch.
    DEVICE_MEMBER u64 place(u32 batch, u32 g, u32 r) const {
        return ((u64)batch * seq_len + query(r)) * heads + g * group() + head(r);
    }
    DEVICE_MEMBER u64 key_place(u32 batch, u32 g, u32 key) const { return ((u64)batch * kv_capacity + key) * kv_heads + g; }
    DEVICE_MEMBER u32 last_key(u32 r) const { return query(r) + kv_len - seq_len; }
    // The first key that is seen with this last one.
    DEVICE_MEMBER u32 first_before(u32 last) const { return window && last + 1 > window ? last + 1 - window : 0; }
    DEVICE_MEMBER u32 first_key(u32 r) const { return first_before(last_key(r)); }
    DEVICE_MEMBER bool sees(u32 r, u32 key) const { return key <= last_key(r) && key >= first_key(r); }
    // The place of a row's log-sum in [batch, H, seq_len].
    DEVICE_MEMBER u64 lse_place(u32 batch, u32 g, u32 r) const {
        return ((u64)batch * heads + g * group() + head(r)) * seq_len + query(r);
    }
};

#define SIZES u32 seq_len, u32 kv_len, u32 kv_capacity, u32 heads, u32 kv_heads, u32 head_dim, u32 value_dim, u32 window, f32 scale
#define THE_SIZES sizes(seq_len, kv_len, kv_capacity, heads, kv_heads, head_dim, value_dim, window, scale)

DEVICE Sizes sizes(SIZES) {
    u32 group = heads / kv_heads, inverse = group > 1 ? 0xffffffffu / group + 1 : 0;
    return Sizes{seq_len, kv_len, kv_capacity, heads, kv_heads, head_dim, value_dim, window, scale, group, inverse};
}

// Sums and maxima over the four lanes of a row.
DEVICE f32 quad_sum(f32 x) {
    x += from_lane_xor(x, 1);
    return x + from_lane_xor(x, 2);
}
DEVICE f32 quad_max(f32 x) {
    x = larger(x, from_lane_xor(x, 1));
    return larger(x, from_lane_xor(x, 2));
}
