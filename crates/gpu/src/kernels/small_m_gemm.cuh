// Products of up to 32 rows with weights as they lie, bf16 or blocks, on tensor cores: tiles of 128 rows would keep a
// few multiprocessors busy. What a block's numbers are before its scale (levels) are whole numbers of at most eight
// bits, or floats of eight or four, all of them exact in bf16; so levels are multiplied with activations in bf16, and
// the sum of 32 of them (or 16) by the scale in f32. Columns of weights take the place of an instruction's 16 rows,
// rows of activations that of its 8 columns. Which elements of the depth an instruction takes for which of its own
// does not matter as long as both operands have the same.
//
// A block of threads has one, two, four or eight tiles of 16 lines of weights, and each of its eight warps an equal
// share of a tile's chunks of the depth: one tile where there are few columns, eight where there are so many blocks
// that all multiprocessors have some. A block that is over after a chunk or two waits longer for its first chunk and
// for its warps' sums than it has to read. A warp has two chunks under way where a multiprocessor has two blocks, and
// four where it has one. A warp copies chunks to its own shared memory whole, and takes the levels from there: in
// place most loads would be of two bytes, with the memory's latency for each. Activations lie in the block's shared
// memory as instructions take them: all warps read the same ones, and to find, load and round them in each warp takes
// more instructions than the weights do.

// As blocks of 32 numbers without scales.
const u32 BF16 = NUM_TYPES;
LAYOUT(BF16, 32, 64, 16);

// Lines of a tile.
const u32 LINES = 16;
// The most rows of a tile, and floats from a line's sums to the next one's.
const u32 SOME = 32, SUMS_STRIDE = SOME + 8;

// A chunk of the depth in shared memory: of each line the pieces of 16 bytes that its weights lie in. Lines that are
// read together are in different banks: blocks have gaps, and of bf16 every second line has each two neighbouring 64
// bytes the other way round.
template <u32 TYPE> struct Chunk {
    typedef Layout<TYPE> L;
    static const u32 DEPTH = TYPE == BF16 ? 128 : 256;
    static const u32 BYTES = DEPTH / L::LEN * L::BYTES, MISPLACED = L::ALIGN < 16 ? 16 - L::ALIGN : 0;
    static const u32 PIECES = (BYTES + MISPLACED + 15) / 16, STRIDE = TYPE == BF16 ? BYTES : (PIECES | 1) * 16;
    static const u32 SIZE = LINES * STRIDE;
};

// Where a lane's two lines of weights lie, lane / 4 of 16 and the one eight further on: of two columns, or of a pair.
struct LaneLines {
    const u8* rows[2];
    bool are_there[2];
    u32 row_bytes;
};

// Those of a tile of the block's columns; rows of B are `b.stride` bytes.
template <bool IS_PAIRED> DEVICE LaneLines lines_of(const Problem& p, u32 tile) {
    u32 column = p.column + tile * (IS_PAIRED ? 8 : LINES) + threadIdx.x % 32 / 4;
    const u8* row = (const u8*)p.b.data + p.b.row(column);
    u64 second = IS_PAIRED ? p.pair : 8;
    return LaneLines{{row, row + second * p.b.stride}, {column < p.columns, column + (IS_PAIRED ? 0 : 8) < p.columns}, p.b.stride};
}

// Where in a line a lane's 16 of the bytes from 64 `index` on are.
template <u32 TYPE> DEVICE int piece_at(u32 index) {
    int turned = TYPE == BF16 ? threadIdx.x / 4 % 2 * 64 : 0, first = threadIdx.x % 4 * 16;
    return (index % 2 ? first - turned : first + turned) + index * 64;
}

// Copies the lines' weights from a byte of their rows on, as far as they are there: four lanes have a line.
template <u32 TYPE> DEVICE void copy_chunk(u8* to, const LaneLines& lines, u32 first_byte) {
    typedef Chunk<TYPE> C;
    u64 policy = read_once();
    u32 first = threadIdx.x % 4 * 16, line = shared_address(to) + threadIdx.x % 32 / 4 * C::STRIDE;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u8* from = lines.rows[half] + first_byte;
        u32 misplaced = (u32)((u64)from & 15);
        u32 bytes = lines.are_there[half] ? min(misplaced + lines.row_bytes - first_byte, C::PIECES * 16) : 0;
        from = from - misplaced + first;
#pragma unroll
        for (u32 i = 0; i < (C::PIECES + 3) / 4; i++)
            if (first + 64 * i < bytes) copy_async_cached(line + (8 * half * C::STRIDE + piece_at<TYPE>(i)), from + 64 * i, policy);
    }
}

