// Rotation by position of heads that lie in shared memory.

struct Angles {
    const f32* cosines;  // of the row's position, and then its sines
    u32 head_dim, start, half, is_interleaved;
};

// Rotates the heads of a row, by a whole block, as `rotate` in elementwise.cu.
DEVICE void rotate_in_place(f32* row, u32 width, const Angles& angles) {
    u32 pairs = width / angles.head_dim * angles.half;
    for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
        u32 pair = i % angles.half;
        f32* head = row + i / angles.half * angles.head_dim + angles.start;
        f32* low = head + (angles.is_interleaved ? 2 * pair : pair);
        f32* high = head + (angles.is_interleaved ? 2 * pair + 1 : pair + angles.half);
        f32 a = *low, b = *high, cosine = angles.cosines[pair], sine = angles.cosines[angles.half + pair];
        *low = fmaf(a, cosine, -(b * sine));
        *high = fmaf(b, cosine, a * sine);
    }
}

// Those of a position, of a table of angles.
DEVICE Angles angles_of(const f32* table, u32 position, u32 head_dim, u32 start, u32 half, u32 is_interleaved) {
    return {table + (u64)position * 2 * half, head_dim, start, half, is_interleaved};
}
