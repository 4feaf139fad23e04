// What a router's kernels share: the scores of a row, and the sort of few choices.

// Softmax of each row, its k largest and their weights, a warp a row: see top_k.rs. `probs` holds the logits on
// entry; entropy, lse and squares are [rows].
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

// Writes the sums of the numbers before each of `len` numbers, which may be in their place; returns that of all. A
// whole block.
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

// The tiles of a group's rows from `first` to `end`, triples (group, first row, rows) of at most `height` rows each,
// from tile `to` on.
DEVICE void write_tiles_of(u32* tiles, u32 to, u32 group, u32 first, u32 end, u32 height) {
#pragma unroll 1
    for (; first < end; first += height, to++) {
        tiles[3 * to] = group;
        tiles[3 * to + 1] = first;
        tiles[3 * to + 2] = min(end - first, height);
    }
}
// Tiles without rows from `from` up to `num_tiles`, by a block.
DEVICE void write_no_tiles(u32* tiles, u32 from, u32 num_tiles) {
#pragma unroll 1
    for (u32 i = 3 * from + threadIdx.x; i < 3 * num_tiles; i += 256) tiles[i] = 0;
}

// The tiles of the rows that groups are cut into, groups in their order, and tiles without rows up to `num_tiles`.
// One block.
DEVICE void write_tiles(const u32* offsets, u32* tiles, u32 groups, u32 height, u32 num_tiles) {
    u32 before = 0;
#pragma unroll 1
    for (u32 start = 0; start < groups; start += 256) {
        u32 g = start + threadIdx.x, all, first = 0, end = 0;
        if (g < groups) {
            first = offsets[g];
            end = offsets[g + 1];
        }
        write_tiles_of(tiles, before + sum_below((end - first + height - 1) / height, all), g, first, end, height);
        before += all;
    }
    write_no_tiles(tiles, before, num_tiles);
}

// Of a warp's lanes, which have a choice of expert `key` each if it `is_there`: how many choices before a lane's are
// of its expert, those that `counts` has and those of lower lanes. Then `counts` has them all.
template <typename Count> DEVICE u32 counted_before(Count* counts, u32 key, bool is_there) {
    u32 alike = lanes_like(key), below = __popc(alike & ((1u << threadIdx.x % 32) - 1)), before = is_there ? counts[key] + below : 0;
    __syncwarp();
    if (is_there && below == 0) counts[key] += (Count)__popc(alike);
    __syncwarp();
    return before;
}

const u32 MAX_FEW_CHOICES = 512, MAX_EXPERTS = 1024;

// All of this at once for few choices, each of which has a row, by one block, with the tiles that the rows are cut
// into.
struct FewChoices {
    u32 *counts, *offsets, *row_tokens;
    f32* row_weights;
    u32 *token_rows, *tiles;
    u32 tokens, k, experts, height, num_tiles;

    // Choices by rank, then by token: the order that an expert serves them in. A warp counts as many of them, one
    // after the other, as there are for each of eight warps, and each expert's count is then known from those of the
    // warps before.
    DEVICE_MEMBER void sort(const u32* ids, const f32* weights) const {
        const u32 MOST = MAX_FEW_CHOICES / 256;
        __shared__ u16 of_warps[8][MAX_EXPERTS];
        __shared__ u32 first[MAX_EXPERTS];
        u32 choices = tokens * k, each = (choices + 255) / 256, warps = (choices + each * 32 - 1) / (each * 32), warp = threadIdx.x / 32;
        u32 keys[MOST], places[MOST], earlier[MOST];
        f32 own_weights[MOST];
#pragma unroll
        for (u32 n = 0; n < MOST; n++) {
            u32 i = (warp * each + n) * 32 + threadIdx.x % 32;
            places[n] = n < each && i < choices ? i % tokens * k + i / tokens : NOBODY;
            keys[n] = places[n] != NOBODY ? min(ids[places[n]], experts - 1) : NOBODY;
            own_weights[n] = places[n] != NOBODY ? weights[places[n]] : 0.0f;
        }
#pragma unroll 1
        for (u32 w = 0; w < warps; w++)
            for (u32 e = threadIdx.x; e < experts; e += 256) of_warps[w][e] = 0;
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < MOST; n++)
            if (n < each) earlier[n] = counted_before(of_warps[warp], keys[n], keys[n] != NOBODY);
        __syncthreads();
        list_experts(of_warps, warps, first);
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < MOST; n++) {
            if (keys[n] == NOBODY) continue;
            u32 row = first[keys[n]] + of_warps[warp][keys[n]] + earlier[n];
            row_tokens[row] = places[n] / k;
            row_weights[row] = own_weights[n];
            token_rows[places[n]] = row;
        }
    }

    // Replaces the warps' counts of each expert by how many of its choices the warps before have, and writes what is
    // known of experts. Rows and tiles are counted at once, in halves of a word.
    DEVICE_MEMBER void list_experts(u16 (&of_warps)[8][MAX_EXPERTS], u32 warps, u32 (&first)[MAX_EXPERTS]) const {
        u32 before = 0;
#pragma unroll 1
        for (u32 start = 0; start < experts; start += 256) {
            u32 e = start + threadIdx.x, all, count = 0;
            for (u32 w = 0; w < warps && e < experts; w++) {
                u32 own = of_warps[w][e];
                of_warps[w][e] = (u16)count;
                count += own;
            }
            u32 below = before + sum_below(count | (count + height - 1) / height << 16, all), row = below & 0xffff;
            if (e < experts) {
                first[e] = offsets[e] = row;
                counts[e] = count;
                write_tiles_of(tiles, below >> 16, e, row, row + count, height);
            }
            before += all;
        }
        if (threadIdx.x == 0) offsets[experts] = before & 0xffff;
        write_no_tiles(tiles, before >> 16, num_tiles);
    }
};

#define FEW_CHOICES u32 *counts, u32 *offsets, u32 *row_tokens, f32 *row_weights, u32 *token_rows, u32 *few_tiles, u32 tokens, u32 experts, \
                    u32 height, u32 num_tiles
#define THE_FEW_CHOICES FewChoices{counts, offsets, row_tokens, row_weights, token_rows, few_tiles, tokens, k, experts, height, num_tiles}
