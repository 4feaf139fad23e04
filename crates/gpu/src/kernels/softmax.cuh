// What routers' scores share: the highest of a row and its softmax, a warp a row.

const u32 NOBODY = 0xffffffffu;

DEVICE f32 negative_infinity() { return bits_float(0xff800000u); }

DEVICE f32 warp_greatest(f32 x) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        f32 other = from_lane_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

// e to the power of a logit less the highest, of which `total` is the sum and `moment` that of e times the distance.
DEVICE f32 add_exponential(f32 logit, f32 top, f32& total, f32& moment) {
    f32 distance = logit - top, e = expf(distance);
    total += e;
    // e^x is 0 below: bounds the distance where 0 times infinity would be NaN.
    moment = fmaf(e, distance < -104.0f ? -104.0f : distance, moment);
    return e;
}

// Softmax of a row of which lane l has numbers l + 32 j, in their place, and what it says of the row.
template <u32 PER> DEVICE void softmax_of_lanes(f32 (&x)[PER], u32 width, f32& lse, f32& entropy) {
    u32 lane = threadIdx.x % 32;
    f32 top = negative_infinity(), total = 0.0f, moment = 0.0f;
#pragma unroll
    for (u32 j = 0; j < PER; j++) top = x[j] > top ? x[j] : top;
    top = warp_greatest(top);
#pragma unroll
    for (u32 j = 0; j < PER; j++)
        if (lane + 32 * j < width) x[j] = add_exponential(x[j], top, total, moment);
    total = warp_sum(total);
    moment = warp_sum(moment);
    f32 scale = 1.0f / total;
#pragma unroll
    for (u32 j = 0; j < PER; j++) x[j] *= scale;
    lse = top + logf(total);
    entropy = logf(total) - moment * scale;
}

// Softmax of the row of `logits`, whose memory `probs` may be, and what it says of the row.
DEVICE void softmax_row(const f32* logits, f32* probs, u32 width, f32& lse, f32& entropy) {
    u32 lane = threadIdx.x % 32;
    f32 top = negative_infinity(), total = 0.0f, moment = 0.0f;
    for (u32 i = lane; i < width; i += 32) top = logits[i] > top ? logits[i] : top;
    top = warp_greatest(top);
    for (u32 i = lane; i < width; i += 32) probs[i] = add_exponential(logits[i], top, total, moment);
    total = warp_sum(total);
    moment = warp_sum(moment);
    f32 scale = 1.0f / total;
    for (u32 i = lane; i < width; i += 32) probs[i] *= scale;
    lse = top + logf(total);
    entropy = logf(total) - moment * scale;
}

// The k highest of a row, best first, the lower index at a tie; NaN comes last. Negative infinity is nobody's choice
// unless all are open.
template <bool ALL_ARE_OPEN> DEVICE void choose(const f32* row, u32* ids, u32 width, u32 k) {
    u32 lane = threadIdx.x % 32;
    u64 last = ~0ull;
    for (u32 choice = 0; choice < k; choice++) {
        u64 best = 0;
        for (u32 i = lane; i < width; i += 32) {
            u64 key = (u64)ordered(row[i]) << 32 | (u32)~i;
            if (key < last && key > best && (ALL_ARE_OPEN || row[i] != negative_infinity())) best = key;
        }
        last = warp_largest(best);
        if (lane == 0) ids[choice] = last == 0 ? NOBODY : ~(u32)last;
    }
}
