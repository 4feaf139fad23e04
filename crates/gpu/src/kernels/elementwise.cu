// Operations that treat every element alike, and lookups of rows.

#define FOR_EACH(i, len) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (len); i += (u64)gridDim.x * blockDim.x)

// Eight elements at a time, which `eight` gets by the first of them, and those that are left over one by one: a
// multiprocessor has to have some 16 KB under way for all that memory gives.
template <typename Eight, typename One> DEVICE void for_all(u64 len, Eight eight, One one) {
    FOR_EACH(i, len / 8) eight(8 * i);
    FOR_EACH(i, len % 8) one(len / 8 * 8 + i);
}

KERNEL(256) cast_elements(const void* x, u32 x_bf16, void* y, u32 y_bf16, u64 len) {
    for_all(
        len,
        [&](u64 i) {
            f32 values[8];
            load_vector(values, x, x_bf16, i);
            store_vector(y, y_bf16, i, values);
        },
        [&](u64 i) { store_any(y, y_bf16, i, load_any(x, x_bf16, i)); });
}

// As bf16 in the order of levels, whole rows of 32.
KERNEL(256) cast_to_levels(const void* x, u32 x_bf16, bf16* y, u64 len) {
    FOR_EACH(i, len / 8) {
        u64 from = i / 4 * 32 + i % 4 * 4;
        f32 v[8];
#pragma unroll
        for (u32 j = 0; j < 8; j++) v[j] = load_any(x, x_bf16, from + j % 4 + j / 4 * 16);
        f32 in_order[8] = {v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]};
        store_vector(y, 1, i * 8, in_order);
    }
}

KERNEL(256) fill_elements(f32* y, f32 value, u64 len) {
    FOR_EACH(i, len) y[i] = value;
}

KERNEL(256) copy_words(const u16* from, u16* to, u64 first, u64 start, u64 len) {
    if ((first | start) % 8 != 0) {
        FOR_EACH(i, len) to[start + i] = from[first + i];
        return;
    }
    for_all(
        len, [&](u64 i) { *(uint4*)(to + start + i) = *(const uint4*)(from + first + i); },
        [&](u64 i) { to[start + i] = from[first + i]; });
}

// Of each sequence `each` words, from `first` of the `given` that it has to `start` of the `step` that it has there.
KERNEL(256) copy_words_of_each(const u16* from, u16* to, u64 each, u64 given, u64 first, u64 step, u64 start, u64 len) {
    if ((each | given | first | step | start) % 8 != 0) {
        FOR_EACH(i, len) to[i / each * step + start + i % each] = from[i / each * given + first + i % each];
        return;
    }
    // `len` is a multiple of `each`, so that nothing is left over.
    FOR_EACH(eight, len / 8) {
        u64 i = 8 * eight, sequence = i / each, inside = i % each;
        *(uint4*)(to + sequence * step + start + inside) = *(const uint4*)(from + sequence * given + first + inside);
    }
}

KERNEL(256) add_elements(f32* y, const void* x, u32 x_bf16, u64 len) {
    for_all(
        len,
        [&](u64 i) {
            f32 sums[8], values[8];
            load_vector(sums, y, 0, i);
            load_vector(values, x, x_bf16, i);
#pragma unroll
            for (u32 j = 0; j < 8; j++) sums[j] += values[j];
            store_vector(y, 0, i, sums);
        },
        [&](u64 i) { y[i] += load_any(x, x_bf16, i); });
}

// Replaces every element by what `change` makes of it.
template <typename Change> DEVICE void change_all(void* y, u32 y_bf16, u64 len, Change change) {
    for_all(
        len,
        [&](u64 i) {
            f32 values[8];
            load_vector(values, y, y_bf16, i);
#pragma unroll
            for (u32 j = 0; j < 8; j++) values[j] = change(values[j]);
            store_vector(y, y_bf16, i, values);
        },
        [&](u64 i) { store_any(y, y_bf16, i, change(load_any(y, y_bf16, i))); });
}

KERNEL(256) scale_elements(void* y, u32 y_bf16, f32 factor, u64 len) {
    change_all(y, y_bf16, len, [&](f32 x) { return x * factor; });
}

// NaN stays.
KERNEL(256) clip_elements(void* y, u32 y_bf16, f32 limit, u64 len) {
    change_all(y, y_bf16, len, [&](f32 x) { return x > limit ? limit : x < -limit ? -limit : x; });
}

KERNEL(256) clip_backward(f32* dy, const void* y, u32 y_bf16, f32 limit, u64 len) {
    FOR_EACH(i, len) {
        if (fabsf(load_any(y, y_bf16, i)) >= limit) dy[i] = 0.0f;
    }
}