// ---- levels: of 32 elements a lane has those from 4 (lane % 4) on and from 16 further on, four each, in pairs (0,
// 2), (1, 3), as bytes and halves of bytes come apart; of bf16 it has eight neighbours in order ----

// Four bytes of a chunk, whose address is a multiple of ALIGN.
template <u32 ALIGN> DEVICE u32 word_at(const u8* at) {
    if (ALIGN >= 4) return *(const u32*)at;
    if (ALIGN == 2) return ((const u16*)at)[0] | (u32)((const u16*)at)[1] << 16;
    // From the two words that they may lie in: behind a line's last piece there is another line, or room for one
    // piece.
    u32 misplaced = (u32)(u64)at & 3;
    const u32* words = (const u32*)(at - misplaced);
    return (u32)(((u64)words[1] << 32 | words[0]) >> misplaced * 8);
}

// Of halves of words, the bits in MASK: as many over 128, of which a unit is the lowest bit, less 128 and `ZERO`.
template <u32 MASK, u32 ZERO> DEVICE u32 pair_of_counts(u32 bits) {
    return multiply_add_pairs(masked_with<MASK * 0x10001>(bits, 0x43004300u), 0x3f803f80u, 0xc300c300u | ZERO * 0x10001u);
}

// Of the low bytes of halves, signed numbers: seven bits count from 128 on, the sign takes away 128 more.
DEVICE u32 pair_of_bytes(u32 bits) {
    return multiply_add_pairs(masked_with<0x007f007f>(bits, 0x43004300u), 0x3f803f80u, masked_with<0x00800080>(bits, 0xc300c300u));
}

// E4M3 floats there: their bits are those of floats that are 2^120 times smaller, or NaN.
DEVICE u32 pair_of_f8(u32 bits) {
    u32 sizes = bits & 0x007f007f, are_nan = (sizes + 0x00010001) >> 7 & 0x00010001;
    return multiply_add_pairs(sizes << 4 | (bits & 0x00800080) << 8, 0x7b807b80u, 0x80008000u) | are_nan * 0x7fff;
}

// Twice the E2M1 floats in the low four bits of halves: bits of floats that are 2^127 times smaller.
DEVICE u32 pair_of_fp4(u32 bits) { return multiply_add_pairs((bits & 0x00070007) << 6 | (bits & 0x00080008) << 12, 0x7f007f00u, 0x80008000u); }

template <u32 TYPE> DEVICE u32 pair_of_levels(u32 bits) {
    if constexpr (TYPE == Q8 || TYPE == IQ4_NL) return pair_of_bytes(bits);
    else if constexpr (TYPE == F8) return pair_of_f8(bits);
    else if constexpr (TYPE == MXFP4) return pair_of_fp4(bits);
    else if constexpr (TYPE == Q6K) return pair_of_counts<0x3f, 32>(bits);
    else if constexpr (TYPE == Q3K) return pair_of_counts<0x7, 4>(bits);
    else if constexpr (TYPE == Q2K) return pair_of_counts<0x3, 0>(bits);
    else if constexpr (TYPE == Q5_0) return pair_of_counts<0x1f, 16>(bits);
    else return pair_of_counts<TYPE == Q5K || TYPE == Q5_1 ? 0x1f : 0xf, TYPE == Q4 ? 8 : 0>(bits);
}

// A line's levels of 32 elements; the scales of the first and of the last 16, and what is to be taken from each
// number of theirs.
struct LevelPairs {
    u32 pairs[4];
    f32 scales[2], least[2];
};

// Whether something is to be taken, and whether that and scales are those of 16 elements.
template <u32 TYPE> struct Scaling {
    static const bool HAS_LEAST = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q2K || TYPE == Q4K || TYPE == Q5K;
    static const bool HAS_TWO_SCALES = TYPE == Q2K || TYPE == Q3K || TYPE == Q6K;
};

// The low four bits of every byte, and above them those of others that are in the mask.
DEVICE u32 with_high_bits(u32 low, u32 high, u32 mask) { return (low & 0x0f0f0f0f) | (high & mask) << 4; }

// Four bits, each the lowest of a byte.
DEVICE u32 bits_apart(u32 bits) { return (bits & 15) * 0x00204081 & 0x01010101; }

