// Drawing tokens from logits (../../sampling.rs): a block has a row of them, and keeps the order of ids wherever it
// counts.

const u32 DRAWING_THREADS = 512, DRAWING_WARPS = DRAWING_THREADS / 32;

// Floats in order as whole numbers; what is impossible (NaN, minus infinity) is 0.
DEVICE u32 key_of(f32 x) { return float_bits(x) == 0xff800000u ? 0 : ordered(x); }

DEVICE u64 max_u64(u64 a, u64 b) { return a > b ? a : b; }

struct Logits {
    const f32* values;
    u32 count;
    f32 temperature, largest;
    // Times as likely as the likeliest one, in units of 2^-40: sums of whole numbers do not depend on their order.
    DEVICE_MEMBER u64 weight(u32 id) const {
        f32 x = values[id];
        if (key_of(x) == 0) return 0;
        f32 weight = largest == bits_float(0x7f800000u) ? (x == largest ? 1.0f : 0.0f) : expf((x - largest) / temperature);
        return (u64)(weight * 1099511627776.0f);
    }
};

// The largest over the block, in every thread.
DEVICE u64 block_largest(u64 x) {
    __shared__ u64 largest[DRAWING_WARPS];
    x = warp_largest(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = x;
    __syncthreads();
    for (u32 i = 0; i < DRAWING_WARPS; i++) x = max_u64(x, largest[i]);
    return x;
}

// Tokens with larger keys stay, and of those with this one the first `ties` ids.
struct Cut {
    u32 key;
    u64 ties;
};

// The cut above which tokens, the likeliest first, just have `wanted` of what `measure` says of each. All together
// have as much.
template <typename Measure> DEVICE Cut cut_at(const Logits& logits, u64 wanted, Measure measure) {
    __shared__ u64 bins[256], left;
    __shared__ u32 chosen;
    u32 key = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) bins[threadIdx.x] = 0;
        __syncthreads();
        // Most logits share a few bins: a warp adds up what it has for each of them first.
        for (u32 at = 0; at < logits.count; at += DRAWING_THREADS) {
            u32 id = at + threadIdx.x, own = id < logits.count ? key_of(logits.values[id]) : 0;
            bool counts = own != 0 && (own & known) == key;
            u32 bin = own >> shift & 255;
            u64 size = counts ? measure(id) : 0;
            for (u32 left_over = lanes_where(counts); left_over != 0;) {
                u32 of_first = from_lane(bin, __ffs((int)left_over) - 1);
                bool is_of_it = counts && bin == of_first;
                u64 sum = warp_sum(is_of_it ? size : (u64)0);
                if (threadIdx.x % 32 == 0) atomicAdd(&bins[of_first], sum);
                left_over &= ~lanes_where(is_of_it);
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 rest = wanted;
            u32 bin = 255;
            for (; bin > 0 && bins[bin] < rest; bin--) rest -= bins[bin];
            left = rest;
            chosen = bin;
        }
        __syncthreads();
        wanted = left;
        key |= chosen << shift;
        known |= 255u << shift;
    }
    // Tokens of one key are alike.
    u64 one = 1;
    for (u32 id = threadIdx.x; id < logits.count; id += DRAWING_THREADS)
        if (key_of(logits.values[id]) == key) one = max_u64(one, measure(id));
    one = block_largest(one);
    return Cut{key, (wanted + one - 1) / one};
}

// What the filters leave.
struct Kept {
    const Logits& logits;
    Cut cut;
    u64 least;
    // Whether it is one of the likeliest that the cut leaves some of.
    DEVICE_MEMBER bool is_tied(u32 id) const { return cut.key != 0 && key_of(logits.values[id]) == cut.key; }
    // `ties` tied tokens come before this one.
    DEVICE_MEMBER u64 weight(u32 id, u64 ties) const {
        u32 key = key_of(logits.values[id]);
        if (key == 0 || key < cut.key || (is_tied(id) && ties >= cut.ties)) return 0;
        u64 weight = logits.weight(id);
        return weight >= least ? weight : 0;
    }
};

