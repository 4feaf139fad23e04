// A router's scores, and the counting sort of its choices by expert.

// Softmax of each row, its k largest and their weights, a warp a row: see top_k.rs. `probs` holds the logits on entry; entropy, lse and
// squares are [rows].
struct TopK {
    f32* probs;
    u32* ids;
    f32 *weights, *lse, *entropy, *squares;
    u32 width, k, normalize;

    DEVICE_MEMBER void row(u32 row) const {
        if (k > 32) of_any_width(row);
        else if (width <= 64) of_width<2>(row);
        else if (width <= 256) of_width<8>(row);
        else of_any_width(row);
    }

    // The same with the row in registers, PER numbers in each lane; lane c gets choice c.
    template <u32 PER> DEVICE_MEMBER void of_width(u32 row) const {
        u32 lane = threadIdx.x % 32;
        f32 *p = probs + (u64)row * width, x[PER], square = 0.0f, own_lse, own_entropy;
        // Those that may be chosen have numbers above 0.
        u32 open[PER];
#pragma unroll
        for (u32 j = 0; j < PER; j++) {
            bool is_there = lane + 32 * j < width;
            x[j] = is_there ? p[lane + 32 * j] : negative_infinity();
            open[j] = is_there ? max(ordered(x[j]), 1u) : 0;
            square = is_there ? fmaf(x[j], x[j], square) : square;
        }
        u32 chosen = 0;
        for (u32 choice = 0; choice < k; choice++) {
            u32 best = 0, index = 0;
#pragma unroll
            for (u32 j = 0; j < PER; j++)
                if (open[j] > best) {
                    best = open[j];
                    index = lane + 32 * j;
                }
            u32 id = warp_least_of(warp_greatest_of(best) == best ? index : NOBODY);
            if (lane == choice) chosen = id;
#pragma unroll
            for (u32 j = 0; j < PER; j++)
                if (id == lane + 32 * j) open[j] = 0;
        }
        softmax_of_lanes(x, width, own_lse, own_entropy);
        square = warp_sum(square);
        if (lane == 0) {
            lse[row] = own_lse;
            entropy[row] = own_entropy;
            squares[row] = square;
        }
        f32 weight = 0.0f;
#pragma unroll
        for (u32 j = 0; j < PER; j++) {
            if (lane + 32 * j < width) p[lane + 32 * j] = x[j];
            f32 other = from_lane(x[j], (int)(chosen % 32));
            if (chosen / 32 == j) weight = other;
        }
        f32 sum = warp_sum(lane < k ? weight : 0.0f);
        if (lane >= k) return;
        ids[(u64)row * k + lane] = chosen;
        weights[(u64)row * k + lane] = weight * (normalize ? 1.0f / sum : 1.0f);
    }

    DEVICE_MEMBER void of_any_width(u32 row) const {
        u32 lane = threadIdx.x % 32;
        f32 *p = probs + (u64)row * width, *w = weights + (u64)row * k;
        u32* chosen = ids + (u64)row * k;
        choose<true>(p, chosen, width, k);
        f32 square = 0.0f, own_lse, own_entropy;
        for (u32 i = lane; i < width; i += 32) square = fmaf(p[i], p[i], square);
        square = warp_sum(square);
        softmax_row(p, p, width, own_lse, own_entropy);
        if (lane == 0) {
            lse[row] = own_lse;
            entropy[row] = own_entropy;
            squares[row] = square;
        }
        __syncwarp();
        f32 sum = 0.0f;
        for (u32 choice = 0; choice < k; choice++) sum += p[chosen[choice]];
        for (u32 choice = lane; choice < k; choice += 32) w[choice] = p[chosen[choice]] * (normalize ? 1.0f / sum : 1.0f);
    }
};

#define TOP_K f32 *probs, u32 *ids, f32 *weights, f32 *lse, f32 *entropy, f32 *squares, u32 rows, u32 width, u32 k, u32 normalize
#define THE_TOP_K TopK{probs, ids, weights, lse, entropy, squares, width, k, normalize}

KERNEL(256) softmax_top_k(TOP_K) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row < rows) THE_TOP_K.row(row);
}