// IQ4_NL's numbers of the low four bits of every byte (iq4_level).
DEVICE u32 iq4_bytes(u32 word) {
    u32 low = word & 0x07070707, pairs = (low | low >> 4) & 0x00ff00ff, selector = (pairs | pairs >> 8) & 0xffff;
    u32 are_upper = (word >> 3 & 0x01010101) * 255;
    return (bytes_named(0xbfad9881, 0xf6eaddcf, selector) & ~are_upper) | (bytes_named(0x26190d01, 0x71594535, selector) & are_upper);
}

// The first and the second four of a lane's numbers in the low bits of bytes, above which there may be more; and the
// block's scales. `part` is that of a block of several times 32.
template <u32 TYPE> DEVICE void words_of_short_block(u32 (&words)[2], LevelPairs& y, const u8* block, u32 part) {
    typedef Layout<TYPE> L;
    u32 at = threadIdx.x % 4 * 4;
    if (TYPE == Q8 || TYPE == F8) {
        const u8* bytes = block + (TYPE == Q8 ? 2 : 4 + part * 32) + at;
        words[0] = word_at<L::ALIGN>(bytes);
        words[1] = word_at<L::ALIGN>(bytes + 16);
        y.scales[0] = TYPE == Q8 ? half_value(*(const u16*)block) : *(const f32*)block;
    } else if (TYPE == Q4 || TYPE == MXFP4) {
        u32 word = word_at<L::ALIGN>(block + (TYPE == Q4 ? 2 : 1) + at);
        words[0] = word;
        words[1] = word >> 4;
        y.scales[0] = TYPE == Q4 ? half_value(*(const u16*)block) : half_power(block[0]);
    } else if (TYPE == IQ4_NL) {
        u32 word = word_at<2>(block + 2 + at);
        words[0] = iq4_bytes(word);
        words[1] = iq4_bytes(word >> 4);
        y.scales[0] = half_value(*(const u16*)block);
    } else if (TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1) {
        const u32 FIRST = TYPE == Q4_1 ? 4 : TYPE == Q5_0 ? 6 : 8;
        u32 word = word_at<L::ALIGN>(block + FIRST + at), high = TYPE == Q4_1 ? 0 : word_at<L::ALIGN>(block + FIRST - 4) >> at;
#pragma unroll
        for (u32 i = 0; i < 2; i++) words[i] = with_high_bits(word >> 4 * i, bits_apart(high >> 16 * i), 0x01010101);
        y.scales[0] = half_value(*(const u16*)block);
        if (TYPE != Q5_0) y.least[0] = -half_value(*(const u16*)(block + 2));
    }
}

template <u32 TYPE> DEVICE void words_of_long_block(u32 (&words)[2], LevelPairs& y, const u8* block, u32 part) {
    u32 at = threadIdx.x % 4 * 4;
    if (TYPE == Q2K || TYPE == Q3K) {
        const u8* bytes = block + (TYPE == Q2K ? 16 : 32) + part / 4 * 32 + at;
        f32 scale = half_value(*(const u16*)(block + 80)), least = half_value(*(const u16*)(block + 82));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            words[i] = word_at<2>(bytes + 16 * i) >> part % 4 * 2;
            if (TYPE == Q3K) {
                words[i] = (words[i] & 0x03030303) | (word_at<2>(block + at + 16 * i) >> part & 0x01010101) << 2;
                y.scales[i] = q3_scale(block, part * 2 + i);
            } else {
                u32 both = block[part * 2 + i];
                y.scales[i] = scale * (f32)(both & 15);
                y.least[i] = least * (f32)(both >> 4);
            }
        }
    } else if (TYPE == Q4K || TYPE == Q5K) {
        const u8* bytes = block + (TYPE == Q5K ? 48 : 16) + part / 2 * 32 + at;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            words[i] = *(const u32*)(bytes + 16 * i) >> part % 2 * 4;
            if (TYPE == Q5K) words[i] = with_high_bits(words[i], *(const u32*)(block + 16 + at + 16 * i) >> part, 0x01010101);
        }
        float2 both = scale_and_least(block, part);
        y.scales[0] = both.x;
        y.least[0] = both.y;
    } else {
        const u8 *bytes = block + part / 4 * 64 + part % 2 * 32 + at, *highs = block + 128 + part / 4 * 32 + at;
        f32 scale = half_value(*(const u16*)(block + 208));
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 low = word_at<2>(bytes + 16 * i) >> part % 4 / 2 * 4;
            words[i] = with_high_bits(low, word_at<2>(highs + 16 * i) >> part % 4 * 2, 0x03030303);
            y.scales[i] = scale * (f32)(signed char)block[192 + part * 2 + i];
        }
    }
}

