// Weights in blocks of few bits with scales. What the bytes mean: quantized/layouts.rs. Blocks begin at any byte that
// their size allows, so many are read in pieces of 2 or 4 bytes.

enum BlockType { Q8, Q4, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4_NL, MXFP4, F8, NUM_TYPES };

// Elements and bytes of a block, and what its address is a multiple of.
template <u32 TYPE> struct Layout;
#define LAYOUT(TYPE, LEN_, BYTES_, ALIGN_) \
    template <> struct Layout<TYPE> { static const u32 LEN = LEN_, BYTES = BYTES_, ALIGN = ALIGN_; }
LAYOUT(Q8, 32, 34, 2);
LAYOUT(Q4, 32, 18, 2);
LAYOUT(Q4_1, 32, 20, 4);
LAYOUT(Q5_0, 32, 22, 2);
LAYOUT(Q5_1, 32, 24, 4);
LAYOUT(Q2K, 256, 84, 4);
LAYOUT(Q3K, 256, 110, 2);
LAYOUT(Q4K, 256, 144, 16);
LAYOUT(Q5K, 256, 176, 16);
LAYOUT(Q6K, 256, 210, 2);
LAYOUT(IQ4_NL, 32, 18, 2);
LAYOUT(MXFP4, 32, 17, 1);
LAYOUT(F8, 128, 132, 4);

// 8 bytes of a block as two words.
template <u32 ALIGN> DEVICE uint2 eight_bytes(const u8* at) {
    if (ALIGN == 16) return *(const uint2*)at;
    if (ALIGN == 4) return make_uint2(((const u32*)at)[0], ((const u32*)at)[1]);
    if (ALIGN == 2) {
        const u16* halves = (const u16*)at;
        return make_uint2(halves[0] | (u32)halves[1] << 16, halves[2] | (u32)halves[3] << 16);
    }
    // The whole words that they lie in.
    u32 shift = (u32)((u64)at & 3) * 8;
    const u32* words = (const u32*)(at - shift / 8);
    u64 low = words[0], middle = words[1], high = shift ? words[2] : 0;
    return make_uint2((u32)((middle << 32 | low) >> shift), (u32)((high << 32 | middle) >> shift));
}
DEVICE u32 byte_of(uint2 bytes, u32 i) { return (i < 4 ? bytes.x : bytes.y) >> (i % 4 * 8) & 255; }
DEVICE f32 half_at(const u8* at) { return half_value((u16)(at[0] | at[1] << 8)); }

// Byte n of 16.
DEVICE f32 level(u64 low, u64 high, u32 n) { return (f32)(signed char)((n < 8 ? low : high) >> (n % 8 * 8)); }
DEVICE f32 iq4_level(u32 n) { return level(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, n); }
// Twice an E2M1 float: its bits are those of a float that is 2^127 times smaller, zero and the one below the normal
// ones as well.
DEVICE f32 fp4_level(u32 n) { return bits_float((n & 7) << 22 | (n & 8) << 28) * bits_float(0x7f000000u); }

// Half of two to the power of `exponent` less 127; all ones stand for NaN.
DEVICE f32 half_power(u32 exponent) {
    u32 bits = exponent == 0 ? 0x00200000u : exponent == 1 ? 0x00400000u : exponent == 255 ? 0x7fc00000u : (exponent - 1) << 23;
    return bits_float(bits);
}

// An E4M3 float: bias 7, no infinities. Its bits are those of a float that is 2^120 times smaller.
DEVICE f32 f8_value(u32 byte) {
    f32 x = bits_float((byte & 127) << 20 | (byte & 128) << 24) * bits_float(0x7b800000u);
    return (byte & 127) == 127 ? bits_float(0x7fc00000u) : x;
}

// A whole number below 2^16 as a float, less another: without a conversion, of which fewer come at a time.
DEVICE f32 count_less(u32 n, f32 zero) { return bits_float(0x4b000000u | n) - (8388608.0f + zero); }

// Scale and least value of 32 elements of a Q4_K or Q5_K, whose first 16 bytes these are.
DEVICE float2 scale_and_least(const u8* block, u32 index) {
    uint4 head = *(const uint4*)block;
    u32 shift = index % 4 * 8, low = head.y >> shift, middle = head.z >> shift, high = head.w >> shift;
    u32 scale = index < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
    u32 least = index < 4 ? middle & 63 : (high >> 4 & 15) | (middle >> 2 & 48);
    return make_float2(half_value((u16)head.x) * count_less(scale, 0.0f), half_value((u16)(head.x >> 16)) * count_less(least, 0.0f));
}

DEVICE f32 q3_scale(const u8* block, u32 index) {
    const u8* bytes = block + 96;
    u32 low = bytes[index % 8] >> (index / 8 * 4) & 15, high = bytes[8 + index % 4] >> (index / 4 * 2) & 3;
    return half_at(block + 108) * ((f32)(low | high << 4) - 32.0f);
}

// Eight elements, which are `scale` times these numbers less `least`.
struct Levels {
    f32 x[8], scale, least;
};

// The four bits from bit `shift` on of each of four bytes, less `zero`: they stay where they are in the word, as a
// part of the mantissa of a float that is large enough for them to count ones.
DEVICE void nibbles_less(f32* x, u32 word, u32 shift, f32 zero) {
    word >>= shift;
    x[0] = bits_float((word & 0xf) | 0x4b000000u) - (8388608.0f + zero);
    x[1] = bits_float((word & 0xf00) | 0x47000000u) - (32768.0f + zero);
    x[2] = bits_float((word & 0xf0000) | 0x43000000u) - (128.0f + zero);
    x[3] = bits_float((word >> 8 & 0xf0000) | 0x43000000u) - (128.0f + zero);
}

