// Cross entropy of rows of logits, in place: see head_loss.rs.

// The larger value wins, of equal ones the lower index; NaN never does.
DEVICE void take_larger(f32& value, u32& index, f32 other_value, u32 other_index) {
    if (other_value > value || (other_value == value && other_index < index)) {
        value = other_value;
        index = other_index;
    }
}

// A block a row. `results` [rows, 3] f32: the sum of exponentials relative to the largest logit, the target's logit less the
// largest, and 1 if the target is the first of the largest. With `has_grad` the row becomes grad_scale (softmax - target). A row
// whose target is 0xffffffff has no loss and no gradient.
KERNEL(256) cross_entropy(f32* logits, const u32* targets, f32* results, u32 columns, u32 has_grad, f32 grad_scale) {
    __shared__ f32 values[8];
    __shared__ u32 indices[8];
    u32 target = targets[blockIdx.x], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    logits += (u64)blockIdx.x * columns;
    if (target == 0xffffffffu) {
        if (has_grad)
            for (u32 i = threadIdx.x; i < columns; i += 256) logits[i] = 0.0f;
        return;
    }
    f32 top = bits_float(0xff800000u);
    u32 index = 0xffffffffu;
    for (u32 i = threadIdx.x; i < columns; i += 256) take_larger(top, index, logits[i], i);
    for (int mask = 16; mask > 0; mask >>= 1) {
        f32 other = from_lane_xor(top, mask);
        u32 other_index = from_lane_xor(index, mask);
        take_larger(top, index, other, other_index);
    }
    if (lane == 0) {
        values[warp] = top;
        indices[warp] = index;
    }
    __syncthreads();
    for (u32 w = 0; w < 8; w++) take_larger(top, index, values[w], indices[w]);
    f32 logit = logits[target], sum = 0.0f;
    for (u32 i = threadIdx.x; i < columns; i += 256) sum += expf(logits[i] - top);
    sum = block_sum(sum);
    if (has_grad) {
        f32 factor = grad_scale / sum;
        for (u32 i = threadIdx.x; i < columns; i += 256)
            logits[i] = expf(logits[i] - top) * factor - (i == target ? grad_scale : 0.0f);
    }
    if (threadIdx.x == 0) {
        f32* result = results + (u64)blockIdx.x * 3;
        result[0] = sum;
        result[1] = logit - top;
        result[2] = index == target ? 1.0f : 0.0f;
    }
}
