// f32 numbers as three of bf16, for products by tensor cores: see logits.rs.

DEVICE f32 as_bf16(f32 x) {
    bf16 y;
    store(y, x);
    return load(y);
}

// Part 0, 1 or 2 of x, whose sum is x; an infinite number has no others than the first.
DEVICE f32 part_of(f32 x, u32 part) {
    f32 first = as_bf16(x);
    if (part == 0) return first;
    if (!(fabsf(first) <= 3.4e38f)) return 0.0f;
    f32 second = as_bf16(x - first);
    return part == 1 ? second : as_bf16(x - first - second);
}

// Rows of `width` numbers, `num` of them in all, become rows of `num_parts` lists of as many; `names` has two bits
// for each list.
KERNEL(256) cut_numbers(const f32* x, bf16* to, u32 num, u32 width, u32 names, u32 num_parts) {
    for (u64 i = blockIdx.x * 256 + threadIdx.x; i < num; i += gridDim.x * 256) {
        f32 number = x[i];
        u64 at = (u64)((u32)i / width) * width * num_parts + (u32)i % width;
        for (u32 part = 0; part < num_parts; part++) store(to[at + (u64)part * width], part_of(number, names >> (2 * part) & 3));
    }
}
