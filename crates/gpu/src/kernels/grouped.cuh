// What the kernels of products share: what becomes of sums, and what a block computes.

// ---- activations ----

enum Activation { SWIGLU, GELU, GELU_TANH, RELU, CLAMPED_SWIGLU };

// To a few units in the last place (|x| / 30 more of them): `expf` has eight instructions for two. As one that costs
// so little NVRTC would work out all activations and choose then, and take 45 s in place of 9 to find out how.
DEVICE f32 sigmoid(f32 x) { return reciprocal(1.0f + power_of_two_if_asked(-1.44269504f * x)); }
// Not fminf, which would lose a NaN.
DEVICE f32 cut_above(f32 x, f32 limit) { return x > limit ? limit : x; }
DEVICE f32 cut(f32 x, f32 limit) { return x < -limit ? -limit : cut_above(x, limit); }
DEVICE f32 tanh_argument(f32 x) { return 0.7978846f * (x + 0.044715f * x * x * x); }

struct Shape {
    u32 kind;
    f32 alpha, limit;
};

template <u32 KIND> struct Kind { static const u32 VALUE = KIND; };

// Runs what there is for an activation, once for all elements that a thread has: asked for each of them, they would
// wait for one another.
template <typename Run> DEVICE void for_kind(const Shape& s, Run run) {
    switch (s.kind) {
        case SWIGLU: return run(Kind<SWIGLU>{});
        case GELU: return run(Kind<GELU>{});
        case GELU_TANH: return run(Kind<GELU_TANH>{});
        case RELU: return run(Kind<RELU>{});
        default: return run(Kind<CLAMPED_SWIGLU>{});
    }
}

template <u32 KIND> DEVICE f32 activate_as(const Shape& s, f32 gate, f32 up) {
    if constexpr (KIND == SWIGLU) return gate * sigmoid(gate) * up;
    else if constexpr (KIND == GELU) return gate * (0.5f * erfcf(-0.70710678f * gate));
    else if constexpr (KIND == GELU_TANH) return gate * sigmoid(2.0f * tanh_argument(gate));
    else if constexpr (KIND == RELU) return gate < 0.0f ? 0.0f : gate;
    else {
        f32 g = cut_above(gate, s.limit);
        return g * sigmoid(s.alpha * g) * (cut(up, s.limit) + 1.0f);
    }
}

// The activations of N gates, in their place.
template <u32 KIND, u32 N> DEVICE void activate_all_as(const Shape& s, f32 (&gate)[N], const f32 (&up)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) gate[i] = activate_as<KIND>(s, gate[i], up[i]);
}
template <u32 N> DEVICE void activate(const Shape& s, f32 (&gate)[N], const f32 (&up)[N]) {
    for_kind(s, [&](auto kind) { activate_all_as<decltype(kind)::VALUE>(s, gate, up); });
}

// The activation, and with da its own gradient the gradients of gate and up in their place.
template <u32 KIND> DEVICE f32 pull_back_as(const Shape& s, f32 da, f32& gate, f32& up) {
    f32 h = gate;
    if constexpr (KIND == SWIGLU) {
        f32 sig = sigmoid(h), silu = h * sig, u = up;
        gate = da * u * (sig + silu * (1.0f - sig));
        up = da * silu;
        return silu * u;
    } else if constexpr (KIND == GELU) {
        f32 cdf = 0.5f * erfcf(-0.70710678f * h), pdf = 0.3989423f * expf(-0.5f * h * h);
        gate = da * (cdf + h * pdf);
        return h * cdf;
    } else if constexpr (KIND == GELU_TANH) {
        f32 sig = sigmoid(2.0f * tanh_argument(h)), a = h * sig;
        gate = da * (sig + 2.0f * a * (1.0f - sig) * 0.7978846f * (1.0f + 3.0f * 0.044715f * h * h));
        return a;
    } else if constexpr (KIND == RELU) {
        gate = h <= 0.0f ? 0.0f : da;
        return h < 0.0f ? 0.0f : h;
    } else {
        f32 g = cut_above(h, s.limit), raised = cut(up, s.limit) + 1.0f, sig = sigmoid(s.alpha * g), a = g * sig;
        gate = h > s.limit ? 0.0f : da * raised * (sig + s.alpha * a * (1.0f - sig));
        up = fabsf(up) > s.limit ? 0.0f : da * a;
        return a * raised;
    }
}

