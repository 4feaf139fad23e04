// A router's choice by scores, bias and groups, a warp a row: see score_top_k.rs.

DEVICE f32 nan_value() { return bits_float(0x7fc00000u); }

// Sigmoids of the row, and in place of the softmax these divided by their sum; returns the entropy.
DEVICE f32 sigmoid_row(const f32* logits, f32* gates, f32* probs, u32 width) {
    u32 lane = threadIdx.x % 32;
    f32 total = 0.0f, entropy = 0.0f;
    for (u32 i = lane; i < width; i += 32) {
        gates[i] = 1.0f / (1.0f + expf(-logits[i]));
        total += gates[i];
    }
    total = warp_sum(total);
    for (u32 i = lane; i < width; i += 32) {
        f32 p = total == 0.0f ? 0.0f : gates[i] / total;
        probs[i] = p;
        if (p > 0.0f) entropy -= p * logf(p);
    }
    return warp_sum(entropy);
}

// Puts all of a row's experts out of reach that are not in the best groups; `of_groups` is [num_groups].
DEVICE void limit_groups(f32* ranking, f32* of_groups, u32 width, u32 num_groups, u32 top_groups, u32 by_top_two) {
    u32 lane = threadIdx.x % 32, size = width / num_groups;
    for (u32 g = lane; g < num_groups; g += 32) {
        f32 first = negative_infinity(), second = first;
        for (u32 i = g * size; i < (g + 1) * size; i++) {
            f32 score = ranking[i];
            if (score > first) {
                second = first;
                first = score;
            } else if (score > second) second = score;
        }
        of_groups[g] = by_top_two && size > 1 ? first + second : first;
    }
    __syncwarp();
    for (u32 g = lane; g < num_groups; g += 32) {
        u32 better = 0;
        for (u32 other = 0; other < num_groups; other++)
            better += of_groups[other] > of_groups[g] || (of_groups[other] == of_groups[g] && other < g);
        if (better < top_groups) continue;
        for (u32 i = g * size; i < (g + 1) * size; i++) ranking[i] = negative_infinity();
    }
    __syncwarp();
}

// How weights are taken of scores.
struct Weighing {
    u32 is_normalized;
    f32 scale;
    u32 first_null;
    // Whether a choice has a weight; `NOBODY` is no expert either.
    DEVICE_MEMBER bool counts(u32 id) const { return id < first_null; }
    DEVICE_MEMBER f32 sum(const f32* scores, const u32* ids, u32 k) const {
        f32 sum = 0.0f;
        for (u32 choice = 0; choice < k; choice++)
            if (counts(ids[choice])) sum += scores[ids[choice]];
        // As in DeepSeek-V3.
        return sum + 1e-20f;
    }
};

#define WEIGHING u32 is_normalized, f32 scale, u32 first_null
#define THE_WEIGHING Weighing{is_normalized, scale, first_null}

KERNEL(256) score_top_k(f32* logits, f32* probs, f32* gates, f32* ranking, f32* of_groups, u32* ids, f32* weights, f32* lse, f32* entropy,
                        const f32* bias, u32 rows, u32 width, u32 k, f32 temperature, u32 num_groups, u32 top_groups, u32 by_top_two,
                        WEIGHING) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    Weighing weighing = THE_WEIGHING;
    logits += (u64)row * width;
    probs += (u64)row * width;
    ids += (u64)row * k;
    weights += (u64)row * k;
    if (gates) gates += (u64)row * width;
    if (ranking) ranking += (u64)row * width;
    if (of_groups) of_groups += (u64)row * num_groups;
    bool is_finite = true;
    for (u32 i = lane; i < width; i += 32) {
        logits[i] /= temperature;
        is_finite = is_finite && fabsf(logits[i]) < bits_float(0x7f800000u);
    }
    is_finite = lanes_where(is_finite) == 0xffffffffu;
    // A token that is spoilt chooses the first experts, and what it gets of them shows it.
    if (!is_finite)
        for (u32 i = lane; i < width; i += 32) logits[i] = 0.0f;
    __syncwarp();
    f32 own_lse, own_entropy;
    softmax_row(logits, probs, width, own_lse, own_entropy);
    if (gates) own_entropy = sigmoid_row(logits, gates, probs, width);
    if (!is_finite) {
        own_lse = own_entropy = nan_value();
        for (u32 i = lane; i < width; i += 32) {
            probs[i] = nan_value();
            if (gates) gates[i] = nan_value();
        }
    }
    if (lane == 0) {
        lse[row] = own_lse;
        entropy[row] = own_entropy;
    }
    const f32* scores = gates ? gates : probs;
    if (ranking) {
        for (u32 i = lane; i < width; i += 32) ranking[i] = (is_finite ? scores[i] : 0.0f) + (bias ? bias[i] : 0.0f);
        __syncwarp();
        if (of_groups) limit_groups(ranking, of_groups, width, num_groups, top_groups, by_top_two);
    }
    choose<false>(ranking ? ranking : logits, ids, width, k);
    __syncwarp();
    f32 factor = is_normalized ? scale / weighing.sum(scores, ids, k) : scale;
    for (u32 choice = lane; choice < k; choice += 32)
        weights[choice] = weighing.counts(ids[choice]) ? scores[ids[choice]] * factor : 0.0f;
}