// Levels of the elements from 32 `index` on of a chunk whose first block is at `blocks`.
template <u32 TYPE> DEVICE LevelPairs level_pairs(const u8* blocks, u32 index) {
    typedef Layout<TYPE> L;
    const u32 PARTS = L::LEN / 32;
    u32 part = index % PARTS, words[2];
    const u8* block = blocks + index / PARTS * L::BYTES;
    LevelPairs y;
    y.least[0] = 0.0f;
    if constexpr (TYPE == BF16) {
        uint4 eight = *(const uint4*)(blocks + piece_at<BF16>(index));
        y.pairs[0] = eight.x;
        y.pairs[1] = eight.y;
        y.pairs[2] = eight.z;
        y.pairs[3] = eight.w;
        return y;
    }
    if constexpr (L::LEN == 256) words_of_long_block<TYPE>(words, y, block, part);
    else words_of_short_block<TYPE>(words, y, block, part);
    if (!Scaling<TYPE>::HAS_TWO_SCALES) {
        y.scales[1] = y.scales[0];
        y.least[1] = y.least[0];
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) y.pairs[i] = pair_of_levels<TYPE>(words[i / 2] >> i % 2 * 8);
    return y;
}

// ---- activations in shared memory: of each 32 elements of the depth and of each eight rows 512 bytes, 16 for every
// lane ----

// As many rows as eight GROUPS, in the order of levels of a TYPE.
template <u32 TYPE, u32 GROUPS> struct StagedRows {
    u8* to;
    // Four neighbours, the first of which is a multiple of four.
    DEVICE_MEMBER void put_at(u32 row, u32 k, const Few<4>& v) const {
        u32 quarter = TYPE == BF16 ? k % 32 / 8 : k % 16 / 4, half = TYPE == BF16 ? k % 8 / 4 : k % 32 / 16;
        u8* own = to + (k / 32 * GROUPS + row / 8) * 512 + (row % 8 * 4 + quarter) * 16 + half * 8;
        const u32 SECOND = TYPE == BF16 ? 1 : 2;
        *(uint2*)own = make_uint2(pack_bf16(v.x[0], v.x[SECOND]), pack_bf16(v.x[3 - SECOND], v.x[3]));
    }
    // `rows` rows of A, at most 32 and of `len` elements from `start` on, by a whole block. A thread has eight of
    // them on their way at a time. Each lane's `own` is where its row is.
    template <typename T> DEVICE_MEMBER void put_all(const Operand& a, u32 own, u32 rows, u32 start, u32 len) const {
        const T* data = (const T*)a.data + start;
        u32 fours = len / 4, all = (rows + 7) / 8 * fours;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < (all + 31) / 32 * 32; i += 256) {
            u32 first = i / fours * 8, k = i % fours * 4;
            Few<4> v[8];
#pragma unroll
            for (u32 r = 0; r < 8; r++) {
                const T* row = data + (u64)from_lane(own, (int)(first + r)) * a.stride;
                if (first + r < rows) v[r] = few<4>(row + k);
            }
#pragma unroll
            for (u32 r = 0; r < 8; r++)
                if (first + r < rows) put_at(first + r, k, v[r]);
        }
    }
    // The same of rows in bf16 that are in order already, at whole pieces of 16 bytes: all of them are on their way
    // at once.
    DEVICE_MEMBER void copy_all(const Operand& a, u32 own, u32 rows, u32 start, u32 len) const {
        u32 lane = threadIdx.x % 32;
        const bf16* from[GROUPS];
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++)
            from[g] = (const bf16*)a.data + (u64)from_lane(own, (int)(8 * g + lane / 4)) * a.stride + start + lane % 4 * 8;
        for (u32 k = threadIdx.x / 32 * 32; k < len; k += 256)
#pragma unroll
            for (u32 g = 0; g < GROUPS; g++) copy_async(to + (k / 32 * GROUPS + g) * 512 + lane * 16, from[g] + k, 8 * g + lane / 4 < rows);
    }
};

// Activations of up to eight GROUPS rows: `begin` asks for what says where they are, and `put` brings a piece of the
// depth, which is there then, or on its way as copies.
template <u32 TYPE, u32 GROUPS> struct Activations {
    static const bool COME_AMID = GROUPS == 1, ARE_COPIED = true;
    StagedRows<TYPE, GROUPS> to;
    Operand a;
    u32 rows, own;
    DEVICE_MEMBER void begin() {
        u32 lane = threadIdx.x % 32;
        own = (u32)a.first + lane;
        if (a.gather && lane < rows) own = a.gather[own];
    }
    DEVICE_MEMBER void put(u32 start, u32 len) const {
        bool is_in_order = a.is_bf16 == (TYPE == BF16 ? 1 : IN_LEVELS);
        if (is_in_order && ((u64)a.data | a.stride * 2) % 16 == 0) to.copy_all(a, own, rows, start, len);
        else if (a.is_bf16) to.template put_all<bf16>(a, own, rows, start, len);
        else to.template put_all<f32>(a, own, rows, start, len);
    }
};