// From u, the gradients of N activations before their row's weight: those of gates and ups in their place, the
// activations times the weight in that of u; the sum of u times the activations is returned.
template <u32 KIND, u32 N> DEVICE f32 pull_all_back_as(const Shape& s, f32 weight, f32 (&u)[N], f32 (&gate)[N], f32 (&up)[N]) {
    f32 part = 0.0f;
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        f32 a = pull_back_as<KIND>(s, weight * u[i], gate[i], up[i]);
        part += u[i] * a;
        u[i] = weight * a;
    }
    return part;
}
template <u32 N> DEVICE f32 pull_back(const Shape& s, f32 weight, f32 (&u)[N], f32 (&gate)[N], f32 (&up)[N]) {
    f32 part = 0.0f;
    for_kind(s, [&](auto kind) { part = pull_all_back_as<decltype(kind)::VALUE>(s, weight, u, gate, up); });
    return part;
}

DEVICE bool is_gated(Shape s) { return s.kind == SWIGLU || s.kind == CLAMPED_SWIGLU; }

// ---- epilogues: `take` gets the sum (or two) of a row and a column, and returns what is to be added up over the
// row; `take_eight` gets those of eight columns, of which the first is a multiple of 8, where rows are whole vectors
// ----

// What epilogues read they may ask for while sums are computed: `ask` gets a row and the first of 64 columns that are
// there. Of eight columns they read it ahead (`ahead`), while what comes before is at work.
struct NothingAhead {};

// What is stored is the sum, and what `base` (if it is there, in f32 unless it says bf16; the same memory or another)
// has in its place besides. All members are always given: NVRTC 13.0 leaves one that is not as it may be where this
// lies in another structure, as in StoreBoth.
struct Store {
    void* to;
    const void* base;
    u32 is_bf16, stride, base_bf16;
    static const bool HAS_PARTS = false;
    struct Ahead {
        float4 low, high;
    };
    // What was read ahead of the base on top of the sums.
    static DEVICE_MEMBER void add(f32 (&x)[8], const Ahead& ahead) {
        f32 before[8] = {ahead.low.x, ahead.low.y, ahead.low.z, ahead.low.w, ahead.high.x, ahead.high.y, ahead.high.z, ahead.high.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] += before[i];
    }
    DEVICE_MEMBER Ahead ahead(u64 row, u32 column) const {
        if (!base) return {};
        f32 x[8];
        load_vector(x, base, base_bf16, row * stride + column);
        return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
    }
    DEVICE_MEMBER void ask(u64 row, u32 column) const {
        if (!base) return;
        const u8* from = (const u8*)base;
        u64 size = base_bf16 ? 2 : 4, start = row * stride;
        ask_for(from + (start + column) * size);
        ask_for(from + (start + min(column + 32, stride - 1)) * size);
    }
    DEVICE_MEMBER f32 take(u32 group, u64 row, u32 column, f32 x, f32) const {
        u64 at = row * stride + column;
        store_any(to, is_bf16, at, base ? load_any(base, base_bf16, at) + x : x);
        return 0.0f;
    }
    DEVICE_MEMBER bool has_vectors() const { return stride % 8 == 0; }
    DEVICE_MEMBER f32 take_eight(u32 group, u64 row, u32 column, f32 (&x)[8], f32 (&)[8], const Ahead& ahead) const {
        if (base) add(x, ahead);
        store_vector(to, is_bf16, row * stride + column, x);
        return 0.0f;
    }
};

