// A router's scores, and the counting sort of its choices by expert.

KERNEL(256) softmax_top_k(TOP_K) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row < rows) THE_TOP_K.row(row);
}

// Sums over blocks of `rows_each` rows: of the probabilities, the entropy, the squared lse and the squared logits, if
// these are there, [blocks, width + 3].
KERNEL(256) sum_scores(const f32* probs, const f32* lse, const f32* entropy, const f32* squares, f32* sums, u32 rows, u32 width,
                       u32 rows_each) {
    __shared__ f32 of_groups[256];
    u32 first = blockIdx.x * rows_each, end = min(first + rows_each, rows);
    f32* to = sums + (u64)blockIdx.x * (width + 3);
    // Groups of threads take rows in turns, each thread a column of at most 256 at a time.
    u32 wide = min(width, 256u), groups = 256 / wide, group = threadIdx.x / wide, own = threadIdx.x % wide;
    for (u32 start = 0; start < width; start += wide) {
        f32 sum = 0.0f;
        if (group < groups && start + own < width) {
#pragma unroll 8
            for (u32 row = first + group; row < end; row += groups) sum += probs[(u64)row * width + start + own];
        }
        of_groups[threadIdx.x] = sum;
        __syncthreads();
        if (group == 0 && start + own < width) {
            for (u32 other = 1; other < groups; other++) sum += of_groups[other * wide + own];
            to[start + own] = sum;
        }
        __syncthreads();
    }
    if (threadIdx.x >= 3) return;
    const f32* from = threadIdx.x == 0 ? entropy : threadIdx.x == 1 ? lse : squares;
    f32 sum = 0.0f;
    if (from) {
#pragma unroll 8
        for (u32 row = first; row < end; row++) sum += threadIdx.x == 1 ? from[row] * from[row] : from[row];
    }
    to[width + threadIdx.x] = sum;
}

// What choices say of an expert: how many tokens name it first, and the sum of the weights of its choices.
struct ChoicesOf {
    u32 firsts, nothing;
    double weight;
};

const u32 SUMMED_CHOICES = 512;

// Of 512 choices and every expert, [blocks, E]: threads have experts, and each goes through all of the choices in
// order.
KERNEL(256) sum_choices(const u32* ids, const f32* weights, ChoicesOf* parts, u32 choices, u32 k, u32 experts) {
    __shared__ u32 keys[SUMMED_CHOICES];
    __shared__ f32 own[SUMMED_CHOICES];
    u32 start = blockIdx.x * SUMMED_CHOICES, count = min(choices - start, SUMMED_CHOICES);
    for (u32 i = threadIdx.x; i < count; i += 256) {
        u32 id = ids[start + i];
        keys[i] = id < experts ? 2 * id + ((start + i) % k == 0) : 0xffffffffu;
        own[i] = weights[start + i];
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += 256) {
        ChoicesOf sum = {};
        for (u32 i = 0; i < count; i++) {
            if (keys[i] / 2 != e) continue;
            sum.weight += own[i];
            sum.firsts += keys[i] % 2;
        }
        parts[(u64)blockIdx.x * experts + e] = sum;
    }
}

