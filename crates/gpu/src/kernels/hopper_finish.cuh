// What becomes of a tile's sums on Hopper: tensor cores wait meanwhile, for which a warp has few instructions to
// spare. (Counters of an H100: an eighth to a quarter of a product's time, most of it instructions that wait for the
// one before; here they are a seventh to three quarters as many.) So a warp whose rows and columns are all there goes
// to an epilogue of which all is known when this is compiled that need not be asked for each part of a tile; any
// other one to hand_over (grouped.cuh).

// ---- epilogues of which more is known: `row` is where a row's first column goes, and `take` gets eight columns from
// `at` columns further on; they give what those of grouped.cuh do. Those that are SHORT are there once for each part
// of a tile ----

template <bool IS_BF16, bool HAS_BASE> struct StoreKnown {
    const Store& store;
    static const bool IS_SHORT = true;
    struct Row {
        f32* to;
        const f32* base;
    };
    DEVICE_MEMBER Row row(u64 row, u32 column) const {
        u64 at = row * store.stride + column;
        return {IS_BF16 ? (f32*)((bf16*)store.to + at) : (f32*)store.to + at, HAS_BASE ? (const f32*)store.base + at : nullptr};
    }
    DEVICE_MEMBER Store::Ahead ahead(const Row& row, u32 at) const {
        if (!HAS_BASE) return {};
        const float4* from = (const float4*)(row.base + at);
        return {from[0], from[1]};
    }
    DEVICE_MEMBER f32 take(const Row& row, u32 at, f32 (&x)[8], f32 (&)[8], const Store::Ahead& ahead) const {
        if (HAS_BASE) Store::add(x, ahead);
        store_vector(row.to, IS_BF16, at, x);
        return 0.0f;
    }
};

// SwiGLU without biases, all in bf16.
struct SwigluKnown {
    const Activate& activate;
    static const bool IS_SHORT = true;
    struct Row {
        bf16 *h, *a;
    };
    DEVICE_MEMBER Row row(u64 row, u32 column) const {
        u64 width = activate.width;
        return {activate.h ? (bf16*)activate.h + row * 2 * width + column : nullptr, (bf16*)activate.a + row * width + column};
    }
    DEVICE_MEMBER NothingAhead ahead(const Row&, u32) const { return {}; }
    DEVICE_MEMBER f32 take(const Row& row, u32 at, f32 (&gate)[8], f32 (&up)[8], const NothingAhead&) const {
        uint4 gates = packed(gate), ups = packed(up);
        if (row.h) {
            *(uint4*)(row.h + at) = gates;
            *(uint4*)(row.h + activate.width + at) = ups;
        }
        unpack(gate, gates);
        unpack(up, ups);
        activate_all_as<SWIGLU>(activate.shape, gate, up);
        *(uint4*)(row.a + at) = packed(gate);
        return 0.0f;
    }
};

// Its gradients, in bf16 as well.
struct SwigluPulledBack {
    const PullBack& pulled;
    static const bool IS_SHORT = false;
    struct Row {
        const bf16* h;
        bf16 *dh, *weighed;
        f32 weight;
    };
    DEVICE_MEMBER Row row(u64 row, u32 column) const {
        u64 width = pulled.width, at = row * 2 * width + column;
        return {(const bf16*)pulled.h + at, (bf16*)pulled.dh + at, (bf16*)pulled.weighed + row * width + column, pulled.row_weights[row]};
    }
    DEVICE_MEMBER PullBack::Ahead ahead(const Row& row, u32 at) const {
        return {*(const uint4*)(row.h + at), *(const uint4*)(row.h + pulled.width + at)};
    }
    DEVICE_MEMBER f32 take(const Row& row, u32 at, f32 (&u)[8], f32 (&)[8], const PullBack::Ahead& ahead) const {
        f32 gate[8], up[8];
        unpack(gate, ahead.gate);
        unpack(up, ahead.up);
        f32 part = pull_all_back_as<SWIGLU>(pulled.shape, row.weight, u, gate, up);
        *(uint4*)(row.dh + at) = packed(gate);
        *(uint4*)(row.dh + pulled.width + at) = packed(up);
        *(uint4*)(row.weighed + at) = packed(u);
        return part;
    }
};