// h [R, A F], if it is kept, and its activation a [R, F]; the activation is taken of numbers of h's type.
struct Activate {
    void *h, *a;
    const f32* bias;
    u32 is_bf16, a_bf16, width;
    Shape shape;
    static const bool HAS_PARTS = false;
    typedef NothingAhead Ahead;
    DEVICE_MEMBER Ahead ahead(u64, u32) const { return {}; }
    DEVICE_MEMBER void ask(u64, u32) const {}
    DEVICE_MEMBER f32 take(u32 group, u64 row, u32 column, f32 gate, f32 up) const {
        u32 inputs = is_gated(shape) ? 2 : 1;
        if (bias) {
            const f32* own = bias + (u64)group * inputs * width + column;
            gate += own[0];
            if (inputs == 2) up += own[width];
        }
        u64 at = row * inputs * width + column;
        if (h) store_any(h, is_bf16, at, gate);
        if (h && inputs == 2) store_any(h, is_bf16, at + width, up);
        // What is saved is what the activation is taken of, so that backward sees the same function.
        f32 gates[1] = {rounded(gate, is_bf16)}, ups[1] = {rounded(up, is_bf16)};
        activate(shape, gates, ups);
        store_any(a, a_bf16, row * width + (a_bf16 == IN_LEVELS ? place_in_levels(column) : column), gates[0]);
        return 0.0f;
    }
    DEVICE_MEMBER bool has_vectors() const { return width % 8 == 0; }
    DEVICE_MEMBER f32 take_eight(u32 group, u64 row, u32 column, f32 (&gate)[8], f32 (&up)[8], const Ahead&) const {
        u32 inputs = is_gated(shape) ? 2 : 1;
        if (bias) {
            const f32* own = bias + (u64)group * inputs * width + column;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                gate[i] += own[i];
                if (inputs == 2) up[i] += own[width + i];
            }
        }
        u64 at = row * inputs * width + column;
        if (h) {
            store_vector(h, is_bf16, at, gate);
            if (inputs == 2) store_vector(h, is_bf16, at + width, up);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            gate[i] = rounded(gate[i], is_bf16);
            up[i] = rounded(up[i], is_bf16);
        }
        activate(shape, gate, up);
        store_vector(a, a_bf16, row * width + column, gate);
        return 0.0f;
    }
};

// From u, the gradient of the activation before the row's weight: dh [R, A F], and the activations times the row's
// weight [R, F], which the second matrices' gradients are taken of; the sums over rows of u a are parts.
struct PullBack {
    const void* h;
    void *dh, *weighed;
    const f32* row_weights;
    u32 is_bf16, width;
    Shape shape;
    static const bool HAS_PARTS = true;
    struct Ahead {
        uint4 gate, up;
    };
    DEVICE_MEMBER Ahead ahead(u64 row, u32 column) const {
        if (!is_bf16) return {};
        bool has_up = is_gated(shape);
        const bf16* from = (const bf16*)h + row * (has_up ? 2 : 1) * width + column;
        return {*(const uint4*)from, *(const uint4*)(has_up ? from + width : from)};
    }
    // Of bf16; of f32 it is half.
    DEVICE_MEMBER void ask(u64 row, u32 column) const {
        u64 size = is_bf16 ? 2 : 4, at = row * (is_gated(shape) ? 2 : 1) * width + column;
        ask_for((const char*)h + at * size);
        if (is_gated(shape)) ask_for((const char*)h + (at + width) * size);
    }
    DEVICE_MEMBER f32 take(u32 group, u64 row, u32 column, f32 u, f32) const {
        u32 inputs = is_gated(shape) ? 2 : 1;
        u64 at = row * inputs * width + column;
        f32 gate[1] = {load_any(h, is_bf16, at)}, up[1] = {inputs == 2 ? load_any(h, is_bf16, at + width) : 0.0f}, own[1] = {u};
        f32 part = pull_back(shape, row_weights[row], own, gate, up);
        store_any(dh, is_bf16, at, gate[0]);
        if (inputs == 2) store_any(dh, is_bf16, at + width, up[0]);
        store_any(weighed, is_bf16, row * width + column, own[0]);
        return part;
    }
    DEVICE_MEMBER bool has_vectors() const { return width % 8 == 0; }
    DEVICE_MEMBER f32 take_eight(u32 group, u64 row, u32 column, f32 (&u)[8], f32 (&)[8], const Ahead& ahead) const {
        u32 inputs = is_gated(shape) ? 2 : 1;
        u64 at = row * inputs * width + column;
        f32 gate[8], up[8] = {}, weight = row_weights[row];
        if (is_bf16) {
            unpack(gate, ahead.gate);
            unpack(up, ahead.up);
        } else {
            load_vector(gate, h, 0, at);
            if (inputs == 2) load_vector(up, h, 0, at + width);
        }
        f32 part = pull_back(shape, weight, u, gate, up);
        store_vector(dh, is_bf16, at, gate);
        if (inputs == 2) store_vector(dh, is_bf16, at + width, up);
        store_vector(weighed, is_bf16, row * width + column, u);
        return part;
    }
};