// The gradient of the logits. `d_probs` [parts, width] may be null.
KERNEL(256) score_top_k_backward(const f32* probs, const f32* gates, const f32* logits, const u32* ids, const f32* weights, const f32* lse,
                                 const f32* d_weights, const f32* d_probs, f32* d_logits, u32 rows, u32 width, u32 k, f32 temperature,
                                 u32 part_len, u32 before, f32 d_lse_squared, WEIGHING) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    Weighing weighing = THE_WEIGHING;
    probs += (u64)row * width;
    logits += (u64)row * width;
    d_logits += (u64)row * width;
    ids += (u64)row * k;
    weights += (u64)row * k;
    d_weights += (u64)row * k;
    if (gates) gates += (u64)row * width;
    if (d_probs) d_probs += (u64)((before + row) / part_len) * width;
    const f32* scores = gates ? gates : probs;
    // The gradient of the scores that weights are taken of, and without gates that of the distribution, which is
    // these.
    for (u32 i = lane; i < width; i += 32) d_logits[i] = d_probs && !gates ? d_probs[i] : 0.0f;
    f32 share = is_normalized ? 1.0f / weighing.sum(scores, ids, k) : scale;
    __syncwarp();
    for (u32 choice = lane; choice < k; choice += 32) {
        if (!weighing.counts(ids[choice])) continue;
        f32 d = d_weights[choice];
        if (is_normalized) {
            // A sum of differences, which loses no digit where one weight is nearly all.
            f32 centered = 0.0f;
            for (u32 other = 0; other < k; other++)
                if (weighing.counts(ids[other])) centered += weights[other] * (d - d_weights[other]);
            d = centered;
        }
        d_logits[ids[choice]] += d * share;
    }
    __syncwarp();
    f32 z = 2.0f * lse[row] * d_lse_squared;
    if (gates) {
        f32 total = 0.0f, mean = 0.0f, base = d_probs ? d_probs[0] : 0.0f;
        for (u32 i = lane; i < width; i += 32) {
            total += gates[i];
            if (d_probs) mean = fmaf(probs[i], d_probs[i] - base, mean);
        }
        total = warp_sum(total);
        mean = warp_sum(mean);
        for (u32 i = lane; i < width; i += 32) {
            f32 d = d_logits[i];
            if (d_probs && total > 0.0f) d += ((d_probs[i] - base) - mean) / total;
            d_logits[i] = (d * gates[i] * (1.0f - gates[i]) + z * expf(logits[i] - lse[row])) / temperature;
        }
        return;
    }
    // Differences from the first choice lose no digit where its probability is nearly 1.
    f32 base = d_logits[ids[0] < width ? ids[0] : 0], mean = 0.0f;
    for (u32 i = lane; i < width; i += 32) mean = fmaf(probs[i], d_logits[i] - base, mean);
    mean = warp_sum(mean);
    __syncwarp();
    for (u32 i = lane; i < width; i += 32) d_logits[i] = probs[i] * ((d_logits[i] - base) - mean + z) / temperature;
}