// A warp's tokens, which follow those of the warp before: lanes have every 32nd, so that what a warp reads lies
// together.
struct WarpTokens {
    u32 first, end;
    DEVICE_MEMBER u32 own_ties(const Kept& kept) const {
        u32 ties = 0;
        for (u32 id = first + threadIdx.x % 32; id < end; id += 32) ties += kept.is_tied(id);
        return ties;
    }
    // Calls `take(id, weight)` with every lane's of 32 at a time, id >= end beyond the last, until it says that it
    // has enough. `ties` are those before the warp's first token.
    template <typename Take> DEVICE_MEMBER void weigh(const Kept& kept, u64 ties, Take take) const {
        for (u32 at = first; at < end; at += 32) {
            u32 id = at + threadIdx.x % 32, tied = lanes_where(id < end && kept.is_tied(id));
            u64 weight = id < end ? kept.weight(id, ties + __popc(tied & ((1u << threadIdx.x % 32) - 1))) : 0;
            ties += __popc(tied);
            if (take(id, weight)) return;
        }
    }
};

// A row's id is the token at the share `drawn` of the weights that the filters leave (the first of the likeliest ones
// at temperature 0, or where nothing is possible); its share is in `draws` if there are such. The host's answer has
// the highest bit as well if any logit is not a number. Filters: the `top_k` likeliest (0: all), of these the fewest
// that have `top_p` of their weights (1: all), and none less than `min_p` times as likely as the likeliest.
KERNEL(512) draw_tokens(const f32* values, u32 count, f32 temperature, u32 top_k, f32 top_p, f32 min_p, f32 drawn, const f32* draws,
                        u32* ids, u32* answers) {
    values += (u64)blockIdx.x * count;
    if (draws) drawn = draws[blockIdx.x];
    u64 best = 0, bad = 0, possible = 0, total;
    for (u32 id = threadIdx.x; id < count; id += DRAWING_THREADS) {
        f32 x = values[id];
        u32 key = key_of(x);
        best = max_u64(best, (u64)key << 32 | (u32)~id);
        bad |= x != x;
        possible += key != 0;
    }
    best = block_largest(best);
    bad = block_largest(bad);
    sum_below(possible, possible);
    u32 likeliest = (u32)(best >> 32) == 0 ? 0 : ~(u32)best;
    if (threadIdx.x == 0) {
        ids[blockIdx.x] = likeliest;
        answers[blockIdx.x] = likeliest | (u32)bad << 31;
    }
    if (temperature == 0.0f || possible == 0) return;

    Logits logits = {values, count, temperature, values[likeliest]};
    Kept kept = {logits, Cut{0, 0}, (u64)(min_p * 1099511627776.0f)};
    if (top_k > 0 && top_k < possible) kept.cut = cut_at(logits, top_k, [](u32) { return (u64)1; });
    u32 share = (count + DRAWING_WARPS - 1) / DRAWING_WARPS, first = min(threadIdx.x / 32 * share, count);
    WarpTokens tokens = {first, min(first + share, count)};
    for (u32 pass = top_p < 1.0f ? 0 : 1; pass < 2; pass++) {
        u64 sum = 0, ties = 0;
        u64 before = from_lane(sum_below((u64)tokens.own_ties(kept), ties), 0);
        u64 least = kept.least;
        // The nucleus is one of all weights that are left; the least likely are taken away after it.
        if (pass == 0) kept.least = 0;
        tokens.weigh(kept, before, [&](u32, u64 weight) { sum += weight; return false; });
        // Where the warp's weights begin.
        u64 start = from_lane(sum_below(sum, total), 0);
        kept.least = least;
        if (pass == 0) {
            u64 enough = (u64)((double)top_p * (double)total);
            if (total > 0) kept.cut = cut_at(logits, enough > 0 ? enough : 1, [&](u32 id) { return logits.weight(id); });
            continue;
        }
        u64 place = (u64)((double)drawn * (double)total);
        if (place < start || place >= start + warp_sum(sum)) continue;
        tokens.weigh(kept, before, [&](u32 id, u64 weight) {
            u64 up_to = start + warp_sum_up_to(weight);
            u32 beyond = lanes_where(place < up_to);
            if (beyond != 0 && (u32)__ffs((int)beyond) - 1 == threadIdx.x % 32) {
                ids[blockIdx.x] = id;
                answers[blockIdx.x] = id | (u32)bad << 31;
            }
            start = from_lane(up_to, 31);
            return beyond != 0;
        });
    }
}