// ---- what a block computes ----

// Rows of the list of tiles: which group, its first row, and how many rows there are from it on, at most a tile's; a
// tile without rows is there because the host that launches does not know how many there are.
struct Tile {
    u32 group, first, rows;
};

// An operand: row i is row `gather[first + i]` or `first + i` of `data`.
struct Operand {
    const void* data;
    const u32* gather;
    u64 first;
    u32 stride, is_bf16;
    DEVICE_MEMBER u64 row(u32 i) const { return (gather ? (u64)gather[first + i] : first + i) * stride; }
};

struct Problem {
    Operand a, b;
    u32 rows, columns, depth;  // of this tile, of all columns, of the sum
    u32 group, column;         // the tile's first column
    u64 row;                   // the tile's first row in the output
    u64 pair;                  // rows of B from a column's to its second
};

// A warp asks for what the epilogue reads of `rows` rows from `first_row` of the tile on and of `columns` columns
// from its first.
template <typename Epilogue> DEVICE void ask_ahead(const Problem& p, const Epilogue& epilogue, u32 first_row, u32 rows, u32 columns) {
    u32 pieces = columns / 64;
    for (u32 i = threadIdx.x % 32; i < rows * pieces; i += 32) {
        u32 row = first_row + i / pieces, column = p.column + i % pieces * 64;
        if (row < p.rows && column < p.columns) epilogue.ask(p.row + row, column);
    }
}

// ---- from tensor cores to epilogues: sums lie over a warp's registers in pairs of columns, and go by way of its own
// shared memory, so that a lane has eight neighbouring columns, and the code of an epilogue is there once ----

// 16 rows of 32 columns, or of 16 pairs, with a gap, so that neighbouring rows are in different banks.
const u32 OWN_STRIDE = 40, OWN_BYTES = 16 * OWN_STRIDE * 4;
const u32 OWN_COLUMNS = 32, OWN_PAIRS = 16;
// Rows that each lane has of them: a row's columns are those of four neighbouring lanes, or of two.
template <bool IS_PAIRED> struct Own { static const u32 HELD = IS_PAIRED ? 1 : 2, LANES = IS_PAIRED ? 2 : 4; };

// A lane's two sums of block `block` of eight columns (of pairs: two blocks of first ones, then two of second ones)
// and of the upper or lower eight rows, as instructions leave them: row lane / 4, columns 2 (lane % 4) on.
DEVICE void lay_down(f32* own, u32 block, u32 half, f32 x, f32 y) {
    u32 lane = threadIdx.x % 32;
    *(float2*)(own + (lane / 4 + 8 * half) * OWN_STRIDE + block * 8 + lane % 4 * 2) = make_float2(x, y);
}

// What the epilogue reads for each of the lane's rows from `first_row` of the tile on, and for its eight columns of
// those from `first_column` on.
template <bool IS_PAIRED, typename Epilogue>
DEVICE void look_ahead(const Problem& p, const Epilogue& epilogue, u32 first_row, u32 first_column,
                       typename Epilogue::Ahead (&ahead)[Own<IS_PAIRED>::HELD]) {
    u32 lane = threadIdx.x % 32, column = first_column + lane % Own<IS_PAIRED>::LANES * 8;
    if (!epilogue.has_vectors() || column + 8 > p.columns) return;
#pragma unroll
    for (u32 i = 0; i < Own<IS_PAIRED>::HELD; i++) {
        u32 row = first_row + lane / Own<IS_PAIRED>::LANES + i * 8;
        if (row < p.rows) ahead[i] = epilogue.ahead(p.row + row, column);
    }
}

