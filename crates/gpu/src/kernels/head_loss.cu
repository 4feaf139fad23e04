// Cross entropy of rows of logits, in place: see head_loss.rs.

// The larger value wins, of equal ones the lower index; NaN never does.
DEVICE void take_larger(f32& value, u32& index, f32 other_value, u32 other_index) {
    if (other_value > value || (other_value == value && other_index < index)) {
        value = other_value;
        index = other_index;
    }
}

// A sum of exponentials relative to `from`, relative to `to`. One without terms is 0 however far these are.
DEVICE f32 moved(f32 sum, f32 from, f32 to) { return sum == 0.0f ? 0.0f : sum * expf(from - to); }

// Of some of a row's logits the largest and where it is first, and the sum of exponentials relative to it.
struct Seen {
    f32 top, sum;
    u32 index;

    // What exponentials are relative to while nothing is seen that has any.
    DEVICE_MEMBER f32 base() const { return top == bits_float(0xff800000u) ? 0.0f : top; }
    DEVICE_MEMBER void add(const f32* x, u32 count, u32 first) {
        f32 before = base();
        for (u32 i = 0; i < count; i++) take_larger(top, index, x[i], first + i);
        f32 now = base();
        if (now != before) sum = moved(sum, before, now);
        for (u32 i = 0; i < count; i++) sum += expf(x[i] - now);
    }
    DEVICE_MEMBER void join(const Seen& other) {
        f32 own = base(), of_other = other.base();
        take_larger(top, index, other.top, other.index);
        f32 now = base();
        sum = moved(sum, own, now) + moved(other.sum, of_other, now);
    }
};

// A block a row. `results` [rows, 3] f32: the sum of exponentials relative to the largest logit, the target's logit
// less the largest, and 1 if the target is the first of the largest. With `has_grad` the row becomes grad_scale
// (softmax - target), or that is written to `rounded` if there is one. A row whose target is 0xffffffff has no loss
// and no gradient.
KERNEL(256) cross_entropy(f32* logits, bf16* rounded, const u32* targets, f32* results, u32 columns, u32 has_grad, f32 grad_scale) {
    __shared__ Seen warps[8];
    u32 target = targets[blockIdx.x], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    logits += (u64)blockIdx.x * columns;
    if (rounded) rounded += (u64)blockIdx.x * columns;
    if (target == 0xffffffffu) {
        if (!has_grad) return;
        for (u32 i = threadIdx.x; i < columns; i += 256) {
            if (rounded) store(rounded[i], 0.0f);
            else logits[i] = 0.0f;
        }
        return;
    }
    Seen seen = {bits_float(0xff800000u), 0.0f, 0xffffffffu};
    if (columns % 4 == 0) {
        for (u32 i = threadIdx.x * 4; i < columns; i += 256 * 4) {
            float4 four = *(const float4*)(logits + i);
            f32 x[4] = {four.x, four.y, four.z, four.w};
            seen.add(x, 4, i);
        }
    } else {
        for (u32 i = threadIdx.x; i < columns; i += 256) seen.add(logits + i, 1, i);
    }
    for (int mask = 16; mask > 0; mask >>= 1)
        seen.join(Seen{from_lane_xor(seen.top, mask), from_lane_xor(seen.sum, mask), from_lane_xor(seen.index, mask)});
    // Every warp's first lane has what its other lanes have, up to rounding: that one's counts.
    if (lane == 0) warps[warp] = seen;
    __syncthreads();
    seen = warps[0];
    for (u32 w = 1; w < 8; w++) seen.join(warps[w]);
    f32 top = seen.top, distance = logits[target] - top;
    // Nobody writes before everybody has read the target's logit.
    __syncthreads();
    if (has_grad) {
        f32 factor = grad_scale / seen.sum;
        auto grad = [&](u32 i, f32 x) { return expf(x - top) * factor - (i == target ? grad_scale : 0.0f); };
        if (columns % 4 == 0) {
            for (u32 i = threadIdx.x * 4; i < columns; i += 256 * 4) {
                float4 x = *(const float4*)(logits + i);
                f32 g[4] = {grad(i, x.x), grad(i + 1, x.y), grad(i + 2, x.z), grad(i + 3, x.w)};
                if (rounded) *(uint2*)(rounded + i) = make_uint2(pack_bf16(g[0], g[1]), pack_bf16(g[2], g[3]));
                else *(float4*)(logits + i) = make_float4(g[0], g[1], g[2], g[3]);
            }
        } else {
            for (u32 i = threadIdx.x; i < columns; i += 256) {
                if (rounded) store(rounded[i], grad(i, logits[i]));
                else logits[i] = grad(i, logits[i]);
            }
        }
    }
    if (threadIdx.x == 0) {
        f32* result = results + (u64)blockIdx.x * 3;
        result[0] = seen.sum;
        result[1] = distance;
        result[2] = seen.index == target ? 1.0f : 0.0f;
    }
}
