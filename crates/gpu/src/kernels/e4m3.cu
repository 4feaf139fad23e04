// What products in eight-bit floats take (../../e4m3.rs): numbers rounded to E4M3 times a power of two that a block
// shares. They are written as bf16 numbers, or as bytes with the blocks' scales beside them, where pointers are
// given.

const u32 BLOCK = 128;

// The power of two by which numbers of at most `largest` are divided, so that they are at most 448 and this is more
// than 224.
DEVICE f32 scale_for(f32 largest) {
    u32 bits = float_bits(largest);
    int exponent = (int)(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
    return bits_float((u32)(max(exponent, -110) + 127) << 23);
}

// The float of E4M3 nearest to a number of at most 448, ties to even; what is not finite is NaN.
DEVICE f32 nearest(f32 x) {
    f32 size = bits_float(float_bits(x) & 0x7fffffffu);
    u32 bits = float_bits(size);
    f32 normal = bits_float((bits + 0x7ffffu + (bits >> 20 & 1)) & 0xfff00000u);
    // Multiples of 2^-9: there are no others at 2^14.
    f32 rounded = size < 0.015625f ? size + 16384.0f - 16384.0f : normal;
    if (bits >= 0x7f800000u) rounded = bits_float(0x7fffffffu);
    return bits_float(float_bits(rounded) | (float_bits(x) & 0x80000000u));
}

// The byte of a number that is a float of E4M3.
DEVICE u32 byte_of(f32 x) {
    u32 bits = float_bits(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7f;
    if (size < 0x3c800000u) return sign | (u32)(bits_float(size) * 512.0f);
    return sign | ((size >> 20) - (120u << 3));
}

// Sizes as whole numbers: those of floats and NaN are in order.
DEVICE u32 size_of(f32 x) { return float_bits(x) & 0x7fffffffu; }

// Four or eight numbers from `at` on, of which `count` are there, as vectors if `is_whole`.
template <u32 N> DEVICE void load_some(f32 (&x)[N], const void* from, u32 is_bf16, u64 at, u32 count, bool is_whole) {
    if (is_whole && is_bf16) {
#pragma unroll
        for (u32 i = 0; i < N / 4; i++) {
            uint2 words = count > 4 * i ? *(const uint2*)((const bf16*)from + at + 4 * i) : make_uint2(0, 0);
            x[4 * i] = bits_float(words.x << 16);
            x[4 * i + 1] = bits_float(words.x & 0xffff0000u);
            x[4 * i + 2] = bits_float(words.y << 16);
            x[4 * i + 3] = bits_float(words.y & 0xffff0000u);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) x[i] = i < count ? load_any(from, is_bf16, at + i) : 0.0f;
}

// Numbers (x / scale, rounded) to the places that there are.
template <u32 N>
DEVICE void store_some(const f32 (&x)[N], f32 scale, bf16* rounded, u8* bytes, u64 at, u32 count, bool is_whole) {
#pragma unroll
    for (u32 i = 0; i < N / 4; i++) {
        if (count <= 4 * i) continue;
        const f32* four = x + 4 * i;
        if (bytes)
            *(u32*)(bytes + at + 4 * i) =
                byte_of(four[0]) | byte_of(four[1]) << 8 | byte_of(four[2]) << 16 | byte_of(four[3]) << 24;
        if (!rounded) continue;
        if (is_whole) {
            *(uint2*)(rounded + at + 4 * i) =
                make_uint2(pack_bf16(four[0] * scale, four[1] * scale), pack_bf16(four[2] * scale, four[3] * scale));
            continue;
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (4 * i + j < count) store(rounded[at + 4 * i + j], four[j] * scale);
    }
}

// A warp has 128 columns of a row. Rows of bytes are whole vectors of 16.
KERNEL(256) e4m3_rows(const void* x, u32 x_bf16, bf16* rounded, u8* bytes, f32* scales, u32 columns, u64 blocks) {
    u64 index = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (index >= blocks) return;
    u32 of_row = (columns + BLOCK - 1) / BLOCK, lane = threadIdx.x % 32;
    u32 column = (u32)(index % of_row) * BLOCK + lane * 4;
    u64 at = index / of_row * columns + column;
    u32 count = column < columns ? min(columns - column, 4u) : 0;
    bool is_whole = columns % 4 == 0;
    f32 four[4];
    load_some(four, x, x_bf16, at, count, is_whole);
    f32 scale = scale_for(bits_float(warp_largest(max(max(size_of(four[0]), size_of(four[1])), max(size_of(four[2]), size_of(four[3]))))));
    f32 inverse = 1.0f / scale;
#pragma unroll
    for (u32 i = 0; i < 4; i++) four[i] = nearest(four[i] * inverse);
    store_some(four, scale, rounded, bytes, at, count, is_whole);
    if (scales && lane == 0) scales[index] = scale;
}

// A block has 128 x 128 of matrix blockIdx.z, of `columns` columns and `rows` rows, of which each group has
// `of_group`; groups without rows of their own (`offsets`) are left out. Turned bytes are those of a group's matrices
// side by side, each transposed; their rows are whole vectors of 16 then, and whole blocks where there are several.
KERNEL(256) e4m3_matrices(const void* x, u32 x_bf16, const u32* offsets, bf16* rounded, u8* bytes, u8* turned, f32* scales, u32 rows,
                          u32 columns, u32 of_group) {
    const u32 STRIDE = BLOCK + 16;
    __shared__ u32 sizes[8];
    // Pieces of 16 bytes, whose order differs from eight rows to the next: those that a warp writes at a time lie in
    // different banks.
    __shared__ __align__(16) u8 tile[BLOCK * STRIDE];
    u32 matrix = blockIdx.z, group = matrix / of_group;
    if (offsets && offsets[group] == offsets[group + 1]) return;
    u32 chunk = threadIdx.x % 16, line = threadIdx.x / 16;
    u32 column = blockIdx.x * BLOCK + chunk * 8, first = blockIdx.y * BLOCK;
    u32 count = column < columns ? min(columns - column, 8u) : 0;
    bool is_whole = columns % 4 == 0;
    f32 eight[8][8];
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 row = first + line + 16 * i;
        load_some(eight[i], x, x_bf16, ((u64)matrix * rows + row) * columns + column, row < rows ? count : 0, is_whole);
#pragma unroll
        for (u32 j = 0; j < 8; j++) largest = max(largest, size_of(eight[i][j]));
    }
    largest = warp_largest(largest);
    if (threadIdx.x % 32 == 0) sizes[threadIdx.x / 32] = largest;
    __syncthreads();
    for (u32 i = 0; i < 8; i++) largest = max(largest, sizes[i]);
    f32 scale = scale_for(bits_float(largest)), inverse = 1.0f / scale;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 row = first + line + 16 * i;
#pragma unroll
        for (u32 j = 0; j < 8; j++) eight[i][j] = nearest(eight[i][j] * inverse);
        store_some(eight[i], scale, rounded, bytes, ((u64)matrix * rows + row) * columns + column, row < rows ? count : 0, is_whole);
        if (!turned) continue;
#pragma unroll
        for (u32 j = 0; j < 8; j++) tile[(chunk * 8 + j) * STRIDE + (i ^ (chunk & 7)) * 16 + line] = (u8)byte_of(eight[i][j]);
    }
    u32 row_blocks = (rows + BLOCK - 1) / BLOCK, column_blocks = (columns + BLOCK - 1) / BLOCK, inside = matrix % of_group;
    if (scales && threadIdx.x == 0) {
        u64 straight = ((u64)matrix * row_blocks + blockIdx.y) * column_blocks + blockIdx.x;
        u64 across = (((u64)group * column_blocks + blockIdx.x) * of_group + inside) * row_blocks + blockIdx.y;
        scales[turned ? across : straight] = scale;
    }
    if (!turned) return;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 at = threadIdx.x + 256 * i, turned_row = at / 8, part = at % 8 * 16;
        if (blockIdx.x * BLOCK + turned_row >= columns || first + part >= rows) continue;
        u64 to = (((u64)group * columns + blockIdx.x * BLOCK + turned_row) * of_group + inside) * rows + first + part;
        *(uint4*)(turned + to) = *(const uint4*)(tile + turned_row * STRIDE + (at % 8 ^ (turned_row / 8 & 7)) * 16);
    }
}