// Hands `take` the epilogue with what is known of it; false where there is none for what it is.
template <typename Take> DEVICE bool with_known(const Store& store, Take take) {
    if (!store.is_bf16 && !store.base) take(StoreKnown<false, false>{store});
    else if (!store.is_bf16) take(StoreKnown<false, true>{store});
    else if (!store.base) take(StoreKnown<true, false>{store});
    else return false;
    return true;
}
template <typename Take> DEVICE bool with_known(const Activate& activate, Take take) {
    if (activate.shape.kind != SWIGLU || activate.bias || !activate.is_bf16 || !activate.a_bf16) return false;
    take(SwigluKnown{activate});
    return true;
}
template <typename Take> DEVICE bool with_known(const PullBack& pulled, Take take) {
    if (pulled.shape.kind != SWIGLU || !pulled.is_bf16) return false;
    take(SwigluPulledBack{pulled});
    return true;
}

// ---- sums on their way: 16 rows of 32 columns, or of 16 pairs, without gaps, the chunks of four columns of a row
// swapped so that both those who lay sums down and those who take eight columns find what they ask for at once in
// different banks ----

DEVICE u32 swap_of(u32 row) { return (row & 3) << 1 | (row & 1); }

// Where a lane lays down its two sums of each block of eight columns, in the upper eight rows of a buffer; those
// below are 256 numbers on.
DEVICE void where_laid_down(u32 (&of_block)[4]) {
    u32 lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
#pragma unroll
    for (u32 block = 0; block < 4; block++) of_block[block] = row * 32 + ((block * 2 + pair / 2) ^ swap_of(row)) * 4 + pair % 2 * 2;
}

// Eight columns of a buffer's row from `chunk` on.
DEVICE void take_up(f32 (&x)[8], const f32* buffer, u32 row, u32 chunk) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float4 four = *(const float4*)(buffer + row * 32 + ((chunk + i) ^ swap_of(row)) * 4);
        x[4 * i] = four.x;
        x[4 * i + 1] = four.y;
        x[4 * i + 2] = four.z;
        x[4 * i + 3] = four.w;
    }
}

// The sums of a lane for a block of eight columns of a part, or of a part's pairs: all first columns of pairs come
// before all second ones.
template <bool IS_PAIRED> DEVICE u32 sums_at(u32 part, u32 block, u32 parts) {
    return 4 * (IS_PAIRED ? block / 2 * (parts * 2) + part * 2 + block % 2 : part * 4 + block);
}

// Hands a warp's sums to the epilogue, all of which are there, part by part by way of two buffers in turn.
template <bool IS_PAIRED, u32 SUMS, typename Known, typename Ahead>
DEVICE void finish_whole(const Problem& p, const Known& known, const f32 (&sums)[SUMS], f32* own, f32 (&row_parts)[Own<IS_PAIRED>::HELD],
                         Ahead (&ahead)[Own<IS_PAIRED>::HELD]) {
    const u32 HELD = Own<IS_PAIRED>::HELD, LANES = Own<IS_PAIRED>::LANES, PARTS = SUMS / 16, WIDTH = IS_PAIRED ? OWN_PAIRS : OWN_COLUMNS;
    u32 lane = threadIdx.x % 32, row = lane / LANES, chunk = lane % LANES * 2, first_row = (threadIdx.x - COPIERS) / 32 * 16;
    u32 of_block[4];
    where_laid_down(of_block);
    typename Known::Row rows[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; i++) rows[i] = known.row(p.row + first_row + row + 8 * i, p.column + chunk * 4);
    // What a part's epilogue reads is on its way while two parts before it are at work: behind one it is waited for.
    // (Counters of an H100: a quarter of the time of gradients of activations.)
    Ahead next[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; i++) next[i] = known.ahead(rows[i], WIDTH);
    auto lay_down_part = [&](u32 part, f32* const (&upper)[4]) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 block = i / 2, half = i % 2, at = sums_at<IS_PAIRED>(part, block, PARTS) + half * 2;
            *(float2*)(upper[block] + half * 256) = make_float2(sums[at], sums[at + 1]);
        }
    };
    // What one buffer has is read before the warp meets again, for the other one.
    auto take_part = [&](u32 part, const f32* buffer) {
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            f32 x[8], y[8];
            take_up(x, buffer, row + 8 * i, chunk);
            if (IS_PAIRED) take_up(y, buffer, row + 8 * i, chunk + 4);
            Ahead now = ahead[i];
            ahead[i] = next[i];
            if (part + 2 < PARTS) next[i] = known.ahead(rows[i], (part + 2) * WIDTH);
            row_parts[i] += known.take(rows[i], part * WIDTH, x, y, now);
        }
    };
    // Both ways written out: by a function that lays down what it is handed, NVRTC brings the sums to memory.
    if constexpr (Known::IS_SHORT) {
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            f32* buffer = own + part % 2 * 512;
            f32* const upper[4] = {buffer + of_block[0], buffer + of_block[1], buffer + of_block[2], buffer + of_block[3]};
            lay_down_part(part, upper);
            take_part(part, buffer);
        }
    } else {
#pragma unroll 1
        for (u32 part = 0; part < PARTS; part++) {
            f32* buffer = own + part % 2 * 512;
            f32* const upper[4] = {buffer + of_block[0], buffer + of_block[1], buffer + of_block[2], buffer + of_block[3]};
            // Which registers a part has must be known when this is compiled.
#pragma unroll
            for (u32 chosen = 0; chosen < PARTS; chosen++)
                if (chosen == part) lay_down_part(chosen, upper);
            take_part(part, buffer);
        }
    }
    __syncwarp();
}

