// Elements by ones or fours, for kernels of rows of which some are whole vectors.

// N elements from `at` on, N of 1 or 4.
template <u32 N> struct Few { f32 x[N]; };

template <u32 N> DEVICE Few<N> few(const f32* from) {
    if constexpr (N == 4) {
        float4 four = *(const float4*)from;
        return Few<N>{{four.x, four.y, four.z, four.w}};
    } else return Few<N>{{from[0]}};
}
template <u32 N> DEVICE Few<N> few(const bf16* from) {
    if constexpr (N == 4) {
        uint2 pairs = *(const uint2*)from;
        return Few<N>{{bits_float(pairs.x << 16), bits_float(pairs.x & 0xffff0000u), bits_float(pairs.y << 16), bits_float(pairs.y & 0xffff0000u)}};
    } else return Few<N>{{load(from[0])}};
}
template <u32 N> DEVICE void put(f32* to, const Few<N>& few) {
    if constexpr (N == 4) *(float4*)to = make_float4(few.x[0], few.x[1], few.x[2], few.x[3]);
    else to[0] = few.x[0];
}
template <u32 N> DEVICE void put(bf16* to, const Few<N>& few) {
    if constexpr (N == 4) *(uint2*)to = make_uint2(pack_bf16(few.x[0], few.x[1]), pack_bf16(few.x[2], few.x[3]));
    else store(to[0], few.x[0]);
}

// Of RMS norms: squares of four elements on top of others, and what a row of so many with that sum is multiplied
// with.
DEVICE f32 add_squares(f32 sum, const Few<4>& v) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) sum = fmaf(v.x[j], v.x[j], sum);
    return sum;
}
DEVICE f32 scale_of(f32 sum, u32 width, f32 eps) { return one_over_root(fmaf(sum, reciprocal((f32)width), eps)); }