KERNEL(256) sigmoid_elements(const f32* x, f32* y, u64 len) {
    FOR_EACH(i, len) y[i] = 1.0f / (1.0f + expf(-x[i]));
}

KERNEL(256) sigmoid_backward(const f32* dy, const f32* y, f32* dx, u64 len) {
    FOR_EACH(i, len) dx[i] = dy[i] * y[i] * (1.0f - y[i]);
}

// y [rows, columns] += bias [columns].
KERNEL(256) add_bias(void* y, u32 y_bf16, const f32* bias, u64 len, u32 columns) {
    FOR_EACH(i, len) store_any(y, y_bf16, i, load_any(y, y_bf16, i) + bias[i % columns]);
}

// Row blockIdx.y of `sums` (+)= the sum of rows [rows_each blockIdx.y, ..) of x, 32 columns a block: its eight warps
// take rows in turns, and what they have is added up in their order.
KERNEL(256) sum_columns(const void* x, u32 x_bf16, f32* sums, u32 rows, u32 columns, u32 rows_each, u32 add) {
    __shared__ f32 of_warps[8][32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    u32 first = blockIdx.y * rows_each, end = min(first + rows_each, rows);
    f32 sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (u32 row = first + warp; row < end; row += 8) sum += load_any(x, x_bf16, (u64)row * columns + column);
    }
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (u32 w = 1; w < 8; w++) sum += of_warps[w][lane];
    f32* to = sums + (u64)blockIdx.y * columns + column;
    *to = add ? *to + sum : sum;
}

// Rows of `width` numbers, `num` of them in all, from rows of `num_parts` lists of as many: each number is (or gets)
// the sum of its parts, the last first.
KERNEL(256) add_parts(const f32* parts, f32* to, u32 num, u32 width, u32 num_parts, u32 add) {
    FOR_EACH(i, num) {
        const f32* own = parts + (u64)((u32)i / width) * width * num_parts + (u32)i % width;
        f32 sum = 0.0f;
#pragma unroll 4
        for (u32 part = num_parts; part > 0; part--) sum += own[(u64)(part - 1) * width];
        to[i] = add ? to[i] + sum : sum;
    }
}

// One sum of squares for each block, from place `first` on, of the elements that are its own, added up in f64 in an
// order that the length fixes.
KERNEL(256) sums_of_squares(const void* x, u32 x_bf16, double* sums, u32 first, u64 len) {
    __shared__ double all[256];
    double sum = 0.0;
    auto add = [&](double value) { sum += value * value; };
    for_all(
        len,
        [&](u64 i) {
            f32 values[8];
            load_vector(values, x, x_bf16, i);
#pragma unroll
            for (u32 j = 0; j < 8; j++) add(values[j]);
        },
        [&](u64 i) { add(load_any(x, x_bf16, i)); });
    all[threadIdx.x] = sum;
    for (u32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[first + blockIdx.x] = all[0];
}

// One step of AdamW; see adamw.rs for the formulas. `compute` may be null.
KERNEL(256) adamw_step(f32* param, const void* grad, u32 grad_bf16, f32* m, f32* v, bf16* compute, u64 len, f32 grad_scale, f32 keep,
                       f32 beta1, f32 one_minus_beta1, f32 beta2, f32 one_minus_beta2, f32 inv_root_correction2, f32 eps, f32 step_size) {
    FOR_EACH(i, len) {
        // All are asked for before anything is written: the compiler cannot know that they are different memory.
        f32 g = load_any(grad, grad_bf16, i) * grad_scale, mean = m[i], square = v[i], p = param[i];
        mean = fmaf(mean, beta1, g * one_minus_beta1);
        square = fmaf(square, beta2, g * g * one_minus_beta2);
        p = p * keep - step_size * (mean / fmaf(sqrtf(square), inv_root_correction2, eps));
        m[i] = mean;
        v[i] = square;
        param[i] = p;
        if (compute) store(compute[i], p);
    }
}

// y [rows, width] = the rows of `table` that `ids` name.
KERNEL(256) gather_rows(const u32* ids, const void* table, u32 table_bf16, void* y, u32 y_bf16, u32 width) {
    u64 from = (u64)ids[blockIdx.x] * width, to = (u64)blockIdx.x * width;
    if (width % 8 != 0) {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) store_any(y, y_bf16, to + i, load_any(table, table_bf16, from + i));
        return;
    }
    for (u32 i = 8 * threadIdx.x; i < width; i += 8 * blockDim.x) {
        f32 values[8];
        load_vector(values, table, table_bf16, from + i);
        store_vector(y, y_bf16, to + i, values);
    }
}