// Hands to the epilogue what the warp has laid down: rows from `first_row` of the tile on, and columns from
// `first_column`. `parts` gets what the epilogue returned for each of the lane's rows. `ahead` is what it reads there
// and, if it goes on, becomes what it reads as many columns on.
template <bool IS_PAIRED, typename Epilogue>
DEVICE void hand_over(const Problem& p, const Epilogue& epilogue, const f32* own, u32 first_row, u32 first_column,
                      f32 (&parts)[Own<IS_PAIRED>::HELD], typename Epilogue::Ahead (&ahead)[Own<IS_PAIRED>::HELD], bool goes_on) {
    const u32 WIDTH = IS_PAIRED ? OWN_PAIRS : OWN_COLUMNS;
    u32 lane = threadIdx.x % 32, column = first_column + lane % Own<IS_PAIRED>::LANES * 8;
    bool has_next = goes_on && column + WIDTH + 8 <= p.columns;
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < Own<IS_PAIRED>::HELD; i++) {
        u32 inside = lane / Own<IS_PAIRED>::LANES + i * 8, row = first_row + inside;
        if (row >= p.rows || column >= p.columns) continue;
        const f32* first = own + inside * OWN_STRIDE + (column - first_column);
        const f32* second = IS_PAIRED ? first + OWN_PAIRS : first;
        u32 edge = min(p.columns - column, 8u);
        if (edge == 8 && epilogue.has_vectors()) {
            f32 x[8], y[8];
            load_vector(x, first, 0, 0);
            load_vector(y, second, 0, 0);
            typename Epilogue::Ahead now = ahead[i];
            if (has_next) ahead[i] = epilogue.ahead(p.row + row, column + WIDTH);
            parts[i] += epilogue.take_eight(p.group, p.row + row, column, x, y, now);
            continue;
        }
#pragma unroll 1
        for (u32 c = 0; c < edge; c++)
            parts[i] += epilogue.take(p.group, p.row + row, column + c, first[c], IS_PAIRED ? second[c] : 0.0f);
    }
    __syncwarp();
}

// A row's part from those of its lanes, in each of them.
template <bool IS_PAIRED> DEVICE f32 row_part(f32 part) {
#pragma unroll
    for (u32 mask = 1; mask < Own<IS_PAIRED>::LANES; mask *= 2) part += from_lane_xor(part, (int)mask);
    return part;
}

// Gives `take` each row, of those from `first_row` on that the warp has handed over, with its part.
template <bool IS_PAIRED, typename Take>
DEVICE void take_row_parts(const f32 (&parts)[Own<IS_PAIRED>::HELD], u32 first_row, Take take) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < Own<IS_PAIRED>::HELD; i++) {
        f32 part = row_part<IS_PAIRED>(parts[i]);
        if (lane % Own<IS_PAIRED>::LANES == 0) take(first_row + lane / Own<IS_PAIRED>::LANES + i * 8, part);
    }
}

// Products of rows. `tiles` are triples (group, first row, rows); group g's matrix begins at row g * group_rows of B,
// or where entry g of B says if B is a list of addresses.
struct Rows {
    const void* a;
    const u32* gather;
    const void* b;
    const u32* tiles;
    u32 a_bf16, b_bf16, a_stride, b_stride, group_rows, columns, depth, pair, b_listed;
};

// That of the list's tile `index`, and of columns from `column` on.
DEVICE Problem rows_problem(const Rows& r, u32 index, u32 column) {
    const u32* tile = r.tiles + 3 * index;
    Problem p;
    p.a = Operand{r.a, r.gather, tile[1], r.a_stride, r.a_bf16};
    p.b = r.b_listed ? Operand{((const void* const*)r.b)[tile[0]], nullptr, 0, r.b_stride, r.b_bf16}
                     : Operand{r.b, nullptr, (u64)tile[0] * r.group_rows, r.b_stride, r.b_bf16};
    // A tile without rows may name a matrix that is not there.
    if (tile[2]) is_global(p.b.data);
    p.rows = tile[2];
    p.columns = r.columns;
    p.depth = r.depth;
    p.group = tile[0];
    p.column = column;
    p.row = tile[1];
    p.pair = r.pair;
    return p;
}

