// What a router's kernels share: the scores of a row, and the sort of few choices.

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
#pragma unroll 1
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

// Writes the sums of the numbers before each of `len` numbers, which may be in their place; returns that of all. A whole block.
DEVICE u32 scan(const u32* from, u32* to, u32 len) {
    u32 before = 0;
#pragma unroll 1
    for (u32 first = 0; first < len; first += 256) {
        u32 i = first + threadIdx.x, all, own = i < len ? from[i] : 0;
        u32 below = sum_below(own, all);
        if (i < len) to[i] = before + below;
        before += all;
    }
    return before;
}

// The tiles of rows that groups are cut into, triples (group, first row, rows): at most `height` rows each, groups in their order, and
// tiles without rows up to `num_tiles`. One block.
DEVICE void write_tiles(const u32* offsets, u32* tiles, u32 groups, u32 height, u32 num_tiles) {
    u32 before = 0;
#pragma unroll 1
    for (u32 start = 0; start < groups; start += 256) {
        u32 g = start + threadIdx.x, all, first = 0, end = 0;
        if (g < groups) {
            first = offsets[g];
            end = offsets[g + 1];
        }
        u32 own = (end - first + height - 1) / height, to = before + sum_below(own, all);
#pragma unroll 1
        for (u32 i = 0; i < own; i++) {
            u32* tile = tiles + 3 * (to + i);
            tile[0] = g;
            tile[1] = first + i * height;
            tile[2] = min(end - tile[1], height);
        }
        before += all;
    }
#pragma unroll 1
    for (u32 i = before + threadIdx.x; i < num_tiles; i += 256) tiles[3 * i] = tiles[3 * i + 1] = tiles[3 * i + 2] = 0;
}

// Of a warp's lanes, which have a choice of expert `key` each if it `is_there`: how many choices before a lane's are of its expert, those that
// `counts` has and those of lower lanes. Then `counts` has them all.
DEVICE u32 counted_before(u32* counts, u32 key, bool is_there) {
    u32 alike = lanes_like(key), below = __popc(alike & ((1u << threadIdx.x % 32) - 1)), before = is_there ? counts[key] + below : 0;
    __syncwarp();
    if (is_there && below == 0) counts[key] += __popc(alike);
    __syncwarp();
    return before;
}

const u32 MAX_FEW_CHOICES = 512, MAX_EXPERTS = 1024;

// All of this at once for few choices, each of which has a row, by one block, with the tiles that the rows are cut into.
struct FewChoices {
    u32 *counts, *offsets, *row_tokens;
    f32* row_weights;
    u32 *token_rows, *tiles;
    u32 tokens, k, experts, height, num_tiles;

    DEVICE_MEMBER void sort(const u32* ids, const f32* weights) const {
        __shared__ u32 keys[MAX_FEW_CHOICES], earlier[MAX_FEW_CHOICES], of_experts[MAX_EXPERTS], first[MAX_EXPERTS + 1];
        u32 choices = tokens * k;
        // By rank, then by token: the order that an expert serves them in.
#pragma unroll 1
        for (u32 i = threadIdx.x; i < choices; i += 256) keys[i] = min(ids[i % tokens * k + i / tokens], experts - 1);
#pragma unroll 1
        for (u32 e = threadIdx.x; e < experts; e += 256) of_experts[e] = 0;
        __syncthreads();
        if (threadIdx.x < 32) count_earlier(keys, earlier, of_experts, choices);
        __syncthreads();
        u32 rows = scan(of_experts, first, experts);
        if (threadIdx.x == 0) first[experts] = rows;
        __syncthreads();
#pragma unroll 1
        for (u32 e = threadIdx.x; e <= experts; e += 256) {
            offsets[e] = first[e];
            if (e < experts) counts[e] = of_experts[e];
        }
#pragma unroll 1
        for (u32 i = threadIdx.x; i < choices; i += 256) {
            u32 token = i % tokens, choice = token * k + i / tokens, row = first[keys[i]] + earlier[i];
            row_tokens[row] = token;
            row_weights[row] = weights[choice];
            token_rows[choice] = row;
        }
        write_tiles(first, tiles, experts, height, num_tiles);
    }

    // How many choices before each are of its expert, and how many each expert has: by one warp, 32 choices at a time.
    DEVICE_MEMBER void count_earlier(const u32* keys, u32* earlier, u32* of_experts, u32 choices) const {
        u32 lane = threadIdx.x;
#pragma unroll 1
        for (u32 start = 0; start < choices; start += 32) {
            bool is_there = start + lane < choices;
            u32 before = counted_before(of_experts, is_there ? keys[start + lane] : NOBODY, is_there);
            if (is_there) earlier[start + lane] = before;
        }
    }
};

#define FEW_CHOICES u32 *counts, u32 *offsets, u32 *row_tokens, f32 *row_weights, u32 *token_rows, u32 *few_tiles, u32 tokens, u32 experts, \
                    u32 height, u32 num_tiles
#define THE_FEW_CHOICES FewChoices{counts, offsets, row_tokens, row_weights, token_rows, few_tiles, tokens, k, experts, height, num_tiles}