// Of expert blockIdx.x and all choices, from those of each part, in an order that their number fixes.
KERNEL(256) add_choices(const ChoicesOf* parts, ChoicesOf* sums, u32 num_parts, u32 experts) {
    __shared__ double all[256];
    __shared__ u32 firsts[256];
    ChoicesOf sum = {};
    for (u32 i = threadIdx.x; i < num_parts; i += 256) {
        ChoicesOf part = parts[(u64)i * experts + blockIdx.x];
        sum.weight += part.weight;
        sum.firsts += part.firsts;
    }
    all[threadIdx.x] = sum.weight;
    firsts[threadIdx.x] = sum.firsts;
    for (u32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            all[threadIdx.x] += all[threadIdx.x + half];
            firsts[threadIdx.x] += firsts[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = ChoicesOf{firsts[0], 0, all[0]};
}

// The gradient of the logits, a warp a row: see top_k.rs. `d_probs` [width] may be null; `centered` lists no row
// twice.
KERNEL(256) softmax_top_k_backward(const f32* probs, const u32* ids, const f32* weights, const f32* lse, const f32* d_weights,
                                   const f32* d_probs, f32* d_logits, f32 d_lse_squared, u32 rows, u32 width, u32 k, u32 normalize) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    probs += (u64)row * width;
    d_logits += (u64)row * width;
    ids += (u64)row * k;
    weights += (u64)row * k;
    d_weights += (u64)row * k;
    for (u32 i = lane; i < width; i += 32) d_logits[i] = d_probs ? d_probs[i] : 0.0f;
    __syncwarp();
    if (!normalize)
        for (u32 choice = lane; choice < k; choice += 32) d_logits[ids[choice]] += d_weights[choice];
    __syncwarp();
    // Differences from the likeliest expert lose no digit where its probability is nearly 1.
    f32 base = d_logits[ids[0]], mean = 0.0f;
    for (u32 i = lane; i < width; i += 32) mean = fmaf(probs[i], d_logits[i] - base, mean);
    f32 shift = 2.0f * lse[row] * d_lse_squared - warp_sum(mean);
    __syncwarp();
    for (u32 i = lane; i < width; i += 32) d_logits[i] = probs[i] * ((d_logits[i] - base) + shift);
    __syncwarp();
    if (!normalize) return;
    for (u32 choice = lane; choice < k; choice += 32) {
        // g - <w, g> as a sum of differences, which loses no digit where one weight is nearly 1.
        f32 centered = 0.0f;
        for (u32 other = 0; other < k; other++) centered += weights[other] * (d_weights[choice] - d_weights[other]);
        d_logits[ids[choice]] += weights[choice] * centered;
    }
}

// ---- counting sort: choices by expert, then by rank, then by token ----
//
// An id above `last` is taken for it: that is the last expert where every choice has to have a row, and above all
// experts where some are none. A block has the choices of one rank (blockIdx.y) of 1,024 tokens, a warp those of 128.
// Cells [E, K, blocks of tokens] hold the choices of each (expert, rank, block), then their first position.

const u32 OF_THREAD = 4, SORT_TOKENS = 256 * OF_THREAD;

// A thread's choices in its block, every 32nd of its warp's.
struct OwnChoices {
    u32 tokens, k, first;
    DEVICE_MEMBER OwnChoices(u32 tokens, u32 k)
        : tokens(tokens), k(k), first(blockIdx.x * SORT_TOKENS + threadIdx.x / 32 * 32 * OF_THREAD + threadIdx.x % 32) {}
    DEVICE_MEMBER u32 token(u32 i) const { return first + 32 * i; }
    DEVICE_MEMBER bool is_there(u32 i) const { return token(i) < tokens; }
    DEVICE_MEMBER u64 choice(u32 i) const { return (u64)token(i) * k + blockIdx.y; }
    // Experts, or more where there is none.
    DEVICE_MEMBER void load(u32 (&experts)[OF_THREAD], const u32* ids, u32 last) const {
#pragma unroll
        for (u32 i = 0; i < OF_THREAD; i++) experts[i] = is_there(i) ? min(ids[choice(i)], last) : NOBODY;
    }
};

// The block's cell of an expert.
DEVICE u64 cell_of(u32 expert, u32 k) { return ((u64)expert * k + blockIdx.y) * gridDim.x + blockIdx.x; }

KERNEL(256) count_choices(const u32* ids, u32* cells, u32 tokens, u32 k, u32 experts, u32 last) {
    SHARED(shared);
    u32 *counts = (u32*)shared, own[OF_THREAD];
    OwnChoices(tokens, k).load(own, ids, last);
    for (u32 e = threadIdx.x; e < experts; e += 256) counts[e] = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++)
        if (own[i] < experts) atomicAdd(&counts[own[i]], 1u);
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += 256) cells[cell_of(e, k)] = counts[e];
}

// Cells of an expert become the sums of those before them; `counts` [E] is the total. A block an expert; the last to
// be done writes offsets [E + 1], if they are wanted: the sums of the experts' counts before each.
KERNEL(256) scan_cells(u32* cells, u32* counts, u32 num_cells, u32* offsets, u32* arrived) {
    cells += (u64)blockIdx.x * num_cells;
    u32 count = scan(cells, cells, num_cells);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
    if (!offsets || !is_last_block(arrived, gridDim.x)) return;
    u32 rows = scan(counts, offsets, gridDim.x);
    if (threadIdx.x == 0) offsets[gridDim.x] = rows;
}

KERNEL(256) list_tiles(const u32* offsets, u32* tiles, u32 groups, u32 height, u32 num_tiles) {
    write_tiles(offsets, tiles, groups, height, num_tiles);
}

KERNEL(256) sort_few_choices(const u32* ids, const f32* weights, u32 k, FEW_CHOICES) { THE_FEW_CHOICES.sort(ids, weights); }

// A router's whole decision for as many rows as the one block has warps.
KERNEL(256) decide_for_few(TOP_K, FEW_CHOICES) {
    u32 row = threadIdx.x / 32;
    if (row < rows) THE_TOP_K.row(row);
    __syncthreads();
    THE_FEW_CHOICES.sort(ids, weights);
}

// Gives each choice its row: the expert's first one, and its position among the expert's choices, if that is below
// the limit.
KERNEL(256) place_choices(const u32* ids, const f32* weights, const u32* cells, const u32* offsets, u32* row_tokens,
                          f32* row_weights, u32* token_rows, u32 tokens, u32 k, u32 experts, u32 last, u32 limit) {
    SHARED(shared);
    u32 *counts = (u32*)shared, *of_warp = counts + threadIdx.x / 32 * experts;  // [8 warps, E]
    OwnChoices choices(tokens, k);
    u32 own[OF_THREAD], before[OF_THREAD];
    f32 own_weights[OF_THREAD];
    choices.load(own, ids, last);
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) own_weights[i] = own[i] < experts ? weights[choices.choice(i)] : 0.0f;
    for (u32 e = threadIdx.x; e < 8 * experts; e += 256) counts[e] = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) before[i] = counted_before(of_warp, own[i], own[i] < experts);
    __syncthreads();
    // Counts become positions of each warp's first.
    for (u32 e = threadIdx.x; e < experts; e += 256) {
        u32 position = cells[cell_of(e, k)];
#pragma unroll
        for (u32 warp = 0; warp < 8; warp++) {
            u32 count = counts[warp * experts + e];
            counts[warp * experts + e] = position;
            position += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        u32 row = NOBODY;
        if (own[i] < experts) {
            u32 position = of_warp[own[i]] + before[i];
            if (position < limit) {
                row = offsets[own[i]] + position;
                row_tokens[row] = choices.token(i);
                row_weights[row] = own_weights[i];
            }
        }
        if (choices.is_there(i)) token_rows[choices.choice(i)] = row;
    }
}