// Those that are normed first, the whole depth at once: one row is asked for before weights, and normed behind what
// asks for these.
template <u32 TYPE, u32 GROUPS> struct NormedActivations {
    static const bool COME_AMID = false, ARE_COPIED = false;
    StagedRows<TYPE, GROUPS> to;
    const Norm& norm;
    u32 rows, width;
    HeldRow held;
    DEVICE_MEMBER void begin() {
        if (rows == 1) held.load(norm, width);
    }
    DEVICE_MEMBER void put(u32, u32) const { norm_rows(norm, to, rows, width, held); }
};

// Adds the products of elements from 32 `index` of a chunk on: to a lane's sums of its two lines with rows 2 (lane %
// 4) on of each eight. `x` is where the first eight rows' activations of these elements are.
template <u32 TYPE, u32 GROUPS> DEVICE void add_levels(f32 (&sums)[GROUPS][4], const u8* const (&lines)[2], u32 index, const u8* x) {
    const bool HAS_LEAST = Scaling<TYPE>::HAS_LEAST, HAS_TWO_SCALES = Scaling<TYPE>::HAS_TWO_SCALES;
    LevelPairs w[2] = {level_pairs<TYPE>(lines[0], index), level_pairs<TYPE>(lines[1], index)};
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        uint4 own = *(const uint4*)(x + g * 512 + threadIdx.x % 32 * 16);
        u32 pairs[4] = {own.x, own.y, own.z, own.w};
        f32 products[4] = {}, whole[4] = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 fragment[4] = {w[0].pairs[2 * i], w[1].pairs[2 * i], w[0].pairs[2 * i + 1], w[1].pairs[2 * i + 1]};
            if (TYPE == BF16) {
                mma_bf16(sums[g], fragment, pairs[2 * i], pairs[2 * i + 1]);
                continue;
            }
            mma_bf16(products, fragment, pairs[2 * i], pairs[2 * i + 1]);
            if (HAS_LEAST) {
                const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
                mma_bf16(whole, ones, pairs[2 * i], pairs[2 * i + 1]);
            }
            if (!HAS_TWO_SCALES && i == 0) continue;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                sums[g][j] = fmaf(w[j / 2].scales[i], products[j], sums[g][j]);
                if (HAS_LEAST) sums[g][j] = fmaf(-w[j / 2].least[i], whole[j], sums[g][j]);
                products[j] = whole[j] = 0.0f;
            }
        }
    }
}