// Sums over blocks of `rows_each` rows: of the probabilities, the entropy, the squared lse and the squared logits, if these are there,
// [blocks, width + 3].
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

// Of 512 choices and every expert, [blocks, E]: threads have experts, and each goes through all of the choices in order.
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

// The gradient of the logits, a warp a row: see top_k.rs. `d_probs` [width] may be null; `centered` lists no row twice.
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
// An id above `last` is taken for it: that is the last expert where every choice has to have a row, and above all experts where some
// are none. Tokens come in blocks of 256. Cells [E, K, blocks] hold the choices of each (expert, rank, block), then their first position.

const u32 SORT_TOKENS = 256;

KERNEL(256) count_choices(const u32* ids, u32* cells, u32 tokens, u32 k, u32 experts, u32 last) {
    SHARED(shared);
    u32* counts = (u32*)shared;  // [E]
    u32 token = blockIdx.x * SORT_TOKENS + threadIdx.x;
    for (u32 rank = 0; rank < k; rank++) {
        for (u32 e = threadIdx.x; e < experts; e += SORT_TOKENS) counts[e] = 0;
        __syncthreads();
        u32 expert = token < tokens ? min(ids[(u64)token * k + rank], last) : 0xffffffffu;
        if (expert < experts) atomicAdd(&counts[expert], 1u);
        __syncthreads();
        for (u32 e = threadIdx.x; e < experts; e += SORT_TOKENS) cells[((u64)e * k + rank) * gridDim.x + blockIdx.x] = counts[e];
        __syncthreads();
    }
}

// Writes the sums of the numbers before each of `len` numbers, which may be in their place; returns that of all. A whole block.
DEVICE u32 scan(const u32* from, u32* to, u32 len) {
    u32 before = 0;
    for (u32 first = 0; first < len; first += 256) {
        u32 i = first + threadIdx.x, all, own = i < len ? from[i] : 0;
        u32 below = sum_below(own, all);
        if (i < len) to[i] = before + below;
        before += all;
    }
    return before;
}

// Cells of an expert become the sums of those before them; `counts` [E] is the total. A block an expert.
KERNEL(256) scan_cells(u32* cells, u32* counts, u32 num_cells) {
    cells += (u64)blockIdx.x * num_cells;
    u32 count = scan(cells, cells, num_cells);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
}

// offsets [E + 1]: the sums of the experts' counts before each. One block.
KERNEL(256) first_rows(const u32* counts, u32* offsets, u32 experts) {
    u32 rows = scan(counts, offsets, experts);
    if (threadIdx.x == 0) offsets[experts] = rows;
}

// The tiles of rows that groups are cut into, triples (group, first row, rows): at most `height` rows each, groups in their order, and
// tiles without rows up to `num_tiles`. One block.
DEVICE void write_tiles(const u32* offsets, u32* tiles, u32 groups, u32 height, u32 num_tiles) {
    u32 before = 0;
    for (u32 start = 0; start < groups; start += 256) {
        u32 g = start + threadIdx.x, all, first = 0, end = 0;
        if (g < groups) {
            first = offsets[g];
            end = offsets[g + 1];
        }
        u32 own = (end - first + height - 1) / height, to = before + sum_below(own, all);
        for (u32 i = 0; i < own; i++) {
            u32* tile = tiles + 3 * (to + i);
            tile[0] = g;
            tile[1] = first + i * height;
            tile[2] = min(end - tile[1], height);
        }
        before += all;
    }
    for (u32 i = before + threadIdx.x; i < num_tiles; i += 256) tiles[3 * i] = tiles[3 * i + 1] = tiles[3 * i + 2] = 0;
}

KERNEL(256) list_tiles(const u32* offsets, u32* tiles, u32 groups, u32 height, u32 num_tiles) {
    write_tiles(offsets, tiles, groups, height, num_tiles);
}

const u32 MAX_FEW_CHOICES = 512, MAX_EXPERTS = 1024;

// All of this at once for few choices, each of which has a row, by one block, with the tiles that the rows are cut into.
struct FewChoices {
    u32 *counts, *offsets, *row_tokens;
    f32* row_weights;
    u32 *token_rows, *tiles;
    u32 tokens, k, experts, height, num_tiles;