// Row `ids[b]` of `table` += the rows of dy that `rows[starts[b]..starts[b + 1]]` name, in this order; without ids
// row b is set to that sum, without rows row r is row r of dy.
KERNEL(256) add_rows_of_ids(const u32* ids, const u32* starts, const u32* rows, const void* dy, u32 dy_bf16, f32* table, u32 width) {
    u32 first = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    f32* to = table + (u64)(ids ? ids[blockIdx.x] : blockIdx.x) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        f32 sum = ids ? to[i] : 0.0f;
#pragma unroll 4
        for (u32 row = first; row < end; row++) sum += load_any(dy, dy_bf16, (u64)(rows ? rows[row] : row) * width + i);
        to[i] = sum;
    }
}

// Eight pairs at once of heads whose halves are whole vectors.
DEVICE void rotate_vectors(void* x, u32 x_bf16, const f32* cosines, u32 columns, u32 head_dim, u32 start, u32 half, f32 sign) {
    u32 of_half = half / 8, count = columns / head_dim * of_half;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        u32 pair = i % of_half * 8;
        u64 low = (u64)blockIdx.x * columns + i / of_half * head_dim + start + pair;
        f32 a[8], b[8], cosine[8], sine[8];
        load_vector(a, x, x_bf16, low);
        load_vector(b, x, x_bf16, low + half);
        load_vector(cosine, cosines, 0, pair);
        load_vector(sine, cosines, 0, half + pair);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            f32 own = a[j], other = b[j], turn = sine[j] * sign;
            a[j] = fmaf(own, cosine[j], -(other * turn));
            b[j] = fmaf(other, cosine[j], own * turn);
        }
        store_vector(x, x_bf16, low, a);
        store_vector(x, x_bf16, low + half, b);
    }
}

// Rotates the pairs of every head of row blockIdx.x of x by the angle of its position. `angles` [positions, 2, half]
// are cosines, then sines.
KERNEL(256) rotate(void* x, u32 x_bf16, const f32* angles, const u32* positions, u32 columns, u32 head_dim, u32 start, u32 half,
                   u32 is_interleaved, f32 sign) {
    const f32* cosines = angles + (u64)positions[blockIdx.x] * 2 * half;
    if (!is_interleaved && (columns | head_dim | start | half) % 8 == 0)
        return rotate_vectors(x, x_bf16, cosines, columns, head_dim, start, half, sign);
    u32 pairs = columns / head_dim * half;
    for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
        u32 pair = i % half;
        u64 head = (u64)blockIdx.x * columns + i / half * head_dim + start;
        u64 low = head + (is_interleaved ? 2 * pair : pair), high = head + (is_interleaved ? 2 * pair + 1 : pair + half);
        f32 a = load_any(x, x_bf16, low), b = load_any(x, x_bf16, high), cosine = cosines[pair], sine = cosines[half + pair] * sign;
        store_any(x, x_bf16, low, fmaf(a, cosine, -(b * sine)));
        store_any(x, x_bf16, high, fmaf(b, cosine, a * sine));
    }
}

// Blocks of columns of row blockIdx.x from one matrix to another, all in units of so many bytes.
template <typename T>
DEVICE void copy_blocks(const T* from, T* to, u32 count, u32 width, u32 from_start, u32 from_step, u32 to_start, u32 to_step) {
    for (u32 i = threadIdx.x; i < count * width; i += blockDim.x) {
        u32 block = i / width, column = i % width;
        to[to_start + block * to_step + column] = from[from_start + block * from_step + column];
    }
}
KERNEL(256) copy_columns(const void* from, void* to, u32 unit, u32 count, u32 width, u32 from_width, u32 from_start, u32 from_step,
                         u32 to_width, u32 to_start, u32 to_step) {
    u64 from_row = (u64)blockIdx.x * from_width, to_row = (u64)blockIdx.x * to_width;
    if (unit == 16) copy_blocks((const uint4*)from + from_row, (uint4*)to + to_row, count, width, from_start, from_step, to_start, to_step);
    else if (unit == 4) copy_blocks((const u32*)from + from_row, (u32*)to + to_row, count, width, from_start, from_step, to_start, to_step);
    else copy_blocks((const u16*)from + from_row, (u16*)to + to_row, count, width, from_start, from_step, to_start, to_step);
}

// The same added, f32, block after block: they may be one of `to` again and again.
KERNEL(256) add_columns(const f32* from, f32* to, u32 count, u32 width, u32 from_width, u32 from_start, u32 from_step, u32 to_width,
                        u32 to_start, u32 to_step) {
    from += (u64)blockIdx.x * from_width + from_start;
    to += (u64)blockIdx.x * to_width + to_start;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x)
        for (u32 block = 0; block < count; block++) to[block * to_step + i] += from[block * from_step + i];
}