// The same of any tile.
template <bool IS_PAIRED, u32 SUMS, typename Epilogue>
DEVICE void finish_cut(const Problem& p, const Epilogue& epilogue, const f32 (&sums)[SUMS], f32* own,
                       f32 (&row_parts)[Own<IS_PAIRED>::HELD], typename Epilogue::Ahead (&ahead)[Own<IS_PAIRED>::HELD]) {
    u32 first_row = (threadIdx.x - COPIERS) / 32 * 16;
    const u32 PARTS = SUMS / 16;
#pragma unroll 1
    for (u32 part = 0; part < PARTS; part++) {
#pragma unroll
        for (u32 chosen = 0; chosen < PARTS; chosen++) {
            if (chosen != part) continue;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 block = i / 2, half = i % 2, at = sums_at<IS_PAIRED>(chosen, block, PARTS) + half * 2;
                lay_down(own, block, half, sums[at], sums[at + 1]);
            }
        }
        u32 column = p.column + part * (IS_PAIRED ? OWN_PAIRS : OWN_COLUMNS);
        hand_over<IS_PAIRED>(p, epilogue, own, first_row, column, row_parts, ahead, part + 1 < PARTS);
    }
}

// Hands a warp's sums to the epilogue: 16 rows in parts of 32 columns, or of 16 pairs. `ahead` is what the epilogue
// reads for the first part.
template <bool IS_PAIRED, u32 SUMS, typename Epilogue>
DEVICE void finish(const Problem& p, const Epilogue& epilogue, const f32 (&sums)[SUMS], f32* parts, u32 num_parts, f32* own,
                   typename Epilogue::Ahead (&ahead)[Own<IS_PAIRED>::HELD]) {
    f32 row_parts[Own<IS_PAIRED>::HELD] = {};
    bool has_rows = p.rows >= (threadIdx.x - COPIERS) / 32 * 16 + 16, has_columns = p.columns - p.column >= SUMS * (IS_PAIRED ? 1 : 2);
    bool is_whole = has_rows && has_columns && epilogue.has_vectors();
    bool is_done = is_whole && with_known(epilogue, [&](const auto& known) { finish_whole<IS_PAIRED>(p, known, sums, own, row_parts, ahead); });
    if (!is_done) finish_cut<IS_PAIRED>(p, epilogue, sums, own, row_parts, ahead);
    if constexpr (Epilogue::HAS_PARTS)
        take_row_parts<IS_PAIRED>(row_parts, (threadIdx.x - COPIERS) / 32 * 16, [&](u32 row, f32 part) {
            if (row < p.rows) parts[(p.row + row) * num_parts + p.column / (SUMS * 2)] = part;
        });
}