// Adds the products of a chunk that is in shared memory from `from` on: its lines begin at a byte of `lines`, and
// `left` elements of the depth are left. `x` is where the activations of its first elements are, `step` bytes before
// the next 32 elements'.
template <u32 TYPE, u32 GROUPS>
DEVICE void add_chunk(f32 (&sums)[GROUPS][4], const u8* from, const LaneLines& lines, u32 first_byte, const u8* x, u32 step, u32 left) {
    typedef Chunk<TYPE> C;
    const u8* blocks[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        blocks[half] = from + (threadIdx.x % 32 / 4 + 8 * half) * C::STRIDE + ((u32)(u64)lines.rows[half] + first_byte) % 16;
    if (left >= C::DEPTH) {
        // One or two chunks are over before the instructions of a loop that is taken apart have come.
#pragma unroll (GROUPS == 1 && Layout<TYPE>::LEN == 32 ? 2 : 4)
        for (u32 i = 0; i < C::DEPTH / 32; i++) add_levels<TYPE, GROUPS>(sums, blocks, i, x + i * step);
        return;
    }
    // What lies behind a row's end is another's, or nothing.
#pragma unroll 1
    for (u32 i = 0; i < left / 32; i++) add_levels<TYPE, GROUPS>(sums, blocks, i, x + i * step);
}

// A block's shared memory: the chunks that each warp has under way, two or four, in the place of which its sums lie
// for the others later, and behind them activations.
template <u32 TYPE> struct Room {
    typedef Chunk<TYPE> C;
    u8* shared;
    u32 stages;
    DEVICE_MEMBER u8* chunk(u32 i) const { return shared + (threadIdx.x / 32 * stages + (i & (stages - 1))) * C::SIZE; }
    // Waits for the oldest of all that are under way.
    DEVICE_MEMBER void wait() const {
        if (stages == 2) copy_wait<1>();
        else copy_wait<3>();
    }
    // Waits for what was asked for before the second half of them.
    DEVICE_MEMBER void wait_for_half() const {
        if (stages == 2) copy_wait<1>();
        else copy_wait<2>();
    }
    DEVICE_MEMBER f32* sums(u32 warp) const { return (f32*)(shared + warp * stages * C::SIZE); }
    DEVICE_MEMBER u8* staged() const { return shared + 8 * stages * C::SIZE; }
    // How much of the depth there is room for, in whole chunks.
    template <u32 GROUPS> DEVICE_MEMBER u32 depth() const { return (shared_bytes() - 8 * stages * C::SIZE) / (16 * GROUPS) / C::DEPTH * C::DEPTH; }
};

// Goes through a warp's chunks in turn, each of which `chunk_of` gives its place in the depth: `copy` asks for one,
// and `add` adds it, when it is there. The depth comes in pieces, the same for all warps, of which `activations` are
// in shared memory. Few of them are asked for amid the first weights: behind all that a multiprocessor may have under
// way they would come when all of that has, and before it memory would have little to do. Many, which take longer
// than weights, come behind those. (An H200: a text of OLMoE's 1% less, 64 texts amid weights 3% more.)
template <u32 TYPE, typename Activations, typename ChunkOf, typename Copy, typename Add>
DEVICE void for_chunks(u32 count, u32 depth, u32 of_piece, const Room<TYPE>& room, Activations& activations, ChunkOf chunk_of, Copy copy, Add add) {
    typedef Chunk<TYPE> C;
    auto ask = [&](u32 i) {
        if (i < count) copy(i, chunk_of(i), room.chunk(i));
        copy_commit();
    };
    auto ask_from = [&](u32 first, u32 end) {
#pragma unroll 1
        for (u32 i = first; i < end; i++) ask(i);
    };
    const bool COME_AMID = Activations::COME_AMID;
    activations.begin();
    ask_from(0, COME_AMID ? room.stages / 2 : room.stages);
    u32 i = 0;
#pragma unroll 1
    for (u32 start = 0; start < depth; start += of_piece) {
        // Nobody reads those of the piece before any more.
        if (start > 0) __syncthreads();
        activations.put(start, min(depth - start, of_piece));
        if (Activations::ARE_COPIED) copy_commit();
        if (COME_AMID && start == 0) {
            ask_from(room.stages / 2, room.stages);
            room.wait_for_half();
        } else if (Activations::ARE_COPIED) copy_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (; i < count && chunk_of(i) * C::DEPTH < start + of_piece; i++) {
            u32 chunk = chunk_of(i);
            room.wait();
            __syncwarp();
            add(i, chunk, chunk * C::DEPTH - start, room.chunk(i));
            __syncwarp();
            ask(i + room.stages);
        }
    }
    copy_wait<0>();
    __syncwarp();
}

// How many of `all` chunks a warp has that is `part` of `parts`.
DEVICE u32 chunks_of(u32 all, u32 part, u32 parts) { return all > part ? (all - part + parts - 1) / parts : 0; }

// The warp's part of the sums of up to 8 GROUPS rows, where it is `part` of `parts` that share a tile. Pieces of the
// depth are `of_piece`.
template <u32 TYPE, u32 GROUPS, typename Activations>
DEVICE void add_chunks(f32 (&sums)[GROUPS][4], const Problem& p, const LaneLines& lines, u32 part, u32 parts, const Room<TYPE>& room, u32 of_piece,
                       Activations& activations) {
    typedef Chunk<TYPE> C;
    const u8* staged = room.staged();
    const u32 STEP = GROUPS * 512;
    for_chunks<TYPE>(
        chunks_of((p.depth + C::DEPTH - 1) / C::DEPTH, part, parts), p.depth, of_piece, room, activations, [&](u32 i) { return part + i * parts; },
        [&](u32, u32 chunk, u8* to) { copy_chunk<TYPE>(to, lines, chunk * C::BYTES); },
        [&](u32, u32 chunk, u32 k, const u8* from) {
            add_chunk<TYPE, GROUPS>(sums, from, lines, chunk * C::BYTES, staged + k / 32 * STEP, STEP, p.depth - chunk * C::DEPTH);
        });
}

template <u32 TYPE, u32 GROUPS> DEVICE void lay_down_sums(const f32 (&sums)[GROUPS][4], const Room<TYPE>& room) {
    static_assert(2 * Chunk<TYPE>::SIZE >= LINES * SUMS_STRIDE * 4, "sums fit where a warp's chunks were");
    u32 lane = threadIdx.x % 32;
    f32* own = room.sums(threadIdx.x / 32);
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            *(float2*)(own + (lane / 4 + 8 * half) * SUMS_STRIDE + 8 * g + lane % 4 * 2) = make_float2(sums[g][2 * half], sums[g][2 * half + 1]);
    __syncthreads();
}

// By a block of 1, 2, 4 or 8 tiles.
template <bool IS_PAIRED, u32 TYPE, u32 GROUPS, typename Activations, typename Epilogue>
DEVICE void multiply_groups(const Problem& p, u32 tiles, const Epilogue& epilogue, const Room<TYPE>& room, u32 of_piece, Activations& activations) {
    u32 warp = threadIdx.x / 32, parts = 8 / tiles;
    f32 sums[GROUPS][4] = {};
    add_chunks<TYPE, GROUPS>(sums, p, lines_of<IS_PAIRED>(p, warp % tiles), warp / tiles, parts, room, of_piece, activations);
    lay_down_sums<TYPE, GROUPS>(sums, room);
    auto all = [&](u32 tile, u32 line, u32 row) {
        f32 sum = 0.0f;
        for (u32 part = 0; part < parts; part++) sum += room.sums(part * tiles + tile)[line * SUMS_STRIDE + row];
        return sum;
    };
    const u32 OF_TILE = IS_PAIRED ? 8 : LINES;
    // A power of two.
    u32 width = OF_TILE * tiles, log_width = tiles == 8 ? 3 : tiles / 2;
    log_width += IS_PAIRED ? 3 : 4;
    for (u32 i = threadIdx.x; i < width * p.rows; i += 256) {
        u32 column = i & (width - 1), row = i >> log_width, tile = column / OF_TILE, line = column % OF_TILE;
        if (p.column + column >= p.columns) continue;
        epilogue.take(p.group, p.row + row, p.column + column, all(tile, line, row), IS_PAIRED ? all(tile, line + 8, row) : 0.0f);
    }
}

template <bool IS_PAIRED, u32 TYPE, u32 GROUPS, typename Epilogue>
DEVICE void multiply_up_to(const Problem& p, u32 tiles, const Epilogue& epilogue, const Room<TYPE>& room) {
    Activations<TYPE, GROUPS> activations = {{room.staged()}, p.a, p.rows, 0};
    multiply_groups<IS_PAIRED, TYPE, GROUPS>(p, tiles, epilogue, room, room.template depth<GROUPS>(), activations);
}

template <bool IS_PAIRED, u32 TYPE, typename Epilogue> DEVICE void multiply_some(const Problem& p, u32 tiles, u32 stages, const Epilogue& epilogue) {
    SHARED(shared);
    Room<TYPE> room = {shared, stages};
    if (p.rows == 0) return;
    if (p.rows <= 8) multiply_up_to<IS_PAIRED, TYPE, 1>(p, tiles, epilogue, room);
    else if (p.rows <= 16) multiply_up_to<IS_PAIRED, TYPE, 2>(p, tiles, epilogue, room);
    else multiply_up_to<IS_PAIRED, TYPE, 4>(p, tiles, epilogue, room);
}

// The same of up to eight rows, which are normed first: all of them have room.
template <u32 TYPE, typename Epilogue>
DEVICE void multiply_normed(const Problem& p, u32 tiles, u32 stages, const Norm& norm, const Epilogue& epilogue) {
    SHARED(shared);
    Room<TYPE> room = {shared, stages};
    NormedActivations<TYPE, 1> activations = {{room.staged()}, norm, p.rows, p.depth, {}};
    multiply_groups<false, TYPE, 1>(p, tiles, epilogue, room, p.depth, activations);
}

// The sum of `count` rows, at most eight GROUPS and each a tile of its own, each times its group's matrix and its
// weight: what becomes of a token whose experts have one row each. A block has 16 columns, and its warps every eighth
// chunk of all rows, those of the same elements one after the other. Activations lie together as rows of a tile do: a
// chunk is multiplied with those of eight rows, and its own row's sums count.
template <u32 TYPE, u32 GROUPS> DEVICE void combine_groups(const Rows& r, const f32* row_weights, u32 count, const Store& store, const Room<TYPE>& room) {
    typedef Chunk<TYPE> C;
    const u32 STEP = GROUPS * 512;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * LINES + lane / 4;
    // Lane i knows row i.
    u32 group = lane < count ? r.tiles[3 * lane] : 0;
    f32 weight = lane < count ? row_weights[lane] : 0.0f, sums[1][4] = {};
    const u8* staged = room.staged();
    Activations<TYPE, GROUPS> activations = {{room.staged()}, Operand{r.a, nullptr, 0, r.a_stride, r.a_bf16}, count, 0};
    auto lines_of_row = [&](u32 row) {
        u32 own = from_lane(group, (int)row);
        const u8* data = r.b_listed ? ((const u8* const*)r.b)[own] : (const u8*)r.b + (u64)own * r.group_rows * r.b_stride;
        is_global(data);
        const u8* line = data + (u64)column * r.b_stride;
        return LaneLines{{line, line + 8 * (u64)r.b_stride}, {column < r.columns, column + 8 < r.columns}, r.b_stride};
    };
    for_chunks<TYPE>(
        chunks_of((r.depth + C::DEPTH - 1) / C::DEPTH * count, warp, 8), r.depth, room.template depth<GROUPS>(), room, activations,
        [&](u32 i) { return (warp + 8 * i) / count; },
        [&](u32 i, u32 chunk, u8* to) { copy_chunk<TYPE>(to, lines_of_row((warp + 8 * i) % count), chunk * C::BYTES); },
        [&](u32 i, u32 chunk, u32 k, const u8* from) {
            u32 row = (warp + 8 * i) % count;
            f32 products[1][4] = {}, own = from_lane(weight, (int)row);
            const u8* x = staged + k / 32 * STEP + row / 8 * 512;
            add_chunk<TYPE, 1>(products, from, lines_of_row(row), chunk * C::BYTES, x, STEP, r.depth - chunk * C::DEPTH);
            if (lane % 4 != row % 8 / 2) return;
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) sums[0][j] = fmaf(own, row % 2 ? products[0][j + 1] : products[0][j], sums[0][j]);
        });
#pragma unroll
    for (u32 j = 0; j < 4; j += 2)
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) sums[0][j] += from_lane_xor(sums[0][j], mask);
    lay_down_sums<TYPE, 1>(sums, room);
    u32 own = blockIdx.x * LINES + threadIdx.x;
    if (threadIdx.x >= LINES || own >= r.columns) return;
    f32 sum = 0.0f;