// Tile `index` of all, where eight rows of tiles are gone through column by column, so that blocks at work share rows
// of A as well as columns of B.
DEVICE void tile_at(u32 index, u32 column_tiles, u32 row_tiles, u32& row, u32& column) {
    const u32 PANEL = 8;
    u32 panel = index / (PANEL * column_tiles), inside = index % (PANEL * column_tiles);
    u32 height = min(PANEL, row_tiles - panel * PANEL);
    row = panel * PANEL + inside % height;
    column = inside / height;
}

// That of a block in this order, where the grid is columns by the list's tiles.
DEVICE Problem rows_problem_in_panels(const Rows& r, u32 tile_columns) {
    u32 row, column;
    tile_at(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x, gridDim.y, row, column);
    return rows_problem(r, row, column * tile_columns);
}

// The same where blockIdx.y names a tile of the list, and blockIdx.x one of columns.
DEVICE Problem rows_problem(const Rows& r, u32 tile_columns) { return rows_problem(r, blockIdx.y, blockIdx.x * tile_columns); }

#define ROWS const void *a, const u32 *gather, const void *b, const u32 *tiles, u32 a_bf16, u32 b_bf16, u32 a_stride, u32 b_stride, \
             u32 group_rows, u32 columns, u32 depth, u32 pair, u32 b_listed
#define THE_ROWS Rows{a, gather, b, tiles, a_bf16, b_bf16, a_stride, b_stride, group_rows, columns, depth, pair, b_listed}

#define STORE void *to, const f32 *base, u32 to_bf16, u32 stride
#define THE_STORE Store{to, base, to_bf16, stride, 0}

#define ACTIVATE void *h, void *activated, const f32 *bias, u32 h_bf16, u32 activated_bf16, u32 width, u32 kind, f32 alpha, f32 limit
#define THE_ACTIVATE Activate{h, activated, bias, h_bf16, activated_bf16, width, Shape{kind, alpha, limit}}

#define PULL_BACK const void *h, void *dh, void *weighed, const f32 *row_weights, u32 h_bf16, u32 width, u32 kind, f32 alpha, f32 limit, f32 *parts
#define THE_PULL_BACK PullBack{h, dh, weighed, row_weights, h_bf16, width, Shape{kind, alpha, limit}}

// Gradients of weights: group g has the rows offsets[g]..offsets[g + 1] of both operands as its depth, and the matrix
// [rows, columns] at g * rows * columns of the output. A group without rows is left alone, or is zeros.
struct Depths {
    const void *a, *b;
    const u32 *a_gather, *b_gather, *offsets;
    u32 a_bf16, b_bf16, rows, columns, keeps_unused;
};

// Those of a group from `row` and `column` on, at most `tile` rows; false if there is nothing to do.
DEVICE bool depths_problem(const Depths& d, u32 group, u32 row, u32 column, u32 tile, Problem& p) {
    u32 first = d.offsets[group], end = d.offsets[group + 1];
    p.a = Operand{d.a, d.a_gather, first, d.rows, d.a_bf16};
    p.b = Operand{d.b, d.b_gather, first, d.columns, d.b_bf16};
    p.row = row;
    p.rows = min(d.rows - row, tile);
    p.columns = d.columns;
    p.depth = end - first;
    p.group = group;
    p.column = column;
    p.pair = 0;
    return end > first || !d.keeps_unused;
}

#define DEPTHS const void *a, const u32 *a_gather, const void *b, const u32 *b_gather, const u32 *offsets, u32 a_bf16, u32 b_bf16, \
               u32 rows, u32 columns, u32 keeps_unused, void *to, u32 to_bf16, u32 add
#define THE_DEPTHS Depths{a, b, a_gather, b_gather, offsets, a_bf16, b_bf16, rows, columns, keeps_unused}