    DEVICE_MEMBER void sort(const u32* ids, const f32* weights) const {
        __shared__ u32 keys[MAX_FEW_CHOICES], of_experts[MAX_EXPERTS], first[MAX_EXPERTS];
        u32 choices = tokens * k;
        // By rank, then by token: the order that an expert serves them in.
        for (u32 i = threadIdx.x; i < choices; i += 256) keys[i % k * tokens + i / k] = min(ids[i], experts - 1);
        __syncthreads();
        for (u32 e = threadIdx.x; e < experts; e += 256) {
            u32 count = 0;
            for (u32 i = 0; i < choices; i++) count += keys[i] == e;
            of_experts[e] = counts[e] = count;
        }
        __syncthreads();
        u32 rows = scan(of_experts, first, experts);
        __syncthreads();
        for (u32 e = threadIdx.x; e < experts; e += 256) offsets[e] = first[e];
        if (threadIdx.x == 0) offsets[experts] = rows;
        for (u32 i = threadIdx.x; i < choices; i += 256) {
            u32 row = first[keys[i]], token = i % tokens, choice = token * k + i / tokens;
            for (u32 before = 0; before < i; before++) row += keys[before] == keys[i];
            row_tokens[row] = token;
            row_weights[row] = weights[choice];
            token_rows[choice] = row;
        }
        __syncthreads();
        write_tiles(offsets, tiles, experts, height, num_tiles);
    }
};

#define FEW_CHOICES u32 *counts, u32 *offsets, u32 *row_tokens, f32 *row_weights, u32 *token_rows, u32 *tiles, u32 tokens, u32 experts, \
                    u32 height, u32 num_tiles
#define THE_FEW_CHOICES FewChoices{counts, offsets, row_tokens, row_weights, token_rows, tiles, tokens, k, experts, height, num_tiles}

KERNEL(256) sort_few_choices(const u32* ids, const f32* weights, u32 k, FEW_CHOICES) { THE_FEW_CHOICES.sort(ids, weights); }

// A router's whole decision for as many rows as the one block has warps.
KERNEL(256) decide_for_few(TOP_K, FEW_CHOICES) {
    u32 row = threadIdx.x / 32;
    if (row < rows) THE_TOP_K.row(row);
    __syncthreads();
    THE_FEW_CHOICES.sort(ids, weights);
}

// Gives each choice its row: the expert's first one, and its position among the expert's choices, if that is below the limit.
KERNEL(256) place_choices(const u32* ids, const f32* weights, const u32* cells, const u32* offsets, u32* row_tokens,
                          f32* row_weights, u32* token_rows, u32 tokens, u32 k, u32 experts, u32 last, u32 limit) {
    SHARED(shared);
    u32* counts = (u32*)shared;  // [8 warps, E]: choices of a warp's tokens
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x * SORT_TOKENS + threadIdx.x;
    for (u32 i = threadIdx.x; i < 8 * experts; i += SORT_TOKENS) counts[i] = 0;
    __syncthreads();
    for (u32 rank = 0; rank < k; rank++) {
        u64 choice = (u64)token * k + rank;
        u32 expert = token < tokens ? min(ids[choice], last) : 0xffffffffu;
        u32 same = lanes_like(expert);
        u32 earlier = __popc(same & ((1u << lane) - 1));
        bool is_choice = expert < experts;
        if (is_choice && earlier == 0) counts[warp * experts + expert] = __popc(same);
        __syncthreads();
        if (is_choice) {
            u32 position = cells[((u64)expert * k + rank) * gridDim.x + blockIdx.x] + earlier;
            for (u32 w = 0; w < warp; w++) position += counts[w * experts + expert];
            u32 row = position < limit ? offsets[expert] + position : 0xffffffffu;
            if (position < limit) {
                row_tokens[row] = token;
                row_weights[row] = weights[choice];
            }
            token_rows[choice] = row;
        } else if (token < tokens) {
            token_rows[choice] = 0xffffffffu;
        }
        __syncthreads();
        if (is_choice && earlier == 0) counts[warp * experts + expert] = 0;
        __syncthreads();
    }
}