// Elements k..k + 8 of a row that begins at `row`; k is a multiple of 8.
template <u32 TYPE> DEVICE Levels levels_of(const u8* row, u32 k) {
    const u32 ALIGN = Layout<TYPE>::ALIGN;
    const u8* block = row + (u64)(k / Layout<TYPE>::LEN) * Layout<TYPE>::BYTES;
    u32 j = k % Layout<TYPE>::LEN, part = j / 32, i = j % 32;
    f32 scale, least = 0.0f;
    uint2 bytes, more = make_uint2(0, 0);
    u32 shift = i < 16 ? 0 : 4, zero = 0, high = 0;
    const bool IS_LONG = TYPE == Q4K || TYPE == Q5K;
    const u32 FIRST = TYPE == Q4_1 ? 4 : TYPE == Q5_0 ? 6 : TYPE == Q5_1 ? 8 : TYPE == MXFP4 ? 1 : 2;
    if (TYPE == Q8) {
        bytes = eight_bytes<ALIGN>(block + 2 + i);
        scale = half_at(block);
    } else if (TYPE == F8) {
        bytes = eight_bytes<ALIGN>(block + 4 + j);
        scale = *(const f32*)block;
    } else if (TYPE == Q2K) {
        bytes = eight_bytes<ALIGN>(block + 16 + part / 4 * 32 + i);
        shift = part % 4 * 2;
        u32 both = block[j / 16];
        scale = half_at(block + 80) * (f32)(both & 15);
        least = half_at(block + 82) * (f32)(both >> 4);
    } else if (TYPE == Q3K) {
        bytes = eight_bytes<ALIGN>(block + 32 + part / 4 * 32 + i);
        more = eight_bytes<ALIGN>(block + i);
        shift = part % 4 * 2;
        zero = 4;
        scale = q3_scale(block, j / 16);
    } else if (IS_LONG) {
        bytes = eight_bytes<ALIGN>(block + (TYPE == Q5K ? 48 : 16) + part / 2 * 32 + i);
        if (TYPE == Q5K) more = eight_bytes<ALIGN>(block + 16 + i);
        shift = part % 2 * 4;
        float2 both = scale_and_least(block, part);
        scale = both.x;
        least = both.y;
    } else if (TYPE == Q6K) {
        bytes = eight_bytes<ALIGN>(block + part / 4 * 64 + part % 2 * 32 + i);
        more = eight_bytes<ALIGN>(block + 128 + part / 4 * 32 + i);
        shift = part % 4 / 2 * 4;
        zero = 32;
        scale = half_at(block + 208) * (f32)(signed char)block[192 + j / 16];
    } else {
        bytes = eight_bytes<TYPE == Q5_0 || TYPE == MXFP4 ? Layout<TYPE>::ALIGN : 2>(block + FIRST + i % 16);
        if (TYPE == Q5_0 || TYPE == Q5_1) high = block[FIRST - 4 + i / 8];
        if (TYPE == Q4) zero = 8;
        if (TYPE == Q5_0) zero = 16;
        scale = TYPE == MXFP4 ? half_power(block[0]) : half_at(block);
        if (TYPE == Q4_1 || TYPE == Q5_1) least = -half_at(block + 2);
    }
    Levels levels;
    levels.scale = scale;
    levels.least = least;
    if (TYPE == Q4 || TYPE == Q4_1 || TYPE == Q4K) {
        nibbles_less(levels.x, bytes.x, shift, (f32)zero);
        nibbles_less(levels.x + 4, bytes.y, shift, (f32)zero);
        return levels;
    }
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
        u32 byte = byte_of(bytes, e);
        f32& x = levels.x[e];
        if (TYPE == Q8) x = (f32)(signed char)byte;
        else if (TYPE == F8) x = f8_value(byte);
        else if (TYPE == IQ4_NL) x = iq4_level(byte >> shift & 15);
        else if (TYPE == MXFP4) x = fp4_level(byte >> shift & 15);
        else {
            u32 n = byte >> shift & (TYPE == Q2K || TYPE == Q3K ? 3 : 15);
            if (TYPE == Q5_0 || TYPE == Q5_1) n |= (high >> e & 1) << 4;
            if (TYPE == Q3K) n |= (byte_of(more, e) >> part & 1) << 2;
            if (TYPE == Q5K) n |= (byte_of(more, e) >> part & 1) << 4;
            if (TYPE == Q6K) n |= (byte_of(more, e) >> (part % 4 * 2) & 3) << 4;
            x = count_less(n, (f32)zero);
        }
    }
    return levels;
}

template <u32 TYPE> DEVICE void decode(f32 (&w)[8], const u8* row, u32 k) {
    Levels levels = levels_of<TYPE>(row, k);
#pragma unroll
    for (u32 e = 0; e < 8; e++) w[e] = levels.scale * levels.x[e] - levels.least;
}

// Decodes by a type that is known at run time.
DEVICE void decode_any(u32 type, f32 (&w)[8], const u8* row, u32 k) {
    switch (type) {
        case Q8: return decode<Q8>(w, row, k);
        case Q4: return decode<Q4>(w, row, k);
        case Q4_1: return decode<Q4_1>(w, row, k);
        case Q5_0: return decode<Q5_0>(w, row, k);
        case Q5_1: return decode<Q5_1>(w, row, k);
        case Q2K: return decode<Q2K>(w, row, k);
        case Q3K: return decode<Q3K>(w, row, k);
        case Q4K: return decode<Q4K>(w, row, k);
        case Q5K: return decode<Q5K>(w, row, k);
        case Q6K: return decode<Q6K>(w, row, k);
        case IQ4_NL: return decode<IQ4_NL>(w, row, k);
        case MXFP4: return decode<MXFP4>(w, row, k);
        default: return decode<F8>(w, row, k);
    }
}