#pragma unroll
    for (u32 other = 0; other < 8; other++) sum += room.sums(other)[threadIdx.x * SUMS_STRIDE];
    store.take(0, 0, own, sum, 0.0f);
}

template <u32 TYPE> DEVICE void combine_some(const Rows& r, const f32* row_weights, u32 count, const Store& store, u32 stages) {
    SHARED(shared);
    Room<TYPE> room = {shared, stages};
    if (count <= 8) combine_groups<TYPE, 1>(r, row_weights, count, store, room);
    else combine_groups<TYPE, 4>(r, row_weights, count, store, room);
}

// What becomes of a few tokens' rows, as in combine_rows (grouped.cu), which the last block of some columns adds up.
// With no `y` nothing does.
struct Combine {
    const u32* token_rows;
    const f32 *row_weights, *base;
    f32* y;
    u32 tokens, choices;
    u32* arrived;
};

#define COMBINE const u32 *token_rows, const f32 *row_weights, const f32 *combined_base, f32 *combined, u32 tokens, u32 choices, u32 *arrived
#define THE_COMBINE Combine{token_rows, row_weights, combined_base, combined, tokens, choices, arrived}

DEVICE void combine_columns(const Combine& c, u32 width, const Store& rows) {
    if (!c.y || !is_last_block(c.arrived + blockIdx.x, gridDim.y)) return;
    u32 column = blockIdx.x * width + threadIdx.x % width;
    if (column >= rows.stride) return;
    for (u32 token = threadIdx.x / width; token < c.tokens; token += 256 / width) {
        f32 sum = 0.0f;
#pragma unroll 8
        for (u32 i = 0; i < c.choices; i++) {
            u32 row = c.token_rows[token * c.choices + i];
            if (row != 0xffffffffu) sum = fmaf(c.row_weights ? c.row_weights[row] : 1.0f, load_any(rows.to, rows.is_bf16, (u64)row * rows.stride + column), sum);
        }
        u64 at = (u64)token * rows.stride + column;
        c.y[at] = c.base ? c.base[at] + sum : sum;
    }
}
